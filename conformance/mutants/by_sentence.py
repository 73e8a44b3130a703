"""Codecs that break one sentence of SPEC.md each; `conformance.mutants.sentences` says what finds them.

Readers that take what they must refuse are `ruled.Ruled` without a rule. The others refuse what they must take, write
what they must not, or do with deltas what they must not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .. import oracle
from ..engines import codecs as engines
from ..oracle import CODES, DELTA_FILE, FLOATING, METADATA_FILE, Patch, State, bits, digests
from .registry import SENTENCE, Mutant, register
from .right import Plain, reread
from .ruled import RuleBroken, Ruled


def breaks(*ids: str) -> Callable[[type], type]:
    """The decorator that registers a codec which breaks these sentences."""

    def decorate(engine: type) -> type:
        place = f"{engine.__module__}:{engine.__name__}"
        register(Mutant(engine.__name__, "sentence", SENTENCE, place, engine.__doc__ or "", "", "", None, breaks=ids))
        return engine

    return decorate


def _made(name: str, does: str, base: type, ids: Sequence[str], **members: object) -> None:
    """Register a class of this name in this module."""
    engine = type(name, (base,), {"__doc__": does, "__module__": __name__, **members})
    globals()[name] = breaks(*ids)(engine)


# -- what must be refused, and is taken --------------------------------------------------------------------------------


def _takes(name: str, does: str, *rules: str, also: Sequence[str] = ()) -> None:
    """A reader without these rules."""
    _made(name, does, Ruled, [*dict.fromkeys(rule.split()[0] for rule in rules), *also], off=frozenset(rules))


_takes("TakesHalfADelta", "A directory that lacks a file is a delta without layers.", "S2.1-1")
_takes("LeavesOutLayersWithoutAPair", "A layer of which a tensor is missing is left out.", "S3.1-1")
_takes("TakesFurtherTensors", "A tensor that no layer declares is passed over.", "S3.1-2")
_takes("TakesAnyNumbersForPositions", "Positions of any dtype are converted.", "S3.2-1 dtype")
_takes("FlattensPositions", "Positions with two axes are flattened.", "S3.2-1 axes")
_takes("TakesPositionsInAnyOrder", "Positions are not compared with each other.", "S3.2-2 order")
_takes("DropsPositionsOutside", "Positions outside the tensor are dropped.", "S3.2-2 range")
_takes("FlattensValues", "Values with two axes are flattened.", "S3.3-1 axes")
_takes("StopsAtTheShorter", "Of more positions or values than the other the rest is dropped.", "S3.3-1 length")
_takes("ConvertsValues", "Values of another dtype are converted.", "S3.3-2")
_takes("TakesLongHeaders", "A header may be of any length.", "S3.5-1")
_takes("SkipsSpaceBeforeTheHeader", "White space before the header is skipped.", "S3.5-2")
_takes("SkipsBytesThatAreNotUtf8", "Bytes of the header that are not UTF-8 are left out.", "S3.5-3 text")
_takes("MendsTheHeader", "A brace that is missing at the end of the header is put there.", "S3.5-3 value")
_takes("TakesTheLastOfTwoKeys", "Of a key that the header has twice the last one counts.", "S3.5-3 twice")
_takes("TakesFurtherKeysOfAnEntry", "An entry of the header may have further keys.", "S3.5-5")
_takes("RoundsNumbersOfAnEntry", "Numbers of an entry are rounded.", "S3.5-6")
_takes("IgnoresShapesOfTheHeader", "What a tensor holds follows from its offsets alone.", "S3.5-7")
_takes("RoundsHalvesUp", "An odd number of halves is rounded up to pairs.", "S3.5-8")
_takes("TakesGapsAndOverlaps", "Data that is missing is zero, and nobody asks what covers it.", "S3.5-9")
_takes("IgnoresOddHeaderMetadata", "A `__metadata__` of another form is passed over.", "S3.5-11")
_takes("IgnoresNamesInTheHeader", "The header's `layer_names` are not compared.", "S3.5-12")
_takes("TakesUnknownDtypes", "A dtype that it does not know is a float of that width.", "S3.6-1")
_takes("TakesIntegersUnannounced", "Integer values need no extension.", "S3.6-2", also=["S11.1-3"])
_takes("SkipsTheByteOrderMark", "A byte order mark is skipped, and another encoding guessed.", "S4.1-1 text")
_takes("IgnoresTextAfterTheEnd", "What follows the JSON object is passed over.", "S4.1-1 value")
_takes("TakesAnyJsonForADelta", "Metadata that is no object is that of a delta without layers.", "S4.1-1 object")
_takes("TakesLongMetadata", "metadata.json may be of any length.", "S4.1-2")
_takes("TakesTheLastOfTwoMetadataKeys", "Of a key that metadata.json has twice the last one counts.", "S4.1-3")
_takes("TakesInfinity", "Numbers may be infinite.", "S4.1-4")
_takes("FillsInWhatIsMissing", "A key that is missing has the value that it would have.", "S4.2-1")
_takes("TakesAnyVersion", "The version is not compared.", "S4.2-3 version")
_takes("TakesAnyFormat", "The format is not compared.", "S4.2-3 format")
_takes("TakesTextsOfAnyType", "Keys for people may have values of any type.", "S4.2-3 text")
_takes("IgnoresOddRequirements", "A `requires` of another form is passed over.", "S4.2-3 list")
_takes("TakesTrueForANumber", "True is 1.", "S4.2-4")
_takes("TakesWholeFloats", "9.0 is 9.", "S4.2-5")
_takes("ReplacesLoneSurrogates", "A lone surrogate is replaced in silence.", "S4.3-1")
_takes("TakesANameTwice", "Two layers may have one name.", "S4.3-2")
_takes("ConvertsSizes", "Sizes are converted to integers.", "S4.4-1")
_takes("IgnoresChanged", "changed_elements is not compared.", "S4.5-1")
_takes("IgnoresTotals", "total_elements is not compared.", "S4.5-2")
_takes("IgnoresDensities", "density_pct is not compared.", "S4.5-3")
_takes("SkipsLayersThatItDoesNotKnow", "A layer of no tensor is left out.", "S5.1-1 name")
_takes("TakesAnyShape", "Shapes are not compared.", "S5.1-1 shape")
_takes("IgnoresOddLineages", "A field of the lineage may have any type.", "S9.1-1")
_takes("NeedsNoVersion", "A lineage need not say run and version.", "S9.1-2")
_takes("HashesNothing", "The payload's hash is not compared.", "S9.2-1")
_takes("IgnoresTheBase", "The digest of the base is not compared.", "S9.3-1")
_takes("IgnoresTheResult", "The digest after the change is not compared.", "S9.3-2")
_takes("TakesOtherSchemesForUnknown", "A digest of another scheme is not compared.", "S9.3-4")
_takes("AppliesOnePart", "One part of two is an update.", "S9.7-5")
_takes("IgnoresRequirements", "What `requires` lists is not looked at.", "S11.1-1")
_takes("ComposesAnyTotals", "Deltas of states of different sizes are composed.", "S12.2-2 total")
_takes("ComposesAnyShapes", "Shapes of deltas are not compared.", "S12.2-2 shape")
_takes("ComposesAnyDtypes", "Dtypes of deltas are not compared.", "S12.2-2 dtype")
_takes("ComposesLineageWithNone", "A delta with lineage is composed with one without.", "S12.2-3")
_takes("ComposesRuns", "Deltas of two runs are composed.", "S12.2-4 run", also=["S9.5-1"])
_takes("ComposesAcrossVersions", "Versions of deltas are not compared.", "S12.2-4 version", "S12.2-4 digest")
_takes("ComposesAcrossDigests", "Digests of deltas are not compared.", "S12.2-4 digest")
_takes("ComposesWithoutABase", "A delta that states no base follows any other.", "S12.2-4 stated")
_takes("ComposesParts", "One part of two is composed.", "S12.2-5")


@breaks("S1-1", "S2.2-3")
class MakesTheBestOfIt(Ruled):
    """What it cannot read is left out, and the rest applied."""

    def read(self, delta: Path) -> Sequence[Patch]:
        try:
            return super().read(delta)
        except Exception:
            return ()


@breaks("S4.3-3")
class FoldsCase(Ruled):
    """Names are compared without case."""

    def named(self, name: str, weights: Mapping[str, Tensor]) -> str:
        return next((known for known in weights if known.casefold() == name.casefold()), name)


@breaks("S4.3-3")
class NormalisesNames(Ruled):
    """Names are compared in their composed form."""

    def named(self, name: str, weights: Mapping[str, Tensor]) -> str:
        import unicodedata

        form = unicodedata.normalize("NFC", name)
        return next((known for known in weights if unicodedata.normalize("NFC", known) == form), name)


@breaks("S5.1-1")
class WritesAsItChecks(Ruled):
    """Writes a layer before it has looked at the next one."""

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        for patch in self.read(delta):
            self.check([patch], weights)
            self.write(weights, patch)


@breaks("S14.3-1")
class ReadsThePackedLayout(Ruled):
    """Takes the layout of one payload over all layers."""

    def read(self, delta: Path) -> Sequence[Patch]:
        parts = oracle.disassemble(delta)
        flat = {entry.key: entry for entry in parts.entries}
        if "delta.indices_flat" not in flat:
            return super().read(delta)
        lengths = np.frombuffer(flat["delta.layer_lengths"].data, np.int64).tolist()
        at, data = np.frombuffer(flat["delta.indices_flat"].data, np.int32), flat["delta.values_flat"].data
        patches, codes = [], ["BF16", "F16", "F32"]  # as in the only deltas of that layout that the suite has
        for code, name, shape, n in zip(
            codes, parts.metadata["layer_names"], parts.metadata["layer_shapes"], lengths, strict=True
        ):
            size = n * oracle.width(code)
            values = np.frombuffer(data[:size], oracle.unsigned(code))
            patches.append(Patch(name, tuple(shape), code, at[:n].astype(np.int64), values))
            at, data = at[n:], data[size:]
        return patches


@breaks("S14.3-1")
class ReadsTheKeyedLayout(Ruled):
    """Takes the layout of tensors that are keyed by their names."""

    def read(self, delta: Path) -> Sequence[Patch]:
        try:
            return super().read(delta)
        except RuleBroken as broken:
            if str(broken) != "S3.1-1":
                raise
        parts = oracle.disassemble(delta)
        numbers = {name: number for number, name in enumerate(parts.metadata["layer_names"])}
        parts.entries = [replace(entry, key=self._numbered(entry.key, numbers)) for entry in parts.entries]
        return reread(parts)

    def _numbered(self, key: str, numbers: Mapping[str, int]) -> str:
        name, _, part = key.rpartition(".")
        return f"{numbers[name]}.{part}" if name in numbers else key


# -- what must be taken, and is refused --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A good delta as a reader that is too strict looks at it."""

    delta: Path

    @cached_property
    def raw(self) -> oracle.RawDelta:
        return oracle.read_delta(self.delta)

    @cached_property
    def said(self) -> Mapping[str, Any]:
        return self.raw.metadata

    @cached_property
    def lineage(self) -> Mapping[str, Any]:
        return self.said.get("lineage") or {}

    @cached_property
    def header(self) -> bytes:
        raw = (self.delta / DELTA_FILE).read_bytes()
        return raw[8 : 8 + int.from_bytes(raw[:8], "little")]

    @cached_property
    def parts(self) -> oracle.Draft:
        return oracle.disassemble(self.delta)

    @property
    def names(self) -> list[str]:
        return [patch.name for patch in self.raw.patches]


