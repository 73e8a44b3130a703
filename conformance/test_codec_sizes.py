"""Every promise again where counters, blocks and number formats end: 2^24 elements, 2^20 changes, 300 tensors.

What is driven is planned in `driving.ranges`; the states are made in `inputs.sizes`. Sizes beyond 2^31 are in
`test_codec_large`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from . import oracle
from .driving.codec import Scratch, applied, encoded
from .engines.codecs import FullCodec
from .findings import require
from .inputs import sizes
from .inputs.sizes import Pair
from .oracle import Patch, State, assert_bit_equal, clone, digests, expected_patches, expected_state, total_elements
from .oracle.layouts import Layout, Piece, lay_out

bit_exact = pytest.mark.check("bit_exact")
LARGE = {sizes.power(size): size for size in sizes.LARGE_ELEMENTS}
"""One tensor for each call: a program gets a file of 16 MiB, not of 64."""
TURNS = [f"elements, dtypes {turn} further" for turn in range(1, 4)]
"""Each size in another dtype: a kernel for elements of two bytes has chunks of its own."""
CASES = ("elements", *TURNS, *LARGE, "changes", "dimensions")


def _pair(case: str, engine: FullCodec) -> Pair:
    """The states of a case, in dtypes that the engine takes."""
    codes = sizes.mixed(engine.capabilities)
    if case in ("elements", *TURNS):
        turn = TURNS.index(case) + 1 if case in TURNS else 0
        return sizes.of_elements(sizes.ELEMENTS, [*codes[turn % len(codes) :], *codes[: turn % len(codes)]])
    if case in LARGE:
        return sizes.of_elements([LARGE[case]], [sizes.one_byte(engine.capabilities, LARGE[case])])
    if case == "changes":
        return sizes.of_changes(sizes.CHANGES, codes)
    if case == "fewer changes":
        return sizes.of_changes([n for n in sizes.CHANGES if n < 2**20], codes)
    return sizes.of_dimensions() if case == "dimensions" else sizes.of_tensors(int(case))


def _assert_patches(expected: Sequence[Patch], found: Sequence[Patch]) -> None:
    """Names, positions and bits; the finding is the first place that is wrong."""
    names = [patch.name for patch in expected], sorted(patch.name for patch in found)
    require(names[0] == names[1], "layers", expected=_short(names[0]), found=_short(names[1]))
    for want, got in zip(expected, sorted(found, key=lambda patch: patch.name), strict=True):
        count = len(want.indices), len(got.indices)
        wrong = np.flatnonzero(want.indices[: min(count)] != got.indices[: min(count)])
        at = int(wrong[0]) if wrong.size else min(count)
        first = [int(p.indices[at]) if at < len(p.indices) else "the end" for p in (want, got)]
        same = count[0] == count[1] and not wrong.size
        require(same, f"change {at} of {count[0]}", tensor=want.name, expected=first[0], found=first[1])
        wrong = np.flatnonzero(want.bits != got.bits)
        at = int(wrong[0]) if wrong.size else 0
        place = (int(want.indices[at]),) if wrong.size else None
        bits = [hex(int(p.bits[at])) if wrong.size else None for p in (want, got)]
        require(not wrong.size, "bits", tensor=want.name, position=place, expected=bits[0], found=bits[1])


def _short(names: Sequence[str]) -> str:
    return f"{len(names)} of them, {', '.join(names[:3])} to {names[-1]}" if len(names) > 6 else str(list(names))


# -- writing and applying ----------------------------------------------------------------------------------------------


def _assert_encodes(engine: FullCodec, pair: Pair, scratch: Scratch) -> None:
    with scratch() as tmp:
        written = oracle.read_delta(encoded(engine, *pair, tmp / "delta"))
    _assert_patches(expected_patches(*pair), written.patches)
    expected, found = total_elements(pair[0]), written.metadata["total_elements"]
    require(found == expected, "total_elements", expected=expected, found=found)


def _assert_applies(engine: FullCodec, pair: Pair, scratch: Scratch) -> None:
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", expected_patches(*pair), total_elements(pair[0]))
        assert_bit_equal(pair[1], applied(engine, delta, pair[0]), "applied")


@bit_exact
@pytest.mark.level("writer")
@pytest.mark.parametrize("case", [*CASES, *map(str, sizes.TENSORS)])
def test_encode(engine: FullCodec, scratch: Scratch, case: str) -> None:
    _assert_encodes(engine, _pair(case, engine), scratch)


@bit_exact
@pytest.mark.level("applier")
@pytest.mark.parametrize("case", [*CASES, *map(str, sizes.TENSORS)])
def test_apply(engine: FullCodec, scratch: Scratch, case: str) -> None:
    _assert_applies(engine, _pair(case, engine), scratch)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _for_threads(engine: FullCodec) -> Pair:
    """Chunks for several threads, the last of them short."""
    return sizes.of_elements([3 * 2**20 + sizes.PAGE + 5], [sizes.one_byte(engine.capabilities)], salt=5)


@bit_exact
@pytest.mark.level("codec")
@pytest.mark.parametrize("count", sizes.THREADS)
def test_threads(engine: FullCodec, scratch: Scratch, count: int) -> None:
    """As many threads as torch says; against the oracle, not against each other."""
    pair = _for_threads(engine)
    with _threads(count):
        _assert_encodes(engine, pair, scratch)
        _assert_applies(engine, pair, scratch)


# -- inverting and composing -------------------------------------------------------------------------------------------

LARGEST = max(LARGE, key=lambda name: LARGE[name])
_WHOLE = ["elements", LARGEST, "fewer changes", "300"]


@pytest.mark.check("inverts")
@pytest.mark.needs("inverts")
@pytest.mark.parametrize("case", _WHOLE)
def test_invert(engine: FullCodec, scratch: Scratch, case: str) -> None:
    base, target = _pair(case, engine)
    weights, patches = clone(base), expected_patches(base, target)
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", patches, total_elements(base))
        engine.invert(delta, weights, tmp / "inverse")
        written = oracle.read_delta(tmp / "inverse").patches
    assert_bit_equal(target, weights, "invert applies the delta, too")
    _assert_patches(expected_patches(target, base), written)


@pytest.mark.check("composes")
@pytest.mark.needs("composes")
@pytest.mark.parametrize("case", _WHOLE)
def test_compose(engine: FullCodec, scratch: Scratch, case: str) -> None:
    """A delta cut in two halves that share a part, of which the second's bits count."""
    base, target = _pair(case, engine)
    patches = expected_patches(base, target)
    halves = [[_part(patch, number) for patch in patches] for number in (0, 1)]
    with scratch() as tmp:
        deltas = [
            oracle.write_delta(tmp / str(number), half, total_elements(base)) for number, half in enumerate(halves)
        ]
        engine.compose(deltas, tmp / "composed")
        _assert_patches(patches, oracle.read_delta(tmp / "composed").patches)


