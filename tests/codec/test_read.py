"""read_delta: one fault at a time, each refused with its reason, and nothing but `DeltaError` for any broken file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from refdelta import DELTA_FILE, METADATA_FILE, Delta, DeltaError, Lineage, Reason, TensorPatch, read_delta, write_delta
from refdelta.files.container import read_header
from tests.codec.support import bf16, container, edit_header, edit_metadata, split_container, write_metadata, write_v2

Layer = tuple[str, list[int], Tensor, Tensor]


def i32(*positions: int) -> Tensor:
    return torch.tensor(positions, dtype=torch.int32)


def layers() -> list[Layer]:
    return [("m.a", [2, 3], i32(1, 5), bf16(1, 2)), ("m.b", [7], i32(0, 3, 6), torch.tensor([1.0, 2.0, 3.0]))]


def valid(tmp_path: Path) -> Path:
    return write_v2(tmp_path / "d", layers(), 13)


def refusal(folder: Path) -> DeltaError:
    with pytest.raises(DeltaError) as caught:
        read_delta(folder)
    return caught.value


def test_the_delta_that_the_faults_are_put_into_is_valid(tmp_path: Path) -> None:
    delta = read_delta(valid(tmp_path))
    assert (len(delta.patches), delta.changed_elements, delta.total_elements) == (2, 5, 13)


# Places


def test_what_is_no_delta(tmp_path: Path) -> None:
    valid(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    for name in ("none", "file", "empty", "gone", "fifo", "nul\0byte"):
        assert refusal(tmp_path / name).reason is Reason.NOT_A_DELTA, name


@pytest.mark.parametrize("name", [DELTA_FILE, METADATA_FILE])
def test_half_a_delta_is_none(tmp_path: Path, name: str) -> None:
    folder = valid(tmp_path)
    (folder / name).unlink()
    error = refusal(folder)
    assert error.reason is Reason.NOT_A_DELTA
    assert name in error.detail


@pytest.mark.parametrize("name", [DELTA_FILE, METADATA_FILE])
@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "directory", "device"])
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    """Without waiting at a FIFO that nobody writes."""
    folder = valid(tmp_path)
    (folder / name).unlink()
    if kind == "directory":
        (folder / name).mkdir()
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        place = tmp_path / "fifo" if kind == "link to a fifo" else folder / name
        os.mkfifo(place)
        if place.parent != folder:
            (folder / name).symlink_to(place)
    error = refusal(folder)
    assert error.reason is Reason.UNREADABLE
    assert "regular" in error.detail


def test_links_to_files_and_directories_are_followed(tmp_path: Path) -> None:
    folder = valid(tmp_path)
    (tmp_path / "blob").write_bytes((folder / DELTA_FILE).read_bytes())
    (folder / DELTA_FILE).unlink()
    (folder / DELTA_FILE).symlink_to(tmp_path / "blob")
    (tmp_path / "latest").symlink_to(folder)
    assert len(read_delta(tmp_path / "latest").patches) == 2
    assert len(read_delta(str(tmp_path / "latest")).patches) == 2


# Metadata


def put(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda metadata: metadata.__setitem__(key, value)


def drop(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda metadata: metadata.pop(key)


METADATA: dict[str, tuple[Reason, Callable[[dict[str, Any]], object]]] = {
    "format absent": (Reason.UNSUPPORTED_FORMAT, drop("format")),
    "format other": (Reason.UNSUPPORTED_FORMAT, put("format", "sparse_delta_v2")),
    "format list": (Reason.UNSUPPORTED_FORMAT, put("format", ["sparse_delta"])),
    "version absent": (Reason.UNSUPPORTED_VERSION, drop("format_version")),
    "version 1": (Reason.UNSUPPORTED_VERSION, put("format_version", 1)),
    "version 3": (Reason.UNSUPPORTED_VERSION, put("format_version", 3)),
    "version text": (Reason.UNSUPPORTED_VERSION, put("format_version", "2")),
    "version float": (Reason.UNSUPPORTED_VERSION, put("format_version", 2.0)),
    "version true": (Reason.UNSUPPORTED_VERSION, put("format_version", True)),
    "names absent": (Reason.BAD_METADATA, drop("layer_names")),
    "names text": (Reason.BAD_METADATA, put("layer_names", "ab")),
    "names object": (Reason.BAD_METADATA, put("layer_names", {"m.a": 0, "m.b": 1})),
    "name number": (Reason.BAD_NAME, put("layer_names", ["m.a", 7])),
    "name null": (Reason.BAD_NAME, put("layer_names", ["m.a", None])),
    "name empty": (Reason.BAD_NAME, put("layer_names", ["m.a", ""])),
    "name surrogate": (Reason.BAD_NAME, put("layer_names", ["m.a", "\ud800"])),
    "names equal": (Reason.DUPLICATE_NAME, put("layer_names", ["m.a", "m.a"])),
    "names swapped": (Reason.KEYS_MISMATCH, put("layer_names", ["m.b", "m.a"])),
    "names of another payload": (Reason.KEYS_MISMATCH, put("layer_names", ["m.a", "m.c"])),
    "one name less": (Reason.BAD_METADATA, put("layer_names", ["m.a"])),
    "shapes absent": (Reason.BAD_METADATA, drop("layer_shapes")),
    "one shape more": (Reason.BAD_METADATA, put("layer_shapes", [[2, 3], [7], []])),
    "shape number": (Reason.BAD_SHAPE, put("layer_shapes", [[2, 3], 7])),
    "shape null": (Reason.BAD_SHAPE, put("layer_shapes", [[2, 3], None])),
    "shape text": (Reason.BAD_SHAPE, put("layer_shapes", [[2, 3], "7"])),
    "shape float": (Reason.BAD_SHAPE, put("layer_shapes", [[2, 3], [7.0]])),
    "shape true": (Reason.BAD_SHAPE, put("layer_shapes", [[2, 3], [7, True]])),
    "fault 8: shape negative": (Reason.BAD_SHAPE, put("layer_shapes", [[2, 3], [-7]])),
    "fault 8: shape negative twice": (Reason.BAD_SHAPE, put("layer_shapes", [[-2, -3], [7]])),
    "fault 8: shape wraps": (Reason.BAD_SHAPE, put("layer_shapes", [[2**32, 2**32], [7]])),
    "shape huge and empty": (Reason.BAD_SHAPE, put("layer_shapes", [[0, 2**63], [7]])),
    "both layers dropped": (Reason.KEYS_MISMATCH, lambda m: m.update(layer_names=[], layer_shapes=[])),
    "changed absent": (Reason.BAD_METADATA, drop("changed_elements")),
    "changed text": (Reason.BAD_METADATA, put("changed_elements", "5")),
    "changed float": (Reason.BAD_METADATA, put("changed_elements", 5.0)),
    "changed true": (Reason.BAD_METADATA, put("changed_elements", True)),
    "fault 11: changed more": (Reason.COUNT_MISMATCH, put("changed_elements", 6)),
    "fault 11: changed less": (Reason.COUNT_MISMATCH, put("changed_elements", 4)),
    "changed negative": (Reason.COUNT_MISMATCH, put("changed_elements", -5)),
    "total absent": (Reason.BAD_METADATA, drop("total_elements")),
    "total float": (Reason.BAD_METADATA, put("total_elements", 13.0)),
    "fault 7: total of changed elements": (Reason.COUNT_MISMATCH, put("total_elements", 5)),
    "total less than the layers": (Reason.COUNT_MISMATCH, put("total_elements", 12)),
    "total negative": (Reason.COUNT_MISMATCH, put("total_elements", -13)),
    "total huge": (Reason.COUNT_MISMATCH, put("total_elements", 10**400)),
    "density absent": (Reason.BAD_METADATA, drop("density_pct")),
    "density text": (Reason.BAD_METADATA, put("density_pct", "38.462")),
    "density true": (Reason.BAD_METADATA, put("density_pct", True)),
    "density null": (Reason.BAD_METADATA, put("density_pct", None)),
    "density as a fraction": (Reason.COUNT_MISMATCH, put("density_pct", 0.385)),
    "density off by a thousandth": (Reason.COUNT_MISMATCH, put("density_pct", 38.461)),
    "density not rounded": (Reason.COUNT_MISMATCH, put("density_pct", 38.4615)),
    "density huge": (Reason.COUNT_MISMATCH, put("density_pct", 10**400)),
    "base_model number": (Reason.BAD_METADATA, put("base_model", 1)),
    "model_id list": (Reason.BAD_METADATA, put("model_id", [])),
    "kind object": (Reason.BAD_METADATA, put("kind", {})),
    "created_at number": (Reason.BAD_METADATA, put("created_at", 1.5)),
    "timestamp text": (Reason.BAD_METADATA, put("timestamp", "1.5")),
    "timestamp true": (Reason.BAD_METADATA, put("timestamp", True)),
    "requires unknown": (Reason.UNSUPPORTED_EXTENSION, put("requires", ["non_floating_values", "zstd"])),
    "requires text": (Reason.BAD_METADATA, put("requires", "zstd")),
    "requires numbers": (Reason.BAD_METADATA, put("requires", [1])),
    "requires a number beside a text": (Reason.BAD_METADATA, put("requires", ["non_floating_values", 1])),
    "lineage list": (Reason.BAD_METADATA, put("lineage", [])),
    "lineage without run": (Reason.BAD_METADATA, put("lineage", {"version": 1})),
    "lineage without version": (Reason.BAD_METADATA, put("lineage", {"run_id": "r"})),
    "lineage run empty": (Reason.BAD_METADATA, put("lineage", {"run_id": "", "version": 1})),
    "lineage version text": (Reason.BAD_METADATA, put("lineage", {"run_id": "r", "version": "1"})),
    "lineage version true": (Reason.BAD_METADATA, put("lineage", {"run_id": "r", "version": True})),
    "lineage version negative": (Reason.BAD_METADATA, put("lineage", {"run_id": "r", "version": -1})),
    "lineage base float": (Reason.BAD_METADATA, put("lineage", {"run_id": "r", "version": 1, "base_version": 0.0})),
    "lineage digest number": (Reason.BAD_METADATA, put("lineage", {"run_id": "r", "version": 1, "digest": 1})),
    "lineage digests list": (Reason.BAD_METADATA, put("lineage", {"run_id": "r", "version": 1, "layer_digests": [""]})),
    "lineage hash short": (Reason.BAD_METADATA, put("lineage", {"run_id": "r", "version": 1, "payload_sha256": "00"})),
    "lineage part": (Reason.BAD_METADATA, put("lineage", {"run_id": "r", "version": 1, "part": [2, 2]})),
    "lineage hash of another payload": (
        Reason.PAYLOAD_MISMATCH,
        put("lineage", {"run_id": "r", "version": 1, "payload_sha256": "0" * 64}),
    ),
}


@pytest.mark.parametrize("fault", METADATA)
def test_metadata_faults(tmp_path: Path, fault: str) -> None:
    reason, edit = METADATA[fault]
    folder = valid(tmp_path)
    edit_metadata(folder, edit)
    assert refusal(folder).reason is reason


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"format": "sparse_delta", "format": "sparse_delta"}',
        b'{"x": NaN}',
        b'{"x": -Infinity}',
        b'{"x": 1e999}',
        b'{"x": ' + b"1" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"x": {"y": 1, "y": 1}}',
    ],
)
def test_metadata_that_is_no_strict_json_object(tmp_path: Path, text: bytes) -> None:
    folder = valid(tmp_path)
    (folder / METADATA_FILE).write_bytes(text)
    assert refusal(folder).reason is Reason.BAD_METADATA


@pytest.mark.parametrize("key", ["base_model", "model_id", "kind", "created_at", "timestamp"])
def test_optional_fields_may_be_absent_or_null(tmp_path: Path, key: str) -> None:
    folder = valid(tmp_path)
    edit_metadata(folder, put(key, None))
    assert read_delta(folder).extra[key] is None
    edit_metadata(folder, drop(key))
    assert key not in read_delta(folder).extra


def test_unknown_keys_are_kept_and_ignored(tmp_path: Path) -> None:
    folder = valid(tmp_path)
    edit_metadata(folder, put("theirs", {"a": [1, None]}))
    edit_metadata(folder, put("lineage", {"run_id": "r", "version": 3, "later": [2]}))
    delta = read_delta(folder)
    assert delta.extra["theirs"] == {"a": [1, None]}
    assert delta.lineage == Lineage("r", 3, extra={"later": [2]})


def test_what_is_said_of_half_an_F4_pair_is_true(tmp_path: Path) -> None:
    """The bytes are filled; it is the pairs, along the last dimension, that are not whole."""
    for shape, end, said in (([2, 3], 3, "F4 of shape [2, 3]: an element is a pair"), ([2, 2], 3, "does not fill")):
        header = json.dumps({"w": {"dtype": "F4", "shape": shape, "data_offsets": [0, end]}}).encode()
        (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))
        with (tmp_path / "file").open("rb", buffering=0) as file, pytest.raises(DeltaError) as caught:
            read_header(file)
        assert caught.value.reason is Reason.BAD_HEADER
        assert said in caught.value.detail
        assert ("does not fill" in caught.value.detail) == (said == "does not fill")


@pytest.mark.parametrize(("changed", "total", "low", "high"), [(1, 200_000, 0.0, 0.001), (3, 40_000, 0.007, 0.008)])
def test_half_way_between_two_roundings_either_will_do(
    tmp_path: Path, changed: int, total: int, low: float, high: float
) -> None:
    layer = ("w", [100], i32(*range(changed)), bf16(*range(changed)))
    for density, good in ((low, True), (high, True), (high + 0.001, False)):
        folder = write_v2(tmp_path / str(density), [layer], total, density_pct=density)
        if good:
            assert read_delta(folder).changed_elements == changed
        else:
            assert refusal(folder).reason is Reason.COUNT_MISMATCH


@pytest.mark.parametrize(("total", "density"), [(13, 38.462), (13, 0.0), (10**9, 0.0)])
def test_fault_11_changed_elements_without_layers(tmp_path: Path, total: int, density: float) -> None:
    """Also where the density fits either count."""
    folder = write_v2(tmp_path / "d", [], total, changed_elements=5, density_pct=density)
    error = refusal(folder)
    assert error.reason is Reason.COUNT_MISMATCH
    assert error.detail == "changed_elements: payload holds 0, metadata says 5"


def test_the_density_of_a_state_without_elements_is_0(tmp_path: Path) -> None:
    assert read_delta(write_v2(tmp_path / "zero", [], 0)).density_pct == 0.0
    assert refusal(write_v2(tmp_path / "one", [], 0, density_pct=1.0)).reason is Reason.COUNT_MISMATCH


@pytest.mark.parametrize("total", [12, -13, 2**63, 10**400])
def test_an_impossible_total_is_named_before_the_payload_is_read(tmp_path: Path, total: int) -> None:
    """Its hash is wrong too, which would be found by reading it."""
    folder = valid(tmp_path)
    lineage = {"run_id": "r", "version": 1, "payload_sha256": "0" * 64}
    edit_metadata(folder, lambda m: m.update(total_elements=total, density_pct=100 * 5 / total, lineage=lineage))
    error = refusal(folder)
    assert error.reason is Reason.COUNT_MISMATCH
    assert "total_elements" in error.detail


def test_the_largest_total_is_taken(tmp_path: Path) -> None:
    total = 2**63 - 1
    assert read_delta(write_v2(tmp_path / "d", layers(), total)).total_elements == total


# Payload


LAYERS: dict[str, tuple[Reason, Layer]] = {
    "fault 5: position numel": (Reason.INDEX_RANGE, ("m.b", [7], i32(0, 3, 7), torch.ones(3))),
    "fault 4: position negative": (Reason.INDEX_RANGE, ("m.b", [7], i32(-1, 3, 6), torch.ones(3))),
    "fault 4: position wrapped": (Reason.INDEX_RANGE, ("m.b", [2, 2**31], i32(-(2**31), 3, 6), torch.ones(3))),
    "position in a scalar": (Reason.INDEX_RANGE, ("m.b", [], i32(1), torch.ones(1))),
    "position in an empty tensor": (Reason.INDEX_RANGE, ("m.b", [0, 4], i32(0), torch.ones(1))),
    "fault 5: unsorted": (Reason.INDEX_ORDER, ("m.b", [7], i32(0, 6, 3), torch.ones(3))),
    "fault 5: descending at the start": (Reason.INDEX_ORDER, ("m.b", [7], i32(3, 0, 6), torch.ones(3))),
    "fault 5: duplicated": (Reason.INDEX_ORDER, ("m.b", [7], i32(0, 6, 6), torch.ones(3))),
    "fault 5: values longer": (Reason.LENGTH_MISMATCH, ("m.b", [7], i32(0, 3), torch.ones(3))),
    "fault 5: values shorter": (Reason.LENGTH_MISMATCH, ("m.b", [7], i32(0, 3, 6), torch.ones(2))),
    "no values": (Reason.LENGTH_MISMATCH, ("m.b", [7], i32(0, 3, 6), torch.ones(0))),
    "indices 2-D": (Reason.BAD_INDICES, ("m.b", [7], i32(0, 3, 6)[None], torch.ones(3))),
    "indices scalar": (Reason.BAD_INDICES, ("m.b", [7], i32(0).reshape(()), torch.ones(1))),
    "indices I16": (Reason.BAD_INDICES, ("m.b", [7], i32(0, 3, 6).short(), torch.ones(3))),
    "indices U32": (Reason.BAD_INDICES, ("m.b", [7], i32(0, 3, 6).to(torch.uint32), torch.ones(3))),
    "indices F32": (Reason.BAD_INDICES, ("m.b", [7], i32(0, 3, 6).float(), torch.ones(3))),
    "values 2-D": (Reason.BAD_VALUES, ("m.b", [7], i32(0, 3, 6), torch.ones(3, 1))),
    "values scalar": (Reason.BAD_VALUES, ("m.b", [7], i32(0), torch.ones(()))),
    "values I32": (Reason.UNSUPPORTED_DTYPE, ("m.b", [7], i32(0, 3, 6), i32(1, 2, 3))),
    "values BOOL": (Reason.UNSUPPORTED_DTYPE, ("m.b", [7], i32(0, 3, 6), i32(1, 0, 1).bool())),
    "values C64": (Reason.UNSUPPORTED_DTYPE, ("m.b", [7], i32(0, 3, 6), torch.ones(3, dtype=torch.complex64))),
}


@pytest.mark.parametrize("fault", LAYERS)
def test_layer_faults_are_refused_by_name(tmp_path: Path, fault: str) -> None:
    reason, layer = LAYERS[fault]
    shape = layer[1]
    error = refusal(write_v2(tmp_path / "d", [layers()[0], layer], 6 + int(np.prod(shape, dtype=object))))
    assert (error.reason, error.tensor) == (reason, "m.b")


def test_non_floating_values_are_read_where_the_extension_is_required(tmp_path: Path) -> None:
    layer = ("m", [7], i32(0, 3), i32(5, 6))
    folder = write_v2(tmp_path / "d", [layer], 7, requires=["non_floating_values"])
    assert read_delta(folder).patches[0].values.tolist() == [5, 6]


def test_i64_indices_are_read_whatever_the_shape(tmp_path: Path) -> None:
    layer = ("m", [2, 4], torch.tensor([0, 7]), torch.ones(2))
    assert read_delta(write_v2(tmp_path / "d", [layer], 8)).patches[0].indices.tolist() == [0, 7]
    wide = ("m", [3, 2**40], torch.tensor([0, 3 * 2**40 - 1]), torch.ones(2))
    assert read_delta(write_v2(tmp_path / "wide", [wide], 3 * 2**40)).patches[0].indices.tolist()[1] == 3 * 2**40 - 1


def shift(key: str, *offsets: int) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[key].__setitem__("data_offsets", list(offsets))


def field(key: str, name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[key].__setitem__(name, value)


def rename(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    return lambda header: header.__setitem__(new, header.pop(old))


EMPTY_WRAP = {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [32, 32]}

# The payload: 1.values [0, 12), 0.indices [12, 20), 1.indices [20, 32), 0.values [32, 36), as the library orders it.
HEADER: dict[str, tuple[Reason, Callable[[dict[str, Any]], object]]] = {
    "offsets leave a gap": (Reason.BAD_HEADER, shift("1.values", 1, 13)),
    "offsets overlap": (Reason.BAD_HEADER, shift("1.indices", 19, 31)),
    "offsets equal those of another": (Reason.BAD_HEADER, shift("1.indices", 0, 12)),
    "offsets beyond the file": (Reason.BAD_HEADER, shift("0.values", 32, 40)),
    "offsets far beyond the file": (Reason.BAD_HEADER, shift("0.values", 2**62, 2**62 + 4)),
    "offsets negative": (Reason.BAD_HEADER, shift("1.values", -12, 0)),
    "offsets reversed": (Reason.BAD_HEADER, shift("0.values", 36, 32)),
    "offsets of floats": (Reason.BAD_HEADER, field("0.values", "data_offsets", [32.0, 36.0])),
    "offsets of bools": (Reason.BAD_HEADER, field("1.values", "data_offsets", [False, 12])),
    "three offsets": (Reason.BAD_HEADER, field("0.values", "data_offsets", [32, 36, 36])),
    "offsets text": (Reason.BAD_HEADER, field("0.values", "data_offsets", "32")),
    "data behind the last tensor": (Reason.BAD_HEADER, lambda h: [h.pop("0.values")]),
    "shape larger than the bytes": (Reason.BAD_HEADER, field("0.values", "shape", [3])),
    "shape smaller than the bytes": (Reason.BAD_HEADER, field("0.values", "shape", [1])),
    "dtype larger than the bytes": (Reason.BAD_HEADER, field("0.values", "dtype", "F32")),
    "fault 8: shape wraps to no bytes": (Reason.BAD_HEADER, lambda h: h.__setitem__("2.values", EMPTY_WRAP)),
    "fault 8: shape negative": (Reason.BAD_HEADER, field("0.values", "shape", [-2])),
    "fault 8: shape negative twice": (Reason.BAD_HEADER, field("0.values", "shape", [-1, -2])),
    "shape of floats": (Reason.BAD_HEADER, field("0.values", "shape", [2.0])),
    "shape of bools": (Reason.BAD_HEADER, field("0.values", "shape", [2, True])),
    "shape null": (Reason.BAD_HEADER, field("0.values", "shape", None)),
    "dtype unknown": (Reason.UNSUPPORTED_DTYPE, field("0.values", "dtype", "F128")),
    "dtype F6": (Reason.UNSUPPORTED_DTYPE, field("0.values", "dtype", "F6_E2M3")),
    "dtype list": (Reason.UNSUPPORTED_DTYPE, field("0.values", "dtype", ["BF16"])),
    "half an F4 pair": (Reason.BAD_HEADER, lambda h: h["0.values"].update(dtype="F4", shape=[8, 1])),
    "entry list": (Reason.BAD_HEADER, lambda h: h.__setitem__("0.values", ["BF16", [2], [32, 36]])),
    "entry without dtype": (Reason.BAD_HEADER, lambda h: h["0.values"].pop("dtype")),
    "entry with more": (Reason.BAD_HEADER, field("0.values", "strides", [1])),
    "metadata list": (Reason.BAD_HEADER, lambda h: h.__setitem__("__metadata__", [])),
    "metadata of numbers": (Reason.BAD_HEADER, lambda h: h.__setitem__("__metadata__", {"a": 1})),
    "layer_names no JSON": (Reason.BAD_HEADER, lambda h: h["__metadata__"].__setitem__("layer_names", "m.a,m.b")),
    "layer_names others": (Reason.KEYS_MISMATCH, lambda h: h["__metadata__"].__setitem__("layer_names", '["m.a","x"]')),
    "layer_names surrogate": (Reason.BAD_HEADER, lambda h: h["__metadata__"].__setitem__("layer_names", "\ud800")),
    "key of no layer": (Reason.KEYS_MISMATCH, rename("1.values", "2.values")),
    "key with a leading zero": (Reason.KEYS_MISMATCH, rename("1.values", "01.values")),
    "key of another part": (Reason.KEYS_MISMATCH, rename("1.values", "1.scale")),
    "key surplus": (
        Reason.KEYS_MISMATCH,
        lambda h: h.__setitem__("2.values", {"dtype": "F32", "shape": [0], "data_offsets": [36, 36]}),
    ),
}


def test_the_payload_is_laid_out_as_the_header_faults_assume(tmp_path: Path) -> None:
    header, data = split_container((valid(tmp_path) / DELTA_FILE).read_bytes())
    offsets = {key: entry["data_offsets"] for key, entry in header.items() if key != "__metadata__"}
    assert offsets == {"1.values": [0, 12], "0.indices": [12, 20], "1.indices": [20, 32], "0.values": [32, 36]}
    assert len(data) == 36


@pytest.mark.parametrize("fault", HEADER)
def test_header_faults(tmp_path: Path, fault: str) -> None:
    reason, edit = HEADER[fault]
    folder = valid(tmp_path)
    edit_header(folder, edit)
    assert refusal(folder).reason is reason


def test_a_header_without_metadata_is_fine(tmp_path: Path) -> None:
    folder = valid(tmp_path)
    edit_header(folder, drop("__metadata__"))
    assert len(read_delta(folder).patches) == 2


ENTRY = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'

OVERLAP = {
    "0.indices": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]},
    "0.values": {"dtype": "BF16", "shape": [2], "data_offsets": [4, 8]},
}

GAP = {
    "0.indices": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]},
    "0.values": {"dtype": "BF16", "shape": [1], "data_offsets": [8, 10]},
}

CONTAINERS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes"),
    "seven bytes": (b"\x00" * 7, "7 bytes"),
    "fault 8: header beyond the file": ((1000).to_bytes(8, "little") + b"{}", "beyond"),
    "header one byte beyond the file": ((3).to_bytes(8, "little") + b"{}", "beyond"),
    "fault 8: header over 100 MB": ((100_000_001).to_bytes(8, "little") + b"{}", "100000000"),
    "header of 2^64 - 1 bytes": (b"\xff" * 8 + b"{}", "100000000"),
    "empty header": ((0).to_bytes(8, "little"), "{"),
    "array": (container(b"[]"), "{"),
    "leading space": (container(b" {}"), "{"),
    "cut JSON": (container(b'{"a":'), "header"),
    "no UTF-8": (container(b'{"\xff":1}'), "header"),
    "deep": (container(b'{"a":' * 50_000), "nested"),
    "fault 8: duplicate key": (container(b'{"0.values":' + ENTRY + b',"0.values":' + ENTRY + b"}"), "duplicate"),
    "duplicate key in an entry": (container(b'{"a":{"shape":[0],"shape":[0]}}'), "duplicate"),
    "values in the bytes of the indices": (container(OVERLAP, b"\x00" * 8), "overlaps"),
    "bytes of no tensor between two": (container(GAP, b"\x00" * 10), "gap"),
    "data without a tensor": (container(b"{}", b"\x00"), "data at 1"),
}


@pytest.mark.parametrize("fault", CONTAINERS)
def test_container_faults(tmp_path: Path, fault: str) -> None:
    data, said = CONTAINERS[fault]
    folder = valid(tmp_path)
    (folder / DELTA_FILE).write_bytes(data)
    error = refusal(folder)
    assert error.reason is Reason.BAD_HEADER
    assert said in error.detail


def test_a_header_over_100_mb_is_refused_even_in_a_file_that_holds_it(tmp_path: Path) -> None:
    folder = valid(tmp_path)
    with (folder / DELTA_FILE).open("wb") as file:
        file.write((100_000_008).to_bytes(8, "little") + b"{}")
        file.truncate(100_000_016)  # sparse
    assert refusal(folder).reason is Reason.BAD_HEADER


@pytest.mark.parametrize("name", [DELTA_FILE, METADATA_FILE])
def test_every_truncation_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_delta(read_delta(valid(tmp_path)), tmp_path / "ours")
    whole = (folder / name).read_bytes()
    for length in range(len(whole) - (name == METADATA_FILE)):  # the last line end of JSON is no loss
        (folder / name).write_bytes(whole[:length])
        refusal(folder)


@pytest.mark.parametrize("name", [DELTA_FILE, METADATA_FILE])
def test_flipped_bits_are_refused_or_read_as_a_valid_delta(tmp_path: Path, name: str) -> None:
    folder = write_delta(read_delta(valid(tmp_path)), tmp_path / "ours")
    whole = (folder / name).read_bytes()
    for at in range(len(whole)):
        for bit in (0, 3, 6, 7):
            (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            try:
                found = read_delta(folder)
            except DeltaError:
                continue
            for patch in found.patches:
                patch.check_indices()
            assert found.changed_elements == 5


def test_every_flipped_payload_bit_is_refused_where_the_lineage_has_its_hash(tmp_path: Path) -> None:
    delta = read_delta(valid(tmp_path))
    folder = write_delta(Delta(delta.patches, 13, Lineage("r", 1)), tmp_path / "ours")
    whole = (folder / DELTA_FILE).read_bytes()
    for at in range(len(whole)):
        (folder / DELTA_FILE).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refusal(folder)


# Earlier layouts, under the same format name


@pytest.mark.parametrize("version", [None, 1, 2])
@pytest.mark.parametrize("layout", ["packed", "named"])
def test_earlier_layouts_are_recognised(tmp_path: Path, layout: str, version: int | None) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "d"
    folder.mkdir()
    packed = {
        "delta.indices_flat": i32(1, 5, 0),
        "delta.values_flat": bf16(1, 2, 3),
        "delta.layer_lengths": torch.tensor([2, 1]),
    }
    named = {"m.a.indices": i32(1, 5), "m.a.values": bf16(1, 2), "m.b.indices": i32(0), "m.b.values": bf16(3)}
    save_file(packed if layout == "packed" else named, folder / DELTA_FILE)
    metadata = {
        "format": "sparse_delta",
        "format_version": version,
        "layer_names": ["m.a", "m.b"],
        "changed_elements": 3,
    }
    write_metadata(folder, {key: value for key, value in metadata.items() if value is not None})
    if version == 2:
        edit_metadata(folder, lambda m: m.update(layer_shapes=[[2, 3], [4]], total_elements=10, density_pct=30.0))
    assert refusal(folder).reason is Reason.LEGACY_LAYOUT


@pytest.mark.parametrize("version", [None, 1, 3])
def test_of_another_version_nothing_but_an_earlier_layout_is_looked_for(tmp_path: Path, version: int | None) -> None:
    """What else is wrong with the payload, in the eyes of version 2, is beside the point."""
    folder = valid(tmp_path)
    edit_metadata(folder, put("format_version", version))
    (folder / DELTA_FILE).write_bytes(b"no header")
    assert refusal(folder).reason is Reason.UNSUPPORTED_VERSION


@pytest.mark.parametrize("key", ["delta.indices_flat", "delta.values_flat", "delta.layer_lengths"])
def test_one_key_of_the_packed_layout_is_enough_to_name_it(tmp_path: Path, key: str) -> None:
    folder = valid(tmp_path)
    (folder / DELTA_FILE).write_bytes(container({key: {"dtype": "I32", "shape": [0], "data_offsets": [0, 0]}}))
    error = refusal(folder)
    assert error.reason is Reason.LEGACY_LAYOUT
    assert key in error.detail


def test_a_payload_of_other_keys_is_no_earlier_layout(tmp_path: Path) -> None:
    """A checkpoint in the payload's place, and what some other tool keyed by name."""
    from safetensors.torch import save_file

    folder = valid(tmp_path)
    for keys in (["w"], ["w.weight", "v.bias"], ["w.indices", "w"], ["0.indices", "w.values"]):
        save_file({key: torch.zeros(2, 3) for key in keys}, folder / DELTA_FILE)
        assert refusal(folder).reason is Reason.KEYS_MISMATCH, keys


