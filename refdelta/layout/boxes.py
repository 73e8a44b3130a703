"""Boxes of elements of a tensor: how they lie in its shape, what several of them cover, and their JSON.

All positions are flat row-major element numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor

from refdelta.codec.state import TensorInfo
from refdelta.spec import DeltaError, Reason
from refdelta.values import is_int


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


Extent = tuple[tuple[int, int], ...]  # per axis of the tensor: first, one past the last


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


def extent(box: Box, shape: tuple[int, ...]) -> Extent | None:
    """The box as per-axis ranges of ``shape``, or None where it is not aligned with the axes."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
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


def integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(is_int, value)):
        raise ValueError(f"not a list of integers: {value!r}")
    return tuple(value)


def box_to_json(box: Box) -> list[object]:
    return [box.offset, list(box.shape), list(box.strides)]


def box_from_json(value: Sequence[object]) -> Box:
    offset, shape, strides = value
    (first,) = integers([offset])
    return Box(first, integers(shape), integers(strides))
