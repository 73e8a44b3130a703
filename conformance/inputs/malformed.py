"""Deltas with one fault each, named after it, with the reason codes that a refusal may carry.

    FAULTS: name -> Fault
    FAULTS["index_duplicate"].write(directory, patches, total_elements)

`patches` are two or more good ones, each of a non-square tensor with two axes, three positions or more, in a state that
holds other tensors too. The fault is in the second, so that an engine which writes before it has checked everything
leaves a trace in the first. Without the fault, `oracle.write_delta` of the same patches must be taken. `STATE` and
`PATCHES` will do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .. import oracle
from ..oracle import DELTA_FILE, METADATA_FILE, Bits, Draft, Entry, Patch, draft, pack, pack_raw, unpack

Files = Mapping[str, bytes | None]
"""What a directory holds; None stands for a directory where a file belongs."""
Make = Callable[[Draft], Files | None]
"""Puts a fault into a good delta, and returns None; or returns what the directory is to hold instead."""

INDICES, VALUES = "1.indices", "1.values"
"""The payload of the second patch."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to be malformed, with all that is expected of whoever reads it. Golden vectors are made from this."""

    name: str
    feature: str
    """The part of the format that it breaks; the folder of its golden vector."""
    reason: str
    """The reason code that SPEC.md gives to it, and its golden vector states."""
    also: frozenset[str]
    """Other reason codes that describe it, where it breaks several rules."""
    make: Make
    no_vector: str = ""
    """Why it has no golden vector, where it has none; the suite makes it when it runs."""

    @property
    def harmless(self) -> bool:
        """Whether a reader that overlooks it writes what the sender meant: metadata that no weight depends on."""
        return self.feature == "counts" or self.name in _HARMLESS

    @property
    def reasons(self) -> frozenset[str]:
        """Every reason code that a refusal may carry."""
        return self.also | {self.reason}

    def write(self, directory: Path, patches: Sequence[Patch], total_elements: int) -> Path:
        """Write the faulty delta; `directory` does not exist yet, and `directory_absent` leaves it so."""
        parts = draft(patches, total_elements)
        files = self.make(parts)
        for name, content in (parts.files() if files is None else files).items():
            directory.mkdir(exist_ok=True)
            if content is None:
                (directory / name).mkdir()
            elif name:
                (directory / name).write_bytes(content)
        return directory


_HARMLESS = frozenset(
    {
        *("changed_elements_absent", "total_elements_absent", "density_pct_absent", "density_nan"),
        *("changed_a_text", "total_a_text", "density_a_text", "requires_a_text", "requires_unknown"),
    }
)
"""Beside those of the counts."""
FAULTS: dict[str, Fault] = {}
"""Every fault by name."""


def _add(feature: str, name: str, reasons: Sequence[str], make: Make, no_vector: str = "") -> None:
    """The first of ``reasons`` is the one that SPEC.md gives."""
    assert name not in FAULTS, f"two faults named {name}"
    FAULTS[name] = Fault(name, feature, reasons[0], frozenset(reasons[1:]), make, no_vector)


def _fault(feature: str, *reasons: str, no_vector: str = "") -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        _add(feature, make.__name__, reasons, make, no_vector)
        return make

    return register


# -- files -----------------------------------------------------------------------------------------------------------

_NO_DIRECTORIES = "version control keeps no empty directory"


@_fault("files", "not_a_delta")
def directory_absent(parts: Draft) -> Files:
    return {}


@_fault("files", "not_a_delta", no_vector=_NO_DIRECTORIES)
def directory_empty(parts: Draft) -> Files:
    return {"": b""}


@_fault("files", "not_a_delta")
def metadata_absent(parts: Draft) -> Files:
    return {DELTA_FILE: parts.files()[DELTA_FILE]}


@_fault("files", "not_a_delta")
def payload_absent(parts: Draft) -> Files:
    return {METADATA_FILE: parts.files()[METADATA_FILE]}