Strict = Callable[[Seen], object]


class _TooStrict(Plain):
    """Refuses what `refuses` says."""

    refuses: Strict

    def read(self, delta: Path) -> Sequence[Patch]:
        patches = super().read(delta)
        if type(self).refuses(Seen(delta)):
            raise ValueError("too strict")
        return patches


def _refuses(name: str, does: str, ids: Sequence[str], refuses: Strict) -> None:
    """A reader that also refuses this."""
    _made(name, does, _TooStrict, ids, refuses=refuses)


def _depth(value: object) -> int:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if below is None else 1 + max(map(_depth, below), default=0)


_OPTIONAL = ("requires", "lineage", "base_model", "model_id", "kind", "created_at", "timestamp")
_KNOWN = {"format", "format_version", "changed_elements", "total_elements", "density_pct", "layer_names"}
_KNOWN |= {"layer_shapes", *_OPTIONAL}
_FIELDS = {"run_id", "version", "base_version", "base_digest", "digest", "layer_digests", "payload_sha256", "part"}


def _is_padded(seen: Seen) -> bool:
    return len(seen.header) - len(seen.header.rstrip(b" ")) >= 8


def _starts_aligned(seen: Seen) -> bool:
    at = 0
    for entry in seen.parts.entries:
        if at % oracle.width(entry.code):
            return False
        at += len(entry.data)
    return len(seen.header) % 8 == 0


