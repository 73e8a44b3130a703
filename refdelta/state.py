"""What a state is: tensors by checkpoint name, out of a mapping or a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from refdelta.names import checkpoint_names
from refdelta.spec import DTYPE_CODES, DeltaError, Reason, check_argument, check_name, check_shape

Weights: TypeAlias = Mapping[str, Tensor] | nn.Module
"""A state: tensors by checkpoint name, or a module whose ``state_dict`` holds them."""

EXTRA_STATE = "_extra_state"
"""How torch's ``state_dict`` names what a module keeps beside its tensors."""


def named_tensors(weights: Weights) -> dict[str, Tensor]:
    """The tensors of a state by name: a mapping's as it names them; anything else in it is refused (bad_option).

    Of a module: what its ``state_dict`` holds (parameters, frozen ones too, and persistent buffers), tied names each,
    under the names that a checkpoint has, without those of wrappers (`refdelta.names`); two that become one are refused
    (duplicate_name).
    """
    check_argument("weights", weights, (Mapping, nn.Module), "a module, or a mapping of names to tensors")
    if not isinstance(weights, nn.Module):
        return _tensors_of(weights)
    held = {name: t for name, t in weights.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    return {name: held[trainers] for trainers, name in checkpoint_names(held).items()}


def _tensors_of(weights: Mapping[str, object]) -> dict[str, Tensor]:
    """A mapping's tensors, without torch's own entries for what is none (`nn.Module.get_extra_state`)."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif not str(name).endswith(EXTRA_STATE):
            raise DeltaError(Reason.BAD_OPTION, f"expected a torch tensor, found {type(value).__name__}", str(name))
    return found


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` without those that are the same view of the same memory as an earlier one."""
    views: dict[object, str] = {}
    for name, t in tensors.items():
        # Empty tensors share no memory, whatever address they report.
        view = (t.device, t.data_ptr(), t.shape, t.stride(), t.dtype) if t.numel() else name
        views.setdefault(view, name)
    return {name: tensors[name] for name in views.values()}


def tracked(weights: Weights) -> dict[str, Tensor]:
    """The tensors that count: all of a mapping; of a module each tensor once, under the first of its names.

    Raises `DeltaError` (bad_name, bad_shape, unsupported_dtype) where one of them has no place in a delta.
    """
    tensors = named_tensors(weights)
    counted = first_names(tensors) if isinstance(weights, nn.Module) else tensors
    for name, t in counted.items():
        check_name(name)
        check_shape(tuple(t.shape), name)
        if t.dtype not in DTYPE_CODES or t.layout != torch.strided or t.is_meta:
            raise DeltaError(Reason.UNSUPPORTED_DTYPE, f"{t.dtype} in layout {t.layout} on {t.device.type}", name)
    return counted


def total_elements(tensors: Mapping[str, Tensor]) -> int:
    """Elements of all ``tensors``."""
    return sum(t.numel() for t in tensors.values())
