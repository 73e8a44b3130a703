"""States in memory that is not simply theirs: strided views, and names that share elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..oracle import Patch, State, clone, expected_patches

KINDS = ("contiguous", "stepped", "transposed", "offset")
"""Where the elements of a view lie: as in its buffer, every other one, column by column, behind an offset."""

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def view_of(tensor: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A view with the elements of `tensor` and the strides of `kind`, and the buffer of ones that it lies in."""
    carrier = _CARRIERS[tensor.dtype.itemsize]
    buffer = torch.ones(2 * tensor.numel() + 5, dtype=carrier)
    view = buffer.as_strided(tuple(tensor.shape), _strides(kind, tensor.shape), 0 if kind == "contiguous" else 3)
    view.copy_(tensor.view(carrier))
    return view.view(tensor.dtype), buffer


def _strides(kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides."""
    order = range(len(shape)) if kind == "transposed" else range(len(shape) - 1, -1, -1)
    strides, step = [0] * len(shape), 2 if kind == "stepped" else 1
    for axis in order:
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Placed:
    """A state in views of buffers."""

    kinds: Mapping[str, str]
    """Name -> one of KINDS."""
    views: dict[str, Tensor]
    buffers: Mapping[str, Tensor]
    """What lies between and around a view's elements is in here, too."""

    @classmethod
    def of(cls, state: State, kinds: Mapping[str, str]) -> Placed:
        """Copies of the tensors, placed."""
        both = {name: view_of(tensor, kinds[name]) for name, tensor in state.items()}
        views, buffers = ({name: pair[at] for name, pair in both.items()} for at in (0, 1))
        return cls(kinds, views, buffers)


@dataclass(frozen=True, slots=True)
class Aliased:
    """A change of a state in which further names stand for memory of its tensors."""

    base: State
    target: State
    aliases: Mapping[str, tuple[str, int]]
    """Alias -> the tensor that owns the memory, and the row of it that the alias begins with; 0: all of it."""

    def tied(self, state: State) -> dict[str, Tensor]:
        """A copy of `state` with the aliases, which share its copy's memory."""
        held = clone(state)
        return held | {alias: held[owner][row:] if row else held[owner] for alias, (owner, row) in self.aliases.items()}

    def patches(self) -> tuple[Patch, ...]:
        """What a delta says that states the change under every name."""
        return expected_patches(self.tied(self.base), self.tied(self.target))
