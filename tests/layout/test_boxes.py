"""Box arithmetic, held to the positions of every element."""

from __future__ import annotations

import json
import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refdelta.layout.boxes import (
    Box,
    Move,
    box_from_json,
    box_of_ranges,
    box_to_json,
    canonical,
    extent,
    is_run,
    joined_axes,
    outermost_axis,
    outermost_first,
    positions,
    positions_at,
    row_major_strides,
    runs,
    same_moves,
    slice_axis,
)
from refdelta.spec import DeltaError


@st.composite
def boxes(draw: st.DrawFn, smallest: int = 0) -> Box:
    """A box without repeated positions: the axes of a strided tensor in any order, with gaps or none."""
    sizes = draw(st.lists(st.integers(smallest, 4), max_size=4))
    stride, strides = draw(st.integers(1, 3)), list[int]()
    for size in sizes:
        strides.append(stride)
        stride *= max(size, 1) * draw(st.sampled_from([1, 1, 2]))
    order = draw(st.permutations(range(len(sizes))))
    return Box(draw(st.integers(0, 9)), tuple(sizes[i] for i in order), tuple(strides[i] for i in order))


def by_counting(box: Box) -> list[int]:
    """The positions, one index at a time."""
    steps = [sum(i * s for i, s in zip(index, box.strides, strict=True)) for index in np.ndindex(*box.shape)]
    return [box.offset + step for step in steps]


@given(boxes())
def test_positions(box: Box) -> None:
    """All of them, and those of some elements, in the box's own order."""
    expected = by_counting(box)
    assert positions(box).tolist() == expected
    numbers = torch.arange(len(expected)).flip(0)[::2]
    assert positions_at(box, numbers).tolist() == expected[::-1][::2]


@given(boxes(smallest=1), st.randoms())
def test_canonical_boxes_are_equal_where_the_positions_are(box: Box, random: Random) -> None:
    """A box with its axes in another order, one of them cut in two and one of size 1 added, is the same box."""
    axes = list(zip(box.shape, box.strides, strict=True))
    if axes and axes[0][0] % 2 == 0:
        size, stride = axes.pop(0)
        axes += [(2, stride * (size // 2)), (size // 2, stride)]
    axes.append((1, 7))
    random.shuffle(axes)
    other = Box(box.offset, tuple(n for n, _ in axes), tuple(s for _, s in axes))
    assert canonical(other) == canonical(box)
    assert by_counting(canonical(box)) == sorted(by_counting(box))


@given(boxes(smallest=1))
def test_runs_are_neighbours(box: Box) -> None:
    """`is_run` says whether the sorted positions have no gap, and `outermost_first` sorts them."""
    found = sorted(by_counting(box))
    assert is_run(box) == (found == list(range(found[0], found[0] + len(found))))
    assert positions(box).view(box.shape).permute(outermost_first(box)).flatten().tolist() == found


@given(boxes(smallest=1), st.data())
def test_slices_of_the_outermost_axis(box: Box, data: st.DataObject) -> None:
    """A slice holds the positions of the elements in the slice, and those of the outermost axis are in order."""
    axis = outermost_axis(box)
    if axis is None:
        assert box.numel == 1
        return
    size = box.shape[axis]
    assert size > 1
    assert box.strides[axis] == max(s for n, s in zip(box.shape, box.strides, strict=True) if n > 1)
    start = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(start, size))
    found = slice_axis(box, axis, start, end)
    assert by_counting(found) == positions(box).view(box.shape).narrow(axis, start, end - start).flatten().tolist()


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.data())
def test_ranges_and_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    """`box_of_ranges` cuts out what slicing does; `extent` finds the ranges again."""
    ranges = []
    for size in shape:
        first = data.draw(st.integers(0, size - 1))
        ranges.append((first, data.draw(st.integers(first + 1, size))))
    box = box_of_ranges(shape, ranges)
    whole = torch.arange(math.prod(shape)).view(shape)
    assert row_major_strides(shape) == tuple(Box(0, shape, row_major_strides(shape)).view(whole).stride())
    assert by_counting(box) == whole[tuple(slice(*r) for r in ranges)].flatten().tolist()
    assert extent(box, shape) == tuple(ranges)


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ([(2, 12, 12), (3, 4, 4), (4, 1, 1)], ((24, 1, 1),)),
        ([(2, 12, 3), (3, 4, 1)], ((6, 4, 1),)),
        ([(2, 12, 4), (3, 4, 1)], ((2, 12, 4), (3, 4, 1))),
        ([(3, 1, 4), (4, 3, 1)], ((4, 3, 1), (3, 1, 4))),
        ([(1, 5, 9), (1, 1, 1)], ()),
    ],
    ids=["one run on both sides", "one run with gaps", "a run on one side only", "transposed", "one element"],
)
def test_axes_are_joined_where_both_boxes_allow_it(
    axes: list[tuple[int, ...]], expected: tuple[tuple[int, ...], ...]
) -> None:
    """Outermost in the first box first."""
    assert joined_axes(axes) == expected
    assert joined_axes(reversed(axes)) == expected


@given(boxes(smallest=1), st.integers(0, 5))
def test_moves_are_the_same_where_every_element_goes_to_the_same_place(box: Box, further: int) -> None:
    """Whole, and element by element; not with one element elsewhere."""
    target = Box(box.offset + further, box.shape, box.strides)
    whole = [Move.of(box, target)]
    single = [Move(at, at + further, ()) for at in reversed(by_counting(box))]
    assert same_moves(whole, single)
    assert same_moves(single, whole)
    assert same_moves([*whole, Move.still(Box(7, (0, 2), (2, 1)))], single)
    assert same_moves([Move.still(Box(7, (0,), (1,)))], [])
    assert not same_moves(whole, [*single[1:], Move(single[0].source, single[0].param + 1, ())])
    assert not same_moves(whole, single[1:] or [Move(999, 999, ())])
    assert np.array_equal(runs(whole), runs(single))
    assert Move.still(box).numel == box.numel


# --- JSON -------------------------------------------------------------------------------------------------------------


@given(boxes())
def test_json(box: Box) -> None:
    """There and back."""
    assert box_from_json(json.loads(json.dumps(box_to_json(box)))) == box


@pytest.mark.parametrize(
    "value",
    [[0, [2]], [0, [2], [1], 0], ["0", [2], [1]], [True, [2], [1]], [0, [2.0], [1]], [0, "2", [1]], [0, None, [1]]],
    ids=str,
)
def test_json_of_no_box(value: list[object]) -> None:
    """Another form is a ValueError, which `LayoutMap.from_json` and audits turn into their own reasons."""
    with pytest.raises(ValueError, match=r"not a list of integers|values to unpack"):
        box_from_json(value)


@pytest.mark.parametrize("value", [[-1, [2], [1]], [0, [2], [0]], [0, [2], [1, 1]]], ids=str)
def test_json_of_an_impossible_box(value: list[object]) -> None:
    """What `Box` itself refuses."""
    with pytest.raises(DeltaError, match="box"):
        box_from_json(value)
