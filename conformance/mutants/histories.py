"""Codecs that are wrong about inverses, compositions and lineage."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import oracle
from ..oracle import CODES, bits, digests
from .registry import codec_mutants
from .right import Plain

caught_by = codec_mutants("history")


@caught_by("inverts", fault=None)
class InverseHoldsNewValues(Plain):
    """Gathers the old values after it has overwritten them."""

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        self.apply(delta, weights)
        oracle.write_delta(out, self.read(delta), oracle.total_elements(weights))


@caught_by("composes", fault=21)
class EarlierWins(Plain):
    """Composes in the wrong order."""

    def merge(self, earlier: dict[int, Any], later: dict[int, Any]) -> dict[int, Any]:
        return {**later, **earlier}


@caught_by("refuses", "vectors", fault=15)
class ComposesAcrossAGap(Plain):
    """Composes deltas that do not follow each other."""

    def follows(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
        return True


# -- lineage ---------------------------------------------------------------------------------------------------------


@caught_by("refuses", "lineage", fault=15)
class IgnoresLineage(Plain):
    """Applies what was made for another state."""

    def fits(self, lineage: Mapping[str, Any], before: str, after: str) -> bool:
        return True


@caught_by("refuses", "lineage", fault=35)
class ChecksTheBaseAlone(Plain):
    """Takes a change that does not lead to the digest that it states."""

    def fits(self, lineage: Mapping[str, Any], before: str, after: str) -> bool:
        return super().fits(lineage, before, str(lineage.get("digest", after)))


@caught_by("refuses", "lineage", fault=35)
class DigestsLinearly(Plain):
    """Sums keys times bits: flips of the highest bit cancel, and zeros do not count."""

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        total = 0
        for name, tensor in weights.items():
            seed, _ = digests.seed_and_header(name, CODES[tensor.dtype], tuple(tensor.shape))
            total += sum((digests.key(seed, at) | 1) * int(pattern) for at, pattern in enumerate(bits(tensor)))
        return digests.text(total)


@caught_by("refuses", "lineage", fault=35)
class DigestsSignExtended(Plain):
    """Widens elements with their sign."""

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        total = 0
        for name, tensor in weights.items():
            seed, header = digests.seed_and_header(name, CODES[tensor.dtype], tuple(tensor.shape))
            signed = bits(tensor).view(f"i{tensor.dtype.itemsize}")
            words = (int(pattern) % digests.WORDS for pattern in signed)
            total += header + sum(digests.mix64(digests.key(seed, at) ^ word) for at, word in enumerate(words))
        return digests.text(total)
