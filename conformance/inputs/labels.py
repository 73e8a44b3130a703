"""What a draw of the strategies holds, as labels: so that statistics show them, and a test that all of them come up.

    STATE_LABELS, state_labels(state)                of `states`
    CHANGE_LABELS, change_labels(base, target)       of `pairs` and of every step of `chains`
    CHAIN_LABELS, chain_labels(states)               of `chains` and `round_trips`
    LOOSE_LABELS, loose_labels(base, patches, code)  of `loose_deltas`
    PLACE_LABELS, place_labels(placed)               of `placements`
    ALIAS_LABELS, alias_labels(aliased)              of `aliased`

Those of `corrupted` are the keys of `conformance.inputs.corruptions.CORRUPTIONS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from ..oracle import CODES, DTYPES, Bits, Patch, State, bits, expected_patches, unsigned, width
from .memory import KINDS, Aliased, Placed

IEEE = {"F64": (11, 52), "F32": (8, 23), "F16": (5, 10), "BF16": (8, 7), "F8_E5M2": (5, 2)}
"""Exponent and mantissa bits of the dtypes with infinities and several NaNs."""


def _nan(code: str, patterns: Bits) -> Any:
    exponent, mantissa = IEEE[code]
    return (patterns & unsigned(code).type((1 << (exponent + mantissa)) - 1)) > ((1 << exponent) - 1) << mantissa


def _special_labels(code: str, patterns: Bits) -> set[str]:
    if code not in IEEE:
        return set()
    exponent, mantissa = IEEE[code]
    sign, infinity = 1 << (exponent + mantissa), ((1 << exponent) - 1) << mantissa
    magnitude = patterns & unsigned(code).type(sign - 1)
    found = {
        "-0": patterns == sign,
        "subnormal": (magnitude > 0) & (magnitude < 1 << mantissa),
        "infinity": magnitude == infinity,
        "quiet NaN": magnitude > infinity + (1 << (mantissa - 1)) - 1,
        "signalling NaN": (magnitude > infinity) & (magnitude < infinity + (1 << (mantissa - 1))),
        "NaN payload": (magnitude > infinity) & (magnitude != infinity + (1 << (mantissa - 1))),
    }
    return {label for label, where in found.items() if where.any()}


def _name_labels(name: str) -> set[str]:
    found = {
        "name with dots": "." in name,
        "name beyond ASCII": not name.isascii(),
        "name of 200 characters": len(name) >= 200,
        "name ending in .indices or .values": name.endswith((".indices", ".values")),
        "name with quotes, backslashes or control characters": any(c in '"\\' or ord(c) < 32 for c in name),
    }
    return {label for label, holds in found.items() if holds}


def _shape_label(shape: Sequence[int]) -> str:
    return "scalar" if not shape else "empty" if 0 in shape else f"{len(shape)}-D"


def _size_labels(tensor: Tensor) -> set[str]:
    found = {
        "one element": tensor.numel() == 1,
        "255, 256 or 257 elements": tensor.numel() in (255, 256, 257),
        "bytes in whole words of 8": bool(tensor.numel()) and tensor.nbytes % 8 == 0,
        "bytes beyond whole words of 8": tensor.nbytes % 8 != 0,
    }
    return {label for label, holds in found.items() if holds}


def _count_label(count: int) -> str:
    return (
        "no tensors" if not count else "one tensor" if count == 1 else "tensors" if count <= 10 else "over ten tensors"
    )


STATE_LABELS = frozenset(
    {f"dtype {code}" for code in DTYPES}
    | {"scalar", "empty", "1-D", "2-D", "3-D", "no tensors", "one tensor", "tensors", "over ten tensors"}
    | {"one element", "255, 256 or 257 elements", "bytes in whole words of 8", "bytes beyond whole words of 8"}
    | {"-0", "subnormal", "infinity", "quiet NaN", "signalling NaN", "NaN payload"}
    | {"name with dots", "name beyond ASCII", "name of 200 characters", "name ending in .indices or .values"}
    | {"name with quotes, backslashes or control characters"}
)
"""Every label of `state_labels`."""


def state_labels(state: State) -> set[str]:
    """What a drawn state holds, as labels."""
    labels = {_count_label(len(state))}
    for name, tensor in state.items():
        code = CODES[tensor.dtype]
        labels |= {f"dtype {code}", _shape_label(tensor.shape)} | _name_labels(name) | _size_labels(tensor)
        labels |= _special_labels(code, bits(tensor))
    return labels


CHANGE_LABELS = frozenset(
    {
        "nothing changed",
        "everything changed",
        "an unchanged tensor beside a changed one",
        "over ten changed tensors",
        "density below 5 %",
        "density between 5 and 95 %",
        "less than a third of a tensor",
        "a third of a tensor",
        "more than a third of a tensor",
        "the first element",
        "the last element",
        "neighbours",
        "values that lie unaligned in the payload",
        "+0 to -0",
        "NaN to another NaN",
        "number to NaN",
        "NaN kept beside a change",
        "only the sign",
        "only the lowest bit",
        "lowest byte kept",
    }
)
"""Every label of `change_labels`."""


def change_labels(base: State, target: State) -> set[str]:
    """What a drawn change holds, as labels."""
    patches = expected_patches(base, target)
    total, changed = sum(t.numel() for t in base.values()), sum(len(p.indices) for p in patches)
    labels = {
        "nothing changed": bool(total) and not changed,
        "everything changed": bool(total) and changed == total,
        "an unchanged tensor beside a changed one": 0 < len(patches) < sum(bool(t.numel()) for t in base.values()),
        "over ten changed tensors": len(patches) > 10,
        "density below 5 %": bool(changed) and changed < 0.05 * total,
        "density between 5 and 95 %": 0.05 * total <= changed <= 0.95 * total and bool(changed),
        "values that lie unaligned in the payload": _is_unaligned(patches),
    }
    found = {label for label, holds in labels.items() if holds}
    return found.union(*(_patch_labels(patch, bits(base[patch.name])) for patch in patches))


def _is_unaligned(patches: Iterable[Patch]) -> bool:
    """Whether a tensor of the payload begins at no multiple of its element size."""
    at = 0
    for patch in patches:
        for size in (4, width(patch.code)):
            if at % size:
                return True
            at += size * len(patch.indices)
    return False


def _place_labels(patch: Patch) -> set[str]:
    """Which positions change; a patch holds one at least."""
    thirds = 3 * len(patch.indices) - patch.numel
    found = {
        "less than a third of a tensor": thirds < 0,
        "a third of a tensor": thirds == 0,
        "more than a third of a tensor": thirds > 0,
        "the first element": patch.indices[0] == 0,
        "the last element": patch.indices[-1] == patch.numel - 1,
        "neighbours": bool((np.diff(patch.indices) == 1).any()),
    }
    return {label for label, holds in found.items() if holds}


def _patch_labels(patch: Patch, old: Bits) -> set[str]:
    before, after, code = old[patch.indices], patch.bits, patch.code
    flipped, bit_count = before ^ after, 8 * width(code)
    found = {
        "only the sign": (flipped == 1 << (bit_count - 1)).any() and code != "BOOL",
        "only the lowest bit": (flipped == 1).any() and code != "BOOL",
        "lowest byte kept": ((flipped & flipped.dtype.type(0xFF)) == 0).any() and width(code) > 1,
    }
    if code in IEEE:
        nan_before, nan_after = _nan(code, before), _nan(code, after)
        kept = np.delete(old, patch.indices)
        found |= {
            "+0 to -0": ((before == 0) & (after == 1 << (bit_count - 1))).any(),
            "NaN to another NaN": (nan_before & nan_after).any(),
            "number to NaN": (~nan_before & nan_after).any(),
            "NaN kept beside a change": _nan(code, kept).any(),
        }
    return {label for label, holds in found.items() if holds} | _place_labels(patch)


CHAIN_LABELS = frozenset(
    {
        "a step without a change",
        "a position that changes twice",
        "a position that changes back",
        "steps that share nothing",
    }
)
"""Every label of `chain_labels`."""


def chain_labels(states: Sequence[State]) -> set[str]:
    """How the steps of a chain of at least three states meet."""
    steps = [{p.name: p for p in expected_patches(old, new)} for old, new in pairwise(states)]
    found = {"a step without a change"} if not all(steps) else set()
    for start, (one, two) in enumerate(pairwise(steps)):
        twice = {name: np.intersect1d(one[name].indices, two[name].indices) for name in one.keys() & two.keys()}
        twice = {name: at for name, at in twice.items() if len(at)}
        found |= {"a position that changes twice"} if twice else {"steps that share nothing"} if one and two else set()
        before, after = states[start], states[start + 2]
        if any((bits(before[name])[at] == bits(after[name])[at]).any() for name, at in twice.items()):
            found.add("a position that changes back")
    return found


LOOSE_LABELS = frozenset({"no layers", "layers out of name order", "positions that keep their bits", "I32", "I64"})
"""Every label of `loose_labels`."""


def loose_labels(base: State, patches: Sequence[Patch], indices: str) -> set[str]:
    """In what a delta differs from a canonical one."""
    names = [patch.name for patch in patches]
    found = {
        "no layers": not patches,
        "layers out of name order": names != sorted(names),
        "positions that keep their bits": any((bits(base[p.name])[p.indices] == p.bits).any() for p in patches),
    }
    return {label for label, holds in found.items() if holds} | ({indices} if patches else set())


PLACE_LABELS = frozenset(
    {f"{kind} scalar" for kind in KINDS} | {f"{kind} tensor" for kind in KINDS} | {"several kinds"}
)
"""Every label of `place_labels`."""


def place_labels(placed: Placed) -> set[str]:
    """Where a state lies; tensors without elements lie nowhere."""
    views = {name: view for name, view in placed.views.items() if view.numel()}
    found = {f"{placed.kinds[name]} {'tensor' if view.dim() else 'scalar'}" for name, view in views.items()}
    return found | ({"several kinds"} if len({placed.kinds[name] for name in views}) > 1 else set())


ALIAS_LABELS = frozenset(
    {"no aliases", "all of a tensor", "rows of a tensor", "several aliases of a tensor", "a change in shared memory"}
    | {"a change beside shared memory"}
)
"""Every label of `alias_labels`."""


def alias_labels(aliased: Aliased) -> set[str]:
    """How names share memory, and whether what they share changes."""
    owners = [owner for owner, _ in aliased.aliases.values()]
    changed = {patch.name for patch in aliased.patches()}
    found = {
        "no aliases": not owners,
        "all of a tensor": any(not row for _, row in aliased.aliases.values()),
        "rows of a tensor": any(row for _, row in aliased.aliases.values()),
        "several aliases of a tensor": len(set(owners)) < len(owners),
        "a change in shared memory": bool(changed & aliased.aliases.keys()),
        "a change beside shared memory": bool(changed - {*owners, *aliased.aliases}),
    }
    return {label for label, holds in found.items() if holds}
