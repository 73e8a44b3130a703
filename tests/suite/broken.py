"""Engines that are wrong in one way each, and the check that must catch it.

`Plain` is right: a codec on the suite's own oracle, without refdelta. Every mutant changes one method of it (or of the
reference, where positions beyond 32 bits matter). `MUTANTS` lists them: `pytest conformance/ --engine
tests.suite.broken:NAME` must fail in the check that `caught_by` names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance import digests, engines, oracle
from conformance.engines import CAPABILITIES
from conformance.layouts import Layout, Piece
from conformance.oracle import CODES, Patch, State, bits, from_bits


class Plain:
    """A correct codec: slow, and dense throughout."""

    name = "plain"
    capabilities = frozenset(CAPABILITIES) - {"large", "reasons"}

    def find(self, base: State, target: State) -> Sequence[Patch]:
        """The patches that encode writes."""
        return oracle.expected_patches(base, target)

    def total(self, target: State, patches: Sequence[Patch]) -> int:
        return oracle.total_elements(target)

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        what = [{name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in (base, target)]
        if what[0] != what[1]:
            raise ValueError("base and target are states of different tensors")
        patches = self.find(base, target)
        oracle.write_delta(out, patches, self.total(target, patches))

    def read(self, delta: Path) -> Sequence[Patch]:
        """The patches of a delta; raises where anything is wrong with it."""
        return oracle.read_delta(delta).patches

    def check(self, patches: Sequence[Patch], weights: Mapping[str, Tensor]) -> None:
        for patch in patches:
            tensor = weights[patch.name]
            if (tuple(tensor.shape), CODES[tensor.dtype]) != (patch.shape, patch.code):
                raise ValueError(f"{patch.name}: {patch.code} {patch.shape} does not fit {tensor.dtype} {tensor.shape}")

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        """Write one patch through the tensor."""
        tensor = weights[patch.name]
        new = bits(tensor)
        new[patch.indices] = patch.bits
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
        tensor.view(carrier).copy_(from_bits(new, patch.code, patch.shape).view(carrier))

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        patches = self.read(delta)
        self.check(patches, weights)
        for patch in patches:
            self.write(weights, patch)

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        patches = self.read(delta)
        inverse = [replace(patch, bits=bits(weights[patch.name])[patch.indices]) for patch in patches]
        self.apply(delta, weights)
        oracle.write_delta(out, inverse, oracle.total_elements(weights))

    def merge(self, earlier: dict[int, Any], later: dict[int, Any]) -> dict[int, Any]:
        """Bits by position, of two successive patches of one tensor."""
        return {**earlier, **later}

    def follows(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
        """Whether a delta of lineage `after` may come after one of lineage `before`."""
        known = [
            (before.get(old), after.get(new)) for old, new in (("version", "base_version"), ("digest", "base_digest"))
        ]
        links = [link for link in known if None not in link]
        return before.get("run_id") == after.get("run_id") and all(a == b for a, b in links) and bool(links)

    def span(self, deltas: Sequence[Path], names: Sequence[str]) -> dict[str, Any] | None:
        """The lineage of the whole range; `names` are the layers that it changes."""
        lineages = [lineage for delta in deltas if (lineage := oracle.read_lineage(delta))]
        if not lineages:
            return None
        layers: dict[str, str] = {}
        for lineage in lineages:
            layers |= lineage.get("layer_digests", {})
        first, last = lineages[0], lineages[-1]
        ends = {key: first.get(key) for key in ("base_version", "base_digest")}
        ends |= {key: last.get(key) for key in ("run_id", "version", "digest")}
        return {**ends, "layer_digests": {name: layers[name] for name in names if name in layers}}

    def check_chain(self, deltas: Sequence[Path]) -> None:
        for delta in deltas:
            if (oracle.read_lineage(delta) or {}).get("part") not in (None, [0, 1]):
                raise ValueError("one part of several")
        for before, after in pairwise(deltas):
            one, two = oracle.read_lineage(before), oracle.read_lineage(after)
            if (one is None) != (two is None) or (one and two and not self.follows(one, two)):
                raise ValueError(f"{two} does not follow {one}")
        raw = [oracle.read_delta(delta) for delta in deltas]
        seen: dict[str, tuple[object, ...]] = {}
        for patch in (patch for delta in raw for patch in delta.patches):
            if seen.setdefault(patch.name, (patch.shape, patch.code)) != (patch.shape, patch.code):
                raise ValueError(f"{patch.name} differs between the deltas")
        if len({delta.metadata["total_elements"] for delta in raw}) != 1:
            raise ValueError("the deltas are of different states")

    def compose(self, deltas: Sequence[Path], out: Path) -> None:
        self.check_chain(deltas)
        found: dict[str, tuple[Patch, dict[int, Any]]] = {}
        for patch in (patch for delta in deltas for patch in self.read(delta)):
            own = dict(zip(patch.indices.tolist(), patch.bits, strict=True))
            found[patch.name] = patch, self.merge(found[patch.name][1], own) if patch.name in found else own
        merged = [
            replace(patch, indices=np.array(sorted(new)), bits=np.array([new[at] for at in sorted(new)]))
            for _, (patch, new) in sorted(found.items())
        ]
        totals = [oracle.read_delta(delta).metadata["total_elements"] for delta in deltas]
        span = self.span(deltas, [patch.name for patch in merged])
        parts = oracle.draft(merged, totals[0])
        parts.metadata |= {"lineage": span} if span else {}
        parts.write(out)

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        return digests.state_digest(weights)

    def fits(self, lineage: Mapping[str, Any], before: str, after: str) -> bool:
        """Whether a lineage describes the change between states of these digests."""
        whole = lineage.get("part") in (None, [0, 1])
        return whole and lineage.get("base_digest", before) == before and lineage.get("digest", after) == after

    def follow(self, delta: Path, weights: MutableMapping[str, Tensor], digest: str) -> str:
        patches = self.read(delta)
        self.check(patches, weights)
        lineage = {key: value for key, value in (oracle.read_lineage(delta) or {}).items() if value is not None}
        after = self.digest(oracle.expected_state(weights, patches))
        if not self.fits(lineage, digest, after):
            raise ValueError(f"the state goes from {digest} to {after}, the delta's lineage is {lineage}")
        self.apply(delta, weights)
        return after

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        return [piece for piece in layout.pieces if piece.source == name]

    def route(self, layout: Layout, name: str, indices: Tensor, values: Tensor) -> Sequence[tuple[str, Tensor, Tensor]]:
        place = np.unravel_index(indices.numpy(), layout.sources[name]) if layout.sources[name] else ()
        routed = []
        for piece in self.pieces(layout, name):
            inside = np.ones(len(indices), dtype=bool)
            for axis, (first, stop) in zip(place, piece.taken, strict=True):
                inside &= (axis >= first) & (axis < stop)
            moved = [place[axis][inside] - piece.taken[axis][0] for axis in piece.order]
            lead = [np.zeros(inside.sum(), np.int64)] * (len(piece.start) - len(moved))
            at = [axis + start for axis, start in zip([*lead, *moved], piece.start, strict=True)]
            flat = np.ravel_multi_index(at, layout.params[piece.param]) if at else np.zeros(inside.sum(), np.int64)
            routed.append((piece.param, torch.from_numpy(flat), values[torch.from_numpy(inside)]))
        return routed


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken engine and what must catch it."""

    name: str
    """Its class in this module."""
    check: str
    """The check that must fail."""
    chapter: str
    """The test module `test_codec_{chapter}.py` that holds the killing test."""


