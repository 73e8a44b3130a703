"""From checkpoint coordinates to an engine's runtime coordinates, box by box.

A checkpoint tensor reaches a serving engine cut up: q, k and v stacked in one parameter, rows or columns sliced
over tensor-parallel ranks, vocabulary rows padded. A `LayoutMap` states that for one rank as a list of `Region`:
each pairs one box of a checkpoint tensor with one strided box of a runtime parameter. Everything else follows from
the regions: where a changed element goes (`LayoutMap.route`) and whether the map is complete (`LayoutMap.check`).

All positions are flat row-major element numbers, in the checkpoint tensor's shape on one side and in the
parameter's logical shape on the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from refdelta.codec import bits
from refdelta.codec.state import TensorInfo
from refdelta.layout.boxes import Box, box_from_json, box_to_json, coverage, integers, joined_axes
from refdelta.spec import DeltaError, Reason, TensorPatch

__all__ = ["JSON_FORMAT", "JSON_VERSION", "LayoutMap", "LayoutReport", "Region", "RoutedPatch", "destinations"]

JSON_FORMAT = "refdelta_layout"
JSON_VERSION = 1


@dataclass(frozen=True, slots=True)
class Region:
    """One box of a checkpoint tensor and the strided box of a runtime parameter that holds it.

    Element ``i`` of the box stands at ``source_box.offset + sum(i_k * source_box.strides[k])`` in the checkpoint tensor
    and at the same sum over ``param_box`` in the parameter; both boxes have the same shape.

    The second column of a [3, 4] checkpoint tensor, stacked below ten other elements of a one-dimensional parameter:

    >>> import torch
    >>> region = Region("w", Box(1, (3,), (4,)), "stacked", Box(10, (3,), (1,)))
    >>> chosen, positions = region.translate(torch.tensor([0, 1, 9]))
    >>> chosen.tolist(), positions.tolist()  # element 0 lies outside the box
    ([1, 2], [10, 12])
    """

    source: str
    source_box: Box
    param: str
    param_box: Box

    def __post_init__(self) -> None:
        if self.source_box.shape != self.param_box.shape:
            raise DeltaError(
                Reason.SHAPE_MISMATCH,
                f"region into {self.param}: source box {self.source_box.shape}, parameter box {self.param_box.shape}",
                self.source,
            )

    @property
    def numel(self) -> int:
        """Number of elements that the region maps."""
        return self.source_box.numel

    def translate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``indices`` (I64, positions in the checkpoint tensor) lie in the box, and where they go.

        Returns the I64 selection into ``indices`` and, for each selected one, its I64 position in the parameter.
        """
        if not self.numel:
            nothing = torch.empty(0, dtype=torch.int64, device=indices.device)
            return nothing, nothing
        rest = indices - self.source_box.offset
        inside = rest >= 0
        target = torch.full_like(rest, self.param_box.offset)
        axes = zip(self.source_box.shape, self.source_box.strides, self.param_box.strides, strict=True)
        for size, source_stride, param_stride in joined_axes(axes):
            if source_stride == 1:  # the innermost: nothing remains of it
                step, rest = rest, torch.zeros_like(rest)
            else:
                step = torch.div(rest, source_stride, rounding_mode="floor")
                rest = rest - step * source_stride
            inside &= step < size
            target += step if param_stride == 1 else step * param_stride
        inside &= rest == 0
        if bool(inside.all()):
            return torch.arange(len(indices), device=indices.device), target
        chosen = inside.nonzero().flatten()
        return chosen, target[chosen]


