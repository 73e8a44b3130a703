"""Encoders that are wrong in one way each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import oracle
from ..engines import codecs as engines
from ..oracle import CODES, Patch, State, bits, from_bits
from .registry import codec_mutants
from .right import Plain

caught_by = codec_mutants("encoder")


@caught_by("minimal", fault=1)
class ComparesValues(Plain):
    """Misses the sign of zero, and takes every NaN for a change."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        patches = []
        for name in sorted(base):
            wide = torch.complex128 if base[name].is_complex() else torch.float64
            if CODES[base[name].dtype] == "F4":
                wide = torch.uint8
                differ = bits(base[name]) != bits(target[name])
            else:
                differ = (base[name].to(wide) != target[name].to(wide)).reshape(-1).numpy()
            if differ.any():
                at = np.flatnonzero(differ)
                code = CODES[base[name].dtype]
                patches.append(Patch(name, tuple(base[name].shape), code, at, bits(target[name])[at]))
        return patches


def _keep(patch: Patch, where: Any) -> Patch:
    return replace(patch, indices=patch.indices[where], bits=patch.bits[where])


class _LosesChanges(Plain):
    """Drops the changed positions that `kept` does not choose."""

    def kept(self, patch: Patch, old: Any) -> Any:
        raise NotImplementedError

    def find(self, base: State, target: State) -> Sequence[Patch]:
        found = [_keep(p, self.kept(p, bits(base[p.name])[p.indices])) for p in super().find(base, target)]
        return [patch for patch in found if len(patch.indices)]


@caught_by("minimal", fault=2)
class ComparesLowByte(_LosesChanges):
    """Sees a change only where the lowest byte changed."""

    def kept(self, patch: Patch, old: Any) -> Any:
        return ((old ^ patch.bits) & patch.bits.dtype.type(0xFF)) != 0


@caught_by("minimal", fault=5)
class MissesLastElement(_LosesChanges):
    """Stops one element early."""

    def kept(self, patch: Patch, old: Any) -> Any:
        return patch.indices != patch.numel - 1


@caught_by("bit_exact", fault=3)
class TakesNanForUnchanged(_LosesChanges):
    """NaN stands for "unchanged": a number that becomes NaN is not sent."""

    def kept(self, patch: Patch, old: Any) -> Any:
        values = from_bits(patch.bits, patch.code, (len(patch.bits),))
        return ~torch.isnan(values.float()).numpy() if patch.code in ("F32", "BF16", "F16") else slice(None)


@caught_by("minimal", fault=7)
class EmitsUnchangedTensors(Plain):
    """Sends whole tensors when one element changed."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        whole = [bits(target[patch.name]) for patch in super().find(base, target)]
        return [
            replace(patch, indices=np.arange(len(new)), bits=new)
            for patch, new in zip(super().find(base, target), whole, strict=True)
        ]


@caught_by("counted", fault=7)
class CountsChangedTensorsOnly(Plain):
    """total_elements leaves unchanged tensors out."""

    def total(self, target: State, patches: Sequence[Patch]) -> int:
        return sum(patch.numel for patch in patches)


@caught_by("counted", fault=16)
class HasNoEmptyDelta(Plain):
    """Takes a step without a change for an error."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        patches = super().find(base, target)
        if not patches:
            raise ValueError("nothing changed")
        return patches


@caught_by("density_bound", fault=None)
class AlwaysI64(Plain):
    """Ten bytes a change where six would do."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        oracle.write_delta(out, self.find(base, target), oracle.total_elements(target), indices="I64")


class _Header(Plain):
    """Writes something more into the payload's header."""

    def more(self) -> str:
        raise NotImplementedError

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        parts = oracle.draft(self.find(base, target), oracle.total_elements(target))
        parts.header_metadata = {**(parts.header_metadata or {}), "more": self.more()}
        parts.write(out)


@caught_by("deterministic", fault=None)
class StampsTheTime(_Header):
    """The time of day in the payload."""

    def more(self) -> str:
        return str(time.time_ns())


@caught_by("density_bound", fault=None)
class WastesHeader(_Header):
    """A header that costs more than the change."""

    def more(self) -> str:
        return "x" * 10_000


@caught_by("canonical", fault=None)
class KeepsModelOrder(Plain):
    """Layers in the order of the model instead of the order of their names."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        patches = {patch.name: patch for patch in super().find(base, target)}
        return [patches[name] for name in target if name in patches]


@caught_by("deterministic", fault=None)
class OrdersByHash(Plain):
    """Layers in the order of a set: the same all day in one process."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        patches = {patch.name: patch for patch in super().find(base, target)}
        return [patches[name] for name in set(patches)]


@caught_by("bit_exact", "strided", fault=6)
class ReadsStorageOrder(Plain):
    """Flattens a tensor as it lies in memory, not as it is indexed."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        states = [
            {
                n: t if t.is_contiguous() else t.permute(*range(t.ndim - 1, -1, -1)).reshape(t.shape)
                for n, t in s.items()
            }
            for s in (base, target)
        ]
        return super().find(*states)


@caught_by("bit_exact", fault=17)
class MovesItsBase(Plain):
    """Encoding changes the baseline."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        super().encode(base, target, out)
        for patch in self.find(base, target):
            self.write(dict(base), patch)


@caught_by("bit_exact", "stateful", fault=17)
class MovesItsBaselineWhenItWrites(Plain):
    """Encodes against what it wrote last beside it, acknowledged or not."""

    def __init__(self) -> None:
        self.last: dict[Path, State] = {}

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        known = self.last.get(out.parent, base)
        super().encode(known if _alike(known, base) else base, target, out)
        self.last[out.parent] = oracle.clone(target)


def _alike(a: State, b: State) -> bool:
    return [(n, t.shape, t.dtype) for n, t in a.items()] == [(n, t.shape, t.dtype) for n, t in b.items()]


@caught_by("bit_exact", "large", fault=4)
class WrapsPositions(engines.Reference):
    """Positions beyond 2^31 are stored in 32 bits."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        super().encode(base, target, out)
        raw = oracle.read_delta(out)
        wrapped = [replace(p, indices=p.indices.astype(np.int32).astype(np.int64)) for p in raw.patches]
        oracle.write_delta(out, wrapped, raw.metadata["total_elements"], indices="I32")


@caught_by("density_bound", "large", fault=None)
class TakesI64AtTheBoundary(engines.Reference):
    """2^31 elements fit I32, and get I64."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        super().encode(base, target, out)
        raw = oracle.read_delta(out)
        wide = "I64" if any(patch.numel >= 2**31 for patch in raw.patches) else None
        oracle.write_delta(out, raw.patches, raw.metadata["total_elements"], indices=wide)