_refuses(
    "WantsTwoFilesAlone",
    "Refuses a directory with a third file.",
    ["S2.1-2"],
    lambda seen: len([*seen.delta.iterdir()]) > 2,
)
_refuses(
    "WantsI32",
    "Refuses I64 positions where I32 would do.",
    ["S3.2-4"],
    lambda seen: any(
        code == "I64" and patch.numel <= 2**31
        for code, patch in zip(seen.raw.index_codes, seen.raw.patches, strict=True)
    ),
)
_refuses(
    "WantsPositions",
    "Refuses a layer without positions.",
    ["S3.4-1", "S3.4-4"],
    lambda seen: not all(len(patch.indices) for patch in seen.raw.patches),
)
_refuses(
    "WantsNameOrder",
    "Refuses layers that are not in the order of their names.",
    ["S3.4-3", "S3.4-4"],
    lambda seen: seen.names != sorted(seen.names),
)
_refuses(
    "WantsNoPadding", "Refuses more spaces after the header's object than a canonical one has.", ["S3.5-4"], _is_padded
)
_refuses(
    "WantsAlignment",
    "Refuses data that is not aligned.",
    ["S3.5-10"],
    lambda seen: not _starts_aligned(seen),
)
_refuses(
    "WantsItsOwnHeaderKeys",
    "Refuses keys of `__metadata__` that it does not know.",
    ["S3.5-13"],
    lambda seen: {*(seen.parts.header_metadata or {})} - {"layer_names"},
)
_refuses(
    "WantsOneDtype",
    "Refuses a payload of two dtypes.",
    ["S3.6-3"],
    lambda seen: len({patch.code for patch in seen.raw.patches}) > 1,
)
_refuses("WantsFlatMetadata", "Refuses 32 levels of nesting.", ["S4.1-5"], lambda seen: _depth(seen.said) >= 32)
_refuses(
    "WantsShortNumbers",
    "Refuses integers of 4,000 digits.",
    ["S4.1-6"],
    lambda seen: re.search(rb"[0-9]{4000}", (seen.delta / METADATA_FILE).read_bytes()),
)
_refuses(
    "WantsNoNull",
    "Refuses null for a key that may be absent.",
    ["S4.2-2"],
    lambda seen: any(key in seen.said and seen.said[key] is None for key in _OPTIONAL),
)
_refuses(
    "WantsAFloat", "Refuses an integer as density.", ["S4.2-6"], lambda seen: type(seen.said["density_pct"]) is int
)
_refuses(
    "WantsPrintableNames",
    "Refuses control characters in names.",
    ["S4.3-4"],
    lambda seen: any(re.search("[\x00-\x1f]", name) for name in seen.names),
)
_refuses(
    "WantsNamesUnlikeKeys",
    "Refuses names that end like keys of the payload.",
    ["S4.3-4"],
    lambda seen: any(name.endswith((".indices", ".values")) for name in seen.names),
)
_refuses(
    "WantsItsOwnRounding",
    "Refuses the other of two right densities.",
    ["S4.5-4", "S4.5-5"],
    lambda seen: (
        seen.said["density_pct"] != oracle.density_pct(seen.said["changed_elements"], seen.said["total_elements"])
    ),
)
_refuses("WantsKnownKeys", "Refuses keys that it does not know.", ["S4.6-1"], lambda seen: {*seen.said} - _KNOWN)
_refuses("WantsLayers", "Refuses a delta without layers.", ["S5.4-1"], lambda seen: not seen.names)
_refuses(
    "WantsNoNullInLineage",
    "Refuses null for a field of the lineage.",
    ["S9.1-3"],
    lambda seen: None in seen.lineage.values(),
)
_refuses(
    "WantsEveryField",
    "Refuses a lineage that lacks a field.",
    ["S9.1-3"],
    lambda seen: seen.lineage and not {"base_digest", "base_version", "digest"} <= seen.lineage.keys(),
)
_refuses(
    "WantsKnownFields",
    "Refuses fields of the lineage that it does not know.",
    ["S9.1-4"],
    lambda seen: {*seen.lineage} - _FIELDS,
)
_refuses(
    "WantsNoNeedlessExtension",
    "Refuses an extension that the payload makes no use of.",
    ["S11.1-2"],
    lambda seen: seen.said.get("requires") and all(patch.code in FLOATING for patch in seen.raw.patches),
)