def _part(patch: Patch, number: int) -> Patch:
    """Of the positions the even ones, then the odd ones and the first half; bits that the second replaces differ."""
    odd = np.arange(len(patch.indices)) % 2 == 1
    first_half = np.arange(len(patch.indices)) < len(patch.indices) // 2
    keep = odd | first_half if number else ~odd
    bits = patch.bits if number else np.where(first_half, patch.bits ^ 1, patch.bits)
    return Patch(patch.name, patch.shape, patch.code, patch.indices[keep], bits[keep])


@pytest.mark.check("composes")
@pytest.mark.needs("composes")
@pytest.mark.parametrize("count", sizes.DELTAS)
def test_compose_many(engine: FullCodec, scratch: Scratch, count: int) -> None:
    """Each delta changes a place of its own, and one that all change."""
    patches = [
        Patch("w", (count + 1,), "BF16", np.array([number, count]), np.array([number + 1, number + 7], np.uint16))
        for number in range(count)
    ]
    base: State = {"w": oracle.from_bits(np.zeros(count + 1, np.uint16), "BF16", (count + 1,))}
    target = base
    for patch in patches:
        target = expected_state(target, [patch])
    with scratch() as tmp:
        deltas = [oracle.write_delta(tmp / str(n), [patch], count + 1) for n, patch in enumerate(patches)]
        engine.compose(deltas, tmp / "composed")
        _assert_patches(expected_patches(base, target), oracle.read_delta(tmp / "composed").patches)


# -- digests -----------------------------------------------------------------------------------------------------------


@pytest.mark.check("refuses")
@pytest.mark.level("versioned")
@pytest.mark.needs("digests")
@pytest.mark.parametrize("case", ["elements", LARGEST, "dimensions", "300"])
def test_digest(engine: FullCodec, case: str) -> None:
    """Tensor by tensor, so that the finding says which; then all of them."""
    state = _pair(case, engine)[1]
    if case == "elements":
        for name, tensor in state.items():
            _assert_digest(engine, {name: tensor})
    _assert_digest(engine, state)


def _assert_digest(engine: FullCodec, state: State) -> None:
    expected, found = digests.state_digest(state), engine.digest(clone(state))
    require(found == expected, f"digest of {_short(list(state))}", expected=expected, found=found)