@pytest.mark.parametrize(("over", "taken"), [(0, True), (1, False)])
def test_metadata_may_be_as_long_as_a_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: int, taken: bool
) -> None:
    folder = valid(tmp_path)
    monkeypatch.setattr("refdelta.files.reading.MAX_HEADER_BYTES", (folder / METADATA_FILE).stat().st_size - over)
    if taken:
        read_delta(folder)
    else:
        error = refusal(folder)
        assert error.reason is Reason.BAD_METADATA
        assert "more than" in error.detail


def test_messages_say_what_was_found_in_one_order(tmp_path: Path) -> None:
    """Of sets, whose order differs from run to run, and of what is absent or null."""
    folder = valid(tmp_path)
    edit_metadata(folder, put("requires", ["d", "b", "c", "a", "non_floating_values"]))
    assert refusal(folder).detail == "requires: a, b, c, d"
    edit_metadata(folder, drop("requires"))
    edit_metadata(folder, put("total_elements", None))
    assert refusal(folder).detail == "total_elements: expected an integer, found null"
    edit_metadata(folder, drop("total_elements"))
    assert refusal(folder).detail == "total_elements: expected an integer, found nothing"
    edit_metadata(folder, put("total_elements", 13))
    edit_header(folder, lambda header: header.update(x=header.pop("0.values"), y=header.pop("1.values")))
    said = "missing in the payload: ['0.values', '1.values']; not declared: ['x', 'y']"
    assert refusal(folder).detail == said


