"""refdelta's backend, broken where it is large: numbers of two digits, blocks, counters of 16 bits, F32.

As `live`, on the rows of `test_live_sizes`. Each of them passes every smaller row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from refdelta.spec import TensorPatch
from refdelta.vllm.update.block_digests import BlockDigests
from refdelta.vllm.update.proven_layout import Piece, ProvenLayout
from refdelta.vllm.update.ranks import RankGroup

from .live import FLOAT32, WIDE, Route, _rerouted, caught_by


def _renumbered(patch: pytest.MonkeyPatch, part: str) -> None:
    """A change goes to the layer or expert whose number is the first digit, where that has such a tensor."""

    def route(original: Route, target: ProvenLayout, block_digests: BlockDigests, tensor: TensorPatch) -> list[Piece]:
        name = re.sub(rf"\b{part}\.(\d)\d+", rf"{part}.\1", tensor.name)
        known = target.layout.sources.get(name)
        fits = known is not None and known.shape == tensor.shape
        return original(target, block_digests, replace(tensor, name=name) if fits else tensor)

    _rerouted(patch, route)


def _pieces(patch: pytest.MonkeyPatch, change: Callable[[BlockDigests, Piece], Piece]) -> None:
    """Every routed piece is changed."""

    def route(original: Route, target: ProvenLayout, block_digests: BlockDigests, tensor: TensorPatch) -> list[Piece]:
        return [change(block_digests, piece) for piece in original(target, block_digests, tensor)]

    _rerouted(patch, route)


def _kept(piece: Piece, keep: Tensor | slice) -> Piece:
    return Piece(piece.region, piece.positions[keep], piece.param, piece.indices[keep], piece.values[keep])


@caught_by("every_tensor", kind="router", fault=29, row=WIDE)
def first_digit_of_a_layer(patch: pytest.MonkeyPatch) -> None:
    """Only the first digit of a layer's number counts."""
    _renumbered(patch, "layers")


@caught_by("every_tensor", kind="router", fault=27, row=WIDE)
def first_digit_of_an_expert(patch: pytest.MonkeyPatch) -> None:
    """Only the first digit of an expert's number counts."""
    _renumbered(patch, "experts")


@caught_by("every_tensor", kind="applier", fault=None, row=WIDE)
def cut_at_65536_changes(patch: pytest.MonkeyPatch) -> None:
    """Of a region at most 65,536 elements are written."""
    _pieces(patch, lambda _, piece: _kept(piece, slice(0, 2**16)))


@caught_by("shard_boundaries", "test_block_boundaries", kind="applier", fault=None, row=WIDE)
def first_block_alone(patch: pytest.MonkeyPatch) -> None:
    """What is behind the first block of a region is lost."""

    def change(block_digests: BlockDigests, piece: Piece) -> Piece:
        blocks = block_digests.block_of(piece.region, piece.positions)
        return _kept(piece, blocks == blocks.min()) if len(blocks) else piece

    _pieces(patch, change)


@caught_by("every_tensor", kind="router", fault=27, row=WIDE)
def shared_heads_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    """A key-value head that two ranks hold is written on the first of them alone."""

    def route(original: Route, target: ProvenLayout, block_digests: BlockDigests, tensor: TensorPatch) -> list[Piece]:
        lost = RankGroup.world().rank == 1 and re.search(r"\b[kv]_proj\b", tensor.name)
        return [] if lost else original(target, block_digests, tensor)

    _rerouted(patch, route)


@caught_by("shard_boundaries", "test_block_boundaries", kind="applier", fault=4, row=FLOAT32)
def positions_through_float32(patch: pytest.MonkeyPatch) -> None:
    """Positions go through float32, which holds no odd integer beyond 2^24."""

    def route(original: Route, target: ProvenLayout, block_digests: BlockDigests, tensor: TensorPatch) -> list[Piece]:
        at = tensor.indices.to(torch.float32).to(torch.int64).clamp(max=tensor.numel - 1)
        keep = torch.cat([torch.ones(1, dtype=torch.bool), at[1:] != at[:-1]])[: len(at)]
        moved = at[keep].to(tensor.indices.dtype)
        rounded = TensorPatch(tensor.name, tensor.shape, moved, tensor.values[keep])
        return original(target, block_digests, rounded)

    _rerouted(patch, route)


@caught_by("every_tensor", kind="applier", fault=12, row=FLOAT32)
def values_through_bf16(patch: pytest.MonkeyPatch) -> None:
    """F32 and F16 values go through BF16."""
    _pieces(patch, lambda _, piece: replace(piece, values=piece.values.to(torch.bfloat16).to(piece.values.dtype)))


@caught_by("every_tensor", kind="router", fault=35, row=WIDE)
def every_block_is_the_first(patch: pytest.MonkeyPatch) -> None:
    """What changes in a region counts in the digest of its first block."""

    def first(self: BlockDigests, number: int, indices: Tensor) -> Tensor:
        return torch.full_like(indices, self.first[number])

    patch.setattr(BlockDigests, "block_of", first)
