"""Invalid golden vectors: one fault each, named after it, and the one reason for which it is refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import Tensor

from .. import oracle
from ..inputs.malformed import FAULTS, Fault
from ..oracle import DELTA_FILE, METADATA_FILE, Draft, Patch, digests, draft, expected_patches, total_elements
from .parts import (
    Corpus,
    delta_files,
    draft_of,
    flipped,
    json_bytes,
    lineage_of,
    packed_state,
    tensor,
)
from .valid import put

BASE: Mapping[str, Tensor] = {
    "a.weight": tensor("BF16", (3, 5)),
    "b.weight": tensor("F16", (7, 2), salt=20),
    "c.bias": tensor("F32", (2, 3), salt=40),
    "untouched": tensor("F32", (4, 10), salt=60),
}
"""The state of most vectors: none of its matrices is square."""
TARGET = {name: t if name == "untouched" else flipped(t, [1, 2, 5]) for name, t in BASE.items()}


def fill(made: Corpus) -> None:
    """Add every invalid vector."""
    for fault in FAULTS.values():
        if not fault.no_vector:
            _malformed(made, fault)
    for chapter in (_metadata, _header, _counts, _shapes, _sub_byte, _lineage, _compose, _large):
        chapter(made)


def _add(made: Corpus, path: str, why: str, reason: str, files: Mapping[str, bytes], **more: object) -> None:
    made.add(f"invalid/{path}", why, {"base.safetensors": packed_state(BASE), **files}, reason=reason, **more)


def _malformed(made: Corpus, fault: Fault) -> None:
    """The delta of `BASE` with a fault in its second layer."""
    why = " ".join((fault.make.__doc__ or fault.name.replace("_", " ")).split())
    with tempfile.TemporaryDirectory() as folder:
        delta = fault.write(Path(folder) / "delta", expected_patches(BASE, TARGET), total_elements(BASE))
        found = {path.name: path.read_bytes() for path in delta.iterdir()} if delta.exists() else {}
    files = {f"delta/{file}": content for file, content in found.items()}
    _add(made, f"{fault.feature}/{fault.name}", why, fault.reason, files)


def _changed(made: Corpus, path: str, why: str, reason: str, change: Callable[[Draft], object], **more: object) -> None:
    """The good delta of `BASE`, changed."""
    parts = draft_of(BASE, TARGET)
    change(parts)
    _add(made, path, why, reason, delta_files(parts), **more)


# -- texts -----------------------------------------------------------------------------------------------------------


def _metadata(made: Corpus) -> None:
    good = draft_of(BASE, TARGET)
    files, text = delta_files(good), json_bytes(good.metadata)

    def rewritten(path: str, why: str, reason: str, content: bytes) -> None:
        _add(made, path, why, reason, {**files, f"delta/{METADATA_FILE}": content})

    def inserted(path: str, why: str, member: bytes, reason: str = "bad_metadata") -> None:
        rewritten(path, why, reason, text.replace(b"{", b"{" + member + b",", 1))

    inserted("metadata/key_twice", "an object with a key twice", b'"format": "sparse_delta"')
    inserted("metadata/unknown_key_twice", "also where the key is unknown", b'"x": 1, "x": 1')
    inserted("metadata/infinity", "no number of JSON", b'"x": Infinity')
    inserted("metadata/number_beyond_64_bit_floats", "no finite number", b'"x": 1e999')
    rewritten("metadata/byte_order_mark", "JSON has none", "bad_metadata", b"\xef\xbb\xbf" + text)
    rewritten("metadata/text_after_the_end", "one value and no more", "bad_metadata", text + b"{}")
    rewritten("metadata/utf16", "another encoding", "bad_metadata", text.decode().encode("utf-16"))
    for key, value in (("timestamp", "now"), ("timestamp", True), ("created_at", 5), ("base_model", []), ("kind", {})):
        word = {str: "a_text", bool: "true", int: "a_number", list: "a_list", dict: "an_object"}[type(value)]
        path = f"metadata/{key}_{word}"
        _changed(made, path, "optional, but of one type", "bad_metadata", put({key: value}))
    _changed(
        made,
        "extensions/requires_known_and_unknown",
        "one of two extensions is unknown",
        "unsupported_extension",
        put({"requires": ["non_floating_values", "time_travel"]}),
    )
    _changed(
        made,
        "extensions/requires_a_number",
        "extensions are texts",
        "bad_metadata",
        put({"requires": [1]}),
    )
    _not_announced(made)
    surrogate = json.dumps(good.metadata).replace("b.weight", "b.\\ud800").encode()
    header = delta_files(replace_header_names(draft_of(BASE, TARGET)))
    lone = {**header, f"delta/{METADATA_FILE}": surrogate}
    _add(made, "names/layer_name_with_a_lone_surrogate", "a text that UTF-8 has not", "bad_name", lone)
    held = {name.replace("b.weight", "b.\ufffd"): t for name, t in BASE.items()}
    why = "the state has the name that some JSON libraries put in its place"
    files = {**lone, "base.safetensors": packed_state(held)}
    made.add("invalid/names/lone_surrogate_beside_its_replacement", why, files, reason="bad_name")
    _twice(made)


def _twice(made: Corpus) -> None:
    """Two layers of one name, each of which fits."""
    base = {"v": tensor("F16", (7, 2), salt=20), "w": tensor("F16", (7, 2))}
    parts = draft_of(base, {"v": flipped(base["v"], [1, 2]), "w": flipped(base["w"], [4])})
    parts.metadata["layer_names"] = ["w", "w"]
    parts.header_metadata = {"layer_names": '["w","w"]'}
    files = {"base.safetensors": packed_state(base), **delta_files(parts)}
    why = "either layer fits by itself"
    made.add("invalid/names/layer_name_twice_of_one_shape", why, files, reason="duplicate_name")


def _not_announced(made: Corpus) -> None:
    """A change of an integer tensor that `requires` does not announce."""
    base = {**BASE, "steps": tensor("I64", (2, 3), salt=80)}
    parts = draft_of(base, {**base, "steps": flipped(base["steps"], [4])})
    del parts.metadata["requires"]
    files = {"base.safetensors": packed_state(base), **delta_files(parts)}
    why, needs = "a reader that does not know the extension cannot tell", ["non_floating"]
    path = "invalid/extensions/integer_values_not_announced"
    made.add(path, why, files, reason="unsupported_dtype", needs=needs)


def replace_header_names(parts: Draft) -> Draft:
    """Without the header's own list of names, which a changed metadata.json would contradict."""
    parts.header_metadata = None
    return parts