@breaks("S3.4-2", "S3.4-4", "S6-10")
class WantsChanges(Plain):
    """Refuses positions that keep their bits."""

    def check(self, patches: Sequence[Patch], weights: Mapping[str, Tensor]) -> None:
        super().check(patches, weights)
        if any((bits(weights[patch.name])[patch.indices] == patch.bits).any() for patch in patches):
            raise ValueError("nothing changes there")


# -- applying ----------------------------------------------------------------------------------------------------------


@breaks("S3.3-3")
class AddsToWhatIsThere(Plain):
    """Values are differences."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        old = bits(weights[patch.name])[patch.indices]
        super().write(weights, replace(patch, bits=old + patch.bits))


class _Converts(Plain):
    """Changes bits on their way."""

    def converted(self, patch: Patch, sign: int, magnitude: Any) -> Any:
        raise NotImplementedError

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        if patch.code in _INFINITY:
            sign = 1 << (8 * oracle.width(patch.code) - 1)
            new = self.converted(patch, sign, patch.bits & patch.bits.dtype.type(sign - 1))
            patch = replace(patch, bits=new.astype(patch.bits.dtype))
        super().write(weights, patch)


_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}
"""The bits of infinity. A number above them is a NaN."""


@breaks("S3.3-4")
class MakesNanCanonical(_Converts):
    """Every NaN becomes the same one."""

    def converted(self, patch: Patch, sign: int, magnitude: Any) -> Any:
        infinity = _INFINITY[patch.code]
        return np.where(magnitude > infinity, infinity | infinity >> 1 & ~infinity | 1, patch.bits)


@breaks("S3.3-4")
class FlushesSubnormals(_Converts):
    """A subnormal becomes zero."""

    def converted(self, patch: Patch, sign: int, magnitude: Any) -> Any:
        least = _INFINITY[patch.code] & -_INFINITY[patch.code]
        return np.where(magnitude < least, 0, patch.bits)


@breaks("S5.1-2")
class WritesTheFirstLayerAlone(Plain):
    """Every later layer is lost."""

    def read(self, delta: Path) -> Sequence[Patch]:
        return super().read(delta)[:1]


@breaks("S5.1-2")
class LosesTheLastPosition(Plain):
    """The last position of a layer is not written."""

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        super().write(weights, replace(patch, indices=patch.indices[:-1], bits=patch.bits[:-1]))


@breaks("S3.1-1")
class NumbersLayersAsText(Plain):
    """Takes `10.values` for those of layer 2."""

    def read(self, delta: Path) -> Sequence[Patch]:
        patches = super().read(delta)
        order = sorted(range(len(patches)), key=str)
        return [replace(patches[at], name=p.name, shape=p.shape) for at, p in zip(order, patches, strict=True)]


# -- writing -----------------------------------------------------------------------------------------------------------


class _Rewrites(Plain):
    """Changes what it has written."""

    def drafted(self, parts: oracle.Draft) -> None:
        """Change the parts."""

    def header(self, text: str) -> str:
        """The header's text, changed."""
        return text

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        super().encode(base, target, out)
        parts = oracle.disassemble(out)
        self.drafted(parts)
        files = parts.files()
        raw = files[DELTA_FILE]
        end = 8 + int.from_bytes(raw[:8], "little")
        text = self.header(raw[8:end].decode()).encode()
        (out / DELTA_FILE).write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
        (out / METADATA_FILE).write_bytes(files[METADATA_FILE])


