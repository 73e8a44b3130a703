"""refdelta's backend and encoder, broken on purpose: ``--mutant tests.live.mutants:NAME``.

Each function is called in every process of the engine, before the backend is created, and in the process that encodes.
They patch what runs after attestation, so that the engine starts and the conformance suite has to find the fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from refdelta import bits, encode
from refdelta.spec import TensorPatch
from refdelta.vllm import update
from refdelta.vllm.ledger import Ledger
from refdelta.vllm.ranks import RankGroup
from refdelta.vllm.shares import Shares
from refdelta.vllm.target import Piece, Target

Route = Callable[[Target, Shares, TensorPatch], list[Piece]]


def fused_weights_skipped() -> None:
    """q, k, v, gate and up are not runtime parameters, so their changes go nowhere."""
    original = update._route

    def route(target: Target, shares: Shares, patch: TensorPatch) -> list[Piece]:
        return [
            piece for piece in original(target, shares, patch) if not re.search("qkv_proj|gate_up_proj", piece.param)
        ]

    undefended()
    _patch(update, "_route", route)


def k_and_v_swapped() -> None:
    """The changes of k_proj land in v_proj's rows, and the reverse."""
    undefended()
    _patch(update, "_route", _renaming("k_proj", "v_proj"))


def q_norm_and_k_norm_swapped() -> None:
    """The changes of q_norm land in k_norm, and the reverse."""
    undefended()
    _patch(update, "_route", _renaming("q_norm", "k_norm"))


def linear_weights_held_by_value() -> None:
    """Products keep the weight that they saw first, as a graph would that folds it in; parameters look right."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def apply(self: object, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        held: Tensor = layer.__dict__.setdefault("held_by_value", layer.weight.detach().clone())
        return torch.nn.functional.linear(x, held, bias)

    _patch(UnquantizedLinearMethod, "apply", apply)


def second_rank_gets_first_rows() -> None:
    """Rank 1 writes rank 0's half of every row-sharded projection into its own shard."""
    original = update._route

    def route(target: Target, shares: Shares, patch: TensorPatch) -> list[Piece]:
        if RankGroup.world().rank != 1 or not re.search("(q|k|v|gate|up)_proj", patch.name):
            return original(target, shares, patch)
        half = patch.numel // 2
        mine = patch.indices < half
        return original(target, shares, replace(patch, indices=patch.indices[mine] + half, values=patch.values[mine]))

    undefended()
    _patch(update, "_route", route)


def values_added() -> None:
    """Values are taken for differences."""

    def put(tensor: Tensor, piece: Piece) -> None:
        old = bits.gather(tensor, piece.indices)
        bits.scatter_(tensor, piece.indices, old + piece.values)

    undefended()
    _patch(update, "_put", put)


def encoded_by_value() -> None:
    """The encoder compares numbers: a sign of zero is missed, and a NaN differs from itself."""

    def differing(a: Tensor, b: Tensor) -> Tensor:
        return (a != b).flatten().nonzero().flatten()

    # The encoder looks the function up on its own name for the module.
    _patch(encode, "bits", _Overlay(differing))


def written_by_value() -> None:
    """The backend skips elements that hold an equal number already: a sign of zero is not written."""

    def put(tensor: Tensor, piece: Piece) -> None:
        differs = bits.gather(tensor, piece.indices) != piece.values
        bits.scatter_(tensor, piece.indices[differs], piece.values[differs])

    undefended()
    _patch(update, "_put", put)


def first_rank_raises_alone() -> None:
    """The first rank raises for all, where only the last may."""
    _patch(RankGroup, "speaks", property(lambda self: self.rank == 0))


class _Overlay:
    """`refdelta.bits` with another `differing`."""

    def __init__(self, differing: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.differing = differing

    def __getattr__(self, name: str) -> object:
        return getattr(bits, name)


def _renaming(one: str, other: str) -> Route:
    original = update._route
    names = {one: other, other: one}

    def route(target: Target, shares: Shares, patch: TensorPatch) -> list[Piece]:
        name = re.sub(f"{one}|{other}", lambda found: names[found.group()], patch.name)
        return original(target, shares, replace(patch, name=name))

    return route


def undefended() -> None:
    """Turn off what the backend checks of itself after a write: the suite has to find the fault without it."""
    from refdelta.vllm.backend import DeltaSnapshotEngine

    _patch(Ledger, "after", lambda self, delta, accounts, *, repeated: self)
    _patch(DeltaSnapshotEngine, "_check", lambda self, session, update: None)


def _patch(owner: object, name: str, broken: object) -> None:
    setattr(owner, name, broken)