def _header(made: Corpus) -> None:
    good = draft_of(BASE, TARGET)

    def files_with(metadata: str) -> dict[str, bytes]:
        files = delta_files(good)
        raw = files[f"delta/{DELTA_FILE}"]
        _, _, start = oracle.unpack(raw)
        header = json.loads(raw[8:start])
        del header["__metadata__"]
        text = '{"__metadata__":' + metadata + "," + json.dumps(header)[1:]
        return {**files, f"delta/{DELTA_FILE}": oracle.pack_raw(text, [raw[start:]])}

    def with_metadata(path: str, why: str, reason: str, metadata: str) -> None:
        _add(made, path, why, reason, files_with(metadata))

    with_metadata("header/metadata_a_list", "`__metadata__` is an object", "bad_header", "[]")
    with_metadata("header/metadata_of_numbers", "its values are texts", "bad_header", '{"a":1}')
    with_metadata("header/layer_names_not_json", "`layer_names` holds JSON", "bad_header", '{"layer_names":"a.weight"}')
    with_metadata("header/layer_names_fewer", "the last name is missing", "keys_mismatch", _names(good, slice(0, 2)))
    with_metadata("header/metadata_key_twice", "a key twice", "bad_header", '{"a":"1","a":"1"}')
    files = files_with('{"a":"%"}')
    files[f"delta/{DELTA_FILE}"] = files[f"delta/{DELTA_FILE}"].replace(b'"%"', b'"\xff"', 1)
    _add(made, "header/metadata_value_not_utf8", "also where the key is unknown", "bad_header", files)

    def with_entry(path: str, why: str, change: Callable[[dict[str, object]], object]) -> None:
        """The description of the second values changed."""
        files = delta_files(good)
        raw = files[f"delta/{DELTA_FILE}"]
        _, _, start = oracle.unpack(raw)
        header = json.loads(raw[8:start])
        change(header["1.values"])
        files[f"delta/{DELTA_FILE}"] = oracle.pack_raw(json.dumps(header), [raw[start:]])
        _add(made, path, why, "bad_header", files)

    with_entry("header/entry_with_a_further_key", "three keys and no more", put_in({"strides": [1]}))
    with_entry("header/shape_a_float", "3.0 is no integer", put_in({"shape": [3.0]}))
    files = delta_files(good)
    raw = files[f"delta/{DELTA_FILE}"]
    start = int.from_bytes(raw[:8], "little")
    spaced = b" " + raw[8 : 8 + start].rstrip()
    files[f"delta/{DELTA_FILE}"] = len(spaced).to_bytes(8, "little") + spaced + raw[8 + start :]
    _add(made, "header/starts_with_a_space", "the text starts with `{`", "bad_header", files)