MUTANTS: list[Mutant] = []


def caught_by(check: str, chapter: str = "") -> Callable[[type], type]:
    """Register a mutant."""

    def register(engine: type) -> type:
        MUTANTS.append(Mutant(engine.__name__, check, chapter or check))
        return engine

    return register


# -- encoders --------------------------------------------------------------------------------------------------------


@caught_by("minimal")
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


@caught_by("minimal")
class ComparesLowByte(_LosesChanges):
    """Sees a change only where the lowest byte changed."""

    def kept(self, patch: Patch, old: Any) -> Any:
        return ((old ^ patch.bits) & patch.bits.dtype.type(0xFF)) != 0


@caught_by("minimal")
class MissesLastElement(_LosesChanges):
    """Stops one element early."""

    def kept(self, patch: Patch, old: Any) -> Any:
        return patch.indices != patch.numel - 1


@caught_by("bit_exact")
class TakesNanForUnchanged(_LosesChanges):
    """NaN stands for "unchanged": a number that becomes NaN is not sent."""

    def kept(self, patch: Patch, old: Any) -> Any:
        values = from_bits(patch.bits, patch.code, (len(patch.bits),))
        return ~torch.isnan(values.float()).numpy() if patch.code in ("F32", "BF16", "F16") else slice(None)


