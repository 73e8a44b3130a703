"""The hand-written layouts, and the dense truth that they are judged by."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from conformance.oracle import Bits
from conformance.oracle.layouts import LAYOUTS, Layout, Piece, fused_qkv, lay_out, padded_vocabulary


def _numbered(layout: Layout) -> dict[str, Bits]:
    """Every checkpoint element has a number of its own, above 0."""
    arrays, first = {}, 1
    for name, shape in layout.sources.items():
        size = int(np.prod(shape))
        arrays[name] = np.arange(first, first + size, dtype=np.uint16).reshape(shape)
        first += size
    return arrays


def _laid_out(layout: Layout) -> dict[str, Bits]:
    empty = {name: np.zeros(shape, np.uint16) for name, shape in layout.params.items()}
    return lay_out(layout, _numbered(layout), empty)


def test_lay_out_by_hand() -> None:
    sources = {"w": (2, 3), "t": (1, 2), "s": ()}
    pieces = (
        Piece("w", ((1, 2), (1, 3)), "p", (0, 2)),
        Piece("t", ((0, 1), (0, 2)), "p", (0, 0), axes=(1, 0)),
        Piece("w", ((0, 1), (0, 2)), "deep", (1, 0, 0)),
        Piece("s", (), "deep", (0, 0, 1)),
    )
    found = _laid_out(Layout("by hand", sources, {"p": (2, 4), "deep": (2, 1, 2)}, pieces))
    assert found["p"].tolist() == [[7, 0, 5, 6], [8, 0, 0, 0]]
    assert found["deep"].tolist() == [[[0, 9]], [[1, 2]]]


def test_second_rank_of_fused_qkv_by_hand() -> None:
    """8 query heads and 2 kv heads of 4 rows and 6 columns, at TP=2: the second half of each, stacked."""
    rows = _laid_out(fused_qkv(2, 1))["qkv"][:, 0] // 6
    assert rows.tolist() == [*range(16, 32), *range(32 + 4, 32 + 8), *range(40 + 4, 40 + 8)]


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    """2 kv heads at TP=4: ranks 0 and 1 hold the first, 2 and 3 the second."""
    first_rows = [_laid_out(fused_qkv(4, rank))["qkv"][8, 0] // 6 - 32 for rank in range(4)]
    assert first_rows == [0, 0, 4, 4]


def test_vocabulary_padding_stays_empty() -> None:
    """13 rows padded to 16, at TP=4: the last rank holds one row and three of padding."""
    rows = _laid_out(padded_vocabulary(4, 3))["embed"][:, 0]
    assert rows.tolist() == [12 * 3 + 1, 0, 0, 0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_pieces_fit_and_do_not_overlap(layout: Layout) -> None:
    covered = {name: np.zeros(shape, np.int64) for name, shape in layout.params.items()}
    for piece in layout.pieces:
        ones = {name: np.ones(shape, np.int64) for name, shape in layout.sources.items()}
        alone = Layout(layout.name, layout.sources, layout.params, (piece,))
        for name, array in lay_out(alone, ones, {n: np.zeros_like(a) for n, a in covered.items()}).items():
            covered[name] += array
    assert all(array.max() == 1 for array in covered.values())


def test_every_source_is_held_by_the_ranks_together() -> None:
    """Every element of every tensor that is not dropped is on some rank; replicated ones on several."""
    groups: dict[str, list[Layout]] = {}
    for layout in LAYOUTS:
        groups.setdefault(layout.name.partition(" rank=")[0], []).append(layout)
    for name, ranks in groups.items():
        held = Counter(n for layout in ranks for array in _laid_out(layout).values() for n in array.flat)
        numbers = {
            n for source, array in _numbered(ranks[0]).items() for n in array.flat if source not in ranks[0].dropped
        }
        assert numbers <= held.keys(), f"{name}: elements that no rank holds"