def test_a_full_checkpoint_is_no_delta(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    assert refusal(tmp_path).reason is Reason.NOT_A_DELTA


def test_reading_puts_tensors_on_the_device(tmp_path: Path) -> None:
    patch = read_delta(valid(tmp_path), device="meta").patches[0]
    assert patch.indices.is_meta
    assert patch.values.is_meta


def test_no_allocation_beyond_what_the_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and lengths that lie never become a tensor."""
    asked: list[int] = []
    empty = torch.empty

    def counted(size: int, *, dtype: torch.dtype) -> Tensor:
        asked.append(size * dtype.itemsize)
        return empty(size, dtype=dtype)

    wide = TensorPatch("m", (2**20, 2**40), torch.tensor([2**59]), bf16(1))
    folder = write_delta(Delta((wide,), 2**60), tmp_path / "d")
    monkeypatch.setattr(torch, "empty", counted)
    read_delta(folder)
    held = (folder / DELTA_FILE).stat().st_size
    assert asked
    assert max(asked) <= max(held, (folder / METADATA_FILE).stat().st_size)


def test_the_name_of_a_missing_file_outlives_a_mask_of_paths(tmp_path: Path) -> None:
    """vLLM puts <path> for paths into errors that it answers (0.32, `serve/exception_handling/utils.py`)."""
    write_delta(Delta((), 0), tmp_path / "d")
    for name in (DELTA_FILE, METADATA_FILE):
        (tmp_path / "d" / name).unlink()
        with pytest.raises(DeltaError) as caught:
            read_delta(tmp_path / "d")
        text = str(caught.value)
        for pattern in (r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+", r"(?:/[\w\-]+)+/[\w\-]+\.\w+"):
            text = re.sub(pattern, "<path>", text)
        assert text.startswith(f"refdelta[not_a_delta]: no file {name} in ")