@caught_by("minimal")
class EmitsUnchangedTensors(Plain):
    """Sends whole tensors when one element changed."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        whole = [bits(target[patch.name]) for patch in super().find(base, target)]
        return [
            replace(patch, indices=np.arange(len(new)), bits=new)
            for patch, new in zip(super().find(base, target), whole, strict=True)
        ]


@caught_by("counted")
class CountsChangedTensorsOnly(Plain):
    """total_elements leaves unchanged tensors out."""

    def total(self, target: State, patches: Sequence[Patch]) -> int:
        return sum(patch.numel for patch in patches)


@caught_by("counted")
class HasNoEmptyDelta(Plain):
    """Takes a step without a change for an error."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        patches = super().find(base, target)
        if not patches:
            raise ValueError("nothing changed")
        return patches


@caught_by("density_bound")
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


@caught_by("deterministic")
class StampsTheTime(_Header):
    """The time of day in the payload."""

    def more(self) -> str:
        return str(time.time_ns())


@caught_by("density_bound")
class WastesHeader(_Header):
    """A header that costs more than the change."""

    def more(self) -> str:
        return "x" * 10_000


@caught_by("canonical")
class KeepsModelOrder(Plain):
    """Layers in the order of the model instead of the order of their names."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        patches = {patch.name: patch for patch in super().find(base, target)}
        return [patches[name] for name in target if name in patches]


@caught_by("deterministic")
class OrdersByHash(Plain):
    """Layers in the order of a set: the same all day in one process."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        patches = {patch.name: patch for patch in super().find(base, target)}
        return [patches[name] for name in set(patches)]


@caught_by("bit_exact", "strided")
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


@caught_by("bit_exact")
class MovesItsBase(Plain):
    """Encoding changes the baseline."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        super().encode(base, target, out)
        for patch in self.find(base, target):
            self.write(dict(base), patch)


@caught_by("bit_exact", "stateful")
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


@caught_by("bit_exact", "large")
class WrapsPositions(engines.Reference):
    """Positions beyond 2^31 are stored in 32 bits."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        super().encode(base, target, out)
        raw = oracle.read_delta(out)
        wrapped = [replace(p, indices=p.indices.astype(np.int32).astype(np.int64)) for p in raw.patches]
        oracle.write_delta(out, wrapped, raw.metadata["total_elements"], indices="I32")


@caught_by("density_bound", "large")
class TakesI64AtTheBoundary(engines.Reference):
    """2^31 elements fit I32, and get I64."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        super().encode(base, target, out)
        raw = oracle.read_delta(out)
        wide = "I64" if any(patch.numel >= 2**31 for patch in raw.patches) else None
        oracle.write_delta(out, raw.patches, raw.metadata["total_elements"], indices=wide)


# -- appliers --------------------------------------------------------------------------------------------------------


@caught_by("bit_exact")
class AddsValues(Plain):
    """Takes values for differences."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        old = bits(weights[patch.name])[patch.indices]
        super().write(weights, replace(patch, bits=old + patch.bits))


@caught_by("bit_exact", "stateful")
class TakesADeltaOnce(Plain):
    """Skips a directory that it has applied before, whatever has come since."""

    def __init__(self) -> None:
        self.taken: set[Path] = set()

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        if delta not in self.taken:
            super().apply(delta, weights)
        self.taken.add(delta)


@caught_by("idempotent")
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


@caught_by("bit_exact")
class DropsNegativeZero(Plain):
    """Writes -0 as +0."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        zero = patch.bits == 1 << (8 * patch.bits.dtype.itemsize - 1)
        super().write(weights, replace(patch, bits=np.where(zero, 0, patch.bits)))


@caught_by("bit_exact")
class QuietsNan(Plain):
    """Values pass through arithmetic, which sets the quiet bit of every float32 NaN."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        if patch.code == "F32":
            nan = (patch.bits & 0x7FFFFFFF) > 0x7F800000
            patch = replace(patch, bits=np.where(nan, patch.bits | 0x400000, patch.bits))
        super().write(weights, patch)