def put_in(values: Mapping[str, object]) -> Callable[[dict[str, object]], object]:
    """Set these keys."""
    return lambda entry: entry.update(values)


def _names(parts: Draft, which: slice) -> str:
    return json.dumps({"layer_names": json.dumps(parts.metadata["layer_names"][which])})


# -- numbers ---------------------------------------------------------------------------------------------------------


def _counts(made: Corpus) -> None:
    def metadata(path: str, why: str, reason: str, **values: object) -> None:
        _changed(made, f"counts/{path}", why, reason, put(values))

    least = 3 * 5 + 7 * 2 + 2 * 3
    metadata(
        "total_one_below_the_layers",
        "the layers alone have one element more",
        "count_mismatch",
        total_elements=least - 1,
        density_pct=oracle.density_pct(9, least - 1),
    )
    metadata("total_of_another_density", "changed and total give another density", "count_mismatch", total_elements=76)
    metadata("total_2_to_63", "no count beyond 2^63 - 1", "count_mismatch", total_elements=2**63, density_pct=0.0)
    metadata("changed_one_fewer", "the payload holds one more", "count_mismatch", changed_elements=8)
    metadata("changed_a_float", "counts are integers", "bad_metadata", changed_elements=9.0)
    metadata("changed_true", "true is no number", "bad_metadata", changed_elements=True)
    metadata("density_of_four_decimals", "three decimals", "count_mismatch", density_pct=12.0001)
    metadata("density_one_thousandth_off", "the last decimal counts", "count_mismatch", density_pct=12.001)
    tie = "9 of 2,880 are 0.3125 %: 0.312 and 0.313 are both right"
    metadata("density_below_both_neighbours", tie, "count_mismatch", total_elements=2880, density_pct=0.311)
    metadata("density_above_both_neighbours", tie, "count_mismatch", total_elements=2880, density_pct=0.314)
    metadata("density_half_way_itself", tie, "count_mismatch", total_elements=2880, density_pct=0.3125)
    metadata("density_a_fraction", "percent, not a share", "count_mismatch", density_pct=0.12)


def _shapes(made: Corpus) -> None:
    for name, why, shape in (
        ("elements_2_to_63", "2^63 elements, one more than positions can count", [2**32, 2**31]),
        ("dimension_2_to_63", "the same in one dimension", [2**63]),
        ("dimension_2_to_63_of_nothing", "a dimension that large, though the product is zero", [0, 2**63]),
    ):

        def change(parts: Draft, value: list[int] = shape) -> None:
            parts.metadata["layer_shapes"] = [*parts.metadata["layer_shapes"]]
            parts.metadata["layer_shapes"][1] = value

        _changed(made, f"shapes/{name}", why, "bad_shape", change)
    _changed(
        made,
        "shapes/shape_of_numpy_repr",
        "a text that looks like a shape",
        "bad_shape",
        put({"layer_shapes": [[3, 5], "(7, 2)", [2, 3]]}),
    )


