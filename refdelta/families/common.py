"""The words in which a family's layout is written, and what they mean for one rank.

A family is a table of `Row`: runtime parameter, checkpoint tensor, its shape, and how it is cut. Rows of one parameter
stand in it one below the other, in the table's order. Nothing here knows of vLLM; the rules are those of tensor,
expert and pipeline parallelism as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from refdelta.families.reasons import OTHER_RANKS, ROTARY
from refdelta.layout_map import Box, LayoutMap, Region, TensorInfo
from refdelta.spec import DeltaError, Reason

__all__ = [
    "COLUMNS",
    "ROWS",
    "VOCABULARY",
    "WHOLE",
    "Cut",
    "Ends",
    "Ranks",
    "Row",
    "Table",
    "heads",
    "kv_heads",
    "lay_out",
    "refuse",
]

VOCABULARY_MULTIPLE = 64
"""Engines pad vocabularies to a multiple of this many rows before they cut them."""

_Range = tuple[int, int]  # first, one past the last


def refuse(detail: str, tensor: str | None = None) -> DeltaError:
    """The error for a config or size that has no layout."""
    return DeltaError(Reason.UNSUPPORTED_ENGINE, f"layout: {detail}", tensor)


# --- the position of one rank -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where one rank stands in every kind of parallelism. Raises `DeltaError` where no such rank exists."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("tp", "ep", "pp"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if not 0 <= rank < size:
                raise refuse(f"{kind}_rank={rank} is not a rank of {kind}_size={size}")
        # Experts are spread over all ranks that share them: every tensor-parallel rank of every data-parallel replica.
        if self.ep_size > 1 and (self.ep_size % self.tp_size or self.ep_rank % self.tp_size != self.tp_rank):
            raise refuse(
                f"expert-parallel rank {self.ep_rank} of {self.ep_size} cannot be tensor-parallel rank "
                f"{self.tp_rank} of {self.tp_size}: groups are whole multiples of each other"
            )

    def experts(self, count: int) -> _Range:
        """The run of whole experts that this rank holds: all of them, or an even share, the first ranks one more."""
        if self.ep_size > count:
            raise refuse(f"{count} experts cannot be spread over ep_size={self.ep_size}")
        share, more = divmod(count, self.ep_size)
        first = self.ep_rank * share + min(self.ep_rank, more)
        return first, first + share + (self.ep_rank < more)

    def layers(self, count: int) -> _Range:
        """The layers of this pipeline stage: an even share; what is left goes one each to stages from the last but
        one backwards, because the last holds the head too."""
        share, more = divmod(count, self.pp_size)
        sizes = [share + (self.pp_size - 1 - more <= stage < self.pp_size - 1) for stage in range(self.pp_size)]
        first = sum(sizes[: self.pp_rank])
        return first, first + sizes[self.pp_rank]


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a tensor a tensor-parallel rank holds: an even slice of one axis, or all of it."""

    axis: int | None
    units: int | None = None
    """The axis consists of this many indivisible parts (attention heads); None: of its rows or columns."""
    replicated: bool = False
    """Where there are fewer units than ranks, neighbouring ranks hold the same one (kv heads)."""
    padded: bool = False
    """The axis is first padded with zeros, to a multiple of `VOCABULARY_MULTIPLE`."""

    def of(self, size: int, ranks: Ranks, tensor: str) -> _Range:
        """What the rank holds of an axis of ``size``; the range may reach beyond it, into the padding."""
        if self.padded:
            size = -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        units, tp = self.units or size, ranks.tp_size
        if units % tp == 0:
            slot, slots = ranks.tp_rank, tp
        elif self.replicated and tp % units == 0:
            slot, slots = ranks.tp_rank // (tp // units), units
        else:
            raise refuse(f"{units} heads, rows or columns cannot be spread over tp_size={tp}", tensor)
        return slot * size // slots, (slot + 1) * size // slots


WHOLE = Cut(None)
ROWS = Cut(0)
COLUMNS = Cut(1)
VOCABULARY = Cut(0, padded=True)


def heads(count: int) -> Cut:
    """Rows that form ``count`` query heads."""
    return Cut(0, units=count)


def kv_heads(count: int) -> Cut:
    """Rows that form ``count`` key or value heads."""
    return Cut(0, units=count, replicated=True)


