"""Codecs that take, or half take, what they must refuse."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from .. import oracle
from ..engines import codecs as engines
from ..oracle import Patch
from .registry import codec_mutants
from .right import Plain, reread

caught_by = codec_mutants("reader")


@caught_by("refuses", fault=5)
class ChecksWhileWriting(Plain):
    """Writes a layer before it has checked the next one."""

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        for patch in self.read(delta):
            self.check([patch], weights)
            self.write(weights, patch)


@caught_by("refuses", fault=22)
class SwallowsErrors(Plain):
    """A delta that it cannot read is not an error."""

    def read(self, delta: Path) -> Sequence[Patch]:
        try:
            return super().read(delta)
        except Exception:
            return ()


@caught_by("refuses", fault=23)
class SkipsUnknownTensors(Plain):
    """A name that it does not know is not an error."""

    def check(self, patches: Sequence[Patch], weights: Mapping[str, Tensor]) -> None:
        super().check([patch for patch in patches if patch.name in weights], weights)

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        if patch.name in weights:
            super().write(weights, patch)


@caught_by("refuses", fault=26)
class ComparesSizesOnly(Plain):
    """Any shape with as many elements will do."""

    def check(self, patches: Sequence[Patch], weights: Mapping[str, Tensor]) -> None:
        super().check([replace(p, shape=tuple(weights[p.name].shape)) for p in patches], weights)

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        super().write(weights, replace(patch, shape=tuple(weights[patch.name].shape)))


class _Mends(Plain):
    """Mends a fault in the delta before reading it, as a lenient reader does."""

    def mend(self, parts: oracle.Draft) -> None:
        raise NotImplementedError

    def read(self, delta: Path) -> Sequence[Patch]:
        try:
            return super().read(delta)
        except oracle.OracleError:
            parts = oracle.disassemble(delta)
            self.mend(parts)
            return reread(parts)


@caught_by("refuses", fault=5)
class SortsPositions(_Mends):
    """Takes unsorted positions, and sorts them."""

    def mend(self, parts: oracle.Draft) -> None:
        parts.entries = [self._sorted(entry) if entry.key.endswith(".indices") else entry for entry in parts.entries]

    def _sorted(self, entry: oracle.Entry) -> oracle.Entry:
        return replace(entry, data=np.sort(np.frombuffer(entry.data, np.int32)).tobytes())


@caught_by("refuses", fault=11)
class IgnoresCounts(_Mends):
    """Does not look at changed, total and density."""

    def mend(self, parts: oracle.Draft) -> None:
        changed = sum(entry.shape[0] for entry in parts.entries if entry.key.endswith(".indices"))
        parts.metadata |= {"changed_elements": changed, "total_elements": 10**6, "density_pct": round(changed / 1e4, 3)}


@caught_by("refuses", fault=11)
class IgnoresVersions(_Mends):
    """Takes every format_version for its own."""

    def mend(self, parts: oracle.Draft) -> None:
        parts.metadata["format_version"] = 2


@caught_by("refuses", fault=13)
class IgnoresExtensions(_Mends):
    """Reads a delta that requires something unknown."""

    def mend(self, parts: oracle.Draft) -> None:
        parts.metadata.pop("requires", None)


@caught_by("refuses", fault=8)
class IgnoresExtraKeys(_Mends):
    """Reads the keys that it expects, and leaves others alone."""

    def mend(self, parts: oracle.Draft) -> None:
        parts.entries = [entry for entry in parts.entries if entry.key[0].isdigit()]


@caught_by("declines", fault=12)
class DropsWhatItDeclines(Plain):
    """Leaves out the change of a tensor of a dtype that it does not offer, without a word."""

    capabilities = Plain.capabilities - {"float8"}

    def read(self, delta: Path) -> Sequence[Patch]:
        return [patch for patch in super().read(delta) if not patch.code.startswith("F8")]


@caught_by("refuses", fault=36)
class StaysBrokenAfterARefusal(Plain):
    """A refused delta leaves a session open, which blocks the next."""

    def __init__(self) -> None:
        self.open = False

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        if self.open:
            self.open = False
            raise RuntimeError("a session is still open")
        self.open = True
        super().apply(delta, weights)
        self.open = False


@caught_by("refuses", fault=23)
class EncodesWhatBothHave(Plain):
    """States of different tensors: the common ones are encoded."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        common = [
            n for n in base if n in target and (base[n].shape, base[n].dtype) == (target[n].shape, target[n].dtype)
        ]
        super().encode({n: base[n] for n in common}, {n: target[n] for n in common}, out)


@caught_by("refuses", fault=None)
class GivesNoReasons(engines.Reference):
    """Declares reason codes, and raises bare errors."""

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        try:
            super().apply(delta, weights)
        except ValueError as error:
            raise RuntimeError(str(error)) from error
