"""The rolling state digest ``rd1``: a sum over all elements, so that a change costs the change.

    digest(state)  = sum over its tensors of digest(tensor)                              modulo 2^64
    digest(tensor) = header + sum over positions i of mix64((seed + i * GAMMA) XOR bits_i)
    seed, header   = the first and the second 8 bytes of SHA-256(identity of name, dtype and shape)

SPEC.md defines it for other languages. ``bits_i`` is the element's bit pattern, zero-extended to 64 bits; mix64 is a
bijection, so two states that differ in one element never agree. The order of a sum does not matter, so digests of
disjoint shards add up, and `roll_digest` replaces terms. It finds mistakes, not forgers: whoever can choose the weights
can make two states agree. Every function takes tensors on any device and with any strides.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import numpy as np
import torch
from torch import Tensor

from refdelta.codec import bits
from refdelta.codec.state import Weights, tracked
from refdelta.spec import (
    DTYPE_CODES,
    DeltaError,
    Reason,
    TensorPatch,
    check_argument,
    check_name,
    check_plain,
    check_shape,
)

__all__ = [
    "GAMMA",
    "MIX",
    "SCHEME",
    "ZERO",
    "add",
    "header_digest",
    "layer_digests",
    "parse",
    "positions_digest",
    "roll_digest",
    "run_digest",
    "state_digest",
    "subtract",
    "tensor_digest",
    "terms_at",
    "text",
]

SCHEME: Final = "rd1"
"""The prefix of every digest string."""

GAMMA: Final = 0x9E3779B97F4A7C15
"""Distance of the keys of neighbouring positions, an odd number of 64 bits."""

MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""mix64: for each pair x ^= x >> shift, then x *= factor, on unsigned 64-bit integers that wrap."""

ZERO: Final = f"{SCHEME}:{0:016x}"
"""The digest of no tensors."""

_WORD: Final = 1 << 64
_TEXT: Final = re.compile(rf"{SCHEME}:([0-9a-f]{{16}})")
_UNSIGNED: Final = {torch.uint8: np.uint8, torch.int16: np.uint16, torch.int32: np.uint32, torch.int64: np.uint64}
_CPU_BLOCK: Final = 1 << 15
"""Elements that are mixed at once: a few arrays of this many words fit the cache."""
_DEVICE_BLOCK: Final = 1 << 22


# Digests of states, tensors and shares of tensors


def state_digest(weights: Weights) -> str:
    """The digest of a whole state. O(elements), on as many threads as torch uses.

    Of a module every tensor counts once, under the first of its names. Raises `DeltaError` for a tensor that a delta
    could not hold.
    """
    return add(*layer_digests(weights).values())


def layer_digests(weights: Weights) -> dict[str, str]:
    """Tensor name -> `tensor_digest`; they add up to `state_digest`."""
    return {name: tensor_digest(name, t) for name, t in tracked(weights).items()}


def tensor_digest(name: str, tensor: Tensor) -> str:
    """The digest of one tensor under its name: header and elements."""
    shape = tuple(check_plain(tensor, name).shape)
    return add(header_digest(name, tensor.dtype, shape), run_digest(name, tensor.dtype, shape, 0, tensor))