@breaks("S3.2-3")
class WritesI64(_Rewrites):
    """Positions are I64 throughout."""

    def drafted(self, parts: oracle.Draft) -> None:
        parts.entries = [self._wide(entry) if entry.code == "I32" else entry for entry in parts.entries]

    def _wide(self, entry: oracle.Entry) -> oracle.Entry:
        if not entry.key.endswith(".indices"):
            return entry
        return replace(entry, code="I64", data=np.frombuffer(entry.data, np.int32).astype(np.int64).tobytes())


@breaks("S6-1")
class WritesAPositionTooMany(Plain):
    """The first element of a changed tensor is always among the positions."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        return [self._with_first(patch, target[patch.name]) for patch in super().find(base, target)]

    def _with_first(self, patch: Patch, tensor: Tensor) -> Patch:
        at = np.union1d([0], patch.indices).astype(np.int64)
        return replace(patch, indices=at, bits=bits(tensor)[at])


@breaks("S6-2")
class WritesEveryTensor(Plain):
    """Unchanged tensors are layers without positions."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        found = {patch.name: patch for patch in super().find(base, target)}
        none = np.zeros(0, dtype=np.int64)
        return [
            found.get(n) or Patch(n, tuple(t.shape), CODES[t.dtype], none, none.astype(oracle.unsigned(CODES[t.dtype])))
            for n, t in sorted(target.items())
        ]


