"""Boxes of elements of a tensor: all arithmetic on them, and their one JSON form.

A box says where elements stand: in which order, along which axes, how several boxes cover a tensor together, and
whether two lists of boxes carry the same elements to the same places. All positions are flat row-major element numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refdelta.codec.state import TensorInfo
from refdelta.spec import DeltaError, Reason
from refdelta.values import is_int

__all__ = [
    "Box",
    "Extent",
    "Move",
    "Runs",
    "box_from_json",
    "box_of_ranges",
    "box_to_json",
    "canonical",
    "coverage",
    "extent",
    "integers",
    "is_run",
    "joined_axes",
    "outermost_axis",
    "outermost_first",
    "positions",
    "positions_at",
    "row_major_strides",
    "runs",
    "same_moves",
    "slice_axis",
    "uncovered_elements",
]


@dataclass(frozen=True, slots=True)
class Box:
    """A strided box of elements of one tensor: the positions ``offset + sum(i_k * strides[k])``, 0 <= i_k < shape[k].

    Strides are positive and count elements of the flat row-major tensor.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.offset < 0 or len(self.shape) != len(self.strides):
            raise DeltaError(Reason.BAD_SHAPE, f"not a box: {self!r}")
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size < 0 or (stride <= 0 and size > 1):
                raise DeltaError(Reason.BAD_SHAPE, f"a box needs sizes >= 0 and strides > 0: {self!r}")

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    @property
    def last(self) -> int:
        """The highest position in a non-empty box."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def view(self, flat: Tensor) -> Tensor:
        """The box of a contiguous tensor, as a view of the same storage."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)


# --- axes -------------------------------------------------------------------------------------------------------------