def destinations(indices: Tensor, regions: Sequence[Region]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Where changed elements of one checkpoint tensor go, region by region, in O(changed).

    This is the only router. `LayoutMap.route` is made of it, which the suite's check ``routes`` proves, and so is the
    backend's `ProvenLayout.route`, which a live engine runs.

    Args:
        indices: [n] I32 or I64, ascending: positions in the checkpoint tensor.
        regions: regions of that tensor.

    Yields, for each region that holds some of the elements: its number in ``regions``, an I64 selection into
    ``indices``, and for each selected element its I64 position in the region's parameter.
    """
    positions = indices.to(torch.int64)
    for number, region in enumerate(regions):
        if not region.numel or not positions.numel():
            continue
        # Positions are sorted, so a region costs what lies within its span, not the whole patch.
        span = torch.tensor([region.source_box.offset, region.source_box.last + 1], device=positions.device)
        low, high = (int(i) for i in torch.searchsorted(positions, span))
        chosen, at = region.translate(positions[low:high])
        if chosen.numel():
            yield number, chosen + low, at


@dataclass(frozen=True, slots=True)
class RoutedPatch:
    """Where a patch's elements go in one runtime parameter: I64 positions in its logical shape, and their values."""

    param: str
    indices: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """What `LayoutMap.check` found. `ok` when nothing is unmapped, uncovered or doubly covered."""

    unmapped: tuple[str, ...]
    """Checkpoint tensors without a region, not an alias and not declared dropped."""
    uncovered: Mapping[str, int]
    """Parameter -> number of its elements that no region and no padding box covers."""
    overlapping: tuple[tuple[str, str, str], ...]
    """(parameter, source, source) whose regions share an element; padding appears as ``<padding>``."""
    out_of_bounds: tuple[tuple[str, str], ...]
    """(source, parameter) of regions that leave either tensor."""
    dtype_differs: tuple[tuple[str, str], ...]
    """(source, parameter) whose dtypes differ, so that loading converts instead of copying bits."""
    padding: Mapping[str, int]
    """Parameter -> number of padding elements."""
    dropped: Mapping[str, str]
    """Checkpoint tensor -> the declared reason why the engine does not hold it."""
    mapped_elements: int
    """Elements of runtime parameters that regions cover."""

    @property
    def ok(self) -> bool:
        """Whether every source is accounted for and every parameter is covered exactly once."""
        return not (self.unmapped or self.uncovered or self.overlapping or self.out_of_bounds or self.dtype_differs)

    def findings(self) -> list[str]:
        """One sentence per fault; empty when `ok`."""
        return [
            *(f"checkpoint tensor {name} reaches no parameter" for name in self.unmapped),
            *(f"parameter {name}: {count} elements are covered by nothing" for name, count in self.uncovered.items()),
            *(f"parameter {name}: {a} and {b} write the same elements" for name, a, b in self.overlapping),
            *(f"the region of {source} leaves {source} or {param}" for source, param in self.out_of_bounds),
            *(f"{source} and {param} have different dtypes" for source, param in self.dtype_differs),
        ]


@dataclass(frozen=True)
class LayoutMap:
    """The layout of one rank: which box of which checkpoint tensor stands where in which runtime parameter."""

    sources: Mapping[str, TensorInfo]
    """Every checkpoint tensor, with its shape and dtype."""
    params: Mapping[str, TensorInfo]
    """Every runtime parameter and loadable buffer of this rank. Aliases appear under their first name only."""
    regions: tuple[Region, ...]
    padding: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    """Parameter -> boxes that the loader fills with zeros."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name -> the checkpoint tensor whose parameter it shares (tied embeddings). The name may be that of a
    tensor in the checkpoint files, or one that only the trainer uses because the files hold the tied tensor once."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint tensor -> why this engine does not hold it."""

    def __post_init__(self) -> None:
        for region in self.regions:
            if region.source not in self.sources or region.param not in self.params:
                raise DeltaError(Reason.UNMAPPED, f"region into unknown tensor {region.param!r}", region.source)

    @cached_property
    def _by_source(self) -> Mapping[str, Sequence[Region]]:
        by_source: dict[str, list[Region]] = {}
        for region in self.regions:
            by_source.setdefault(region.source, []).append(region)
        return by_source

    def regions_of(self, source: str) -> Sequence[Region]:
        """The regions of one checkpoint tensor, in the order in which the loader wrote them."""
        return self._by_source.get(source, [])

    def route(self, patch: TensorPatch) -> list[RoutedPatch]:
        """Carry a patch from checkpoint to parameter coordinates, in O(changed).

        Elements that this rank does not hold (another rank's shard, a dropped tensor) are left out. An element may go
        to several places (one checkpoint k into K and V). Raises `DeltaError`: ``unknown_tensor`` for a name that the
        checkpoint does not have, ``shape_mismatch``, ``dtype_mismatch``, ``unmapped`` where no rule accounts for the
        tensor.

        Rank 1 of 2 holds the lower two rows of a [4, 3] tensor:

        >>> import torch
        >>> sizes = {"w": TensorInfo((4, 3), torch.float32)}, {"p": TensorInfo((2, 3), torch.float32)}
        >>> lower = Region("w", Box(6, (2, 3), (3, 1)), "p", Box(0, (2, 3), (3, 1)))
        >>> rank1 = LayoutMap(*sizes, regions=(lower,))
        >>> [piece] = rank1.route(TensorPatch("w", (4, 3), torch.tensor([2, 7]), torch.tensor([0.5, 1.5])))
        >>> piece.param, piece.indices.tolist(), piece.values.tolist()
        ('p', [1], [1.5])
        """
        self.check_patch(patch)
        regions = self.regions_of(patch.name)
        return [
            RoutedPatch(regions[number].param, at, patch.values[chosen])
            for number, chosen, at in destinations(patch.indices, regions)
        ]

    def check_patch(self, patch: TensorPatch) -> None:
        """Raise what `route` raises for a patch that has no place here, or another shape or dtype."""
        self.check_info(patch)
        accounted = patch.name in self.dropped or patch.name in self.aliases
        if not accounted and not self.regions_of(patch.name):
            raise DeltaError(Reason.UNMAPPED, "the layout map has no region for this tensor", patch.name)

    def check_info(self, patch: TensorPatch) -> None:
        """Raise ``unknown_tensor``, ``shape_mismatch`` or ``dtype_mismatch`` where a patch fits no source."""
        info = self.sources.get(patch.name) or self.sources.get(self.aliases.get(patch.name, ""))
        if info is None:
            raise DeltaError(Reason.UNKNOWN_TENSOR, "the checkpoint has no tensor of this name", patch.name)
        if tuple(patch.shape) != info.shape:
            raise DeltaError(
                Reason.SHAPE_MISMATCH, f"expected {list(info.shape)}, found {list(patch.shape)}", patch.name
            )
        if patch.values.dtype != info.dtype:
            raise DeltaError(Reason.DTYPE_MISMATCH, f"expected {info.dtype}, found {patch.values.dtype}", patch.name)

    def check_aliases(self, patches: Sequence[TensorPatch]) -> None:
        """Refuse (``alias_conflict``) patches after which tied names would no longer hold equal bits.

        A tied name that the checkpoint files hold must be patched exactly as its partner; one that they do not hold
        may be left out, but not changed alone.
        """
        named = {patch.name: patch for patch in patches}
        for alias, canonical in self.aliases.items():
            tied, partner = named.get(alias), named.get(canonical)
            if tied is None and (partner is None or alias not in self.sources):
                continue
            if tied is None or partner is None or not _same_change(tied, partner):
                raise DeltaError(
                    Reason.ALIAS_CONFLICT,
                    f"{alias} and {canonical} share one parameter; expected the same change to both, "
                    f"found {_count(tied)} and {_count(partner)} changed elements",
                    alias if tied is not None else canonical,
                )

    def check(self) -> LayoutReport:
        """Prove coverage by exact box arithmetic; see `LayoutReport`."""
        uncovered: dict[str, int] = {}
        overlapping: list[tuple[str, str, str]] = []
        by_param: dict[str, list[tuple[str, Box]]] = {name: [] for name in self.params}
        for region in self.regions:
            by_param[region.param].append((region.source, region.param_box))
        for name, boxes in self.padding.items():
            by_param[name] += [("<padding>", box) for box in boxes]
        for name, owners in by_param.items():
            missing, clashes = coverage(self.params[name], owners)
            overlapping += [(name, a, b) for a, b in clashes]
            if missing:
                uncovered[name] = missing
        mapped = {region.source for region in self.regions}
        accounted = mapped | set(self.dropped) | set(self.aliases)
        return LayoutReport(
            unmapped=tuple(name for name in self.sources if name not in accounted),
            uncovered=uncovered,
            overlapping=tuple(overlapping),
            out_of_bounds=tuple(self._out_of_bounds()),
            dtype_differs=tuple(self._dtype_differs()),
            padding={name: sum(box.numel for box in boxes) for name, boxes in self.padding.items()},
            dropped=dict(self.dropped),
            mapped_elements=sum(region.numel for region in self.regions),
        )

    def _out_of_bounds(self) -> Iterator[tuple[str, str]]:
        for region in self.regions:
            sides = (region.source_box, self.sources[region.source]), (region.param_box, self.params[region.param])
            if region.numel and any(box.last >= info.numel for box, info in sides):
                yield region.source, region.param

    def _dtype_differs(self) -> Iterator[tuple[str, str]]:
        for region in self.regions:
            if self.sources[region.source].dtype != self.params[region.param].dtype:
                yield region.source, region.param

    def to_json(self) -> str:
        """The map as JSON text; `from_json` gives an equal map back."""
        return json.dumps(
            {
                "format": JSON_FORMAT,
                "version": JSON_VERSION,
                "sources": {name: _info_json(info) for name, info in self.sources.items()},
                "params": {name: _info_json(info) for name, info in self.params.items()},
                "regions": [
                    [r.source, box_to_json(r.source_box), r.param, box_to_json(r.param_box)] for r in self.regions
                ],
                "padding": {name: [box_to_json(box) for box in boxes] for name, boxes in self.padding.items()},
                "aliases": dict(self.aliases),
                "dropped": dict(self.dropped),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> LayoutMap:
        """Read what `to_json` wrote. Raises `DeltaError`: ``bad_metadata`` where the text is no map, and what making it
        raises (``bad_shape``, ``shape_mismatch``, ``unmapped``)."""
        try:
            raw = json.loads(text)
            if (raw["format"], raw["version"]) != (JSON_FORMAT, JSON_VERSION):
                raise ValueError(f"not {JSON_FORMAT} version {JSON_VERSION}")
            return cls(
                sources={name: _info(value) for name, value in raw["sources"].items()},
                params={name: _info(value) for name, value in raw["params"].items()},
                regions=tuple(Region(s, box_from_json(sb), p, box_from_json(pb)) for s, sb, p, pb in raw["regions"]),
                padding={name: tuple(box_from_json(box) for box in boxes) for name, boxes in raw["padding"].items()},
                aliases=dict(raw["aliases"]),
                dropped=dict(raw["dropped"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, DeltaError):
                raise
            raise DeltaError(Reason.BAD_METADATA, f"not a layout map: {error!r}") from error


def _count(patch: TensorPatch | None) -> int:
    return 0 if patch is None else patch.indices.numel()


def _same_change(a: TensorPatch, b: TensorPatch) -> bool:
    return (
        a.values.dtype == b.values.dtype
        and a.indices.numel() == b.indices.numel()
        and torch.equal(a.indices.to(torch.int64), b.indices.to(torch.int64))
        and bits.equal(a.values, b.values)
    )


def _info_json(info: TensorInfo) -> list[object]:
    return [list(info.shape), str(info.dtype).removeprefix("torch.")]


def _info(value: Sequence[object]) -> TensorInfo:
    shape, dtype = value
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"not a dtype: {dtype!r}")
    return TensorInfo(integers(shape), found)