@breaks("S6-3")
class OrdersByUtf16(Plain):
    """Names are ordered by 16-bit units, as some languages do."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        return sorted(super().find(base, target), key=lambda patch: patch.name.encode("utf-16-be"))


@breaks("S6-4")
class WritesValuesFirst(_Rewrites):
    """A layer's values lie before its positions."""

    def drafted(self, parts: oracle.Draft) -> None:
        pairs = zip(parts.entries[1::2], parts.entries[::2], strict=True)
        parts.entries = [entry for pair in pairs for entry in pair]


@breaks("S6-5")
class LeavesOutHeaderNames(_Rewrites):
    """The header has no `__metadata__`."""

    def drafted(self, parts: oracle.Draft) -> None:
        parts.header_metadata = None


@breaks("S6-5")
class OrdersEntryKeys(_Rewrites):
    """The keys of an entry are in the order of the alphabet."""

    def header(self, text: str) -> str:
        found = json.loads(text)
        entries = {k: v if k == "__metadata__" else dict(sorted(v.items())) for k, v in found.items()}
        again = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
        return again + " " * (-len(again.encode()) % 8)


@breaks("S6-6")
class WritesSpaces(_Rewrites):
    """The header has spaces after commas and colons."""

    def header(self, text: str) -> str:
        again = json.dumps(json.loads(text), ensure_ascii=False)
        return again + " " * (-len(again.encode()) % 8)


@breaks("S6-7")
class EscapesWhatIsNotAscii(_Rewrites):
    """Names are escaped beyond ASCII."""

    def header(self, text: str) -> str:
        again = json.dumps(json.loads(text), separators=(",", ":"))
        return again + " " * (-len(again) % 8)


@breaks("S6-7")
class EscapesInUpperCase(_Rewrites):
    """Digits of an escape are upper-case."""

    def header(self, text: str) -> str:
        return re.sub(r"(?<=\\u00)[0-9a-f]{2}", lambda found: found.group().upper(), text)


@breaks("S6-7")
class EscapesByNumberAlone(_Rewrites):
    """Line feeds and tabs are escaped by their numbers."""

    def header(self, text: str) -> str:
        again = text.rstrip(" ").replace(r"\\n", r"\\u000a").replace(r"\\t", r"\\u0009")
        return again + " " * (-len(again.encode()) % 8)


@breaks("S6-8")
class DoesNotPad(_Rewrites):
    """The header ends with its object."""

    def header(self, text: str) -> str:
        return text.rstrip(" ")


@breaks("S6-9")
class WritesTheTotal(_Rewrites):
    """The header has a number of the metadata, too."""

    def drafted(self, parts: oracle.Draft) -> None:
        parts.header_metadata = {**(parts.header_metadata or {}), "total": str(parts.metadata["total_elements"])}


@breaks("S8.1-1")
class CountsWhatChanged(Plain):
    """total_elements leaves unchanged tensors out."""

    def total(self, target: State, patches: Sequence[Patch]) -> int:
        return sum(patch.numel for patch in patches)