@_fault("files", "not_a_delta")
def full_checkpoint(parts: Draft) -> Files:
    return {"model.safetensors": parts.files()[DELTA_FILE]}


@_fault("files", "unreadable", "not_a_delta", no_vector=_NO_DIRECTORIES)
def payload_is_a_directory(parts: Draft) -> Files:
    return {**parts.files(), DELTA_FILE: None}


def _payload(change: Callable[[bytes], bytes]) -> Make:
    """The payload file's bytes changed."""

    def make(parts: Draft) -> Files:
        files = parts.files()
        return {**files, DELTA_FILE: change(files[DELTA_FILE])}

    return make


_CUT = ("bad_header", "unreadable")
_add("files", "payload_empty", _CUT, _payload(lambda raw: b""))
_add("files", "payload_cut_in_length", _CUT, _payload(lambda raw: raw[:7]))
_add("files", "payload_cut_in_header", _CUT, _payload(lambda raw: raw[:40]))
_add("files", "payload_cut_in_data", _CUT, _payload(lambda raw: raw[:-1]))
_add("files", "payload_bytes_after_the_end", ("bad_header",), _payload(lambda raw: raw + b"\0"))


# -- the payload's header --------------------------------------------------------------------------------------------


def _header(change: Callable[[str], str]) -> Make:
    """The header's text changed; the data stays."""

    def reframe(raw: bytes) -> bytes:
        _, _, start = unpack(raw)
        return pack_raw(change(raw[8:start].decode().rstrip()), [raw[start:]])

    return _payload(reframe)


def _second_entry(change: Callable[[dict[str, Any]], object]) -> Make:
    """The header's description of the second values changed."""

    def rewrite(text: str) -> str:
        header = json.loads(text)
        change(header[VALUES])
        return json.dumps(header)

    return _header(rewrite)


def _shift(first: int, stop: int) -> Callable[[dict[str, Any]], object]:
    def change(entry: dict[str, Any]) -> None:
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = [begin + first, end + stop]

    return change


_BAD_HEADER = ("bad_header",)
_add("header", "header_longer_than_file", _CUT, _payload(lambda raw: (2**40).to_bytes(8, "little") + raw[8:]))
_add("header", "header_length_negative", _CUT, _payload(lambda raw: b"\xff" * 8 + raw[8:]))
_add(
    "header",
    "header_above_100_MB",
    _BAD_HEADER,
    _header(lambda text: text + " " * (100_000_001 - len(text))),
    no_vector="100 MB",
)
_add("header", "header_not_json", _BAD_HEADER, _header(lambda text: text[:-1]))
_add(
    "header",
    "header_not_utf8",
    _BAD_HEADER,
    _payload(lambda raw: raw[:8] + raw[8:].replace(b"metadata", b"meta\xff\xfeta", 1)),
)
_add("header", "header_a_list", _BAD_HEADER, _header(lambda text: f"[{text}]"))
_add("header", "header_key_twice", _BAD_HEADER, _header(lambda text: text.replace('"0.values"', '"1.values"')))
_add("header", "header_offsets_overlap", _BAD_HEADER, _second_entry(_shift(-8, -8)))
_add("header", "header_offsets_beyond_the_file", _BAD_HEADER, _second_entry(_shift(2**20, 2**20)))
_add("header", "header_offsets_reversed", _BAD_HEADER, _second_entry(lambda e: e.update(data_offsets=[8, 0])))
_add("header", "header_offsets_negative", _BAD_HEADER, _second_entry(lambda e: e.update(data_offsets=[-8, 0])))
_add("header", "header_offsets_absent", _BAD_HEADER, _second_entry(lambda e: e.pop("data_offsets")))
_add("header", "header_shape_too_long", _BAD_HEADER, _second_entry(lambda e: e.update(shape=[10**6])))
_add("header", "header_shape_wraps", _BAD_HEADER, _second_entry(lambda e: e.update(shape=[2**32, 2**32])))
_add("header", "header_shape_negative", _BAD_HEADER, _second_entry(lambda e: e.update(shape=[-1])))
_add(
    "header", "header_dtype_unknown", ("unsupported_dtype", "bad_header"), _second_entry(lambda e: e.update(dtype="F7"))
)


