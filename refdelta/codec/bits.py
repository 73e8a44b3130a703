"""Elements as bit patterns: compare, gather and scatter tensors of every dtype, by logical position.

Positions are flat and row-major in a tensor's logical shape, whatever its strides. Nothing here converts a value, so
signs of zero and NaN payloads survive. Everything works on CPU and CUDA tensors; the first argument decides the device.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refdelta.spec import DTYPE_CODES, DeltaError, Reason

__all__ = [
    "Bits",
    "T",
    "bit_view",
    "check_writable",
    "differing",
    "equal",
    "extent",
    "gather",
    "map_pieces",
    "offsets_in_storage",
    "overlaps_itself",
    "positions_at",
    "resolved",
    "scatter_",
]

T = TypeVar("T")
Bits = npt.NDArray[np.integer[Any]]

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU_CHUNK: Final = 1 << 20
_DEVICE_CHUNK: Final = 1 << 26


def bit_view(t: Tensor) -> Tensor:
    """The same storage, shape and strides as uint8, int16, int32 or int64, by item size. No copy.

    Raises `DeltaError` (unsupported_dtype) for a dtype that safetensors does not have, for a layout that is not
    strided, and for a lazily conjugated or negated tensor, because its storage does not hold its bits.
    """
    if t.dtype not in DTYPE_CODES or t.layout != torch.strided:
        raise DeltaError(Reason.UNSUPPORTED_DTYPE, f"{t.dtype} in layout {t.layout}")
    if t.is_conj() or t.is_neg():
        raise DeltaError(Reason.UNSUPPORTED_DTYPE, f"{t.dtype} with its conjugation or negation pending")
    return t.detach().view(_BITS[t.dtype.itemsize])


def gather(t: Tensor, indices: Tensor) -> Tensor:
    """[n], ``t.dtype``, on ``t``'s device: the elements at ``indices`` ([n] integers in [0, numel)). O(n)."""
    line, offsets = _addresses(resolved(t), indices)
    return line.index_select(0, offsets).view(t.dtype)


def scatter_(t: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write ``values`` ([n], ``t.dtype``) at ``indices`` ([n] distinct integers in [0, numel)), in place. O(n).

    Raises `DeltaError` before writing when dtypes or lengths differ, or as `check_writable` does. The caller checks the
    positions (`TensorPatch.check_indices`).
    """
    if values.dtype != t.dtype:
        raise DeltaError(Reason.DTYPE_MISMATCH, f"expected values of {t.dtype}, found {values.dtype}")
    if indices.shape != values.shape or indices.dim() != 1:
        shapes = f"{list(indices.shape)} indices, {list(values.shape)} values"
        raise DeltaError(Reason.LENGTH_MISMATCH, f"expected two equal 1-D shapes, found {shapes}")
    check_writable(t)
    # vLLM loads weights in inference mode; such tensors take writes there only.
    with torch.inference_mode() if t.is_inference() else nullcontext():
        line, offsets = _addresses(t, indices)
        line.index_copy_(0, offsets, bit_view(resolved(values)).to(t.device))


def check_writable(t: Tensor) -> None:
    """Raise `DeltaError` where single elements of ``t`` cannot be written: no memory, or shared between elements."""
    bit_view(t)
    if t.is_meta:
        raise DeltaError(Reason.UNKNOWN_TENSOR, "on the meta device, which holds no elements")
    if overlaps_itself(t):
        raise DeltaError(Reason.ALIAS_CONFLICT, f"elements share memory: strides {t.stride()} of {list(t.shape)}")


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and all bits are equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return all(map_pieces(_equal_piece, a, b))


def differing(a: Tensor, b: Tensor) -> Tensor:
    """[n] int64 on ``a``'s device: increasing positions at which ``a`` and ``b``, of one dtype and shape, differ.

    One pass in pieces, on as many threads as torch uses. Memory holds the result and one piece for each thread.
    """
    if a.dtype != b.dtype:
        raise DeltaError(Reason.DTYPE_MISMATCH, f"{a.dtype} and {b.dtype}")
    if a.shape != b.shape:
        raise DeltaError(Reason.SHAPE_MISMATCH, f"{list(a.shape)} and {list(b.shape)}")
    found = [at for at in map_pieces(_differing_piece, a, b) if len(at)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=a.device)


def overlaps_itself(t: Tensor) -> bool:
    """Whether two elements may share memory (as in an expanded tensor); exact for views made by slicing."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride <= reach:
            return t.numel() > 0
        reach += stride * (size - 1)
    return False


def offsets_in_storage(t: Tensor, indices: Tensor) -> Tensor:
    """[n] int64: storage offsets, in elements from ``t``'s first, of logical positions. O(n)."""
    rest = indices.to(device=t.device, dtype=torch.int64)
    if t.is_contiguous() or not t.numel():
        return rest
    offsets = torch.zeros_like(rest)
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        offsets += rest.remainder(size) * stride
        rest = rest.div(size, rounding_mode="floor")
    return offsets


def positions_at(t: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `offsets_in_storage`: [n] int64 logical positions, and [n] bool whether ``t`` has an element.

    Offsets may be any integers; where ``t`` has no element the position is meaningless. ``t`` must not overlap itself.
    """
    rest = offsets.to(device=t.device, dtype=torch.int64).clone()
    positions, inside = torch.zeros_like(rest), rest >= 0
    if not t.numel():
        return positions, torch.zeros_like(inside)
    row_major = itertools.accumulate(reversed(t.shape[1:]), operator.mul, initial=1)
    dims = zip(t.stride(), t.shape, reversed(list(row_major)), strict=True) if t.dim() else iter(())
    for stride, size, weight in sorted((dim for dim in dims if dim[1] != 1), reverse=True):
        coordinate = rest.div(stride, rounding_mode="floor").clamp_(0, size - 1)
        rest -= coordinate * stride
        positions += coordinate * weight
    return positions, inside & (rest == 0)


def extent(t: Tensor) -> int:
    """Elements from ``t``'s first to its last in memory, both included; 0 for an empty tensor."""
    return 1 + sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True)) if t.numel() else 0


