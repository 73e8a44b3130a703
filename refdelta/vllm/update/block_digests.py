"""What a rank's live weights add to the state digest, block by block, in checkpoint coordinates.

A region of the layout is cut into blocks of whole rows. The digest of each block is kept, rolled with every update, and
held against memory by audits. A checkpoint tensor whose boxes on all ranks are disjoint or equal is *counted*: each
box by one rank only, however many ranks hold a copy, so that the ranks' sums add up to `refdelta.digest.state_digest`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from refdelta.codec import digests as digest
from refdelta.codec.state import TensorInfo
from refdelta.layout.boxes import (
    Box,
    box_from_json,
    box_to_json,
    canonical,
    is_run,
    outermost_axis,
    outermost_first,
    positions,
    slice_axis,
    uncovered_elements,
)
from refdelta.layout.map import LayoutMap, Region
from refdelta.vllm.proof.position_maps import PositionMap, live_elements

__all__ = [
    "BLOCK",
    "Block",
    "BlockDigests",
    "Boxes",
    "Ownership",
    "boxes_by_source",
    "counted_regions",
    "elements_on_no_rank",
    "header_sum",
    "ownership",
]

BLOCK: Final = 1 << 18
"""Elements of a block at most, where a row has no more."""

Boxes = Mapping[str, Sequence[Sequence[object]]]
"""Checkpoint tensor -> each of its boxes on one rank, as `box_to_json` gives them."""


def counted_regions(layout: LayoutMap) -> tuple[Region, ...]:
    """The layout's regions, and once more for each tied name that the checkpoint files hold beside its partner."""
    tied = [(alias, name) for alias, name in layout.aliases.items() if alias in layout.sources]
    return layout.regions + tuple(replace(r, source=alias) for alias, name in tied for r in layout.regions_of(name))


def boxes_by_source(layout: LayoutMap) -> dict[str, list[list[object]]]:
    """What the other ranks need to know of this one's layout."""
    boxes: dict[str, list[list[object]]] = {}
    for region in counted_regions(layout):
        boxes.setdefault(region.source, []).append(box_to_json(canonical(region.source_box)))
    return boxes


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which of a rank's regions it counts, and what all ranks together count."""

    counted: frozenset[str]
    """Checkpoint tensors of which the ranks together count every element once."""
    owned: tuple[bool, ...]
    """For each of `counted_regions`: whether this rank counts it."""
    replicated: tuple[bool, ...]
    """For each of `counted_regions`: whether an equal box is elsewhere too, on this rank or another."""


def ownership(layout: LayoutMap, by_rank: Sequence[Boxes], rank: int, excluded: Collection[str] = ()) -> Ownership:
    """Give every box to the first rank, and the first of its regions, that holds it.

    ``by_rank``: `boxes_by_source` of every rank. ``excluded``: checkpoint tensors that are not to be counted.
    """
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    for other, boxes in enumerate(by_rank):
        for source, found in boxes.items():
            for number, box in enumerate(found):
                holders.setdefault((source, box_from_json(box)), []).append((other, number))
    distinct: dict[str, list[Box]] = {}
    for source, held in holders:
        distinct.setdefault(source, []).append(held)
    counted = frozenset(
        source
        for source, boxes in distinct.items()
        if source not in excluded and _partition(layout.sources[source], boxes)
    )
    owned, replicated, numbers = [], [], dict[str, int]()
    for region in counted_regions(layout):
        number = numbers[region.source] = numbers.get(region.source, -1) + 1
        holding = holders[region.source, canonical(region.source_box)]
        owned.append(region.source in counted and holding[0] == (rank, number))
        replicated.append(len(holding) > 1)
    return Ownership(counted, tuple(owned), tuple(replicated))


def elements_on_no_rank(sources: Mapping[str, TensorInfo], by_rank: Sequence[Boxes]) -> dict[str, str]:
    """Tensors of which some elements are on no rank although others are: a delta could be lost there in silence."""
    found: dict[str, str] = {}
    for name, info in sources.items():
        boxes = {box_from_json(box) for held in by_rank for box in held.get(name, [])}
        if boxes and (missing := uncovered_elements(info, sorted(boxes, key=lambda box: box.offset))):
            found[name] = f"{missing} of its {info.numel} elements are on no rank"
    return found


