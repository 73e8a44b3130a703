"""Hypothesis strategies for states and changes; public, for anybody's tests.

    states(codes)        a checkpoint: name -> tensor; every dtype in `codes`, scalars, empty tensors, non-square 1-D
                         to 3-D shapes, awkward names, more than ten tensors in some draws, special bit patterns
    pairs(codes)         (base, target): equal names, shapes and dtypes, from nothing changed to everything
    round_trips(codes)   (a, b, a): there and back
    chains(codes, n)     n states, each a change of the one before
    loose_deltas(codes)  what a lenient writer may send: (base, patches, "I32" or "I64"), layers in any order, some
                         positions keeping their bits

`codes` are safetensors dtype codes; `FLOATING` is what every engine must take, `codes_for(capabilities)` what one may.
`state_features` and `pair_features` label what a draw holds, `STATE_FEATURES` and `PAIR_FEATURES` are all labels: the
suite's own tests count them, so that nothing promised here is never drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.random import Generator
from torch import Tensor

from conformance.oracle import (
    CODES,
    DTYPES,
    FLOATING,
    SUB_BYTE,
    Bits,
    Patch,
    State,
    bits,
    expected_patches,
    from_bits,
    unsigned,
    width,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]

_IEEE = {"F64": (11, 52), "F32": (8, 23), "F16": (5, 10), "BF16": (8, 7), "F8_E5M2": (5, 2)}
"""Exponent and mantissa bits of the dtypes with infinities and several NaNs."""
_OTHER_FLOATS = {
    "F8_E4M3": (0x00, 0x80, 0x01, 0x81, 0x07, 0x08, 0x7E, 0xFE, 0x7F, 0xFF),
    "F8_E4M3FNUZ": (0x00, 0x80, 0x01, 0x81, 0x07, 0x7F, 0xFF),
    "F8_E5M2FNUZ": (0x00, 0x80, 0x01, 0x81, 0x03, 0x7F, 0xFF),
    "F8_E8M0": (0x00, 0x01, 0x7F, 0xFE, 0xFF),
    "F4": (0x00, 0x88, 0x08, 0x80, 0x71, 0xFF),
}


def _ieee_specials(exponent: int, mantissa: int) -> list[int]:
    sign, infinity = 1 << (exponent + mantissa), ((1 << exponent) - 1) << mantissa
    quiet, ones = 1 << (mantissa - 1), (1 << mantissa) - 1
    positive = [
        0,  # zero
        1,  # smallest subnormal
        ones,  # largest subnormal
        1 << mantissa,  # smallest normal
        infinity - 1,  # largest finite
        infinity,
        infinity | quiet,
        infinity | 1,  # signalling
        infinity | ones,
    ]
    return positive + [sign | pattern for pattern in positive]


def _specials(code: str) -> Bits:
    if code in _IEEE:
        patterns: Iterable[int] = _ieee_specials(*_IEEE[code])
    elif code == "C64":
        halves = _ieee_specials(*_IEEE["F32"])
        patterns = [real | halves[-1 - at] << 32 for at, real in enumerate(halves)]
    elif code == "BOOL":
        patterns = (0, 1)
    else:
        top = 1 << (8 * width(code) - 1)
        patterns = _OTHER_FLOATS.get(code, (0, 1, top - 1, top, 2 * top - 1))
    return np.array(list(patterns), dtype=unsigned(code))


SPECIALS: Mapping[str, Bits] = {code: _specials(code) for code in DTYPES}
"""Bit patterns per dtype that arithmetic treats specially: zeros, subnormals, infinities, NaNs, extremes."""

ALL = tuple(DTYPES)


def codes_for(capabilities: Iterable[str]) -> tuple[str, ...]:
    """The dtype codes that an engine with these capabilities must take."""
    offered = set(capabilities)
    return tuple(
        code
        for code in DTYPES
        if (code in FLOATING or "non_floating" in offered) and (code != SUB_BYTE or "sub_byte" in offered)
    )


# -- names and shapes ------------------------------------------------------------------------------------------------

_ODD_NAMES = (
    "0.indices",
    "1.values",
    "w.indices",
    "w.values",
    "__metadata__",
    "layer_names",
    "W",
    "w",
    "é",
    "e\u0301",
    "gewicht.β.層",
    "\uff5e",
    "\U0001f642.weight",
    'quote".back\\slash',
    "tab\tnew\nline",
    " ",
    "10",
    "9",
    "a" * 200,
    "層" * 200,
)


def names() -> st.SearchStrategy[str]:
    """One tensor name: usual, or awkward."""
    usual = st.builds("model.layers.{}.{}.weight".format, st.integers(0, 120), st.sampled_from(["q_proj", "o", "norm"]))
    free = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
    return st.one_of(usual, st.sampled_from(_ODD_NAMES), free)


@st.composite
def shapes(draw: Draw) -> tuple[int, ...]:
    """One shape: a scalar, empty, or 1-D to 3-D with different sizes on every axis; at most about 500 elements."""
    kind = draw(st.sampled_from(["scalar", "empty", 1, 1, 2, 2, 2, 3]))
    if kind == "scalar":
        return ()
    if kind == "empty":
        return tuple(draw(st.sampled_from([(0,), (3, 0), (0, 5), (2, 0, 3)])))
    if kind == 1:
        return (draw(st.one_of(st.integers(1, 12), st.sampled_from([64, 255, 257]))),)
    return tuple(draw(st.lists(st.integers(1, 9), min_size=kind, max_size=kind, unique=True)))


# -- contents --------------------------------------------------------------------------------------------------------


def _valid(code: str, patterns: Bits) -> Bits:
    return (patterns & 1).astype(unsigned(code)) if code == "BOOL" else patterns


def _random(code: str, count: int, rng: Generator) -> Bits:
    raw = np.frombuffer(rng.bytes(count * width(code)), dtype=unsigned(code))
    return _valid(code, raw)


def _contents(code: str, count: int, kind: str, rng: Generator) -> Bits:
    """`count` bit patterns: zeros, special ones, random ones, or random with special ones among them."""
    if kind == "zeros":
        return np.zeros(count, dtype=unsigned(code))
    if kind == "special":
        return np.asarray(rng.choice(SPECIALS[code], count))
    random = _random(code, count, rng)
    if kind == "mixed":
        random = np.where(rng.random(count) < 0.3, rng.choice(SPECIALS[code], count), random)
    return random


CHANGES = ("any", "sign", "low_bit", "low_byte_kept", "special")
"""How changed bits differ: anyhow, in the sign, the lowest bit, only above the lowest byte, into special patterns."""


def _changed(code: str, old: Bits, kind: str, rng: Generator) -> Bits:
    """As many patterns, every one different from the old one."""
    dtype, bit_count = unsigned(code), 8 * width(code)
    masks = {"sign": 1 << (bit_count - 1), "low_bit": 1, "low_byte_kept": 1 << (bit_count - 2)}
    if code == "BOOL":
        return np.asarray(old ^ dtype.type(1))
    if kind in masks:
        return np.asarray(old ^ dtype.type(masks[kind]))
    new = rng.choice(SPECIALS[code], len(old)) if kind == "special" else _random(code, len(old), rng)
    return np.where(new == old, old ^ dtype.type(1), new)


_SIZES = (1, 2, 3, 0, 4, 6, 11, 12, 14)
"""Tensors in a state. Beyond ten, an order by text and one by number differ."""


@st.composite
def states(draw: Draw, codes: Sequence[str] = ALL, *, min_tensors: int = 0) -> dict[str, Tensor]:
    """A checkpoint state of up to 14 tensors, contiguous, in insertion order as drawn."""
    count = draw(st.sampled_from([size for size in _SIZES if size >= min_tensors]))
    chosen = draw(st.lists(names(), min_size=count, max_size=count, unique=True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order = draw(st.permutations(list(codes)))
    state: dict[str, Tensor] = {}
    for name in chosen:
        code, shape = order[len(state) % len(order)], draw(shapes())
        kind = draw(st.sampled_from(["random", "mixed", "special", "zeros"]))
        state[name] = from_bits(_contents(code, int(np.prod(shape)), kind, rng), code, shape)
    return state


@st.composite
def changes_of(draw: Draw, base: State) -> dict[str, Tensor]:
    """A state like `base` with some bits changed: per tensor none, one, a few, half or all elements."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    densities = draw(st.sampled_from([(0.0, 0.1, 0.5, 1.0), (0.001, 0.03), (1.0,), (0.0, 0.001), (0.5, 1.0), (0.0,)]))
    target = {}
    for name, tensor in base.items():
        code, new = CODES[tensor.dtype], bits(tensor)
        density, kind = rng.choice(densities), str(rng.choice(CHANGES))
        count = min(len(new), int(np.ceil(density * len(new))))
        at = rng.choice(len(new), count, replace=False) if count else np.zeros(0, dtype=np.int64)
        new[at] = _changed(code, new[at], kind, rng)
        target[name] = from_bits(new, code, tensor.shape)
    return target