@_fault("header", "bad_header")
def header_gap_in_data(parts: Draft) -> Files:
    """Eight bytes that no tensor owns, between the two layers."""
    files = parts.files()
    _, metadata, _ = unpack(files[DELTA_FILE])
    filler = Entry("filler", "U8", (8,), b"\0" * 8)
    framed = pack([*parts.entries[:2], filler, *parts.entries[2:]], metadata)
    _, _, start = unpack(framed)
    header = json.loads(framed[8:start])
    del header["filler"]
    return {**files, DELTA_FILE: pack_raw(json.dumps(header), [framed[start:]])}


# -- keys ------------------------------------------------------------------------------------------------------------


def _rename(old: str, new: str) -> Make:
    return lambda parts: parts.replace(old, lambda entry: replace(entry, key=new))


def _drop(key: str) -> Make:
    def make(parts: Draft) -> None:
        parts.entries = [entry for entry in parts.entries if entry.key != key]

    return make


def _extra(key: str) -> Make:
    return lambda parts: parts.entries.append(Entry(key, "U8", (1,), b"\0"))


_KEYS = ("keys_mismatch",)
_add("keys", "values_absent", _KEYS, _drop(VALUES))
_add("keys", "indices_absent", _KEYS, _drop(INDICES))
_add("keys", "key_extra", _KEYS, _extra("extra"))
_add("keys", "key_of_a_layer_too_many", _KEYS, _extra("7.values"))
_add("keys", "key_with_leading_zero", _KEYS, _rename(VALUES, "01.values"))


@_fault("keys", "keys_mismatch")
def header_names_other_layers(parts: Draft) -> None:
    parts.header_metadata = {"layer_names": json.dumps(parts.metadata["layer_names"][::-1])}


@_fault("legacy", "legacy_layout", "keys_mismatch")
def legacy_packed(parts: Draft) -> None:
    """Layout (a): one flat tensor over all layers."""
    indices, values = parts.entries[0::2], parts.entries[1::2]
    lengths = np.array([entry.shape[0] for entry in indices], dtype=np.int64)
    parts.entries = [
        _joined("delta.indices_flat", indices),
        _joined("delta.values_flat", [replace(entry, code="U8", shape=(len(entry.data),)) for entry in values]),
        Entry("delta.layer_lengths", "I64", (len(lengths),), lengths.tobytes()),
    ]


def _joined(key: str, entries: Sequence[Entry]) -> Entry:
    return Entry(key, entries[0].code, (sum(e.shape[0] for e in entries),), b"".join(e.data for e in entries))


@_fault("legacy", "legacy_layout", "keys_mismatch")
def legacy_keyed_by_name(parts: Draft) -> None:
    """Layout (b): `{name}.indices`, `{name}.values`."""
    names = parts.metadata["layer_names"]
    parts.entries = [
        replace(entry, key=f"{names[int(number)]}.{part}")
        for entry in parts.entries
        for number, part in [entry.key.split(".")]
    ]


@_fault("legacy", "legacy_layout", "unsupported_version")
def legacy_packed_without_version(parts: Draft) -> None:
    legacy_packed(parts)
    del parts.metadata["format_version"]


@_fault("legacy", "unknown_tensor")
def legacy_fused_coordinates(parts: Draft) -> None:
    """Layout (c): positions in a fused runtime parameter, under its name."""
    _name_second(parts, "model.layers.0.self_attn.qkv_proj.weight")


# -- metadata --------------------------------------------------------------------------------------------------------


def _set(feature: str, name: str, reason: str | tuple[str, ...], **values: object) -> None:
    """Keys of metadata.json replaced."""
    reasons = (reason,) if isinstance(reason, str) else reason
    _add(feature, name, reasons, lambda parts: parts.metadata.update(values))


