"""From a family's table to the map of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from refdelta.codec.state import TensorInfo
from refdelta.layout.boxes import Box, box_of_ranges
from refdelta.layout.families.common import Ends, Range, Ranks, Row, Table, refuse
from refdelta.layout.map import LayoutMap, Region
from refdelta.layout.reasons import OTHER_RANKS, ROTARY
from refdelta.spec import DeltaError, Reason

__all__ = ["lay_out"]

_ROTARY_TABLES = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


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
    taken: tuple[Range, ...]
    """What the rank takes of it."""
    at: tuple[Range, ...]
    """Where that stands in the parameter."""
    room: tuple[Range, ...]
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
                taken, at = box_of_ranges(placed.tensor, placed.taken), box_of_ranges(self.shape, placed.at)
                if placed.row.expert is not None:
                    taken, at = _inner(taken), _inner(at)
                yield Region(placed.row.source, taken, self.param, at)

    def padding(self) -> Iterator[Box]:
        for placed in self.placed:
            if placed.at != placed.room:
                (_, filled), (_, stop) = placed.at[0], placed.room[0]
                yield box_of_ranges(self.shape, ((filled, stop), *placed.room[1:]))


def _place(rows: Sequence[Row], ranks: Ranks) -> Iterator[_Placed]:
    top = 0
    for row in rows:
        taken, room = _take(row.shape, row, ranks)
        at = _below(top, [stop - first for first, stop in taken])
        yield _Placed(row, row.shape, taken, at, _below(top, room))
        top += room[0] if room else 0


def _place_experts(rows: Sequence[Row], ranks: Ranks) -> Iterator[_Placed]:
    """Experts along the first axis; of each, the rows one below the other. Experts that are dealt out are not cut."""
    held = ranks.experts(rows[0].experts)
    within = ranks if ranks.ep_size == 1 else Ranks()
    tops: dict[int | None, int] = {}
    for row in rows:
        if row.expert is not None and not held[0] <= row.expert < held[1]:
            continue
        shape, line = _one_expert(row)
        (lines, columns), room = _take(shape, row, within)
        top = tops.get(row.expert, 0)
        tops[row.expert] = top + room[0]
        tensor, which, slots = _slots(row, held)
        at = (slots, *_below(top, room))
        yield _Placed(row, tensor, (which, (lines[0] + line, lines[1] + line), columns), at, at)


def _slots(row: Row, held: Range) -> tuple[tuple[int, ...], Range, Range]:
    """(the tensor's shape with an axis of experts, which of them are taken, which slots of the parameter they fill)."""
    if row.expert is None:
        return row.shape, held, (0, held[1] - held[0])
    slot = row.expert - held[0]
    return (1, *row.shape), (0, 1), (slot, slot + 1)


def _one_expert(row: Row) -> tuple[tuple[int, int], int]:
    """Shape of what the row takes of one expert's matrix before it is cut, and the line at which it begins."""
    height, width = row.shape[-2:]
    if row.half is None:
        return (height, width), 0
    return (height // 2, width), row.half * height // 2


def _take(shape: tuple[int, ...], row: Row, ranks: Ranks) -> tuple[tuple[Range, ...], list[int]]:
    """What the rank takes along each axis, and the room that it has for it."""
    taken, room = [(0, size) for size in shape], list(shape)
    if row.cut.axis is not None:
        size = shape[row.cut.axis]
        first, stop = row.cut.of(size, ranks, row.source)
        taken[row.cut.axis], room[row.cut.axis] = (min(first, size), min(stop, size)), stop - first
    return tuple(taken), room


def _below(top: int, sizes: Sequence[int]) -> tuple[Range, ...]:
    return tuple((top, top + size) if axis == 0 else (0, size) for axis, size in enumerate(sizes))


def _inner(box: Box) -> Box:
    """A box of one expert without the axis of experts."""
    return Box(box.offset, box.shape[1:], box.strides[1:])
