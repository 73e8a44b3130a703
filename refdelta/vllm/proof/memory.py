"""What a model holds under a name now, and whether that is the memory that was looked at before.

Nothing here keeps a tensor: one that was kept goes on pointing at the memory that it had, whatever the engine reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

__all__ = ["Memory", "held_now"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a tensor's elements are, and how they lie there."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """That of a tensor, as it is now."""
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def held_now(model: nn.Module, name: str) -> Tensor | None:
    """What the model's code reads that says ``module.weight``, for a dotted name; None where that is no tensor.

    By attribute, as that code does: a module, a parameter or a buffer may have been replaced, or an attribute hides it.
    """
    found: object = model
    for part in name.split("."):
        found = getattr(found, part, None)
    return found.detach() if isinstance(found, Tensor) else None