def _text(name: str, text: bytes) -> None:
    """All of metadata.json replaced."""
    _add("metadata", name, ("bad_metadata",), lambda parts: {**parts.files(), METADATA_FILE: text})


def _remove(key: str, reason: str) -> None:
    def make(parts: Draft) -> None:
        del parts.metadata[key]

    _add("metadata", f"{key}_absent", (reason,), make)


def _second(feature: str, name: str, reasons: tuple[str, ...], key: str, value: object) -> None:
    """The second layer's entry of a list in metadata.json replaced."""

    def make(parts: Draft) -> None:
        parts.metadata[key] = [*parts.metadata[key]]
        parts.metadata[key][1] = value

    _add(feature, name, reasons, make)


def _name_second(parts: Draft, name: str) -> None:
    """Give the second layer another name, in the metadata and in the header."""
    names = [*parts.metadata["layer_names"]]
    names[1] = name
    parts.metadata["layer_names"] = names
    parts.header_metadata = {"layer_names": json.dumps(names)}


_text("metadata_empty", b"")
_text("metadata_not_json", b"{")
_text("metadata_not_utf8", b'{"format": "\xff\xfe"}')
_text("metadata_a_list", b"[]")
_add(
    "metadata",
    "metadata_above_100_MB",
    ("bad_metadata",),
    lambda parts: {
        **parts.files(),
        METADATA_FILE: parts.files()[METADATA_FILE].ljust(100_000_001),
    },
    no_vector="100 MB",
)
_remove("format", "unsupported_format")
_set("metadata", "format_other", "unsupported_format", format="dense_delta")
_remove("format_version", "unsupported_version")
_set("metadata", "format_version_1", "unsupported_version", format_version=1)
_set("metadata", "format_version_3", "unsupported_version", format_version=3)
_set("metadata", "format_version_text", "unsupported_version", format_version="2")
_set("metadata", "format_version_true", "unsupported_version", format_version=True)
for _key in ("layer_names", "layer_shapes", "changed_elements", "total_elements", "density_pct"):
    _remove(_key, "bad_metadata")
_set("metadata", "layer_names_a_text", "bad_metadata", layer_names="names")
_set("metadata", "layer_shapes_an_object", "bad_metadata", layer_shapes={"0": [1]})
_second("names", "layer_name_a_number", ("bad_name", "bad_metadata"), "layer_names", 7)
_second("shapes", "layer_shape_a_number", ("bad_shape", "bad_metadata"), "layer_shapes", 14)
_second("shapes", "layer_shape_negative", ("bad_shape",), "layer_shapes", [-7, -2])
_second("shapes", "layer_shape_of_texts", ("bad_shape",), "layer_shapes", ["7", "2"])
_second("shapes", "layer_shape_fractional", ("bad_shape",), "layer_shapes", [7.5, 2])
_second("shapes", "layer_shape_boolean", ("bad_shape",), "layer_shapes", [True, 14])
_second("shapes", "layer_shape_wraps", ("bad_shape",), "layer_shapes", [2**32, 2**32])
_set("counts", "total_zero", "count_mismatch", total_elements=0, density_pct=0.0)
_set("counts", "total_negative", ("count_mismatch", "bad_metadata"), total_elements=-1)
_set("metadata", "total_a_text", ("bad_metadata", "count_mismatch"), total_elements="all")
_set("counts", "changed_negative", ("count_mismatch", "bad_metadata"), changed_elements=-1)
_set("metadata", "changed_a_text", ("bad_metadata", "count_mismatch"), changed_elements="5")
_set("metadata", "density_a_text", ("bad_metadata", "count_mismatch"), density_pct="5 %")
_set("metadata", "density_nan", ("bad_metadata", "count_mismatch"), density_pct=float("nan"))
_set("counts", "density_above_100", "count_mismatch", density_pct=100.5)
_set("extensions", "requires_unknown", "unsupported_extension", requires=["time_travel"])
_set("extensions", "requires_a_text", ("bad_metadata", "unsupported_extension"), requires="time_travel")


