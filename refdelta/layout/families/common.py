"""The words in which a family's layout is written, and what they mean for one rank.

A family is a table of `Row`: runtime parameter, checkpoint tensor, its shape, and how it is cut. Rows of one parameter
stand in it one below the other, in the table's order. `refdelta.layout.families.placing` says what that means for one
rank. Nothing here knows of vLLM; the rules are those of tensor, expert and pipeline parallelism as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from refdelta.codec.state import TensorInfo
from refdelta.spec import DeltaError, Reason

__all__ = [
    "COLUMNS",
    "ROWS",
    "VOCABULARY",
    "WHOLE",
    "Cut",
    "Ends",
    "Range",
    "Ranks",
    "Row",
    "Table",
    "heads",
    "kv_heads",
    "refuse",
]

VOCABULARY_MULTIPLE = 64
"""Engines pad vocabularies to a multiple of this many rows before they cut them."""

Range = tuple[int, int]
"""First and one past the last, along one axis."""


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

    def experts(self, count: int) -> Range:
        """The run of whole experts that this rank holds: all of them, or an even share, the first ranks one more."""
        if self.ep_size > count:
            raise refuse(f"{count} experts cannot be spread over ep_size={self.ep_size}")
        share, more = divmod(count, self.ep_size)
        first = self.ep_rank * share + min(self.ep_rank, more)
        return first, first + share + (self.ep_rank < more)

    def layers(self, count: int) -> Range:
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

    def of(self, size: int, ranks: Ranks, tensor: str) -> Range:
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
