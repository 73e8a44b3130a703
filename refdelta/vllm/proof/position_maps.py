"""Where the elements of a parameter stand after the engine rearranged it: a map from position to position.

Kernels that want another order than the checkpoint's cut a parameter into blocks and transpose them. Such a map is a
sum of one small table for each axis, so it costs a few kilobytes whatever the parameter's size; where it is not, axes
share a table, in the worst case one of the parameter's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from refdelta.codec import bits
from refdelta.layout.boxes import Box, positions

__all__ = ["PositionMap", "live_elements"]


@dataclass(frozen=True, slots=True)
class PositionMap:
    """Element ``i`` of a parameter as loaded stands at the sum over ``k`` of ``tables[k][digit k of i]``.

    The digits of ``i`` are those of a row-major position in the shape ``[len(t) for t in tables]``. Positions are flat
    and row-major, in the parameter as loaded on one side and as the engine holds it on the other.
    """

    tables: tuple[Tensor, ...]
    """[n_k] integers each, on the CPU."""

    @classmethod
    def fitted(cls, positions: Tensor) -> PositionMap:
        """The map with the smallest tables that equals ``positions`` (integers, in the shape of the parameter)."""
        rest, tables = positions.to(torch.int64), list[Tensor]()
        while rest.dim() > 1:
            leading = rest.flatten(1)[:, 0] - rest.flatten()[0]
            if torch.equal(rest, leading.view(-1, *[1] * (rest.dim() - 1)) + rest[0]):
                tables.append(leading)
                rest = rest[0]
            else:
                rest = rest.flatten(0, 1)
        return cls(tuple(_compact(table) for table in [*tables, rest.flatten()]))

    @property
    def is_identity(self) -> bool:
        """Whether every element stands where it was loaded."""
        sizes = [len(table) for table in self.tables]
        return all(
            torch.equal(table.to(torch.int64), torch.arange(size) * math.prod(sizes[axis + 1 :]))
            for axis, (table, size) in enumerate(zip(self.tables, sizes, strict=True))
        )

    @property
    def numel(self) -> int:
        """Elements of the parameter as loaded."""
        return math.prod(len(table) for table in self.tables)

    @property
    def table_elements(self) -> int:
        """Elements of all tables: what the map costs."""
        return sum(len(table) for table in self.tables)

    def __call__(self, indices: Tensor) -> Tensor:
        """[n] int64 on ``indices``' device: where the elements at ``indices`` ([n] in [0, numel)) stand. O(n)."""
        rest = indices.to(torch.int64)
        positions = torch.zeros_like(rest)
        for table in reversed(self.tables):
            positions += table.to(rest.device)[rest.remainder(len(table))]
            rest = rest.div(len(table), rounding_mode="floor")
        return positions

    def repeated(self, count: int) -> PositionMap:
        """The first axis, of one or two entries, continued to ``count`` entries at the same distance.

        Raises ValueError where the first axis has another number of entries, or shares its table with the next axis.
        """
        leading, *others = self.tables
        if len(leading) == count:
            return self
        if len(leading) != 2:
            raise ValueError(f"a first axis of {len(leading)} entries cannot be continued to {count}")
        first, second = (int(position) for position in leading)
        return PositionMap((_compact(torch.arange(count) * (second - first) + first), *others))

    def fault(self, held: Tensor) -> str | None:
        """Why ``held`` cannot be this parameter rearranged and padded with zeros; None where it can."""
        try:
            padding = bits.gather(held, self.unused(held.numel()))
        except ValueError as error:
            return str(error)
        return "its padding is not zero" if bits.bit_view(padding).any() else None

    def unused(self, numel: int) -> Tensor:
        """[n] int64: the positions, of ``numel`` that the engine holds, to which no element of the parameter goes.

        Raises ValueError where elements would stand outside, or two at one position.
        """
        free = torch.ones(numel, dtype=torch.bool)
        for taken in self._slices():
            if int(taken.min()) < 0 or int(taken.max()) >= numel:
                raise ValueError(f"its elements would stand outside the {numel} that the engine holds")
            free[taken] = False
        if numel - int(free.sum()) != self.numel:
            raise ValueError("two of its elements would stand at one position")
        return free.nonzero().flatten()

    def _slices(self) -> Iterator[Tensor]:
        """The positions of all elements, in order, one entry of the first table at a time."""
        size = self.numel // len(self.tables[0])
        for start in range(0, self.numel, size):
            yield self(torch.arange(start, start + size))


def live_elements(param: Tensor, box: Box, position_map: PositionMap | None) -> Tensor:
    """The elements that were loaded into a box of a live parameter, in the box's shape.

    Args:
        param: as the engine holds it now; contiguous.
        box: in the parameter as loaded.
        position_map: where the engine moved the parameter's elements; None where they stand as loaded. Only then the
            result is a view of ``param``.
    """
    if position_map is None:
        return box.view(param)
    return bits.gather(param, position_map(positions(box))).view(box.shape)


def _compact(table: Tensor) -> Tensor:
    return table.to(torch.int32) if not len(table) or int(table.abs().max()) < 2**31 else table
