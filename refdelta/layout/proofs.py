"""Two maps of one rank compared, and the maps of all ranks proven to hold a checkpoint exactly.

Maps are equal when they carry the same elements to the same places, however they cut them into regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from refdelta.codec.state import TensorInfo
from refdelta.layout.boxes import Box, Move, coverage, runs, same_moves
from refdelta.layout.map import LayoutMap, Region
from refdelta.layout.reasons import OTHER_RANKS

__all__ = ["AcrossRanks", "Difference", "difference", "lost"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One point in which two maps differ."""

    kind: str
    """``sources``, ``params``, ``regions``, ``padding``, ``aliases`` or ``dropped``."""
    name: str
    """The checkpoint tensor or, for ``params`` and ``padding``, the parameter."""
    first: str
    """What the first map says."""
    second: str
    """What the second map says."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.first} | {self.second}"


def difference(first: LayoutMap, second: LayoutMap) -> list[Difference]:
    """All points in which two maps of one rank differ. Empty when both carry the same elements to the same places."""
    return [
        *_entries("sources", first.sources, second.sources),
        *_entries("params", first.params, second.params),
        *_entries("aliases", first.aliases, second.aliases),
        *_entries("dropped", first.dropped, second.dropped),
        *_moved(first, second),
        *_padded(first, second),
    ]


def lost(rules: LayoutMap, traced: LayoutMap) -> list[str]:
    """Checkpoint tensors that the architecture has a place for and the engine's loader leaves out without a reason.

    The engine's loader drops them at every start, so comparing the engine with a fresh one cannot show it.
    """
    return [
        name
        for name in rules.sources
        if rules.regions_of(name) and not traced.regions_of(name) and name not in {**traced.dropped, **traced.aliases}
    ]


def _entries(kind: str, first: Mapping[str, object], second: Mapping[str, object]) -> Iterator[Difference]:
    if first == second:
        return
    for name in [*first, *(name for name in second if name not in first)]:
        if first.get(name) != second.get(name):
            yield Difference(kind, name, _told(first.get(name)), _told(second.get(name)))


def _told(value: object) -> str:
    if isinstance(value, TensorInfo):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "absent" if value is None else repr(value)


def _moved(first: LayoutMap, second: LayoutMap) -> Iterator[Difference]:
    ours, theirs = _by_pair(first.regions), _by_pair(second.regions)
    for pair in [*ours, *(pair for pair in theirs if pair not in ours)]:
        if ours.get(pair) == theirs.get(pair):
            continue
        a, b = ([Move.of(*boxes) for boxes in side.get(pair, [])] for side in (ours, theirs))
        if not same_moves(a, b):
            source, param = pair
            yield Difference("regions", source, f"{param} {_places(a)}", f"{param} {_places(b)}")


def _padded(first: LayoutMap, second: LayoutMap) -> Iterator[Difference]:
    for name in sorted({*first.padding, *second.padding}):
        a, b = ([Move.still(box) for box in layout.padding.get(name, ())] for layout in (first, second))
        if not same_moves(a, b):
            yield Difference("padding", name, _places(a), _places(b))


def _places(moves: Sequence[Move]) -> str:
    """A few words on where elements go: how many, and the first of them."""
    if not moves:
        return "nothing"
    first = min(moves, key=lambda move: (move.source, move.param))
    count = sum(move.numel for move in moves)
    return f"{count} elements, from {first.source} to {first.param}, {len(moves)} boxes of {first.axes}"


def _by_pair(regions: Sequence[Region]) -> dict[tuple[str, str], list[tuple[Box, Box]]]:
    boxes: dict[tuple[str, str], list[tuple[Box, Box]]] = {}
    for region in regions:
        if region.numel:
            boxes.setdefault((region.source, region.param), []).append((region.source_box, region.param_box))
    return boxes


# --- all ranks --------------------------------------------------------------------------------------------------------

_Shard = frozenset[Box]  # what one rank holds of a tensor


class AcrossRanks:
    """The ranks of one engine, added one by one, and what is wrong with what they hold together.

    It proves three things. Each rank's own map is complete (`LayoutMap.check`). The different shards of a checkpoint
    tensor are disjoint and together make up the tensor, and each shard is on equally many ranks (on all of them where
    the tensor is replicated). A tensor that no rank holds is dropped for one declared reason, the same on all ranks.
    """

    def __init__(self) -> None:
        self.ranks = 0
        self._sources: Mapping[str, TensorInfo] = {}
        self._held: dict[str, dict[_Shard, int]] = {}
        self._not_held: dict[str, dict[str, int]] = {}
        self._findings: list[str] = []

    def add(self, layout: LayoutMap) -> None:
        """The map of the next rank."""
        self._findings += [f"rank {self.ranks}: {finding}" for finding in layout.check().findings()]
        if self.ranks and layout.sources != self._sources:
            self._findings.append(f"rank {self.ranks}: it knows other checkpoint tensors than rank 0")
        self._sources = layout.sources
        for name in layout.sources:
            regions = layout.regions_of(name)
            if regions:
                shard = frozenset(region.source_box for region in regions if region.numel)
                holders = self._held.setdefault(name, {})
                holders[shard] = holders.get(shard, 0) + 1
            else:
                reason = layout.dropped.get(name) or f"alias of {layout.aliases.get(name)}"
                reasons = self._not_held.setdefault(name, {})
                reasons[reason] = reasons.get(reason, 0) + 1
        self.ranks += 1

    def findings(self) -> list[str]:
        """One sentence for each fault. Empty when all three things are proven."""
        return [
            *self._findings,
            *(finding for name, info in self._sources.items() for finding in self._of_tensor(name, info)),
        ]

    def _of_tensor(self, name: str, info: TensorInfo) -> Iterator[str]:
        shards, reasons = self._held.get(name, {}), self._not_held.get(name, {})
        if shards:
            faults = list(_tiling(name, info, list(shards.items())))
            yield from _tiling(name, info, _distinct(shards)) if faults else ()
            if others := sorted(set(reasons) - {OTHER_RANKS}):
                yield f"{name}: some ranks hold it, others say {others[0]!r}"
        elif set(reasons) == {OTHER_RANKS}:
            yield f"{name}: every rank says that others hold it"
        elif len(reasons) > 1:
            yield f"{name}: ranks do not hold it for different reasons: {', '.join(sorted(reasons))}"


def _tiling(name: str, info: TensorInfo, shards: Sequence[tuple[_Shard, int]]) -> Iterator[str]:
    owners = [(str(number), box) for number, (shard, _) in enumerate(shards) for box in shard]
    if any(box.last >= info.numel for _, box in owners):
        yield f"{name}: a shard leaves the tensor"
    missing, clashes = coverage(info, owners)
    if clashes:
        yield f"{name}: different shards share elements"
    if missing:
        yield f"{name}: {missing} of {info.numel} elements are on no rank"
    if len({ranks for _, ranks in shards}) > 1:
        yield f"{name}: its shards are on {[ranks for _, ranks in shards]} ranks, not equally many"


def _distinct(held: Mapping[_Shard, int]) -> list[tuple[_Shard, int]]:
    """The different shards and on how many ranks each is, where ranks may cut the same one differently."""
    found: dict[bytes, tuple[_Shard, int]] = {}
    for shard, ranks in held.items():
        form = runs([Move.still(box) for box in shard]).tobytes()
        first, earlier = found.get(form, (shard, 0))
        found[form] = first, earlier + ranks
    return list(found.values())