def _partition(info: TensorInfo, boxes: list[Box]) -> bool:
    """Whether the boxes hold every element of the tensor exactly once."""
    return sum(box.numel for box in boxes) == info.numel and not uncovered_elements(info, boxes)


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a region."""

    region: int
    """Number in `counted_regions`."""
    rows: tuple[int, int]
    """First row and end, along the region's outermost axis."""
    source: str
    source_box: Box
    param: str
    param_box: Box


@dataclass(frozen=True)
class BlockDigests:
    """The blocks of a rank and their digests, which an update replaces and never changes, so that it can be undone."""

    layout: LayoutMap
    position_maps: Mapping[str, PositionMap]
    ownership: Ownership
    blocks: tuple[Block, ...]
    first: tuple[int, ...]
    """For each region the number of its first block; one more at the end."""
    rows: tuple[int, ...]
    """For each region the rows of its blocks."""
    values: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[blocks] int64 on the CPU: the digest of each block, without the tensor's header."""
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Checkpoint tensor -> its regions, by number."""

    @classmethod
    def of(cls, layout: LayoutMap, position_maps: Mapping[str, PositionMap], found: Ownership) -> BlockDigests:
        """The blocks of a rank, without digests yet."""
        blocks: list[Block] = []
        first, rows, numbers = [0], [], dict[str, list[int]]()
        for number, region in enumerate(counted_regions(layout)):
            step = _rows_of_a_block(region.source_box)
            blocks += _cut(number, region, step)
            first.append(len(blocks))
            rows.append(step)
            numbers.setdefault(region.source, []).append(number)
        return cls(layout, position_maps, found, tuple(blocks), tuple(first), tuple(rows), numbers=numbers)

    def block_of(self, number: int, indices: Tensor) -> Tensor:
        """[n] int64: the blocks of positions ([n] I64 in the checkpoint tensor) that lie in region ``number``."""
        box = self._regions[number].source_box
        axis = outermost_axis(box)
        if axis is None:
            return torch.full_like(indices, self.first[number])
        row = (indices - box.offset).div(box.strides[axis], rounding_mode="floor")
        return row.div(self.rows[number], rounding_mode="floor") + self.first[number]

    def measured(self, live: Mapping[str, Tensor], numbers: Iterable[int] | None = None) -> Tensor:
        """[blocks] int64: the digests of the blocks ``numbers`` (by default all) as they are in memory now.

        Blocks of tensors that are not counted get 0.
        """
        chosen = self.blocks if numbers is None else [self.blocks[number] for number in numbers]
        counted = self.ownership.counted
        found = [self._digest(b, self.held(live, b)) if b.source in counted else 0 for b in chosen]
        return torch.tensor(found, dtype=torch.int64)

    def measured_in(self, number: int, values: Tensor) -> Tensor:
        """[blocks of region ``number``] int64: their digests where the region held ``values`` (of its box's shape)."""
        blocks = self.blocks[self.first[number] : self.first[number + 1]]
        axis = outermost_axis(self._regions[number].source_box)
        pieces = [values if axis is None else values[(slice(None),) * axis + (slice(*b.rows),)] for b in blocks]
        found = [self._digest(b, piece) for b, piece in zip(blocks, pieces, strict=True)]
        return torch.tensor(found, dtype=torch.int64)

    def held(self, live: Mapping[str, Tensor], block: Block | Region) -> Tensor:
        """The elements of a block or a region, in the shape of its box; a view of the live tensor where it can be."""
        return live_elements(live[block.param], block.param_box, self.position_maps.get(block.param))

    @property
    def auditable(self) -> list[int]:
        """Blocks whose digest is known, by number."""
        return [number for number, block in enumerate(self.blocks) if block.source in self.ownership.counted]

    def owned_sums(self, values: Tensor) -> dict[str, int]:
        """Checkpoint tensor -> the sum modulo 2^64 of the blocks that this rank counts, from ``values`` ([blocks])."""
        sums: dict[str, int] = {}
        for number, region in enumerate(self._regions):
            if self.ownership.owned[number]:
                total = int(values[self.first[number] : self.first[number + 1]].sum())
                sums[region.source] = (sums.get(region.source, 0) + total) % (1 << 64)
        return sums

    def replicas(self, values: Tensor) -> dict[str, int]:
        """Box of a checkpoint tensor that is held more than once -> its sum, which all holders must have alike."""
        found: dict[str, int] = {}
        for number, region in enumerate(self._regions):
            if self.ownership.replicated[number]:
                box = box_to_json(canonical(region.source_box))
                total = int(values[self.first[number] : self.first[number + 1]].sum()) % (1 << 64)
                found[f"{region.source} {box}"] = total
        return found

    def with_values(self, values: Tensor) -> BlockDigests:
        """The same blocks with other digests."""
        return replace(self, values=values)

    def differing(self, live: Mapping[str, Tensor], numbers: Sequence[int]) -> dict[str, str]:
        """Checkpoint tensor -> which of its blocks among ``numbers`` are not in memory what ``values`` say."""
        found: dict[str, str] = {}
        measured = self.measured(live, numbers)
        for number in [n for n, have in zip(numbers, measured.tolist(), strict=True) if have != int(self.values[n])]:
            block = self.blocks[number]
            found.setdefault(block.source, f"{block.param}, rows {block.rows[0]} to {block.rows[1] - 1} of a region")
        return found

    def blocks_to_audit(
        self, touched: Sequence[int], budget: int, cursors: tuple[int, int], *, whole: bool
    ) -> tuple[list[int], tuple[int, int]]:
        """Which blocks an update audits, and where the next one goes on.

        With ``whole`` every touched one. Else about ``budget`` elements: half of them in touched blocks, half in
        others, each in turn from the block of its cursor on.
        """
        known = set(self.auditable)
        mine = [number for number in touched if number in known]
        if whole:
            return mine, cursors
        others = sorted(known.difference(mine))
        half = budget // 2 if others else budget
        first, here = self._taken(mine, half, cursors[0])
        rest, there = self._taken(others, budget - half, cursors[1])
        return sorted(first + rest), (here, there)

    def elements(self, numbers: Iterable[int]) -> int:
        """Elements of some blocks."""
        return sum(self.blocks[number].source_box.numel for number in numbers)

    def _taken(self, numbers: Sequence[int], budget: int, cursor: int) -> tuple[list[int], int]:
        """Of ``numbers`` the first from ``cursor`` on that have ``budget`` elements together, and the next cursor."""
        taken, spent = list[int](), 0
        for number in [n for n in numbers if n >= cursor] + [n for n in numbers if n < cursor]:
            if spent >= budget:
                break
            taken.append(number)
            spent += self.blocks[number].source_box.numel
        return taken, taken[-1] + 1 if taken else cursor

    @cached_property
    def _regions(self) -> tuple[Region, ...]:
        return counted_regions(self.layout)

    def region(self, number: int) -> Region:
        """A region by number."""
        return self._regions[number]

    def _digest(self, block: Block, values: Tensor) -> int:
        """Signed, as torch holds it."""
        info = self.layout.sources[block.source]
        name, box = block.source, block.source_box
        if is_run(box):
            in_order = values.permute(outermost_first(box))
            share = digest.run_digest(name, info.dtype, info.shape, box.offset, in_order)
        else:
            share = digest.positions_digest(name, info.dtype, info.shape, positions(box), values.reshape(-1))
        total = digest.parse(share)
        return total - (1 << 64) if total >= 1 << 63 else total


def _rows_of_a_block(box: Box) -> int:
    axis = outermost_axis(box)
    return 1 if axis is None or not box.numel else max(1, BLOCK // (box.numel // box.shape[axis]))


def _cut(number: int, region: Region, step: int) -> Iterator[Block]:
    axis, name, param = outermost_axis(region.source_box), region.source, region.param
    if axis is None or not region.numel:
        yield Block(number, (0, 1), name, region.source_box, param, region.param_box)
        return
    size = region.source_box.shape[axis]
    for start, end in pairwise([*range(0, size, step), size]):
        boxes = (slice_axis(box, axis, start, end) for box in (region.source_box, region.param_box))
        source_box, param_box = boxes
        yield Block(number, (start, end), name, source_box, param, param_box)


def header_sum(name: str, info: TensorInfo) -> int:
    """The part of a tensor's digest that does not depend on its elements."""
    return digest.parse(digest.header_digest(name, info.dtype, info.shape))