@breaks("S8.2-1")
class CountsScalarsAsNothing(Plain):
    """A scalar has no axes, so it counts 0."""

    def total(self, target: State, patches: Sequence[Patch]) -> int:
        return super().total(target, patches) - sum(not t.dim() for t in target.values())


@breaks("S8.2-1")
class CountsEmptyAsOne(Plain):
    """A tensor of no elements counts 1."""

    def total(self, target: State, patches: Sequence[Patch]) -> int:
        return super().total(target, patches) + sum(not t.numel() for t in target.values())


@breaks("S8.3-1")
class EncodesCommonTensors(Plain):
    """Tensors that one of the states lacks are left out."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        common = [n for n in base if n in target and base[n].shape == target[n].shape]
        super().encode({n: base[n] for n in common}, {n: target[n] for n in common}, out)


@breaks("S8.4-1")
class HasAThreshold(Plain):
    """A change of less than a hundredth is not sent."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        return [patch for one in super().find(base, target) if len((patch := self._large(one, base)).indices)]

    def _large(self, patch: Patch, base: State) -> Patch:
        if patch.code not in _INFINITY:
            return patch
        new = oracle.from_bits(patch.bits, patch.code, (len(patch.bits),)).double()
        old = base[patch.name].reshape(-1)[patch.indices].double()
        kept = ~((new - old).abs() < 0.01).numpy()
        return replace(patch, indices=patch.indices[kept], bits=patch.bits[kept])


@breaks("S11.2-1")
class AnnouncesAlways(_Rewrites):
    """Every delta requires the extension."""

    def drafted(self, parts: oracle.Draft) -> None:
        parts.metadata["requires"] = [oracle.NON_FLOATING]


@breaks("S11.2-1")
class AnnouncesNothing(_Rewrites):
    """No delta requires the extension."""

    def drafted(self, parts: oracle.Draft) -> None:
        parts.metadata.pop("requires", None)


@breaks("S13.2-1")
class GivesOneReason(engines.Reference):
    """Whatever it refuses, it refuses for one reason."""

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        try:
            super().apply(delta, weights)
        except ValueError as error:
            error.reason = "not_a_delta"  # type: ignore[attr-defined]  # as an exception of another codec has it
            raise


# -- inverses, compositions, digests -----------------------------------------------------------------------------------


@breaks("S5.5-1")
class InvertsChangesAlone(Plain):
    """The inverse lacks the positions that kept their bits."""

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        old = oracle.clone(weights)
        self.apply(delta, weights)
        oracle.write_delta(out, oracle.expected_patches(weights, old), oracle.total_elements(weights))


@breaks("S5.5-1")
class InvertsToNewValues(Plain):
    """The inverse has the bits of after the change."""

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        self.apply(delta, weights)
        oracle.write_delta(out, self.read(delta), oracle.total_elements(weights))


@breaks("S12.1-1")
class ComposesBackwards(Plain):
    """Of two deltas the earlier one wins."""

    def merge(self, earlier: dict[int, Any], later: dict[int, Any]) -> dict[int, Any]:
        return {**later, **earlier}


@breaks("S12.1-1")
class ComposesTheLastAlone(Plain):
    """A layer has the positions of the last delta that changes it."""

    def merge(self, earlier: dict[int, Any], later: dict[int, Any]) -> dict[int, Any]:
        return later


class _Composes(Plain):
    """Changes the patches of a composition."""

    def composed(self, chain: Sequence[Sequence[Patch]], patches: Sequence[Patch]) -> Sequence[Patch]:
        raise NotImplementedError

    def compose(self, deltas: Sequence[Path], out: Path) -> None:
        chain = [self.read(delta) for delta in deltas]
        super().compose(deltas, out.with_name(f"{out.name} before"))
        raw = oracle.read_delta(out.with_name(f"{out.name} before"))
        lineage = {key: raw.metadata[key] for key in ("lineage",) if key in raw.metadata}
        oracle.write_delta(out, self.composed(chain, raw.patches), raw.metadata["total_elements"], **lineage)