def pairs(codes: Sequence[str] = ALL, *, min_tensors: int = 0) -> st.SearchStrategy[tuple[State, State]]:
    """(base, target)."""
    return states(codes, min_tensors=min_tensors).flatmap(lambda base: st.tuples(st.just(base), changes_of(base)))


def round_trips(codes: Sequence[str] = ALL) -> st.SearchStrategy[tuple[State, State, State]]:
    """(a, b, a): every change is taken back."""
    return pairs(codes, min_tensors=1).map(lambda pair: (pair[0], pair[1], pair[0]))


@st.composite
def chains(draw: Draw, codes: Sequence[str] = ALL, length: int = 4) -> list[State]:
    """`length` states, each a change of the one before."""
    chain: list[State] = [draw(states(codes, min_tensors=1))]
    while len(chain) < length:
        chain.append(draw(changes_of(chain[-1])))
    return chain


@st.composite
def loose_deltas(draw: Draw, codes: Sequence[str] = ALL) -> tuple[State, tuple[Patch, ...], str]:
    """(base, patches, index code): a delta that a reader must take although no canonical writer emits it."""
    base, target = draw(pairs(codes, min_tensors=1))
    patches = [_with_kept(patch, base[patch.name], draw) for patch in expected_patches(base, target)]
    return base, tuple(draw(st.permutations(patches))), draw(st.sampled_from(["I32", "I64"]))


