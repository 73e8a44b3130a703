"""Appliers that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import oracle
from ..oracle import Patch, bits
from .registry import codec_mutants
from .right import Plain, reread

caught_by = codec_mutants("applier")


@caught_by("bit_exact", fault=None)
class AddsValues(Plain):
    """Takes values for differences."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        old = bits(weights[patch.name])[patch.indices]
        super().write(weights, replace(patch, bits=old + patch.bits))


@caught_by("bit_exact", "stateful", fault=19)
class TakesADeltaOnce(Plain):
    """Skips a directory that it has applied before, whatever has come since."""

    def __init__(self) -> None:
        self.taken: set[Path] = set()

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        if delta not in self.taken:
            super().apply(delta, weights)
        self.taken.add(delta)


@caught_by("idempotent", fault=None)
class ExchangesBits(Plain):
    """A second application takes the first one back."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[bytes, Patch]] = {}

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        old = bits(weights[patch.name])[patch.indices]
        seen, before = self.last.get(patch.name, (b"", patch))
        if seen == patch.bits.tobytes() == old.tobytes():
            super().write(weights, before)
        else:
            super().write(weights, patch)
            self.last[patch.name] = patch.bits.tobytes(), replace(patch, bits=old)


@caught_by("bit_exact", fault=1)
class DropsNegativeZero(Plain):
    """Writes -0 as +0."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        zero = patch.bits == 1 << (8 * patch.bits.dtype.itemsize - 1)
        super().write(weights, replace(patch, bits=np.where(zero, 0, patch.bits)))


@caught_by("bit_exact", fault=1)
class QuietsNan(Plain):
    """Values pass through arithmetic, which sets the quiet bit of every float32 NaN."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        if patch.code == "F32":
            nan = (patch.bits & 0x7FFFFFFF) > 0x7F800000
            patch = replace(patch, bits=np.where(nan, patch.bits | 0x400000, patch.bits))
        super().write(weights, patch)


@caught_by("bit_exact", fault=14)
class OrdersKeysAsText(Plain):
    """Takes "10.values" for the third layer."""

    def read(self, delta: Path) -> Sequence[Patch]:
        patches = super().read(delta)
        order = sorted(range(len(patches)), key=str)
        heads = [(patch.name, patch.shape) for patch in patches]
        return [replace(patches[at], name=n, shape=s) for at, (n, s) in zip(order, heads, strict=True)]

    def check(self, patches: Sequence[Patch], weights: Mapping[str, Tensor]) -> None:
        pass


@caught_by("bit_exact", fault=14)
class ReadsByPlaceInTheFile(Plain):
    """Takes the payload's tensors in the order in which they lie, whatever they are called."""

    def read(self, delta: Path) -> Sequence[Patch]:
        parts = oracle.disassemble(delta)
        keys = [f"{number}.{part}" for number in range(len(parts.entries) // 2) for part in ("indices", "values")]
        parts.entries = [replace(entry, key=key) for entry, key in zip(parts.entries, keys, strict=True)]
        return reread(parts)


@caught_by("bit_exact", fault=23)
class AppliesFirstLayerOnly(Plain):
    """Every later layer is lost."""

    def read(self, delta: Path) -> Sequence[Patch]:
        return super().read(delta)[:1]


@caught_by("bit_exact", "strided", fault=10)
class ReplacesTensors(Plain):
    """Puts a new tensor into the mapping: a view that somebody else holds keeps the old values."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        weights[patch.name] = weights[patch.name].clone(memory_format=torch.contiguous_format)
        super().write(weights, patch)


@caught_by("bit_exact", "strided", fault=6)
class WritesBesideViews(Plain):
    """Writes one element before the view's first."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        super().write(weights, patch)
        tensor = weights[patch.name]
        if tensor.storage_offset():
            carrier = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
            carrier.as_strided((1,), (1,), 0).fill_(0)