@breaks("S12.1-2")
class LeavesOutWhatComesBack(_Composes):
    """A position of three deltas or two that has its first value again is left out."""

    def composed(self, chain: Sequence[Sequence[Patch]], patches: Sequence[Patch]) -> Sequence[Patch]:
        often: dict[tuple[str, int], int] = {}
        for patch in (patch for step in chain for patch in step):
            for at in patch.indices.tolist():
                often[patch.name, at] = often.get((patch.name, at), 0) + 1
        found = [self._once(patch, often) for patch in patches]
        return [patch for patch in found if len(patch.indices)]

    def _once(self, patch: Patch, often: Mapping[tuple[str, int], int]) -> Patch:
        kept = np.array([often[patch.name, at] == 1 for at in patch.indices.tolist()], dtype=bool)
        return replace(patch, indices=patch.indices[kept], bits=patch.bits[kept])


@breaks("S12.1-3")
class KeepsEmptyLayers(_Composes):
    """A composition has layers without positions."""

    def composed(self, chain: Sequence[Sequence[Patch]], patches: Sequence[Patch]) -> Sequence[Patch]:
        known = {patch.name for patch in patches}
        empty = {p.name: p for step in chain for p in step if not len(p.indices) and p.name not in known}
        return sorted([*patches, *empty.values()], key=lambda patch: patch.name)


class _Spans(Plain):
    """Changes the lineage of a composition."""

    wrong: str

    def span(self, deltas: Sequence[Path], names: Sequence[str]) -> dict[str, Any] | None:
        found = super().span(deltas, names)
        first = oracle.read_lineage(deltas[0])
        last = oracle.read_lineage(deltas[-1])
        if found is None or first is None or last is None:
            return found
        if self.wrong == "layer_digests":
            return {**found, "layer_digests": first.get("layer_digests", {})}
        return {**found, self.wrong: (last if self.wrong.startswith("base") else first)[self.wrong]}


for _wrong, _name in (
    ("base_version", "SpansFromTheLastVersion"),
    ("base_digest", "SpansFromTheLastDigest"),
    ("version", "SpansToTheFirstVersion"),
    ("digest", "SpansToTheFirstDigest"),
    ("layer_digests", "KeepsTheFirstLayerDigests"),
):
    _made(_name, f"The lineage of a composition has `{_wrong}` of another delta.", _Spans, ["S12.3-1"], wrong=_wrong)


@breaks("S9.3-3")
class ForgetsTheNewDigest(Ruled):
    """After a delta it keeps the digest of before."""

    def kept(self, before: str, after: str) -> str:
        return before


@breaks("S10.1-1")
class MixesNothing(Plain):
    """A digest is a sum of keys and bits."""

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        total = 0
        for name, tensor in weights.items():
            seed, header = digests.seed_and_header(name, CODES[tensor.dtype], tuple(tensor.shape))
            total += header + sum(digests.key(seed, at) ^ int(word) for at, word in enumerate(bits(tensor)))
        return digests.text(total)


@breaks("S10.1-1")
class DigestsWithoutHeader(Plain):
    """A tensor without elements counts nothing."""

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        whole = {name: tensor for name, tensor in weights.items() if tensor.numel()}
        return digests.state_digest(whole)


@breaks("S10.1-2")
class WritesDigestsInUpperCase(Plain):
    """Digits of a digest are upper-case."""

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        scheme, _, number = super().digest(weights).partition(":")
        return f"{scheme}:{number.upper()}"


@breaks("S10.1-2")
class WritesDigestsWithoutZeros(Plain):
    """A digest has no leading zeros."""

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        scheme, _, number = super().digest(weights).partition(":")
        return f"{scheme}:{number.lstrip('0')}"


# -- what a sender and a receiver do -----------------------------------------------------------------------------------


@breaks("S9.4-1", "S9.4-2")
class TakesItForArrived(Plain):
    """Encodes against what it wrote last beside it, unless that was the same: acknowledged or not."""

    def __init__(self) -> None:
        self.last: dict[Path, State] = {}

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        known = self.last.get(out.parent, base)
        alike = [(n, t.shape, t.dtype) for n, t in known.items()] == [(n, t.shape, t.dtype) for n, t in base.items()]
        again = alike and not oracle.difference(known, target)
        super().encode(known if alike and not again else base, target, out)
        self.last[out.parent] = oracle.clone(target)