@_fault("counts", "count_mismatch")
def changed_too_many(parts: Draft) -> None:
    parts.metadata["changed_elements"] += 1


@_fault("counts", "count_mismatch")
def density_of_changed_tensors_only(parts: Draft) -> None:
    changed, total = parts.metadata["changed_elements"], sum(int(np.prod(s)) for s in parts.metadata["layer_shapes"])
    parts.metadata["density_pct"] = round(100 * changed / total, 3)


@_fault("counts", "count_mismatch")
def changed_without_layers(parts: Draft) -> None:
    parts.metadata |= {"layer_names": [], "layer_shapes": [], "changed_elements": 5}
    parts.entries, parts.header_metadata = [], {"layer_names": "[]"}


@_fault("metadata", "bad_metadata", "keys_mismatch")
def shapes_fewer_than_names(parts: Draft) -> None:
    parts.metadata["layer_shapes"] = parts.metadata["layer_shapes"][:-1]


@_fault("names", "bad_name", "bad_metadata")
def layer_name_empty(parts: Draft) -> None:
    _name_second(parts, "")


@_fault("names", "duplicate_name")
def layer_name_twice(parts: Draft) -> None:
    _name_second(parts, parts.metadata["layer_names"][0])


# -- indices and values ----------------------------------------------------------------------------------------------


def _positions(change: Callable[[Bits, int], Bits]) -> Make:
    """The second patch's positions changed, given the tensor's number of elements; I64 where they need it."""

    def make(parts: Draft) -> None:
        numel = int(np.prod(parts.metadata["layer_shapes"][1]))
        entry = parts.entry(INDICES)
        old = np.frombuffer(entry.data, np.int32).astype(np.int64)
        new = change(old, numel)
        code, kind = ("I32", np.int32) if abs(new).max() < 2**31 else ("I64", np.int64)
        parts.replace(INDICES, lambda e: replace(e, code=code, shape=new.shape, data=new.astype(kind).tobytes()))

    return make


def _with(old: Bits, at: int, value: int) -> Bits:
    new = old.copy()
    new[at] = value
    return new


def _recoded(code: str, kind: type[np.generic]) -> Make:
    def change(entry: Entry) -> Entry:
        return replace(entry, code=code, data=np.frombuffer(entry.data, np.int32).astype(kind).tobytes())

    return lambda parts: parts.replace(INDICES, change)


def _values_as(code: str) -> Make:
    """The second patch's values as as many zeros of another dtype; of F16, where they are of this one."""

    def change(entry: Entry) -> Entry:
        other = code if code != entry.code else "F16"
        return replace(entry, code=other, data=bytes(entry.shape[0] * oracle.width(other)))

    return lambda parts: parts.replace(VALUES, change)


def _reshaped(key: str, shape: Callable[[int], tuple[int, ...]]) -> Make:
    return lambda parts: parts.replace(key, lambda entry: replace(entry, shape=shape(entry.shape[0])))


def _resized(by: int) -> Make:
    """The second patch's values longer or shorter than its positions."""

    def change(entry: Entry) -> Entry:
        size = oracle.width(entry.code)
        count = entry.shape[0] + by
        return replace(entry, shape=(count,), data=(entry.data + bytes(size))[: count * size])

    return lambda parts: parts.replace(VALUES, change)


