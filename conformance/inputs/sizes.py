"""States at the sizes where counters, blocks and number formats end: cheap to make, and large where that counts.

A boundary is a number at which code changes its ways: one byte, two bytes, a block, the last integer that float32
holds. Every tensor changes at its ends, on both sides of each boundary that it reaches, and at some places in between.
Names say the size, so that a finding does too: ``n=2^16+1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import core as hypothesis_core
from numpy.typing import NDArray
from torch import Tensor

from ..oracle import DTYPES, Bits, State, digests, from_bits, unsigned

Positions = NDArray[np.int64]

BOUNDARIES = tuple(2**power for power in (8, 12, 16, 18, 20))
FLOAT32 = 2**24
"""From here on float32 holds even integers alone."""
I32 = 2**31
PAGE = 4096


def beside(boundary: int) -> tuple[int, int, int]:
    """The boundary, and a step to each side."""
    return boundary - 1, boundary, boundary + 1


ELEMENTS = (*(n for boundary in BOUNDARIES for n in beside(boundary)), 3 * PAGE, 2**16 + PAGE)
"""Of a tensor, in states that cost nothing."""
LARGE_ELEMENTS = (*beside(FLOAT32), FLOAT32 + PAGE)
"""Of a tensor of 16 MiB where the engine takes elements of one byte."""
CHANGES = (*(n for boundary in (2**8, 2**12, 2**16) for n in beside(boundary)), 70_000, 2**18 + 1, 2**20 + 1)
"""Of a tensor."""
TENSORS = (*beside(2**8), 300, 2**12 + 1)
"""Of a state, all of them changed."""
DIMENSIONS = tuple(range(9))
DELTAS = (2, 12, *beside(2**8))
"""Composed into one."""
THREADS = (1, 2, 5)


def power(number: int) -> str:
    """A size for people: near a power of two from 2^8 on by its distance, else in digits."""
    exponent = max(8, round(np.log2(max(number, 1))))
    rest = number - 2**exponent
    near = 2**16 if exponent >= 24 else PAGE if exponent >= 16 else 1
    if abs(rest) > near:
        return f"{number:,}"
    return f"2^{exponent}" if not rest else f"2^{exponent} {'+' if rest > 0 else '-'} {abs(rest):,}"


def generator(salt: int) -> np.random.Generator:
    """Draws of this run: under ``--hypothesis-seed`` others, else always the same."""
    return np.random.default_rng([salt, int(hypothesis_core.global_force_seed or 0)])


def one_byte(capabilities: Iterable[str], number: int = 0) -> str:
    """The smallest dtype that an engine takes, for large tensors that are cheap; by turns where it has two."""
    offered = set(capabilities)
    known = [code for name, code in (("float8", "F8_E5M2"), ("non_floating", "U8")) if name in offered]
    return known[number % len(known)] if known else "BF16"


def mixed(capabilities: Iterable[str]) -> tuple[str, ...]:
    """Dtypes of one byte, two and four that an engine takes."""
    offered = set(capabilities)
    more = ("F8_E5M2",) if "float8" in offered else ()
    return (*more, *(("U8",) if "non_floating" in offered else ()), "BF16", "F32")


def spots(size: int, rng: np.random.Generator) -> Positions:
    """Positions of a tensor: its ends, both sides of every boundary in it, odd ones far out, one in each block."""
    every = [at for boundary in (*BOUNDARIES, FLOAT32) for at in beside(boundary)]
    blocks = np.arange(0, size, max(2**16, PAGE)) + rng.integers(0, PAGE)
    drawn = rng.integers(0, size, 40) if size else np.empty(0, np.int64)
    found = np.concatenate([[0, size - 1, size - 2, size - size // 7], every, blocks, drawn, drawn | 1])
    return np.unique(found[(found >= 0) & (found < size)]).astype(np.int64)


def _finite(code: str, size: int, rng: np.random.Generator) -> Bits:
    """Bits below those of infinity and NaN in every dtype, with both halves of an element drawn."""
    top = {1: 0x78, 2: 0x7800, 4: 0x7F000000, 8: 0x7F << 56}[DTYPES[code].itemsize]
    return rng.integers(0, top, size, dtype=unsigned(code))


def changed(shape: Sequence[int], code: str, at: Positions, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A tensor, and the same with other bits at these flat positions."""
    old = _finite(code, int(np.prod(shape, dtype=np.int64)), rng)
    new = old.copy()
    new[at] = np.bitwise_xor(old[at], rng.integers(1, 8, len(at), dtype=old.dtype))
    return from_bits(old, code, shape), from_bits(new, code, shape)


Pair = tuple[dict[str, Tensor], dict[str, Tensor]]


def _pair(named: Iterable[tuple[str, tuple[Tensor, Tensor]]]) -> Pair:
    both = dict(named)
    return {name: pair[0] for name, pair in both.items()}, {name: pair[1] for name, pair in both.items()}


def of_elements(sizes: Sequence[int], codes: Sequence[str], salt: int = 1) -> Pair:
    """Two states with a tensor of each size, dtypes by turns; of every other one the shape has two axes."""
    rng = generator(salt)
    return _pair(
        (f"n={power(n)}", changed(_folded(n, number), codes[number % len(codes)], spots(n, rng), rng))
        for number, n in enumerate(sizes)
    )


def _folded(size: int, number: int) -> tuple[int, ...]:
    """One axis, or two where the size has a divisor and the turn is odd."""
    rows = next((d for d in (3, 5, 7, 16, 17, 257) if size % d == 0), 1)
    return (rows, size // rows) if number % 2 else (size,)


def of_changes(counts: Sequence[int], codes: Sequence[str], salt: int = 2) -> Pair:
    """Two states with a tensor for each number of changes: of every second one all, else two thirds."""
    rng = generator(salt)
    found = []
    for number, count in enumerate(counts):
        size = count if number % 2 else count + count // 2 + 3
        at = np.sort(rng.permutation(size)[:count]).astype(np.int64)
        found.append((f"changes={power(count)}", changed((size,), codes[number % len(codes)], at, rng)))
    return _pair(found)


def of_tensors(count: int, salt: int = 3) -> Pair:
    """Two states of so many tensors; of 300, each has 240 changes, which makes 72,000 in the delta."""
    rng, changes = generator(salt), 240 if count == 300 else 2
    size = changes + 3
    at = np.arange(1, changes + 1)
    return _pair((f"layers.{number}.w", changed((size,), "BF16", at, rng)) for number in range(count))


def of_dimensions(salt: int = 4) -> Pair:
    """Two states with a tensor of each number of axes, none of two sizes alike beside each other."""
    rng, sizes = generator(salt), (2, 3, 1, 5, 2, 3, 2, 3)
    shapes = [sizes[:axes] for axes in DIMENSIONS]
    return _pair(
        (f"axes={len(shape)}", changed(shape, "BF16", spots(int(np.prod(shape, dtype=np.int64)), rng), rng))
        for shape in shapes
    )


def lineage_of(base: State, target: State) -> dict[str, object]:
    """What a delta between the two states says of them."""
    before, after = map(digests.state_digest, (base, target))
    return {"run_id": "run", "version": 1, "base_version": 0, "base_digest": before, "digest": after}