class Ends(Enum):
    """Which pipeline stages hold a tensor that belongs to no layer."""

    EVERY = "every stage"
    FIRST = "the first stage"
    LAST = "the last stage"
    BOTH = "the first and the last stage"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a family's table: this tensor, cut like this, stands in that parameter."""

    param: str
    """Runtime parameter."""
    source: str
    """Tensor of the checkpoint files."""
    shape: tuple[int, ...]
    """Its shape there."""
    cut: Cut = WHOLE
    """What a tensor-parallel rank holds; axes are those of one expert where there are experts."""
    experts: int = 0
    """The parameter stacks this many experts along a first axis of its own; expert parallelism deals them out."""
    expert: int | None = None
    """The tensor is this one expert; None: the tensor, too, holds all of them along a first axis."""
    half: int | None = None
    """Of a tensor that holds gate and up one below the other, take the first (0) or the second (1)."""
    layer: int | None = None
    """Decoder layer, for pipeline parallelism; None: see ``ends``."""
    ends: Ends = Ends.EVERY


@dataclass(frozen=True, slots=True)
class Table:
    """A whole model: its rows, and what its files hold besides."""

    rows: Sequence[Row]
    layers: int
    dtype: torch.dtype
    tied: tuple[str, str] | None = None
    """(output head, the embedding that it equals): one parameter under two names."""
    head: Ends = Ends.EVERY
    """Which pipeline stages have an output head."""
    same_stage: Sequence[tuple[int, int]] = ()
    """Layers that a pipeline must not part: the second reads the first one's cache."""
    unused: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Tensors of the files that the engine does not hold: shape and reason."""
    drops: Callable[[str], str | None] = lambda name: None
    """The reason why the engine does not hold a tensor that some files have, by name."""

    def tensors(self) -> dict[str, TensorInfo]:
        """What hub files of this model hold: name -> shape and dtype."""
        shapes = {row.source: row.shape for row in self.rows} | {
            name: shape for name, (shape, _) in self.unused.items()
        }
        return {name: TensorInfo(shape, self.dtype) for name, shape in shapes.items()}


# --- what it means for one rank ---------------------------------------------------------------------------------------


def lay_out(table: Table, ranks: Ranks, tensors: Mapping[str, TensorInfo] | None = None) -> LayoutMap:
    """The map of one rank. ``tensors``: what the checkpoint files hold, where that is known.

    Raises `DeltaError`: ``unsupported_engine`` where the sizes cannot be cut, ``shape_mismatch`` where the files hold
    other shapes than the table says.
    """
    sources = table.tensors() if tensors is None else dict(tensors)
    _check_shapes(table, sources)
    _check_stages(table, ranks)
    if ranks.ep_size > 1 and not any(row.experts for row in table.rows):
        raise refuse(f"ep_size={ranks.ep_size} for a model without experts")
    params: dict[str, TensorInfo] = {}
    regions: list[Region] = []
    padding: dict[str, tuple[Box, ...]] = {}
    here = [row for row in table.rows if _on_stage(row, ranks, table.layers)]
    for name, rows in _by_param(here).items():
        stack = _Stack(name, rows, ranks)
        params[name] = TensorInfo(stack.shape, table.dtype)
        regions += [region for region in stack.regions() if region.source in sources]
        if boxes := tuple(stack.padding()):
            padding[name] = boxes
    mapped = {region.source for region in regions}
    aliases = dict([table.tied]) if table.tied and _at_end(table.head, ranks) else {}
    dropped = dict(_dropped(table, [name for name in sources if name not in mapped and name not in aliases]))
    return LayoutMap(sources, params, tuple(regions), padding, aliases, dropped)


def _check_shapes(table: Table, sources: Mapping[str, TensorInfo]) -> None:
    for row in table.rows:
        found = sources.get(row.source)
        if found is not None and found.shape != row.shape:
            detail = f"layout: the config says {list(row.shape)}, the files hold {list(found.shape)}"
            raise DeltaError(Reason.SHAPE_MISMATCH, detail, row.source)


def _check_stages(table: Table, ranks: Ranks) -> None:
    stages = [replace(ranks, pp_rank=stage).layers(table.layers) for stage in range(ranks.pp_size)]
    for first, second in table.same_stage:
        if not any(start <= first and second < stop for start, stop in stages):
            raise refuse(f"layer {second} reads layer {first}'s cache, on another stage of pp_size={ranks.pp_size}")


def _dropped(table: Table, idle: Sequence[str]) -> Iterator[tuple[str, str]]:
    known = {row.source for row in table.rows} | ({table.tied[0]} if table.tied else set())
    for name in idle:
        if name in known:
            yield name, OTHER_RANKS
        elif name in table.unused:
            yield name, table.unused[name][1]
        elif name.endswith(_ROTARY_TABLES):
            yield name, ROTARY
        elif reason := table.drops(name):
            yield name, reason


_ROTARY_TABLES = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


def _on_stage(row: Row, ranks: Ranks, layers: int) -> bool:
    if row.layer is not None:
        first, stop = ranks.layers(layers)
        return first <= row.layer < stop
    return _at_end(row.ends, ranks)


def _at_end(ends: Ends, ranks: Ranks) -> bool:
    is_first, is_last = ranks.pp_rank == 0, ranks.pp_rank == ranks.pp_size - 1
    held = {Ends.EVERY: True, Ends.FIRST: is_first, Ends.LAST: is_last, Ends.BOTH: is_first or is_last}
    return held[ends]


def _by_param(rows: Sequence[Row]) -> dict[str, list[Row]]:
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.param, []).append(row)
    return grouped


@dataclass(frozen=True, slots=True)
class _Placed:
    """One row on one rank, as ranges along the axes of tensor and parameter."""

    row: Row
    tensor: tuple[int, ...]
    """The tensor's shape; one expert's tensor counts as a stack of one."""
    taken: tuple[_Range, ...]
    """What the rank takes of it."""
    at: tuple[_Range, ...]
    """Where that stands in the parameter."""
    room: tuple[_Range, ...]
    """What the row occupies in the parameter: ``at`` and the padding below it."""


class _Stack:
    """One parameter of one rank: its rows, one below the other."""

    def __init__(self, param: str, rows: Sequence[Row], ranks: Ranks) -> None:
        self.param = param
        self.placed = list(_place_experts(rows, ranks) if rows[0].experts else _place(rows, ranks))
        self.shape = tuple(max(stop for _, stop in axis) for axis in zip(*(p.room for p in self.placed), strict=True))

    def regions(self) -> Iterator[Region]:
        for placed in self.placed:
            if all(first < stop for first, stop in placed.taken):
                taken, at = _box(placed.tensor, placed.taken), _box(self.shape, placed.at)
                if placed.row.expert is not None:
                    taken, at = _inner(taken), _inner(at)
                yield Region(placed.row.source, taken, self.param, at)

    def padding(self) -> Iterator[Box]:
        for placed in self.placed:
            if placed.at != placed.room:
                (_, filled), (_, stop) = placed.at[0], placed.room[0]
                yield _box(self.shape, ((filled, stop), *placed.room[1:]))


def _place(rows: Sequence[Row], ranks: Ranks) -> Iterator[_Placed]:
    top = 0
    for row in rows:
        taken, room = _take(row.shape, row, ranks)
        at = _below(top, [stop - first for first, stop in taken])
        yield _Placed(row, row.shape, taken, at, _below(top, room))
        top += room[0] if room else 0


def _place_experts(rows: Sequence[Row], ranks: Ranks) -> Iterator[_Placed]:
    """Experts along the first axis; of each, the rows one below the other. Experts that are dealt out are not cut."""
    first, stop = ranks.experts(rows[0].experts)
    within = ranks if ranks.ep_size == 1 else Ranks()
    tops: dict[int | None, int] = {}
    for row in rows:
        if row.expert is not None and not first <= row.expert < stop:
            continue
        (height, width), below = _one_expert(row)
        (lines, columns), room = _take((height, width), row, within)
        lines = (lines[0] + below, lines[1] + below)
        top = tops.get(row.expert, 0)
        tops[row.expert] = top + room[0]
        if row.expert is None:
            tensor, lead, slots = row.shape, (first, stop), (0, stop - first)
        else:
            tensor, lead, slots = (1, *row.shape), (0, 1), (row.expert - first, row.expert - first + 1)
        at = (slots, *_below(top, room))
        yield _Placed(row, tensor, (lead, lines, columns), at, at)


def _one_expert(row: Row) -> tuple[tuple[int, int], int]:
    """Shape of what the row takes of one expert's matrix before it is cut, and the line at which it begins."""
    height, width = row.shape[-2:]
    if row.half is None:
        return (height, width), 0
    return (height // 2, width), row.half * height // 2


def _take(shape: tuple[int, ...], row: Row, ranks: Ranks) -> tuple[tuple[_Range, ...], list[int]]:
    """What the rank takes along each axis, and the room that it has for it."""
    taken, room = [(0, size) for size in shape], list(shape)
    if row.cut.axis is not None:
        size = shape[row.cut.axis]
        first, stop = row.cut.of(size, ranks, row.source)
        taken[row.cut.axis], room[row.cut.axis] = (min(first, size), min(stop, size)), stop - first
    return tuple(taken), room


def _below(top: int, sizes: Sequence[int]) -> tuple[_Range, ...]:
    return tuple((top, top + size) if axis == 0 else (0, size) for axis, size in enumerate(sizes))


def _box(shape: Sequence[int], ranges: Sequence[_Range]) -> Box:
    """The box of a row-major tensor that these ranges along its axes cut out."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    offset = sum(first * stride for (first, _), stride in zip(ranges, strides, strict=True))
    return Box(offset, tuple(stop - first for first, stop in ranges), tuple(strides))


def _inner(box: Box) -> Box:
    """A box of one expert without the axis of experts."""
    return Box(box.offset, box.shape[1:], box.strides[1:])
