"""The state digest `rd1` from the text of SPEC.md alone, for judging: each step on one number or on an array of them.

seed_and_header(name, code, shape)    the two numbers that name, dtype and shape give
key(seed, position), mix64(word)      the two steps of an element
tensor_digest(name, tensor), state_digest(state), text(number)
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from . import CODES, State, bits

WORDS = 2**64
LAST = WORDS - 1
Word = TypeVar("Word", int, NDArray[Any])
"""Numbers below 2^64; numpy's products and sums of them wrap by themselves."""


def identity(name: str, code: str, shape: Sequence[int]) -> bytes:
    """What is hashed: every text after its length, every number as eight little-endian bytes."""
    encoded = name.encode("utf-8")
    head = b"rd1" + struct.pack("<Q", len(encoded)) + encoded + struct.pack("<Q", len(code)) + code.encode("ascii")
    return head + struct.pack(f"<Q{len(shape)}Q", len(shape), *shape)


def seed_and_header(name: str, code: str, shape: Sequence[int]) -> tuple[int, int]:
    """The first two little-endian 64-bit words of the SHA-256 of the identity."""
    seed, header = struct.unpack("<QQ", hashlib.sha256(identity(name, code, shape)).digest()[:16])
    return int(seed), int(header)


def key(seed: int, position: Word) -> Word:
    """What the bits at a flat position are combined with."""
    return (position * 0x9E3779B97F4A7C15 + seed) & LAST


def mix64(word: Word) -> Word:
    """A bijection of the numbers below 2^64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & LAST
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & LAST
    word ^= word >> 31
    return word


def tensor_digest(name: str, tensor: Tensor) -> int:
    """A tensor's digest as a number."""
    seed, header = seed_and_header(name, CODES[tensor.dtype], tuple(tensor.shape))
    patterns = bits(tensor).astype(np.uint64)
    keys = key(seed, np.arange(patterns.size, dtype=np.uint64))
    return (header + int(mix64(keys ^ patterns).sum(dtype=np.uint64))) & LAST


def state_digest(state: State) -> str:
    """A state's digest as text."""
    return text(sum(tensor_digest(name, tensor) for name, tensor in state.items()))


def text(number: int) -> str:
    """The written form."""
    return f"rd1:{number % WORDS:016x}"
