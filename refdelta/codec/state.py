"""A state is a set of tensors by checkpoint name. It comes from a mapping or from a module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from refdelta.codec.names import checkpoint_names, distinct
from refdelta.codec.peft import Adapters
from refdelta.plain import obstacle
from refdelta.spec import DTYPE_CODES, DeltaError, Reason, check_argument, check_name, check_plain, check_shape

__all__ = [
    "EXTRA_STATE",
    "TensorInfo",
    "Weights",
    "first_names",
    "holds_memory",
    "named_tensors",
    "total_elements",
    "tracked",
]

Weights: TypeAlias = Mapping[str, Tensor] | nn.Module
"""A state: tensors by checkpoint name, or a module whose ``state_dict`` holds them."""

EXTRA_STATE = "_extra_state"
"""The end of the names under which torch's ``state_dict`` holds what is not a tensor."""


def named_tensors(weights: Weights) -> dict[str, Tensor]:
    """The tensors of a state by name: a mapping's as it names them; anything else in it is refused (bad_option).

    Of a module: what its ``state_dict`` holds (parameters, frozen ones too, and persistent buffers), tied names each,
    under the names that a checkpoint has: without those of wrappers (`refdelta.codec.names`), and of a model in
    adapters what `refdelta.codec.peft` says. Two that become one are refused (duplicate_name).
    """
    check_argument("weights", weights, (Mapping, nn.Module), "a module, or a mapping of names to tensors")
    return _tensors_in(weights) if isinstance(weights, nn.Module) else _tensors_of(weights)


def _tensors_in(module: nn.Module) -> dict[str, Tensor]:
    held = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    if not held and next(module.parameters(), None) is not None:
        detail = "weights: the module has parameters and its state_dict has none: gather them here, or encode elsewhere"
        raise DeltaError(Reason.BAD_OPTION, detail)
    adapters = Adapters.of(module)
    names = {trainers: adapters.checkpoint_name(bare) for trainers, bare in checkpoint_names(held).items()}
    found = {
        name: held[trainers] for trainers, name in distinct({k: v for k, v in names.items() if v is not None}).items()
    }
    _check_ties({trainers: held[trainers] for trainers, name in names.items() if name is None}, found)
    return found


def _check_ties(left_out: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Refuse a tensor tied to one that adapters left behind: in the checkpoint it is tied to the trained copy."""
    behind = {view: name for name, t in left_out.items() if (view := _view(t)) is not None}
    for name, t in found.items() if behind else ():
        if (other := behind.get(_view(t))) is not None:
            detail = f"tied to {other}, whose trained copy is sent: train both of the pair, or none"
            raise DeltaError(Reason.ALIAS_CONFLICT, detail, name)


def _tensors_of(weights: Mapping[str, object]) -> dict[str, Tensor]:
    """A mapping's tensors, without torch's own entries for what is none (`nn.Module.get_extra_state`)."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif not str(name).endswith(EXTRA_STATE):
            raise DeltaError(Reason.BAD_OPTION, f"expected a torch tensor, found {type(value).__name__}", str(name))
    return found


def holds_memory(t: Tensor) -> bool:
    """Whether ``t`` has elements and an address in memory."""
    return obstacle(t) is None and t.layout == torch.strided and not t.is_meta and t.numel() > 0


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` without those that are the same view of the same memory as an earlier one."""
    views: dict[object, str] = {}
    for name, t in tensors.items():
        views.setdefault(_view(t) or name, name)
    return {name: tensors[name] for name in views.values()}


def _view(t: Tensor) -> object:
    """What two names of one tensor have in common; None for one without memory, whatever address it reports."""
    return (t.device, t.data_ptr(), t.shape, t.stride(), t.dtype) if holds_memory(t) else None


def tracked(weights: Weights) -> dict[str, Tensor]:
    """The tensors that count: all tensors of a mapping, or each tensor of a module once, under the first of its names.

    Raises `DeltaError` (bad_name, bad_shape, unsupported_dtype, unsupported_tensor) where one of them has no place in a
    delta.
    """
    tensors = named_tensors(weights)
    counted = first_names(tensors) if isinstance(weights, nn.Module) else tensors
    for name, t in counted.items():
        check_name(name)
        check_plain(t, name)
        check_shape(tuple(t.shape), name)
        if t.dtype not in DTYPE_CODES or t.layout != torch.strided or t.is_meta:
            detail = f"{t.dtype} in layout {t.layout} on {t.device.type}{_advice(t)}"
            raise DeltaError(Reason.UNSUPPORTED_DTYPE, detail, name)
    return counted


def _advice(t: Tensor) -> str:
    """What to do with a tensor whose dtype, layout or device the format has not."""
    if t.is_meta:
        return ", which holds no elements: load its values first"
    if t.layout != torch.strided:
        return ": use its to_dense()"
    return ": dequantize() it" if t.is_quantized else ""


def total_elements(tensors: Mapping[str, Tensor]) -> int:
    """Elements of all ``tensors``."""
    return sum(t.numel() for t in tensors.values())


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements; 1 for shape ``()``."""
        return math.prod(self.shape)