_add("indices", "index_order_swapped", ("index_order",), _positions(lambda old, numel: old[::-1].copy()))
_add("indices", "index_duplicate", ("index_order",), _positions(lambda old, numel: _with(old, 1, old[0])))
_add("indices", "index_equals_size", ("index_range",), _positions(lambda old, numel: _with(old, -1, numel)))
_add("indices", "index_far_beyond", ("index_range",), _positions(lambda old, numel: _with(old, -1, 2**31 - 1)))
_add("indices", "index_wraps_32_bits", ("index_range",), _positions(lambda old, numel: _with(old, -1, 2**32 + old[-1])))
_add("indices", "index_negative", ("index_range",), _positions(lambda old, numel: _with(old, 0, -1)))
_add("indices", "index_far_negative", ("index_range",), _positions(lambda old, numel: _with(old, 0, -(2**33))))
_add("indices", "indices_F32", ("bad_indices",), _recoded("F32", np.float32))
_add("indices", "indices_I16", ("bad_indices",), _recoded("I16", np.int16))
_add("indices", "indices_U32", ("bad_indices",), _recoded("U32", np.uint32))
_add("indices", "indices_2D", ("bad_indices",), _reshaped(INDICES, lambda count: (1, count)))
_add("values", "values_2D", ("bad_values",), _reshaped(VALUES, lambda count: (count, 1)))
_add("values", "values_too_few", ("length_mismatch", "count_mismatch"), _resized(-1))
_add("values", "values_too_many", ("length_mismatch", "count_mismatch"), _resized(1))
_add("state", "values_of_a_wider_dtype", ("dtype_mismatch",), _values_as("F64"))
_add("state", "values_of_another_dtype_as_wide", ("dtype_mismatch",), _values_as("BF16"))
_add("extensions", "values_integer", ("unsupported_dtype", "dtype_mismatch"), _values_as("I16"))


# -- against the state -----------------------------------------------------------------------------------------------


@_fault("state", "unknown_tensor")
def tensor_unknown(parts: Draft) -> None:
    _name_second(parts, "no.such.tensor")


@_fault("state", "unknown_tensor")
def tensor_name_in_other_case(parts: Draft) -> None:
    _name_second(parts, parts.metadata["layer_names"][1].upper())


def _shape_second(change: Callable[[list[int]], list[int]]) -> Make:
    def make(parts: Draft) -> None:
        first, second, *rest = parts.metadata["layer_shapes"]
        parts.metadata["layer_shapes"] = [first, change(second), *rest]

    return make


_add("state", "shape_transposed", ("shape_mismatch",), _shape_second(lambda shape: shape[::-1]))
_add("state", "shape_flattened", ("shape_mismatch",), _shape_second(lambda shape: [int(np.prod(shape))]))
_add("state", "shape_with_an_axis_more", ("shape_mismatch",), _shape_second(lambda shape: [1, *shape]))


# -- a state and good patches of it ----------------------------------------------------------------------------------


def _example(
    codes: Sequence[str] = ("BF16", "F16", "F32"), bound: int = 2**15
) -> tuple[dict[str, Tensor], tuple[Patch, ...]]:
    """Of tensors of these dtypes, their bit patterns below ``bound``."""
    rng = np.random.default_rng(20)
    base, target = {}, {}
    for name, code, shape in zip(("a.weight", "b.weight", "c.bias"), codes, ((3, 5), (7, 2), (2, 3)), strict=True):
        old = rng.integers(0, bound, size=shape).astype(oracle.unsigned(code)).reshape(-1)
        new = old.copy()
        new[[1, 2, 5]] ^= oracle.unsigned(code).type(1)
        base[name] = oracle.from_bits(old, code, shape)
        target[name] = oracle.from_bits(new, code, shape)
    base["untouched"] = oracle.from_bits(np.arange(40), codes[-1], (4, 10))
    target["untouched"] = base["untouched"]
    return base, oracle.expected_patches(base, target)


STATE, PATCHES = _example()
"""A state of four tensors, and good patches of the first three."""


@functools.cache
def example_for(capabilities: frozenset[str]) -> tuple[dict[str, Tensor], tuple[Patch, ...]]:
    """`STATE` and `PATCHES`, or others like them for an engine that takes no NaN, or no other dtype than BF16."""
    if capabilities.issuperset({"float16", "float32", "mixed_dtypes", "nan_values"}):
        return STATE, PATCHES
    several = capabilities.issuperset({"float16", "float32", "mixed_dtypes"})
    return _example(("BF16", "F16", "F32") if several else ("BF16",) * 3, 0x3F00)
