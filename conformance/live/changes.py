"""New states for the live checks: which elements change, and to what. Every function returns a copy.

Values are changed through their bit patterns (`conformance.oracle`); non-floating tensors stay as they are, because the
format moves them only with an extension. Where two names share one tensor (``aliases``), both get the same change.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from .. import oracle
from ..inputs.checkpoints import State, clone

Aliases = tuple[str, str] | None
Positions = NDArray[np.int64]

_FIELDS: Mapping[str, tuple[int, int]] = {"BF16": (8, 7), "F16": (5, 10), "F32": (8, 23), "F64": (11, 52)}
"""dtype code -> (exponent bits, mantissa bits)."""
PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it cuts it into shards."""


def changed(
    state: Mapping[str, torch.Tensor],
    names: Iterable[str],
    aliases: Aliases,
    positions: Callable[[str, torch.Tensor], Positions],
    values: Callable[[str, torch.Tensor, Positions], oracle.Bits],
) -> State:
    """``state`` with the elements ``positions(name, tensor)`` of every floating tensor of ``names`` set to new bits."""
    after = clone(state)
    for name in names:
        tensor = state[name]
        code = oracle.CODES[tensor.dtype]
        if code in _FIELDS and tensor.numel():
            where = positions(name, tensor)
            patterns = oracle.bits(tensor)
            patterns[where] = values(name, tensor, where)
            after[name] = oracle.from_bits(patterns, code, tensor.shape)
    return mirrored(after, state, aliases)


def mirrored(after: State, before: Mapping[str, torch.Tensor], aliases: Aliases) -> State:
    """Give both aliases the change of the one that changed (the first, where both did)."""
    if aliases:
        first, second = aliases
        source = second if not oracle.difference(before[first], after[first]) else first
        after[first], after[second] = after[source].clone(), after[source].clone()
    return after


def every_tensor(state: Mapping[str, torch.Tensor], seed: str, aliases: Aliases = None) -> State:
    """1 to 10 percent of every tensor, at least one element of each, to other finite values of the same size."""

    def positions(name: str, tensor: torch.Tensor) -> Positions:
        draw = _generator(f"{seed} {name}")
        share = draw.uniform(0.01, 0.1)
        return _some(draw, tensor.numel(), max(1, round(share * tensor.numel())))

    return changed(state, state, aliases, positions, lambda name, t, at: moved(t, at, f"{seed} {name}", 0.25))


def one_element(state: Mapping[str, torch.Tensor], which: int, aliases: Aliases = None) -> State:
    """The first (``which=0``) or last (``which=-1``) element of every tensor."""
    return changed(
        state,
        state,
        aliases,
        lambda name, t: np.array([which % t.numel()], dtype=np.int64),
        lambda name, t, at: moved(t, at, f"element {which} {name}", 0.25),
    )


def shard_boundaries(state: Mapping[str, torch.Tensor], ranks: int, aliases: Aliases = None) -> State:
    """Of every tensor the elements on both sides of each cut that ``ranks`` shards make, in rows and in columns."""
    return changed(
        state,
        state,
        aliases,
        lambda name, t: boundary_positions(tuple(t.shape), ranks),
        lambda name, t, at: moved(t, at, f"boundary {name}", 0.25),
    )