@caught_by("bit_exact")
class OrdersKeysAsText(Plain):
    """Takes "10.values" for the third layer."""

    def read(self, delta: Path) -> Sequence[Patch]:
        patches = super().read(delta)
        order = sorted(range(len(patches)), key=str)
        heads = [(patch.name, patch.shape) for patch in patches]
        return [replace(patches[at], name=n, shape=s) for at, (n, s) in zip(order, heads, strict=True)]

    def check(self, patches: Sequence[Patch], weights: Mapping[str, Tensor]) -> None:
        pass


@caught_by("bit_exact")
class ReadsByPlaceInTheFile(Plain):
    """Takes the payload's tensors in the order in which they lie, whatever they are called."""

    def read(self, delta: Path) -> Sequence[Patch]:
        parts = oracle.disassemble(delta)
        keys = [f"{number}.{part}" for number in range(len(parts.entries) // 2) for part in ("indices", "values")]
        parts.entries = [replace(entry, key=key) for entry, key in zip(parts.entries, keys, strict=True)]
        return oracle.read_delta(parts.write(delta.with_name("by_place"))).patches


@caught_by("bit_exact")
class AppliesFirstLayerOnly(Plain):
    """Every later layer is lost."""

    def read(self, delta: Path) -> Sequence[Patch]:
        return super().read(delta)[:1]


@caught_by("bit_exact", "strided")
class ReplacesTensors(Plain):
    """Puts a new tensor into the mapping: a view that somebody else holds keeps the old values."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        weights[patch.name] = weights[patch.name].clone(memory_format=torch.contiguous_format)
        super().write(weights, patch)


@caught_by("bit_exact", "strided")
class WritesBesideViews(Plain):
    """Writes one element before the view's first."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        super().write(weights, patch)
        tensor = weights[patch.name]
        if tensor.storage_offset():
            carrier = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
            carrier.as_strided((1,), (1,), 0).fill_(0)


# -- refusals --------------------------------------------------------------------------------------------------------


@caught_by("refuses")
class ChecksWhileWriting(Plain):
    """Writes a layer before it has checked the next one."""

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        for patch in self.read(delta):
            self.check([patch], weights)
            self.write(weights, patch)


@caught_by("refuses")
class SwallowsErrors(Plain):
    """A delta that it cannot read is not an error."""

    def read(self, delta: Path) -> Sequence[Patch]:
        try:
            return super().read(delta)
        except Exception:
            return ()


@caught_by("refuses")
class SkipsUnknownTensors(Plain):
    """A name that it does not know is not an error."""

    def check(self, patches: Sequence[Patch], weights: Mapping[str, Tensor]) -> None:
        super().check([patch for patch in patches if patch.name in weights], weights)

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        if patch.name in weights:
            super().write(weights, patch)


@caught_by("refuses")
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
            return super().read(self._mended(delta))

    def _mended(self, delta: Path) -> Path:
        parts = oracle.disassemble(delta)
        self.mend(parts)
        return parts.write(delta.with_name("mended"))


@caught_by("refuses")
class SortsPositions(_Mends):
    """Takes unsorted positions, and sorts them."""

    def mend(self, parts: oracle.Draft) -> None:
        parts.entries = [self._sorted(entry) if entry.key.endswith(".indices") else entry for entry in parts.entries]

    def _sorted(self, entry: oracle.Entry) -> oracle.Entry:
        return replace(entry, data=np.sort(np.frombuffer(entry.data, np.int32)).tobytes())


@caught_by("refuses")
class IgnoresCounts(_Mends):
    """Does not look at changed, total and density."""

    def mend(self, parts: oracle.Draft) -> None:
        changed = sum(entry.shape[0] for entry in parts.entries if entry.key.endswith(".indices"))
        parts.metadata |= {"changed_elements": changed, "total_elements": 10**6, "density_pct": round(changed / 1e4, 3)}


@caught_by("refuses")
class IgnoresVersions(_Mends):
    """Takes every format_version for its own."""

    def mend(self, parts: oracle.Draft) -> None:
        parts.metadata["format_version"] = 2


@caught_by("refuses")
class IgnoresExtensions(_Mends):
    """Reads a delta that requires something unknown."""

    def mend(self, parts: oracle.Draft) -> None:
        parts.metadata.pop("requires", None)


@caught_by("refuses")
class IgnoresExtraKeys(_Mends):
    """Reads the keys that it expects, and leaves others alone."""

    def mend(self, parts: oracle.Draft) -> None:
        parts.entries = [entry for entry in parts.entries if entry.key[0].isdigit()]


@caught_by("declines")
class DropsWhatItDeclines(Plain):
    """Leaves out the change of a tensor of a dtype that it does not offer, without a word."""

    capabilities = Plain.capabilities - {"float8"}

    def read(self, delta: Path) -> Sequence[Patch]:
        return [patch for patch in super().read(delta) if not patch.code.startswith("F8")]


@caught_by("refuses")
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


@caught_by("refuses")
class EncodesWhatBothHave(Plain):
    """States of different tensors: the common ones are encoded."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        common = [
            n for n in base if n in target and (base[n].shape, base[n].dtype) == (target[n].shape, target[n].dtype)
        ]
        super().encode({n: base[n] for n in common}, {n: target[n] for n in common}, out)


@caught_by("refuses")
class GivesNoReasons(engines.Reference):
    """Declares reason codes, and raises bare errors."""

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        try:
            super().apply(delta, weights)
        except ValueError as error:
            raise RuntimeError(str(error)) from error


# -- inverse, composition, routes ------------------------------------------------------------------------------------


@caught_by("inverts")
class InverseHoldsNewValues(Plain):
    """Gathers the old values after it has overwritten them."""

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        self.apply(delta, weights)
        oracle.write_delta(out, self.read(delta), oracle.total_elements(weights))


@caught_by("composes")
class EarlierWins(Plain):
    """Composes in the wrong order."""

    def merge(self, earlier: dict[int, Any], later: dict[int, Any]) -> dict[int, Any]:
        return {**later, **earlier}


@caught_by("refuses", "vectors")
class ComposesAcrossAGap(Plain):
    """Composes deltas that do not follow each other."""

    def follows(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
        return True


# -- lineage ---------------------------------------------------------------------------------------------------------


@caught_by("refuses", "lineage")
class IgnoresLineage(Plain):
    """Applies what was made for another state."""

    def fits(self, lineage: Mapping[str, Any], before: str, after: str) -> bool:
        return True


@caught_by("refuses", "lineage")
class ChecksTheBaseAlone(Plain):
    """Takes a change that does not lead to the digest that it states."""

    def fits(self, lineage: Mapping[str, Any], before: str, after: str) -> bool:
        return super().fits(lineage, before, str(lineage.get("digest", after)))


@caught_by("refuses", "lineage")
class DigestsLinearly(Plain):
    """Sums keys times bits: flips of the highest bit cancel, and zeros do not count."""

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        total = 0
        for name, tensor in weights.items():
            seed, _ = digests.seed_and_header(name, CODES[tensor.dtype], tuple(tensor.shape))
            total += sum((digests.key(seed, at) | 1) * int(pattern) for at, pattern in enumerate(bits(tensor)))
        return digests.text(total)


@caught_by("refuses", "lineage")
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


@caught_by("routes")
class SwapsKeyAndValue(Plain):
    """k lands where v belongs."""

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        other = {"k": "v", "v": "k"}.get(name, name) if "qkv" in layout.params else name
        return [replace(piece, source=name) for piece in layout.pieces if piece.source == other]


@caught_by("routes")
class ServesFirstRankOnly(Plain):
    """Every rank gets the first one's slice."""

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        taken = [tuple((0, stop - start) for start, stop in piece.taken) for piece in layout.pieces]
        moved = [replace(piece, taken=cut) for piece, cut in zip(layout.pieces, taken, strict=True)]
        return [piece for piece in moved if piece.source == name]


@caught_by("routes")
class ForgetsTheSecondPlace(Plain):
    """A tensor that stands in two places is written to the first."""

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        return list(super().pieces(layout, name))[:1]


@caught_by("routes")
class ForgetsToTranspose(Plain):
    """Writes a transposed slice as it is read, clipped to the parameter."""

    def route(self, layout: Layout, name: str, indices: Tensor, values: Tensor) -> Sequence[tuple[str, Tensor, Tensor]]:
        if any(piece.axes for piece in self.pieces(layout, name)):
            return [(piece.param, indices, values) for piece in self.pieces(layout, name)]
        return super().route(layout, name, indices, values)
