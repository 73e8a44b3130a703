"""A reader in which every sentence of SPEC.md that refuses something is a rule of its own, by id.

Without a rule it goes on, and makes of what it finds what a lenient reader would make of it. So an engine that breaks
one sentence, and no other, is this one with a rule off. With all rules it is right, as `right.Plain` is, whose other
methods it has; the oracle's own reader has no part in it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .. import oracle
from ..oracle import CODES, DELTA_FILE, DTYPES, FLOATING, METADATA_FILE, NON_FLOATING, Patch, bits
from .right import Plain

JSON_LIMIT = 100_000_000
_TEXTS = ("base_model", "model_id", "kind", "created_at")
_POSITIONS = {"F32": "<f4", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_OF_WIDTH = {1: "F8_E5M2", 2: "F16", 4: "F32", 8: "F64"}


class RuleBroken(ValueError):
    """A rule that does not hold, by its name."""


@dataclass(frozen=True, slots=True)
class _Entry:
    code: str
    axes: int
    data: bytes

    @property
    def width(self) -> int:
        return oracle.width(self.code)


class Ruled(Plain):
    """Reads by rules; `off` names those that it does not keep: an id of SPEC.md, and which of several it has."""

    off: frozenset[str] = frozenset()

    def holds(self, rule: str, condition: object) -> bool:
        """Whether the condition holds; RuleBroken where it must, and does not."""
        if not condition and rule not in self.off:
            raise RuleBroken(rule)
        return bool(condition)

    # -- JSON --------------------------------------------------------------------------------------------------------

    def _json(self, raw: bytes, text: str, value: str, twice: str, number: str) -> Any:
        """A JSON value; the rules are for its encoding, for one whole value, for keys and for numbers."""
        decoded = raw.decode("utf-8", "ignore").removeprefix("\ufeff")
        if not self.holds(text, decoded.encode() == raw) and raw[:2] == b"\xff\xfe":
            decoded = raw.decode("utf-16")

        def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
            self.holds(twice, len(dict(found)) == len(found))
            return dict(found)

        def finite(said: str) -> float:
            self.holds(number, math.isfinite(float(said)))
            return float(said)

        decoder = json.JSONDecoder(object_pairs_hook=pairs, parse_float=finite, parse_constant=finite)
        try:
            found, end = decoder.raw_decode(decoded.strip())
        except json.JSONDecodeError:
            self.holds(value, False)
            return decoder.decode(f"{decoded.strip()}}}")
        self.holds(value, end == len(decoded.strip()))
        return found

    # -- the container -----------------------------------------------------------------------------------------------

    def _container(self, raw: bytes) -> tuple[dict[str, _Entry], Mapping[str, str]]:
        length = int.from_bytes(raw[:8], "little")
        start = 8 + length
        self.holds("a header inside the file", 8 <= start <= len(raw))
        self.holds("S3.5-1", length <= JSON_LIMIT)
        self.holds("S3.5-2", raw[8:9] == b"{")
        header = self._json(raw[8:start], "S3.5-3 text", "S3.5-3 value", "S3.5-3 twice", "S3.5-3 number")
        self.holds("a header that is an object", isinstance(header, dict))
        said = header.pop("__metadata__", {})
        if not self.holds("S3.5-11", isinstance(said, dict) and all(isinstance(v, str) for v in said.values())):
            said = {}
        return dict(self._entries(header, raw[start:])), said

    def _entries(self, header: Mapping[str, Any], data: bytes) -> Iterator[tuple[str, _Entry]]:
        at = 0
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            self.holds("S3.5-5", entry.keys() == {"dtype", "shape", "data_offsets"})
            code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, begin, end]
            if not self.holds("S3.5-6", all(type(number) is int and number >= 0 for number in numbers)):
                *shape, begin, end = map(int, numbers)
            if not self.holds("S3.6-1", code in DTYPES):
                code = ""
            elif code == oracle.SUB_BYTE:
                self.holds("S3.5-8", shape[-1] % 2 == 0)
            self.holds("S3.5-7", not code or end - begin == self._bytes(code, shape))
            self.holds("S3.5-9", begin == at)
            at = end
            yield key, _Entry(code, len(shape), data[begin:end].ljust(end - begin, b"\0"))
        self.holds("S3.5-9", at == len(data))

    def _bytes(self, code: str, shape: Sequence[int]) -> int:
        count = math.prod(shape)
        return (count + 1) // 2 if code == oracle.SUB_BYTE else count * oracle.width(code)

    # -- metadata.json -----------------------------------------------------------------------------------------------

    def _metadata(self, raw: bytes) -> dict[str, Any] | None:
        """What the file says; None where it says nothing of use."""
        self.holds("S4.1-2", len(raw) <= JSON_LIMIT)
        found = self._json(raw, "S4.1-1 text", "S4.1-1 value", "S4.1-3", "S4.1-4")
        if not self.holds("S4.1-1 object", isinstance(found, dict)):
            return None
        self.holds("S4.2-1", {"format", "format_version", *self._required()} <= found.keys())
        said: dict[str, Any] = {"format": "sparse_delta", "format_version": 2, **found}
        self.holds("S4.2-3 format", said["format"] == "sparse_delta")
        self.holds("S4.2-3 version", self._number(said["format_version"]) == 2)
        lists = all(isinstance(said.get(key), list) for key in ("layer_names", "layer_shapes"))
        self.holds("lists of names and shapes", lists)
        for key in _TEXTS:
            self.holds("S4.2-3 text", isinstance(said.get(key), str | None))
        stamp = said.get("timestamp")
        self.holds("S4.2-4", stamp is not True)
        self.holds("S4.2-3 text", isinstance(stamp, int | float | None))
        requires = said.get("requires")
        texts = isinstance(requires, list) and all(isinstance(entry, str) for entry in requires)
        said["requires"] = requires if self.holds("S4.2-3 list", requires is None or texts) else []
        self.holds("S11.1-1", set(said["requires"] or ()) <= {NON_FLOATING})
        return said

    def _required(self) -> tuple[str, ...]:
        return "changed_elements", "total_elements", "density_pct", "layer_names", "layer_shapes"

    def _number(self, value: object) -> int:
        self.holds("S4.2-4", not isinstance(value, bool))
        if not self.holds("S4.2-5", not isinstance(value, float)) and isinstance(value, float):
            return int(value)
        if not isinstance(value, int):
            raise RuleBroken("S4.2-3 number")
        return value

    def _names(self, said: Sequence[object]) -> list[str]:
        names = [self._name(name) for name in said]
        self.holds("S4.3-2", len(set(names)) == len(names))
        return names

    def _name(self, name: object) -> str:
        if not isinstance(name, str):
            raise RuleBroken("S4.3-1")
        self.holds("S4.3-1", name and not re.search("[\ud800-\udfff]", name))
        return re.sub("[\ud800-\udfff]", "\ufffd", name)

    def _shape(self, shape: object) -> tuple[int, ...]:
        if not isinstance(shape, list):
            raise RuleBroken("S4.4-1")
        right = all(type(size) is int and 0 <= size < 2**63 for size in shape) and math.prod(shape) < 2**63
        return tuple(shape) if self.holds("S4.4-1", right) else tuple(map(int, shape))

    # -- both --------------------------------------------------------------------------------------------------------

    def read(self, delta: Path) -> Sequence[Patch]:
        if not self.holds("S2.1-1", all((delta / name).is_file() for name in (DELTA_FILE, METADATA_FILE))):
            return ()
        said = self._metadata((delta / METADATA_FILE).read_bytes())
        if said is None:
            return ()
        entries, header = self._container((delta / DELTA_FILE).read_bytes())
        names, shapes = self._names(said["layer_names"]), [self._shape(shape) for shape in said["layer_shapes"]]
        self.holds("as many shapes as names", len(names) == len(shapes))
        self._check_names(header, said["layer_names"])
        keys = {f"{number}.{part}" for number in range(len(names)) for part in ("indices", "values")}
        self.holds("S3.1-1", keys <= entries.keys())
        self.holds("S3.1-2", entries.keys() <= keys)
        patches = [
            self._patch(name, shape, entries[f"{number}.indices"], entries[f"{number}.values"])
            for number, (name, shape) in enumerate(zip(names, shapes, strict=True))
            if {f"{number}.indices", f"{number}.values"} <= entries.keys()
        ]
        declared = all(patch.code in FLOATING for patch in patches) or NON_FLOATING in (said["requires"] or ())
        self.holds("S3.6-2", declared)
        self._check_counts(said, entries, shapes)
        return patches

    def _check_names(self, header: Mapping[str, str], names: object) -> None:
        text = header.get("layer_names")
        try:
            declared = names if text is None else json.loads(text)
        except json.JSONDecodeError:
            declared = None
        self.holds("S3.5-12", declared == names)

    def _patch(self, name: str, shape: tuple[int, ...], positions: _Entry, values: _Entry) -> Patch:
        self.holds("S3.2-1 dtype", positions.code in ("I32", "I64"))
        self.holds("S3.2-1 axes", positions.axes == 1)
        self.holds("S3.3-1 axes", values.axes == 1)
        at = np.frombuffer(positions.data, _POSITIONS.get(positions.code, "<u4")).astype(np.int64)
        code = values.code or _OF_WIDTH[len(values.data) // max(1, len(at))]
        new = np.frombuffer(values.data, oracle.unsigned(code))
        if not self.holds("S3.3-1 length", len(at) == len(new)):
            at, new = at[: len(new)], new[: len(at)]
        self.holds("S3.2-2 order", bool(np.all(np.diff(at) > 0)))
        inside = (at >= 0) & (at < math.prod(shape))
        if not self.holds("S3.2-2 range", bool(inside.all())):
            at, new = at[inside], new[inside]
        return Patch(name, shape, code, at, new)

    def _check_counts(self, said: Mapping[str, Any], entries: Mapping[str, _Entry], shapes: Sequence[Any]) -> None:
        changed = sum(len(e.data) // e.width for key, e in entries.items() if key.endswith(".indices"))
        least = sum(map(math.prod, shapes))
        self.holds("S4.5-1", self._number(said.get("changed_elements", changed)) == changed)
        total = self._number(said.get("total_elements", least))
        self.holds("S4.5-2", least <= total < 2**63)
        density = said.get("density_pct", oracle.density_pct(changed, total))
        self.holds("S4.2-4", not isinstance(density, bool))
        self.holds("S4.5-3", oracle.is_density(density, changed, total))

    # -- against a state ---------------------------------------------------------------------------------------------

    def check(self, patches: Sequence[Patch], weights: Mapping[str, Tensor]) -> None:
        for patch in patches:
            tensor = weights.get(self.named(patch.name, weights))
            if self.holds("S5.1-1 name", tensor is not None) and tensor is not None:
                self.holds("S5.1-1 shape", tuple(tensor.shape) == patch.shape)
                self.holds("S3.3-2", CODES[tensor.dtype] == patch.code)

    def named(self, name: str, weights: Mapping[str, Tensor]) -> str:
        """The tensor of a state that a name means."""
        return name

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        name = self.named(patch.name, weights)
        if name not in weights:
            return
        tensor = weights[name]
        values = oracle.from_bits(patch.bits, patch.code, (len(patch.bits),)).to(tensor.dtype)
        same = CODES[tensor.dtype] == patch.code
        new = patch.bits if same else bits(values)
        super().write(weights, Patch(name, tuple(tensor.shape), CODES[tensor.dtype], patch.indices, new))

    # -- lineage -----------------------------------------------------------------------------------------------------

    def lineage(self, delta: Path) -> Mapping[str, Any]:
        """The fields that are stated."""
        said = json.loads((delta / METADATA_FILE).read_text(encoding="utf-8")).get("lineage")
        if said is None or not self.holds("S9.1-1", isinstance(said, dict)):
            return {}
        self.holds("S9.1-2", {"run_id", "version"} <= {key for key, value in said.items() if value is not None})
        stated = {key: value for key, value in said.items() if value is not None}
        self.holds("S9.1-1", all(_RIGHT[key](value) for key, value in stated.items() if key in _RIGHT))
        found = hashlib.sha256((delta / DELTA_FILE).read_bytes()).hexdigest()
        self.holds("S9.2-1", stated.get("payload_sha256", found) == found or "S9.1-1" in self.off)
        return stated

    def follow(self, delta: Path, weights: MutableMapping[str, Tensor], digest: str) -> str:
        patches = self.read(delta)
        self.check(patches, weights)
        said = self.lineage(delta)
        part = said.get("part")
        self.holds("S9.7-5", part in (None, [0, 1]) or not _RIGHT["part"](part))
        base = said.get("base_digest", digest)
        if str(base).startswith("rd1:") or "S9.3-4" not in self.off:
            self.holds("S9.3-1", base == digest or not isinstance(base, str))
        after = self.digest(oracle.expected_state(weights, patches))
        end = said.get("digest", after)
        self.holds("S9.3-2", end == after or not isinstance(end, str))
        self.apply(delta, weights)
        return self.kept(digest, after)

    def kept(self, before: str, after: str) -> str:
        """The digest that the receiver has from now on."""
        return after

    # -- compositions ------------------------------------------------------------------------------------------------

    def check_chain(self, deltas: Sequence[Path]) -> None:
        said = [self.lineage(delta) for delta in deltas]
        self.holds("S12.2-5", all(lineage.get("part") in (None, [0, 1]) for lineage in said))
        self.holds("S12.2-3", len({bool(lineage) for lineage in said}) == 1)
        for before, after in pairwise(filter(None, said)):
            self._check_follows(before, after)
        raw = [oracle.read_delta(delta) for delta in deltas]
        self.holds("S12.2-2 total", len({delta.metadata["total_elements"] for delta in raw}) == 1)
        shapes, codes = dict[str, Any](), dict[str, Any]()
        for patch in (patch for delta in raw for patch in delta.patches):
            self.holds("S12.2-2 shape", shapes.setdefault(patch.name, patch.shape) == patch.shape)
            self.holds("S12.2-2 dtype", codes.setdefault(patch.name, patch.code) == patch.code)

    def _check_follows(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        self.holds("S12.2-4 run", before["run_id"] == after["run_id"])
        links = {
            old: (before[old], after[new])
            for old, new in (("version", "base_version"), ("digest", "base_digest"))
            if old in before and new in after
        }
        self.holds("S12.2-4 stated", links)
        for what, (one, two) in links.items():
            self.holds(f"S12.2-4 {what}", one == two)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


_RIGHT: Mapping[str, Callable[[Any], bool]] = {
    "run_id": lambda value: isinstance(value, str) and bool(value),
    "version": _is_count,
    "base_version": _is_count,
    "base_digest": lambda value: isinstance(value, str),
    "digest": lambda value: isinstance(value, str),
    "layer_digests": lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
    "payload_sha256": lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
    "part": lambda value: (
        isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)) and value[0] < value[1]
    ),
}
"""Field of a lineage -> whether a value that is stated is right."""
