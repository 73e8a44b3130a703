"""refdelta's backend, broken from some size on: counters, chunks, names and values that small engines never fill."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from refdelta.codec import bits
from refdelta.spec import TensorPatch
from refdelta.vllm.update.block_digests import BlockDigests
from refdelta.vllm.update.engine_state import EngineState
from refdelta.vllm.update.proven_layout import Piece, ProvenLayout

from .live import FLOAT32, LARGE, Route, _moved, _put, _rerouted, caught_by

_LARGE, _WIDE = "test_a_large_change", "test_four_byte_values"


@caught_by("sizes", _LARGE, kind="router", fault=24, row=LARGE)
def first_digit_counts(patch: pytest.MonkeyPatch) -> None:
    """Of the number of a layer, or of an expert, the first digit counts."""

    def route(original: Route, target: ProvenLayout, block_digests: BlockDigests, tensor: TensorPatch) -> list[Piece]:
        name = re.sub(r"(layers|experts)\.(\d)\d+\.", r"\1.\2.", tensor.name)
        return original(target, block_digests, TensorPatch(name, tensor.shape, tensor.indices, tensor.values))

    _rerouted(patch, route)


@caught_by("sizes", _LARGE, kind="applier", fault=4, row=LARGE)
def writes_cut_at_65536(patch: pytest.MonkeyPatch) -> None:
    """Of a region 65,536 elements are written at most."""

    def put(tensor: Tensor, piece: Piece) -> None:
        bits.scatter_(tensor, piece.indices[: 1 << 16], piece.values[: 1 << 16])

    _put(patch, put)


@caught_by("sizes", _LARGE, kind="router", fault=4, row=LARGE)
def positions_through_float32(patch: pytest.MonkeyPatch) -> None:
    """Positions are carried as float32 numbers, which are exact up to 2^24."""
    _moved(patch, "embed_tokens", lambda at, shape: at.to(torch.float32).to(torch.int64), 0)


@caught_by("sizes", _LARGE, kind="digest", fault=35, row=LARGE)
def every_block_is_the_first(patch: pytest.MonkeyPatch) -> None:
    """What changes in a region counts in its first block."""

    def first(self: BlockDigests, number: int, indices: Tensor) -> Tensor:
        return torch.full_like(indices, self.first[number])

    patch.setattr(BlockDigests, "block_of", first)


@caught_by("sizes", _WIDE, kind="applier", fault=12, row=FLOAT32)
def values_through_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Values of four bytes pass through two."""

    def put(tensor: Tensor, piece: Piece) -> None:
        bits.scatter_(tensor, piece.indices, piece.values.to(torch.bfloat16).to(piece.values.dtype))

    _put(patch, put)


@caught_by("sizes", _LARGE, kind="digest", fault=35, row=LARGE)
def last_block_not_audited(patch: pytest.MonkeyPatch) -> None:
    """The last block of a region of several is never looked at."""
    readable = EngineState.readable_blocks

    def sparing(self: EngineState, moved: dict[str, str]) -> list[int]:
        first, found = self.block_digests.first, readable(self, moved)
        last = {end - 1 for begin, end in pairwise(first) if end - begin > 1}
        return [number for number in found if number not in last]

    patch.setattr(EngineState, "readable_blocks", sparing)