def joined_axes(axes: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The axes of one or several boxes of one shape, outermost first, in as few axes as possible.

    Axes of size 1 are left out. Neighbours become one axis where they are one run in every box.

    Args:
        axes: for each axis its size, then its stride in each of the boxes. The strides in the first box decide which
            axis is further out.
    """
    joined: list[tuple[int, ...]] = []
    for size, *strides in sorted(
        (axis for axis in axes if axis[0] != 1), key=lambda axis: (axis[1:], axis[0]), reverse=True
    ):
        inner = size
        if joined and list(joined[-1][1:]) == [size * stride for stride in strides]:
            inner *= joined.pop()[0]
        joined.append((inner, *strides))
    return tuple(joined)


def canonical(box: Box) -> Box:
    """One standard box for a set of positions: boxes of the same positions have the same one. See `joined_axes`.

    The order of its elements may differ from that of ``box``.
    """
    axes = joined_axes(zip(box.shape, box.strides, strict=True))
    return Box(box.offset, tuple(size for size, _ in axes), tuple(stride for _, stride in axes))


def is_run(box: Box) -> bool:
    """Whether the elements are neighbours, with no gap between the first and the last."""
    axes = joined_axes(zip(box.shape, box.strides, strict=True))
    return not axes or (len(axes) == 1 and axes[0][1] == 1)


def outermost_axis(box: Box) -> int | None:
    """The axis of more than one element that has the largest stride; None where no axis has more than one."""
    axes = [axis for axis, size in enumerate(box.shape) if size > 1]
    return max(axes, key=lambda axis: box.strides[axis]) if axes else None


def outermost_first(box: Box) -> list[int]:
    """The axes in the order of their strides, largest first: what ``permute`` takes to bring elements into order."""
    return sorted(range(len(box.shape)), key=lambda axis: -box.strides[axis])


def slice_axis(box: Box, axis: int, start: int, end: int) -> Box:
    """The part of a box from ``start`` to ``end`` (exclusive) along one axis."""
    shape = (*box.shape[:axis], end - start, *box.shape[axis + 1 :])
    return Box(box.offset + start * box.strides[axis], shape, box.strides)


# --- positions --------------------------------------------------------------------------------------------------------


def positions(box: Box) -> Tensor:
    """[numel] int64: the positions of all elements, in the row-major order of the box."""
    found = torch.tensor([box.offset])
    for size, stride in zip(box.shape, box.strides, strict=True):
        found = (found.unsqueeze(-1) + torch.arange(size) * stride).flatten()
    return found


def positions_at(box: Box, numbers: Tensor) -> Tensor:
    """[n]: ``positions(box)[numbers]`` in O(n), whatever the size of the box. ``numbers``: [n] int64."""
    rest, found = numbers, torch.full_like(numbers, box.offset)
    for size, stride in zip(reversed(box.shape), reversed(box.strides), strict=True):
        found += rest.remainder(size) * stride
        rest = rest.div(size, rounding_mode="floor")
    return found


# --- boxes along the axes of a tensor ---------------------------------------------------------------------------------

Extent = tuple[tuple[int, int], ...]
"""Per axis of the tensor: first, one past the last."""


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def box_of_ranges(shape: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Box:
    """The box of a row-major tensor that these ranges along its axes cut out; `extent` is the way back."""
    strides = row_major_strides(shape)
    offset = sum(first * stride for (first, _), stride in zip(ranges, strides, strict=True))
    return Box(offset, tuple(stop - first for first, stop in ranges), strides)


def extent(box: Box, shape: tuple[int, ...]) -> Extent | None:
    """The box as per-axis ranges of ``shape``, or None where it is not aligned with the axes."""
    strides = row_major_strides(shape)
    starts, rest = [], box.offset
    for stride in strides:
        starts.append(rest // stride)
        rest %= stride
    sizes = [1] * len(shape)
    for size, stride in zip(box.shape, box.strides, strict=True):
        axes = [a for a, s in enumerate(strides) if s == stride and shape[a] > 1 and sizes[a] == 1]
        if size == 1:
            continue
        if not axes:
            return None
        sizes[axes[0]] = size
    if any(start + size > n for start, size, n in zip(starts, sizes, shape, strict=True)):
        return None
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


# --- coverage ---------------------------------------------------------------------------------------------------------


def coverage(info: TensorInfo, owners: Sequence[tuple[str, Box]]) -> tuple[int, list[tuple[str, str]]]:
    """How boxes cover a tensor, exactly: (elements that no box covers, pairs of owners whose boxes share an element).

    Boxes that leave the tensor count as absent.
    """
    inside = [(owner, box) for owner, box in owners if box.numel and box.last < info.numel]
    extents = [(owner, extent(box, info.shape)) for owner, box in inside]
    known = [(owner, extent) for owner, extent in extents if extent is not None]
    if len(known) < len(extents):
        return _cover_by_counting(info, inside)
    clashes = _clashes(known)
    if clashes:
        return info.numel - _union([extent for _, extent in known]), clashes
    return info.numel - sum(box.numel for _, box in inside), []


def uncovered_elements(info: TensorInfo, boxes: Sequence[Box]) -> int:
    """Number of elements of a tensor that none of ``boxes`` holds, exactly."""
    return coverage(info, [("", box) for box in boxes])[0]


def _clashes(extents: Sequence[tuple[str, Extent]]) -> list[tuple[str, str]]:
    if not extents or not extents[0][1]:
        return [(a, b) for (a, _), (b, _) in combinations(extents, 2)]
    ordered = sorted(extents, key=lambda item: item[1][0])
    found: list[tuple[str, str]] = []
    for position, (owner, extent) in enumerate(ordered):
        for other, other_extent in ordered[position + 1 :]:
            if other_extent[0][0] >= extent[0][1]:
                break  # sorted by the first axis: nothing later can reach back
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(extent, other_extent, strict=True)):
                found.append((owner, other))
    return found


def _union(extents: Sequence[Extent]) -> int:
    """Number of elements in any of the ranges, axis by axis between neighbouring edges."""
    if not extents or not extents[0]:
        return len(extents[:1])
    edges = sorted({edge for extent in extents for edge in extent[0]})
    return sum(
        (b - a) * _union([extent[1:] for extent in extents if extent[0][0] <= a and b <= extent[0][1]])
        for a, b in pairwise(edges)
    )


def _cover_by_counting(info: TensorInfo, owners: Sequence[tuple[str, Box]]) -> tuple[int, list[tuple[str, str]]]:
    """The slow exact answer, for boxes that do not follow the axes: mark every element."""
    owner_of = torch.full((max(info.numel, 1),), -1, dtype=torch.int32)
    clashes: dict[tuple[str, str], None] = {}
    for number, (owner, box) in enumerate(owners):
        view = box.view(owner_of)
        for earlier in view[view >= 0].unique().tolist():
            clashes[owners[earlier][0], owner] = None
        view.fill_(number)
    return int((owner_of[: info.numel] < 0).sum()), list(clashes)


# --- boxes that move elements -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """A region without names: position ``source + sum(i_k * s_k)`` goes to ``param + sum(i_k * p_k)``.

    ``axes``: (size, s, p), as `joined_axes` gives them.
    """

    source: int
    param: int
    axes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, source: Box, param: Box) -> Move:
        """From one box to another of the same shape."""
        axes = zip(source.shape, source.strides, param.strides, strict=True)
        return cls(source.offset, param.offset, joined_axes(axes))

    @classmethod
    def still(cls, box: Box) -> Move:
        """A move that leaves the elements of one tensor's box where they are."""
        return cls.of(box, box)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(size for size, *_ in self.axes)


def same_moves(first: Sequence[Move], second: Sequence[Move]) -> bool:
    """Whether two lists carry the same elements to the same places, however they cut them into boxes."""
    a, b = (_coalesced([move for move in side if move.numel]) for side in (first, second))
    if a == b:
        return True
    if sum(move.numel for move in a) != sum(move.numel for move in b):
        return False
    return bool(np.array_equal(runs(a), runs(b)))


def _coalesced(moves: Sequence[Move]) -> list[Move]:
    """Boxes of one form that stand at even distances, as one box with a further axis."""
    if len(moves) == 1:
        return list(moves)
    alike: dict[tuple[tuple[int, ...], ...], list[Move]] = {}
    for move in moves:
        alike.setdefault(move.axes, []).append(move)
    found: list[Move] = []
    for axes, group in alike.items():
        group.sort(key=lambda move: (move.source, move.param))
        steps = {(b.source - a.source, b.param - a.param) for a, b in pairwise(group)}
        s, p = next(iter(steps), (0, 0))
        if len(steps) == 1 and s > 0 and p > 0:
            found.append(Move(group[0].source, group[0].param, joined_axes([*axes, (len(group), s, p)])))
        else:
            found += group
    return sorted(found, key=lambda move: (move.source, move.param, move.axes))


Runs = npt.NDArray[np.int64]
"""[n, 3]: first position, where it goes, length."""


def runs(moves: Sequence[Move]) -> Runs:
    """The same elements as the longest runs of neighbours that stay neighbours. However the moves were cut, it is the
    same."""
    pieces = np.concatenate([_pieces(move) for move in moves])
    order = np.lexsort((pieces[:, 0], pieces[:, 1] - pieces[:, 0]))
    pieces = pieces[order]
    ends = pieces[:-1, :2] + pieces[:-1, 2:]
    starts = np.concatenate([[True], np.any(ends != pieces[1:, :2], axis=1)])
    lengths = np.add.reduceat(pieces[:, 2], np.flatnonzero(starts))
    return np.column_stack([pieces[starts, :2], lengths])


def _pieces(move: Move) -> Runs:
    axes, length = move.axes, 1
    if axes and axes[-1][1:] == (1, 1):
        axes, length = axes[:-1], axes[-1][0]
    at = np.array([[move.source, move.param]], dtype=np.int64)
    for size, s, p in axes:
        steps = np.arange(size, dtype=np.int64)[:, None] * np.array([[s, p]], dtype=np.int64)
        at = (at[:, None, :] + steps[None, :, :]).reshape(-1, 2)
    return np.column_stack([at, np.full(len(at), length, dtype=np.int64)])


# --- JSON -------------------------------------------------------------------------------------------------------------


def integers(value: object) -> tuple[int, ...]:
    """A JSON list of integers as a tuple. Raises ValueError for anything else."""
    if not isinstance(value, list) or not all(map(is_int, value)):
        raise ValueError(f"not a list of integers: {value!r}")
    return tuple(value)


def box_to_json(box: Box) -> list[object]:
    """Offset, shape and strides."""
    return [box.offset, list(box.shape), list(box.strides)]


def box_from_json(value: Sequence[object]) -> Box:
    """The box that `box_to_json` wrote.

    Raises TypeError or ValueError where the form is another one, and `DeltaError` (``bad_shape``) where the numbers are
    not those of a box.
    """
    offset, shape, strides = value
    (first,) = integers([offset])
    return Box(first, integers(shape), integers(strides))