def _addresses(t: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The memory from ``t``'s first to its last element as a 1-D bit view, and the offsets of ``indices`` in it."""
    return bit_view(t).as_strided((extent(t),), (1,)), offsets_in_storage(t, indices)


def resolved(t: Tensor) -> Tensor:
    """``t`` with a pending conjugation or negation carried out, so that its storage holds its bits."""
    return t.detach().resolve_conj().resolve_neg()


def map_pieces(work: Callable[..., T], *tensors: Tensor) -> Iterator[T]:
    """The results of ``work(start, *runs)`` for every piece of tensors of one shape, in row-major order.

    ``runs`` are flat contiguous bit views of the same positions of each tensor, ``start`` the first of them, all on the
    first tensor's device. CPU pieces are worked on by as many threads as torch uses.
    """
    device = tensors[0].device
    on_cpu = device.type == "cpu"
    views = _split([bit_view(resolved(t)) for t in tensors], _CPU_CHUNK if on_cpu else _DEVICE_CHUNK)
    starts = list(itertools.accumulate((piece[0].numel() for piece in views), initial=0))[: len(views)]

    def run(start: int, piece: Sequence[Tensor]) -> T:
        return work(start, *(x.reshape(-1).contiguous().to(device) for x in piece))

    threads = min(len(views), torch.get_num_threads()) if on_cpu else 1
    if threads <= 1:
        yield from map(run, starts, views)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(run, starts, views)


def _split(tensors: Sequence[Tensor], chunk: int) -> list[Sequence[Tensor]]:
    """Views of at most ``chunk`` elements that follow each other in row-major order, of tensors of one shape."""
    first = tensors[0]
    if first.numel() <= chunk:
        return [tensors]
    if all(t.is_contiguous() for t in tensors):
        return list(zip(*(torch.split(t.view(-1), chunk) for t in tensors), strict=True))
    step = max(1, chunk // math.prod(first.shape[1:]))
    slabs = zip(*(torch.split(t, step) for t in tensors), strict=True)
    return [
        piece
        for slab in slabs
        for piece in ([slab] if slab[0].numel() <= chunk else _split([t[0] for t in slab], chunk))
    ]


def _equal_piece(_: int, x: Tensor, y: Tensor) -> bool:
    if x.device.type != "cpu":
        return torch.equal(x, y)
    return np.array_equal(*_words(x, y))


def _differing_piece(start: int, x: Tensor, y: Tensor) -> Tensor:
    """Positions at which a piece differs: the differing words, then the differing lanes of those if they are few."""
    if x.device.type != "cpu":
        return (x != y).nonzero().view(-1).add_(start)
    a, b = _words(x, y)
    at = np.flatnonzero(a != b)
    lanes = a.itemsize // x.element_size()
    lane_dtype = x.numpy().dtype
    if 4 * len(at) > len(a):
        at = np.flatnonzero(x.numpy() != y.numpy())
    elif lanes > 1:
        differ = np.flatnonzero(a[at].view(lane_dtype) != b[at].view(lane_dtype))
        at = at[differ // lanes] * lanes + differ % lanes
    return torch.from_numpy(at).add_(start)


def _words(x: Tensor, y: Tensor) -> tuple[Bits, Bits]:
    """Two flat CPU bit views as arrays, of 8-byte words where length and alignment allow: those compare fastest."""
    lanes = 8 // x.element_size()
    if not x.numel() or x.numel() % lanes or x.storage_offset() % lanes or y.storage_offset() % lanes:
        return x.numpy(), y.numpy()
    return x.view(torch.int64).numpy(), y.view(torch.int64).numpy()