def _with_kept(patch: Patch, tensor: Tensor, draw: Draw) -> Patch:
    """The patch, at times with every other position too, keeping what is there."""
    if not draw(st.booleans()):
        return patch
    new = bits(tensor)
    new[patch.indices] = patch.bits
    return Patch(patch.name, patch.shape, patch.code, np.arange(len(new), dtype=np.int64), new)


# -- labels ----------------------------------------------------------------------------------------------------------


def _nan(code: str, patterns: Bits) -> Any:
    exponent, mantissa = _IEEE[code]
    return (patterns & unsigned(code).type((1 << (exponent + mantissa)) - 1)) > ((1 << exponent) - 1) << mantissa


def _special_labels(code: str, patterns: Bits) -> set[str]:
    if code not in _IEEE:
        return set()
    exponent, mantissa = _IEEE[code]
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


STATE_FEATURES = frozenset(
    {f"dtype {code}" for code in DTYPES}
    | {"scalar", "empty", "1-D", "2-D", "3-D", "no tensors", "more than ten tensors"}
    | {"-0", "subnormal", "infinity", "quiet NaN", "signalling NaN", "NaN payload"}
    | {"name with dots", "name beyond ASCII", "name of 200 characters", "name ending in .indices or .values"}
    | {"name with quotes, backslashes or control characters"}
)
"""Every label of `state_features`."""


def state_features(state: State) -> set[str]:
    """What a drawn state holds, as labels."""
    labels = {"no tensors"} if not state else {"more than ten tensors"} if len(state) > 10 else set()
    for name, tensor in state.items():
        code = CODES[tensor.dtype]
        labels |= {f"dtype {code}", _shape_label(tensor.shape)} | _name_labels(name)
        labels |= _special_labels(code, bits(tensor))
    return labels


PAIR_FEATURES = frozenset(
    {
        "nothing changed",
        "everything changed",
        "an unchanged tensor beside a changed one",
        "more than ten changed tensors",
        "density below 5 %",
        "density between 5 and 95 %",
        "+0 to -0",
        "NaN to another NaN",
        "number to NaN",
        "NaN kept beside a change",
        "only the sign",
        "only the lowest bit",
        "lowest byte kept",
    }
)
"""Every label of `pair_features`."""


def pair_features(base: State, target: State) -> set[str]:
    """What a drawn change holds, as labels."""
    patches = expected_patches(base, target)
    total, changed = sum(t.numel() for t in base.values()), sum(len(p.indices) for p in patches)
    labels = {
        "nothing changed": bool(total) and not changed,
        "everything changed": bool(total) and changed == total,
        "an unchanged tensor beside a changed one": 0 < len(patches) < sum(bool(t.numel()) for t in base.values()),
        "more than ten changed tensors": len(patches) > 10,
        "density below 5 %": bool(changed) and changed < 0.05 * total,
        "density between 5 and 95 %": 0.05 * total <= changed <= 0.95 * total and bool(changed),
    }
    found = {label for label, holds in labels.items() if holds}
    return found.union(*(_patch_labels(patch, bits(base[patch.name])) for patch in patches))


def _patch_labels(patch: Patch, old: Bits) -> set[str]:
    before, after, code = old[patch.indices], patch.bits, patch.code
    flipped, bit_count = before ^ after, 8 * width(code)
    found = {
        "only the sign": (flipped == 1 << (bit_count - 1)).any() and code != "BOOL",
        "only the lowest bit": (flipped == 1).any() and code != "BOOL",
        "lowest byte kept": ((flipped & flipped.dtype.type(0xFF)) == 0).any() and width(code) > 1,
    }
    if code in _IEEE:
        nan_before, nan_after = _nan(code, before), _nan(code, after)
        kept = np.delete(old, patch.indices)
        found |= {
            "+0 to -0": ((before == 0) & (after == 1 << (bit_count - 1))).any(),
            "NaN to another NaN": (nan_before & nan_after).any(),
            "number to NaN": (~nan_before & nan_after).any(),
            "NaN kept beside a change": _nan(code, kept).any(),
        }
    return {label for label, holds in found.items() if holds}