def _sub_byte(made: Corpus) -> None:
    """Three halves are one and a half pairs."""
    base = {"w": tensor("F4", (3, 2))}
    parts = draft_of(base, {"w": flipped(base["w"], [1, 4])})
    parts.replace("0.values", lambda entry: replace(entry, shape=(3,), data=entry.data))
    files = {"base.safetensors": packed_state(base), **delta_files(parts)}
    why = "an odd number of F4 halves"
    made.add("invalid/values/F4_of_odd_length", why, files, reason="bad_header", needs=["sub_byte"])


# -- lineage ---------------------------------------------------------------------------------------------------------


def _lineage(made: Corpus) -> None:
    good = lineage_of(BASE, TARGET, 41)
    digest = digests.state_digest(BASE)
    other = digests.state_digest({**BASE, "untouched": flipped(BASE["untouched"], [7])})

    def lineage(name: str, why: str, reason: str, value: object) -> None:
        _changed(
            made,
            f"lineage/{name}",
            why,
            reason,
            put({"lineage": value}),
            digest=digest,
            needs=["lineage"],
        )

    lineage("a_list", "an object", "bad_metadata", [good])
    lineage("a_text", "an object", "bad_metadata", "run-7")
    for key in ("run_id", "version"):
        lineage(f"{key}_absent", "always there", "bad_metadata", {k: v for k, v in good.items() if k != key})
    for name, field, value in (
        ("run_id_empty", "run_id", ""),
        ("run_id_a_number", "run_id", 7),
        ("version_negative", "version", -1),
        ("version_a_text", "version", "41"),
        ("version_a_float", "version", 41.0),
        ("version_true", "version", True),
        ("base_version_negative", "base_version", -1),
        ("base_version_a_text", "base_version", "40"),
        ("base_digest_a_number", "base_digest", 7),
        ("digest_a_number", "digest", 7),
        ("layer_digests_a_list", "layer_digests", ["rd1:0000000000000000"]),
        ("layer_digests_of_numbers", "layer_digests", {"a.weight": 7}),
        ("payload_sha256_short", "payload_sha256", "0" * 63),
        ("payload_sha256_upper_case", "payload_sha256", "A" * 64),
        ("part_a_number", "part", 0),
        ("part_of_one_number", "part", [0]),
        ("part_equals_count", "part", [2, 2]),
        ("part_negative", "part", [-1, 2]),
        ("part_of_texts", "part", ["0", "2"]),
    ):
        lineage(name, f"{field}: a value of the wrong kind", "bad_metadata", {**good, field: value})
    why = "the SHA-256 of something else"
    lineage("payload_sha256_of_another", why, "payload_mismatch", {**good, "payload_sha256": "0" * 64})
    lineage("base_of_another_state", "made for another state", "base_mismatch", {**good, "base_digest": other})
    lineage("base_of_another_scheme", "a digest that is none here", "base_mismatch", {**good, "base_digest": "x:1"})
    lineage("digest_of_another_state", "leads elsewhere", "digest_mismatch", {**good, "digest": other})
    lineage("digest_of_the_base", "as if nothing changed", "digest_mismatch", {**good, "digest": digest})
    lineage("first_of_two_parts", "the other part is missing", "incomplete", {**good, "part": [0, 2]})
    lineage("second_of_two_parts", "the other part is missing", "incomplete", {**good, "part": [1, 2]})
    parts = draft_of(BASE, TARGET)
    parts.metadata["lineage"] = good
    why = "base version 40 for a receiver that holds another state"
    _add(made, "lineage/receiver_elsewhere", why, "base_mismatch", delta_files(parts), digest=other, needs=["lineage"])