@pytest.mark.check("refuses")
@pytest.mark.level("versioned")
@pytest.mark.needs("digests")
@pytest.mark.parametrize("count", sizes.THREADS)
def test_digest_in_threads(engine: FullCodec, count: int) -> None:
    with _threads(count):
        _assert_digest(engine, _for_threads(engine)[1])


@pytest.mark.check("refuses")
@pytest.mark.level("versioned")
@pytest.mark.needs("lineage")
@pytest.mark.parametrize("case", _WHOLE)
def test_follow(engine: FullCodec, scratch: Scratch, case: str) -> None:
    """A digest that is rolled over the change arrives where the whole state's does."""
    base, target = _pair(case, engine)
    lineage = sizes.lineage_of(base, target)
    weights = clone(base)
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", expected_patches(base, target), total_elements(base), lineage=lineage)
        found = engine.follow(delta, weights, str(lineage["base_digest"]))
    require(found == lineage["digest"], "digest after the delta", expected=lineage["digest"], found=found)
    assert_bit_equal(target, weights, "followed")


# -- routing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Routed:
    """A layout, and how many changes its tensor gets beside those at the boundaries."""

    name: str
    layout: Layout
    more: int = 0


def _cut(size: int, cut: int) -> Layout:
    """One axis in two parts, of which the second stands first, behind padding."""
    name = f"n={sizes.power(size)}"
    pieces = (Piece(name, ((0, cut),), "p", (size - cut + 3,)), Piece(name, ((cut, size),), "p", (3,)))
    return Layout(name, {name: (size,)}, {"p": (size + 5,)}, pieces)


def _turned(rows: int, columns: int, taken: int) -> Layout:
    """The first columns of a matrix transposed in one parameter, the others as they are in a second."""
    name = f"[{rows}, {columns}]"
    pieces = (
        Piece(name, ((0, rows), (0, taken)), "p", (0, 0), (1, 0)),
        Piece(name, ((0, rows), (taken, columns)), "rest", (1, 0)),
    )
    return Layout(name, {name: (rows, columns)}, {"p": (taken, rows), "rest": (rows + 1, columns - taken)}, pieces)


def _stacked(rows: int, columns: int, taken: int) -> Layout:
    """A matrix cut by rows."""
    name = f"[{rows}, {columns}]"
    pieces = (
        Piece(name, ((0, taken), (0, columns)), "p", (1, 0)),
        Piece(name, ((taken, rows), (0, columns)), "rest", (0, 0)),
    )
    return Layout(name, {name: (rows, columns)}, {"p": (taken + 1, columns), "rest": (rows - taken, columns)}, pieces)


ROUTED = (
    *(Routed(sizes.power(size), _cut(size, 2 * size // 3)) for size in sizes.ELEMENTS),
    Routed("a region of 2^18 + 5", _cut(2**18 + 5 + 2**16, 2**18 + 5), more=2**16 + 1),
    Routed("turned", _turned(2**10 + 7, 2**9, 2**8 + 3), more=70_000),
    Routed("a region of 2^24", _stacked(2**12 + 1, 2**12, 2**12)),
)


@pytest.mark.check("routes")
@pytest.mark.needs("routes")
@pytest.mark.parametrize("routed", ROUTED, ids=lambda routed: routed.name)
def test_route(engine: FullCodec, routed: Routed) -> None:
    """Routed and written equals written and laid out densely."""
    code, layout, rng = "U8", routed.layout, sizes.generator(6)
    ((name, shape),) = layout.sources.items()
    size = int(np.prod(shape))
    at = rng.permutation(size)[: routed.more].astype(np.int64)
    at = np.sort(at) if routed.more else sizes.spots(size, rng)
    old = rng.integers(0, 256, shape, dtype=np.uint8)
    new = old.copy()
    new.reshape(-1)[at] ^= rng.integers(1, 256, len(at), dtype=np.uint8)
    before = lay_out(
        layout, {name: old}, {p: rng.integers(0, 256, s, dtype=np.uint8) for p, s in layout.params.items()}
    )
    expected, found = lay_out(layout, {name: new}, before), {param: array.copy() for param, array in before.items()}
    values = oracle.from_bits(new.reshape(-1)[at], code, (len(at),))
    for param, places, bits in engine.route(layout, name, torch.from_numpy(at), values):
        flat, inside = found[param].reshape(-1), places.numpy()
        within = not len(inside) or (inside.min() >= 0 and inside.max() < len(flat))
        require(within, "positions", tensor=param, expected=f"below {len(flat)}", found=int(inside.max(initial=0)))
        flat[inside] = oracle.bits(bits)
    for param, array in expected.items():
        wanted, got = (oracle.from_bits(a.reshape(-1), code, a.shape) for a in (array, found[param]))
        assert_bit_equal({param: wanted}, {param: got}, layout.name)
