"""Which tensors hold their own elements: all of them, as their dtype, in memory that this process can read and write.

A tensor that does not cannot be compared or written. Its address may be 0, like that of every other tensor of its kind,
and then they look tied. Its size may be 0, and then it looks complete. Or an operation of torch fails inside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

__all__ = ["obstacle"]

GATHER: Final = "gather the parameters of all ranks first"

WRAPPERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "DTensor": "holds this rank's shard: use its full_tensor(), on every rank",
        "ShardedTensor": "holds this rank's shard: gather it, or take the full state dict",
        "AsyncCollectiveTensor": "is the result of a collective that may still run: call its wait() first",
        "FakeTensor": "holds no elements: use tensors from outside of its FakeTensorMode",
        "NestedTensor": "holds tensors of several shapes: use them one by one",
    }
)
"""Class of tensors whose operations torch leaves to the class itself -> what they are, and what to do."""

_OTHER_WRAPPER: Final = (
    "runs torch's operations itself, so that its memory is not that of its elements: "
    "use the plain tensor that the checkpoint has (dequantised, unwrapped)"
)
_DISPATCHED_BY_TORCH: Final = Tensor.__torch_dispatch__


def obstacle(t: Tensor) -> str | None:
    """Why ``t`` does not hold its elements, and what to do; None where it does. O(1), and touches no element.

    Dtype, layout and the meta device are not looked at here: those are plain for all to see. No tensor is gathered or
    dequantised either: the first is a call for all ranks at once, the second gives other bits.
    """
    if isinstance(t, UninitializedParameter | UninitializedBuffer):
        return "a lazy parameter that has no shape yet: run the module once, or load its weights, first"
    if type(t).__torch_dispatch__ is not _DISPATCHED_BY_TORCH:
        known = [text for kind in type(t).__mro__ if (text := WRAPPERS.get(kind.__name__))]
        return f"a {type(t).__name__}, which {known[0] if known else _OTHER_WRAPPER}"
    if t.is_nested:
        return f"a nested tensor, which {WRAPPERS['NestedTensor']}"
    return _partition(t) or _missing_memory(t)


def _partition(t: Tensor) -> str | None:
    """What trainers that spread a parameter over ranks leave in its place, by the marks that they set."""
    if not t.__dict__ and type(t) in (Tensor, Parameter):
        return None
    if (shape := getattr(t, "ds_shape", None)) is not None and tuple(t.shape) != tuple(shape):
        return f"ZeRO-3's placeholder of shape {list(t.shape)} for {list(shape)}: use deepspeed.zero.GatheredParameters"
    if (numel := getattr(t, "ds_numel", None)) is not None and t.numel() != int(numel):
        return f"ZeRO-3's placeholder of {t.numel()} elements for {int(numel)}: use deepspeed.zero.GatheredParameters"
    if (shape := getattr(t, "_orig_size", None)) is not None and tuple(t.shape) != tuple(shape):
        return f"this rank's shard, of shape {list(t.shape)}, for {list(shape)}: {GATHER}"
    if getattr(t, "_is_flat_param", False):
        return "FSDP's flat parameter, several tensors in one: use the module, or its full state dict"
    if getattr(t, "_fsdp_flattened", False) and not t.numel():
        return "FSDP's placeholder for a tensor of another rank: use the module, or its full state dict"
    if getattr(t, "_is_sharded", False) is True and not hasattr(t, "_orig_size"):
        return f"marked as a shard: {GATHER}"
    return None


def _missing_memory(t: Tensor) -> str | None:
    if t.layout != torch.strided or t.is_meta or not t.numel():
        return None
    try:
        have = t.untyped_storage().nbytes() if t.data_ptr() else 0
    except (RuntimeError, NotImplementedError):
        have = 0
    if t.is_contiguous():
        extent = t.numel()
    else:
        extent = 1 + sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True))
    if have < (t.storage_offset() + extent) * t.element_size():
        return (
            "without memory for its elements: its storage was freed (FSDP: use the module, or its full state dict), "
            "or it exists only inside a transform of torch (functionalize, vmap, grad)"
        )
    return None