def header_digest(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """The part of a tensor's digest that does not depend on its elements. It is added once, however the tensor is
    sharded."""
    return text(_identity(name, dtype, shape)[1])


def positions_digest(name: str, dtype: torch.dtype, shape: tuple[int, ...], indices: Tensor, values: Tensor) -> str:
    """The share of ``values`` ([n], ``dtype``) at ``indices`` ([n] distinct positions in ``shape``). O(n).

    `header_digest` and the shares of all positions add up to `tensor_digest`. Raises `DeltaError` when dtypes or
    lengths do not fit; the caller checks the positions.
    """
    if check_plain(values, name).dtype != dtype:
        raise DeltaError(Reason.DTYPE_MISMATCH, f"expected {dtype}, found {values.dtype}", name)
    if check_plain(indices, name).shape != values.shape or indices.dim() != 1:
        shapes = f"{list(indices.shape)} indices, {list(values.shape)} values"
        raise DeltaError(Reason.LENGTH_MISMATCH, f"expected two equal 1-D shapes, found {shapes}", name)
    seed, _ = _identity(name, dtype, shape)
    return text(_sum_at(bits.bit_view(bits.resolved(values)), indices.to(values.device), seed))


def run_digest(name: str, dtype: torch.dtype, shape: tuple[int, ...], start: int, run: Tensor) -> str:
    """The share of the elements of ``run`` (any shape, ``dtype``) at ``start`` and the positions behind it."""
    if check_plain(run, name).dtype != dtype:
        raise DeltaError(Reason.DTYPE_MISMATCH, f"expected {dtype}, found {run.dtype}", name)
    seed, _ = _identity(name, dtype, shape)
    return text(sum(bits.map_pieces(lambda at, piece: _sum_of_run(piece, seed + (start + at) * GAMMA), run)))


def roll_digest(digest: str, patch: TensorPatch, old_values: Tensor) -> str:
    """The digest of a state (or of the tensor) after ``patch``, from the one before. O(changed).

    ``old_values``: [changed], the tensor's dtype: what the positions held before.
    """
    check_argument("patch", patch, TensorPatch, "a TensorPatch")
    check_argument("old_values", old_values, Tensor, "a torch tensor")
    before = positions_digest(patch.name, patch.dtype, patch.shape, patch.indices, old_values)
    after = positions_digest(patch.name, patch.dtype, patch.shape, patch.indices, patch.values)
    return add(subtract(digest, before), after)


# Digest strings


def add(*digests: str) -> str:
    """The sum of digests: of disjoint shares, or of different tensors."""
    return text(sum(map(parse, digests)))


def subtract(digest: str, *shares: str) -> str:
    """``digest`` without ``shares`` that it contains."""
    return text(parse(digest) - sum(map(parse, shares)))


def parse(digest: str) -> int:
    """The number that a digest string holds, in [0, 2^64). `DeltaError` (bad_option) unless it is ``rd1:`` and 16
    digits."""
    check_argument("digest", digest, str, f"{SCHEME}:<16 lower-case hex digits>")
    match = _TEXT.fullmatch(digest)
    if match is None:
        raise DeltaError(Reason.BAD_OPTION, f"digest: expected {SCHEME}:<16 lower-case hex digits>, found {digest}")
    return int(match[1], 16)


def text(total: int) -> str:
    """The digest string of a sum of terms. The number is taken modulo 2^64."""
    return f"{SCHEME}:{total % _WORD:016x}"


# Terms


def _identity(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int]:
    """Seed and header term."""
    if dtype not in DTYPE_CODES:
        raise DeltaError(Reason.UNSUPPORTED_DTYPE, f"{dtype}", name)
    texts = (check_name(name).encode(), DTYPE_CODES[dtype].encode())
    identity = SCHEME.encode() + b"".join(_number(len(text)) + text for text in texts)
    sizes = check_shape(shape, name)
    hashed = hashlib.sha256(identity + b"".join(map(_number, (len(sizes), *sizes)))).digest()
    return int.from_bytes(hashed[:8], "little"), int.from_bytes(hashed[8:16], "little")


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _sum_of_run(run: Tensor, first_key: int) -> int:
    """Sum of the terms of a flat bit view of neighbours, the first of which has ``first_key``."""
    size = _block(run)
    ramp = torch.arange(min(size, len(run)), device=run.device) * _signed(GAMMA)
    return sum(
        _mixed_sum(ramp[: len(block)] + _signed(first_key + number * size * GAMMA), block)
        for number, block in enumerate(run.split(size))
    )


def terms_at(name: str, dtype: torch.dtype, shape: tuple[int, ...], indices: Tensor, values: Tensor) -> Tensor:
    """[n] int64 on ``values``' device: each element's term, of which `positions_digest` is the sum. O(n).

    The terms are unsigned 64-bit numbers that wrap. torch holds them in its signed ones.
    """
    seed, _ = _identity(name, dtype, shape)
    patterns, found = bits.bit_view(bits.resolved(values)), []
    for at, block in zip(indices.split(_block(patterns)), patterns.split(_block(patterns)), strict=True):
        found.append(_mixed(at.to(values.device, torch.int64) * _signed(GAMMA) + _signed(seed), block))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=values.device)


def _sum_at(patterns: Tensor, indices: Tensor, seed: int) -> int:
    """Sum of the terms of a flat bit view at ``indices``, both on one device."""
    size = _block(patterns)
    blocks = zip(indices.split(size), patterns.split(size), strict=True)
    return sum(_mixed_sum(at.to(torch.int64) * _signed(GAMMA) + _signed(seed), block) for at, block in blocks)


def _block(t: Tensor) -> int:
    return _CPU_BLOCK if t.device.type == "cpu" else _DEVICE_BLOCK


def _mixed_sum(keys: Tensor, patterns: Tensor) -> int:
    """Sum of mix64(key XOR pattern) of two 1-D tensors, int64 and a bit view; may overwrite ``keys``."""
    mixed = _mixed(keys, patterns)
    if keys.device.type != "cpu":
        return int(mixed.sum())
    return int(mixed.numpy().view(np.uint64).sum(dtype=np.uint64))


def _mixed(keys: Tensor, patterns: Tensor) -> Tensor:
    """mix64(key XOR pattern) of each pair; may overwrite ``keys``, and returns it."""
    if keys.device.type != "cpu":
        return _mixed_of_signed(keys, patterns)
    words = keys.numpy().view(np.uint64)
    unsigned = patterns.contiguous().numpy().view(_UNSIGNED[patterns.dtype])
    np.bitwise_xor(words, unsigned, out=words)
    shifted = np.empty_like(words)
    for shift, factor in MIX:
        words ^= np.right_shift(words, np.uint64(shift), out=shifted)
        if factor != 1:
            words *= np.uint64(factor)
    return keys


def _mixed_of_signed(keys: Tensor, patterns: Tensor) -> Tensor:
    """The same in torch's signed words, on any device: what a shift or a widening fills with the sign is masked out."""
    zero_extended = patterns.to(torch.int64) & _signed((1 << 8 * patterns.element_size()) - 1)
    words = keys.bitwise_xor_(zero_extended)
    for shift, factor in MIX:
        words ^= (words >> shift) & ((1 << 64 - shift) - 1)
        if factor != 1:
            words *= _signed(factor)
    return words


def _signed(value: int) -> int:
    """The integer in [-2^63, 2^63) that has the same low 64 bits."""
    return (value + (_WORD >> 1)) % _WORD - (_WORD >> 1)