# -- composition -----------------------------------------------------------------------------------------------------


def _compose(made: Corpus) -> None:
    a = {"w": tensor("BF16", (3, 5)), "x": tensor("F32", (2,), salt=5)}
    b = {**a, "w": flipped(a["w"], [1, 4])}
    c = {**a, "w": flipped(b["w"], [4, 8])}
    d = {**a, "w": flipped(c["w"], [3])}

    def drafts(*chain: Mapping[str, Tensor], start: int = 1) -> list[Draft]:
        made_of = [draft_of(old, new) for old, new in pairwise(chain)]
        for number, (parts, (old, new)) in enumerate(zip(made_of, pairwise(chain), strict=True), start=start):
            parts.metadata["lineage"] = lineage_of(old, new, number)
        return made_of

    def refused(name: str, why: str, reason: str, chain: list[Draft]) -> None:
        files = {"base.safetensors": packed_state(a)}
        for number, parts in enumerate(chain):
            files |= delta_files(parts, f"deltas/{number}")
        made.add(f"invalid/compose/{name}", why, files, reason=reason, needs=["composes"])

    one, two, three = drafts(a, b, c, d)
    refused("a_version_missed", "the second of three is missing", "base_mismatch", [one, three])
    refused("reordered", "the second comes first", "base_mismatch", [two, one])
    refused("repeated", "the first comes twice", "base_mismatch", [one, one])

    def changed(*fields: tuple[str, object]) -> list[Draft]:
        first, second = drafts(a, b, c)
        second.metadata["lineage"] |= dict(fields)
        return [first, second]

    refused("another_run", "versions of two runs", "base_mismatch", changed(("run_id", "run-8")))
    elsewhere = digests.state_digest(d)
    refused("another_base_digest", "versions fit, digests do not", "base_mismatch", changed(("base_digest", elsewhere)))
    no_base: list[tuple[str, object]] = [("base_version", None), ("base_digest", None)]
    refused("no_base_stated", "whether it follows is unknown", "base_mismatch", changed(*no_base))
    refused("lineage_beside_none", "one of two has a lineage", "base_mismatch", [one, draft_of(b, c)])
    refused("a_part", "one part of an update", "incomplete", changed(("part", [0, 2])))

    def bare(patch: Patch, total: int = 17) -> Draft:
        return draft([patch], total)

    (good,) = expected_patches(a, b)
    first = bare(good)
    refused("another_total", "states of 17 and of 18 elements", "count_mismatch", [first, bare(good, 18)])
    transposed = replace(good, shape=(5, 3))
    refused("another_shape", "[3, 5] and [5, 3]", "shape_mismatch", [first, bare(transposed)])
    refused("another_dtype", "BF16 and F16", "dtype_mismatch", [first, bare(replace(good, code="F16"))])


# -- beyond 2^31 -----------------------------------------------------------------------------------------------------


def _large(made: Corpus) -> None:
    for name, why, shape, at, code in (
        ("numel_2_to_31_minus_1", "the first position behind the last", (2**31 - 1,), [0, 2**31 - 1], "I32"),
        ("numel_2_to_31", "the first position behind the last", (2**15, 2**16), [0, 2**31], "I64"),
        ("numel_2_to_31_plus_1", "the first position behind the last", (3, 715827883), [0, 2**31 + 1], "I64"),
        ("wrapped_to_negative", "2^31 stored in I32 is -2^31", (3, 715827883), [-(2**31), 0], "I32"),
        ("beyond_by_2_to_32", "a position that 32 bits would wrap to 5", (3, 715827883), [0, 2**32 + 5], "I64"),
    ):
        patch = Patch("w", shape, "F8_E5M2", np.array(at), np.array([1, 2], dtype=np.uint8))
        zeros = {"w": {"dtype": "F8_E5M2", "shape": list(shape)}}
        files = delta_files(draft([patch], patch.numel, indices=code))
        made.add(f"invalid/large/{name}", why, files, reason="index_range", needs=["large"], zeros=zeros)
