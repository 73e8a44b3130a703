"""Elements as bit patterns: compare, gather and scatter tensors of every dtype, by logical position.

Positions are flat and row-major in a tensor's logical shape, whatever its strides. Nothing here converts a value, so
signs of zero and NaN payloads survive. Everything works on CPU and CUDA tensors; the first argument decides the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from refdelta.spec import DTYPE_CODES, DeltaError, Reason

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU_CHUNK: Final = 1 << 20
_DEVICE_CHUNK: Final = 1 << 26


def bit_view(t: Tensor) -> Tensor:
    """The same storage, shape and strides as uint8, int16, int32 or int64, by item size. No copy.

    Raises `DeltaError` (unsupported_dtype) for a dtype that safetensors has not, a layout that is not strided, and a
    lazily conjugated or negated tensor, whose storage does not hold its bits.
    """
    if t.dtype not in DTYPE_CODES or t.layout != torch.strided:
        raise DeltaError(Reason.UNSUPPORTED_DTYPE, f"{t.dtype} in layout {t.layout}")
    if t.is_conj() or t.is_neg():
        raise DeltaError(Reason.UNSUPPORTED_DTYPE, f"{t.dtype} with its conjugation or negation pending")
    return t.detach().view(_BITS[t.dtype.itemsize])


def gather(t: Tensor, indices: Tensor) -> Tensor:
    """[n], ``t.dtype``, on ``t``'s device: the elements at ``indices`` ([n] integers in [0, numel)). O(n)."""
    line, offsets = _addresses(_resolved(t), indices)
    return line.index_select(0, offsets).view(t.dtype)


def scatter_(t: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write ``values`` ([n], ``t.dtype``) at ``indices`` ([n] distinct integers in [0, numel)), in place. O(n).

    Raises `DeltaError` before writing when dtypes or lengths differ, or when elements of ``t`` share memory.
    Positions are the caller's to check (`TensorPatch.check_indices`).
    """
    if values.dtype != t.dtype:
        raise DeltaError(Reason.DTYPE_MISMATCH, f"expected values of {t.dtype}, found {values.dtype}")
    if indices.shape != values.shape or indices.dim() != 1:
        shapes = f"{list(indices.shape)} indices, {list(values.shape)} values"
        raise DeltaError(Reason.LENGTH_MISMATCH, f"expected two equal 1-D shapes, found {shapes}")
    if overlaps_itself(t):
        raise DeltaError(Reason.ALIAS_CONFLICT, f"elements share memory: strides {t.stride()} of {list(t.shape)}")
    line, offsets = _addresses(t, indices)
    line.index_copy_(0, offsets, bit_view(_resolved(values)).to(t.device))


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and all bits are equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return all(torch.equal(_words(x), _words(y)) for x, y in _pieces(a, b))


def differing(a: Tensor, b: Tensor) -> Tensor:
    """[n] int64 on ``a``'s device: increasing positions at which ``a`` and ``b``, of one dtype and shape, differ.

    One pass in pieces; beyond the result it holds one piece, or a contiguous copy of one where strides ask for it.
    """
    if a.dtype != b.dtype:
        raise DeltaError(Reason.DTYPE_MISMATCH, f"{a.dtype} and {b.dtype}")
    if a.shape != b.shape:
        raise DeltaError(Reason.SHAPE_MISMATCH, f"{list(a.shape)} and {list(b.shape)}")
    found, start = [], 0
    for x, y in _pieces(a, b):
        at = _differing_flat(x, y)
        if len(at):
            found.append(at.add_(start))
        start += x.numel()
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
    if t.is_contiguous():
        return rest
    offsets = torch.zeros_like(rest)
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        offsets += rest.remainder(size) * stride
        rest = rest.div(size, rounding_mode="floor")
    return offsets


def _addresses(t: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The memory from ``t``'s first to its last element as a 1-D bit view, and the offsets of ``indices`` in it."""
    extent = 1 + sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True)) if t.numel() else 0
    return bit_view(t).as_strided((extent,), (1,)), offsets_in_storage(t, indices) if extent else indices.long()


def _resolved(t: Tensor) -> Tensor:
    return t.detach().resolve_conj().resolve_neg()


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Bit views of both, flat, contiguous and on ``a``'s device, in row-major order."""
    chunk = _CPU_CHUNK if a.device.type == "cpu" else _DEVICE_CHUNK
    for x, y in _split(bit_view(_resolved(a)), bit_view(_resolved(b)), chunk):
        yield x.reshape(-1), y.reshape(-1).to(a.device, non_blocking=True)


def _split(a: Tensor, b: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    if a.numel() <= chunk:
        yield a, b
    elif a.is_contiguous() and b.is_contiguous():
        yield from zip(torch.split(a.view(-1), chunk), torch.split(b.view(-1), chunk), strict=True)
    else:
        row = math.prod(a.shape[1:])
        step = max(1, chunk // row)
        for x, y in zip(torch.split(a, step), torch.split(b, step), strict=True):
            yield from _split(x, y, chunk) if row <= chunk else _split(x[0], y[0], chunk)


def _words(bits: Tensor) -> Tensor:
    """A flat bit view as int64 words where length and alignment allow: integer kernels run fastest on those."""
    lanes = 8 // bits.element_size()
    if bits.numel() % lanes or bits.storage_offset() % lanes:
        return bits
    return bits.view(torch.int64)


def _differing_flat(x: Tensor, y: Tensor) -> Tensor:
    """Positions at which two flat bit views differ: differing words first, then the lanes of those."""
    a, b = _words(x), _words(y)
    if a.dtype != b.dtype:
        a, b = x, y
    lanes = x.numel() // max(a.numel(), 1)
    words = (a != b).nonzero().view(-1)
    if lanes <= 1 or not len(words):
        return words
    if 4 * len(words) > len(a):
        return (x != y).nonzero().view(-1)
    differ = a.index_select(0, words).view(x.dtype) != b.index_select(0, words).view(x.dtype)
    lane = differ.nonzero().view(-1)
    return words.index_select(0, lane.div(lanes, rounding_mode="floor")).mul_(lanes).add_(lane.remainder_(lanes))