def boundary_positions(shape: Sequence[int], ranks: int) -> Positions:
    """Flat positions beside the cuts along every dimension, with and without padding.

    A dimension may hold two tensors in one (gate and up), each of which is sharded: so there are twice as many cuts as
    ranks. Beside each, elements at every corner of the other dimensions and at an inner place. So the corners of every
    shard are among them, and rows and columns are told apart.
    """
    if not shape:
        return np.array([0], dtype=np.int64)
    places = [*itertools.product(*((0, size - 1) for size in shape)), tuple(size // 3 for size in shape)]
    found = [
        [*place[:axis], at, *place[axis + 1 :]]
        for axis, size in enumerate(shape)
        for at in _beside_cuts(size, 2 * ranks)
        for place in places
    ]
    return np.unique(np.ravel_multi_index(np.array(found).T, tuple(shape))).astype(np.int64)


def _beside_cuts(size: int, ranks: int) -> list[int]:
    padded = -(-size // PADDING) * PADDING
    cuts = {whole * rank // ranks for whole in (size, padded) for rank in range(ranks + 1)}
    return sorted({at for cut in cuts for at in (cut - 1, cut) if 0 <= at < size})


def special_patterns(code: str) -> list[int]:
    """Zeros, subnormals, infinities, quiet and signalling NaNs with several payloads, each positive then negative."""
    exponent, mantissa = _FIELDS[code]
    sign, infinity, ones = 1 << (exponent + mantissa), ((1 << exponent) - 1) << mantissa, (1 << mantissa) - 1
    quiet = infinity | 1 << (mantissa - 1)
    positive = [0, 1, ones, infinity, infinity | 1, infinity | ones >> 1, quiet, quiet | 5, infinity | ones]
    return [pattern | flag for pattern in positive for flag in (0, sign)]


def special_values(state: Mapping[str, torch.Tensor], turn: int, aliases: Aliases = None, *, nan: bool = True) -> State:
    """Every tensor gets each special pattern once (or as many as it has elements), at positions drawn from its name.

    The next ``turn`` puts the next pattern of the list at each of these positions: zero becomes negative zero, a NaN
    the same NaN with its sign set, then one with another payload. Aliases get no NaN: vLLM's loader ties the two only
    when `torch.equal` says so, so that a fresh engine on equal bytes with a NaN starts untied. ``nan=False``: none.
    """

    def patterns_of(name: str, tensor: torch.Tensor) -> list[int]:
        code = oracle.CODES[tensor.dtype]
        patterns = special_patterns(code)
        return [p for p in patterns if not _is_nan(p, code)] if not nan or name in (aliases or ()) else patterns

    def positions(name: str, tensor: torch.Tensor) -> Positions:
        return _some(_generator(f"special {name}"), tensor.numel(), len(patterns_of(name, tensor)))

    def values(name: str, tensor: torch.Tensor, at: Positions) -> oracle.Bits:
        code = oracle.CODES[tensor.dtype]
        patterns = patterns_of(name, tensor)
        start = _generator(f"start {name}").integers(len(patterns) // 2) * 2 + turn
        return np.array([patterns[(start + i) % len(patterns)] for i in range(len(at))], oracle.unsigned(code))

    return changed(state, state, aliases, positions, values)


def _is_nan(pattern: int, code: str) -> bool:
    exponent, mantissa = _FIELDS[code]
    return pattern & ((1 << (exponent + mantissa)) - 1) > ((1 << exponent) - 1) << mantissa


def family(name: str) -> str:
    """The parameter family of a checkpoint tensor: its name without prefix and numbers of layers and experts."""
    if re.search(r"_tower\.|embed_(vision|audio)\.", name):
        return "towers"
    name = re.sub(r"^model\.(language_model\.)?(layers\.\d+\.)?", "", name).removesuffix(".weight")
    return re.sub(r"\bexperts\.\d+\.", "experts.", name)


def families(state: Mapping[str, torch.Tensor], aliases: Aliases = None) -> dict[str, list[str]]:
    """Family -> its tensors; two aliases count as the embedding's family."""
    grouped: dict[str, list[str]] = {}
    for name in state:
        grouped.setdefault(family(aliases[0]) if aliases and name == aliases[1] else family(name), []).append(name)
    return grouped


def family_groups(names: Iterable[str], size: int) -> list[tuple[str, ...]]:
    """The families in groups of at most ``size``, for runs in which a fresh engine per family costs too much."""
    ordered = sorted(names)
    bounds = [*range(0, len(ordered), size), len(ordered)]
    return [tuple(ordered[a:b]) for a, b in pairwise(bounds)]


def of_families(state: Mapping[str, torch.Tensor], names: Iterable[str], aliases: Aliases = None) -> State:
    """A third of the elements of ``names`` changed by about half their size: enough to move log-probabilities."""
    return changed(
        state,
        names,
        aliases,
        lambda name, t: _some(_generator(f"behaviour {name}"), t.numel(), max(1, t.numel() // 3)),
        lambda name, t, at: moved(t, at, f"behaviour {name}", 0.5),
    )


def moved(tensor: torch.Tensor, at: Positions, seed: str, strength: float) -> oracle.Bits:
    """Finite bits that differ from those of ``tensor`` at each position: values times 1 + ``strength`` * N(0, 1)."""
    code = oracle.CODES[tensor.dtype]
    old = oracle.bits(tensor)[at]
    values = oracle.from_bits(old, code, old.shape).double().nan_to_num(0.0, 1.0, -1.0)
    noise = torch.from_numpy(_generator(f"value {seed}").standard_normal((2, len(at))))
    scale = float(values.abs().mean()) if len(at) else 0.0
    new = oracle.bits((values * (1 + strength * noise[0]) + 0.02 * scale * noise[1]).to(tensor.dtype))
    return np.where(new == old, new ^ np.array(1, new.dtype), new)


def _some(draw: np.random.Generator, numel: int, count: int) -> Positions:
    """At most ``count`` distinct positions below ``numel``, ascending, without listing all of them."""
    if count >= numel // 2:
        return np.sort(draw.permutation(numel)[:count]).astype(np.int64)
    return np.unique(draw.integers(0, numel, count))


def _generator(seed: str) -> np.random.Generator:
    return np.random.default_rng(list(hashlib.sha256(seed.encode()).digest()[:16]))
