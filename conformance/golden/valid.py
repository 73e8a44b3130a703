"""Valid golden vectors: what a reader must take and, where they are canonical, what a writer must write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from .. import oracle
from ..inputs import strategies
from ..oracle import DELTA_FILE, Draft, Patch, State, digests, draft, expected_patches, total_elements
from .parts import (
    Corpus,
    composed_patches,
    delta_files,
    draft_of,
    flipped,
    inverse_patches,
    lineage_of,
    needs_of,
    packed_state,
    tensor,
)

Change = Callable[[Draft], object]


def put(values: Mapping[str, object]) -> Change:
    """Set these keys of metadata.json."""
    return lambda parts: parts.metadata.update(values)


def fill(made: Corpus) -> None:
    """Add every valid vector."""
    for chapter in (_dtypes, _bits, _shapes, _positions, _layers, _names, _index_widths, _density, _alignment):
        chapter(made)
    for chapter in (_metadata, _header, _lineage, _digests, _inverse, _compose, _large):
        chapter(made)


def _pair(made: Corpus, path: str, why: str, base: State, target: State, *, data_bytes: int | None = None) -> None:
    """The canonical delta between two states."""
    _loose(made, path, why, base, target, None, canonical=True, data_bytes=data_bytes)


def _loose(
    made: Corpus,
    path: str,
    why: str,
    base: State,
    target: State,
    change: Change | None,
    *,
    parts: Draft | None = None,
    canonical: bool = False,
    lineage: bool = False,
    non_floating: bool = False,
    data_bytes: int | None = None,
) -> None:
    """A delta that a reader must take, changed from the canonical one, or made of other parts."""
    made_of = parts or draft_of(base, target)
    if change:
        change(made_of)
    files = {
        "base.safetensors": packed_state(base),
        "expected.safetensors": packed_state(target),
        **delta_files(made_of),
    }
    said: dict[str, object] = {"canonical": canonical, "lineage": lineage, "data_bytes": data_bytes}
    said |= {"base_digest": digests.state_digest(base), "digest": digests.state_digest(target)}
    needs = ["non_floating"] if non_floating else needs_of(base)
    made.add(f"valid/{path}", why, files, needs=needs, **said)


# -- contents --------------------------------------------------------------------------------------------------------


def _dtypes(made: Corpus) -> None:
    for code, specials in strategies.SPECIALS.items():
        base = {"m.weight": tensor(code, (2, len(specials))), "m.bias": tensor(code, (3,), salt=100)}
        patterns = oracle.bits(base["m.weight"])
        patterns[: len(specials)] = specials
        target = {**base, "m.weight": oracle.from_bits(patterns, code, base["m.weight"].shape)}
        _pair(made, f"dtypes/{code}", f"{code}: the first row becomes what arithmetic treats specially", base, target)


_BITS = {
    "zero_becomes_negative_zero": ("BF16", 0x0000, 0x8000),
    "negative_zero_becomes_zero": ("F32", 0x80000000, 0x00000000),
    "nan_becomes_another_nan": ("BF16", 0x7FC0, 0x7FC1),
    "nan_changes_its_sign": ("F16", 0x7E00, 0xFE00),
    "nan_becomes_signalling": ("F32", 0x7FC00000, 0x7FA00000),
    "one_becomes_nan": ("BF16", 0x3F80, 0x7FC0),
    "nan_becomes_one": ("BF16", 0x7FC0, 0x3F80),
    "infinity_changes_its_sign": ("F64", 0x7FF0000000000000, 0xFFF0000000000000),
    "subnormal_becomes_another": ("F16", 0x0001, 0x0002),
    "subnormal_becomes_zero": ("BF16", 0x0001, 0x0000),
    "low_byte_stays": ("BF16", 0x3F80, 0x4080),
    "low_half_stays": ("F32", 0x3F800001, 0x40000001),
    "only_the_lowest_bit": ("F64", 0x3FF0000000000000, 0x3FF0000000000001),
    "only_the_sign_of_8_bits": ("F8_E4M3", 0x38, 0xB8),
}


def _bits(made: Corpus) -> None:
    for name, (code, old, new) in _BITS.items():
        base = {"w": tensor(code, (2, 3), 0, old, 1, 2, 3, old)}
        target = {"w": tensor(code, (2, 3), 0, new, 1, 2, 3, old)}
        _pair(made, f"bits/{name}", f"{code} 0x{old:x} becomes 0x{new:x} in one of two places", base, target)
    base = {"w": tensor("BF16", (1, 4), 0x7FC0, 0xFFFF, 0x7F81, 0x3F80)}
    target = {"w": tensor("BF16", (1, 4), 0x7FC0, 0xFFFF, 0x7F81, 0x3F81)}
    _pair(made, "bits/nan_that_stays", "a NaN whose bits stay is no change", base, target)


# -- shapes and positions --------------------------------------------------------------------------------------------


def _shapes(made: Corpus) -> None:
    for name, shape in {
        "scalar": (),
        "one_element": (1,),
        "vector": (7,),
        "row": (1, 7),
        "column": (7, 1),
        "three_axes": (2, 3, 5),
        "five_axes": (2, 1, 3, 1, 2),
    }.items():
        base = {"w": tensor("BF16", shape)}
        target = {"w": flipped(base["w"], [base["w"].numel() - 1])}
        _pair(made, f"shapes/{name}", f"shape {list(shape)}, the last element changed", base, target)
    base = {"none": tensor("F32", (0, 5), salt=1), "w": tensor("F32", (5, 2))}
    target = {**base, "w": flipped(base["w"], [3])}
    _pair(made, "shapes/tensor_without_elements", "a tensor of shape [0, 5] beside a changed one", base, target)


def _positions(made: Corpus) -> None:
    base = {"w": tensor("BF16", (3, 5))}
    for name, at in {
        "none": [],
        "first": [0],
        "last_but_one": [13],
        "last": [14],
        "first_and_last": [0, 14],
        "neighbours_over_a_row": [4, 5],
        "all_but_one": [*range(7), *range(8, 15)],
        "all": list(range(15)),
    }.items():
        target = {"w": flipped(base["w"], at)}
        _pair(made, f"positions/{name}", f"positions {at} of 15", base, target)


def _layers(made: Corpus) -> None:
    _pair(made, "layers/state_without_tensors", "nothing at all: no tensors, no elements, density 0", {}, {})
    base: dict[str, Tensor] = {"a": tensor("BF16", (4, 25)), "b": tensor("BF16", (25, 4), salt=9)}
    target = {**base, "b": flipped(base["b"], [42])}
    _pair(made, "layers/one_of_two", "one of 200 elements: density 0.5, over unchanged tensors too", base, target)
    base = {f"layer.{number}": tensor("F16", (1, 3), salt=number) for number in range(12)}
    target = {name: flipped(t, [2]) for name, t in base.items()}
    _pair(made, "layers/twelve", "payload keys in the order of numbers, not of texts", base, target)
    base = {"a": tensor("BF16", (2, 3)), "b": tensor("F32", (3, 2), salt=9), "c": tensor("F16", (1, 5), salt=3)}
    target = {name: flipped(t, [1]) for name, t in base.items()}
    patches = expected_patches(base, target)
    backwards = draft([patches[2], patches[0], patches[1]], total_elements(base))
    _loose(made, "layers/not_in_name_order", "readers take any order", base, target, None, parts=backwards)
    empty = Patch("c", (1, 5), "F16", np.array([], dtype=np.int64), np.array([], dtype=np.uint16))
    partial = {**target, "c": base["c"]}
    without = draft([*patches[:2], empty], total_elements(base))
    _loose(made, "layers/one_without_positions", "a layer may hold no positions", base, partial, None, parts=without)
    kept = Patch("c", (1, 5), "F16", np.array([0, 1, 4]), oracle.bits(target["c"])[[0, 1, 4]])
    stays = draft([*patches[:2], kept], total_elements(base))
    _loose(made, "layers/positions_that_keep_their_bits", "readers do not compare", base, target, None, parts=stays)


def _names(made: Corpus) -> None:
    for name, texts in {
        "dots": ["model.layers.10.mlp.weight", "model.layers.9.mlp.weight"],
        "beyond_ascii": ["gewicht.β.層", "é"],
        "composed_and_decomposed": ["é", "e\u0301"],
        "200_characters": ["a" * 200, "層" * 200],
        "like_payload_keys": ["0.indices", "1.values", "w.indices", "w.values"],
        "quotes_backslashes_controls": ['a"b', "a\\b", "a\nb\tc\x00d\x1f", "\x7f\u2028", "/"],
        "upper_and_lower": ["W", "w"],
        "spaces": [" ", "  "],
        "order_of_code_points": ["\uff5e", "\U0001f642"],
        "metadata_key": ["layer_names", "format"],
    }.items():
        base = {text: tensor("BF16", (2, 3), salt=number) for number, text in enumerate(texts)}
        target = {text: flipped(t, [number % 6]) for number, (text, t) in enumerate(base.items())}
        _pair(made, f"names/{name}", "names are any texts but the empty one, in the order of code points", base, target)


def _index_widths(made: Corpus) -> None:
    base = {"w": tensor("BF16", (3, 5))}
    target = {"w": flipped(base["w"], [0, 7, 14])}
    patches = expected_patches(base, target)
    for code in ("I32", "I64"):
        parts = draft(patches, 15, indices=code)
        why = f"{code} positions of a small tensor: readers take both, writers write I32"
        _loose(made, f"indices/{code}", why, base, target, None, parts=parts, canonical=code == "I32")


def _density(made: Corpus) -> None:
    base = {"w": tensor("BF16", (5, 6))}
    for name, count in {"below_a_third": 9, "a_third": 10, "above_a_third": 11}.items():
        target = {"w": flipped(base["w"], range(count))}
        why = f"{count} of 30 elements: {6 * count} bytes, the tensor has 60"
        _pair(made, f"density/{name}", why, base, target, data_bytes=6 * count)
    target = {"w": flipped(base["w"], range(15))}
    _loose(made, "density/as_an_integer", "50 and 50.0 are one number", base, target, put({"density_pct": 50}))
    base = {"w": tensor("BF16", (4, 16))}
    target = {"w": flipped(base["w"], [17])}
    for name, density in {"half_way_down": 1.562, "half_way_up": 1.563}.items():
        why = f"1 of 64 is 1.5625 %: {density} is one of two right densities"
        _loose(made, f"density/{name}", why, base, target, put({"density_pct": density}), canonical=True)


def _alignment(made: Corpus) -> None:
    base = {"a": tensor("U8", (1, 5)), "b": tensor("BF16", (2, 3), salt=5)}
    target = {"a": flipped(base["a"], [0, 2, 4]), "b": flipped(base["b"], [1, 5])}
    _pair(made, "alignment/odd_U8_before_BF16", "the second layer's data starts at an odd byte", base, target)
    base = {"a": tensor("F8_E5M2", (1, 5)), "b": tensor("F64", (2, 3), salt=5)}
    target = {"a": flipped(base["a"], [0, 2, 4]), "b": flipped(base["b"], [1, 5])}
    _pair(made, "alignment/odd_F8_before_F64", "the second layer's data starts at an odd byte", base, target)


# -- what surrounds the payload --------------------------------------------------------------------------------------


def _small() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    base = {"norm": tensor("F32", (4,), salt=50), "w": tensor("BF16", (3, 5))}
    return base, {**base, "w": flipped(base["w"], [2, 9])}


def _metadata(made: Corpus) -> None:
    base, target = _small()
    written_today = {
        "base_model": "org/model",
        "created_at": "2026-01-02T03:04:05.678901+00:00",
        "kind": "sampler",
        "model_id": "run-7",
        "timestamp": 1767323045.678901,
    }
    for name, why, fields in (
        ("as_written_today", "all that the first producer writes", written_today),
        ("optional_keys_null", "null stands for nothing", dict.fromkeys(written_today)),
        ("timestamp_an_integer", "seconds may be whole", {"timestamp": 1767323045}),
        ("nested_32_deep", "lists and objects in each other", {"deep": _nested(30)}),
        ("nested_32_levels", "the innermost list is the 32nd level", {"deep": _nested(31)}),
        ("integer_of_4000_digits", "readers take it, also where they ignore it", {"later": 10**3999}),
        ("unknown_keys", "kept and ignored", {"later": {"a": [1, None, "x"]}, "": 0, "Format": "other"}),
        ("requires_nothing", "no extension is required", {"requires": []}),
        ("requires_null", "null stands for nothing", {"requires": None}),
        ("lineage_null", "null stands for nothing", {"lineage": None}),
    ):
        _loose(made, f"metadata/{name}", why, base, target, put(fields))

    def reordered(parts: Draft) -> None:
        parts.metadata = dict(sorted(parts.metadata.items(), reverse=True))

    _loose(made, "metadata/keys_in_another_order", "objects have no order", base, target, reordered)
    _beside(made, base, target)
    needless = {"requires": ["non_floating_values"]}
    _loose(made, "metadata/requires_more", "an extension without use", base, target, put(needless), non_floating=True)


def _beside(made: Corpus, base: State, target: State) -> None:
    files = {"base.safetensors": packed_state(base), "expected.safetensors": packed_state(target)}
    files |= {**delta_files(draft_of(base, target)), "delta/trainer_state.json": b"{}\n"}
    said = {"base_digest": digests.state_digest(base), "digest": digests.state_digest(target)}
    made.add("valid/files/another_file_beside", "readers ignore other files of the directory", files, **said)


def _nested(depth: int) -> object:
    """Lists and objects in turn, `depth` of them."""
    inner: object = 1
    for level in range(depth):
        inner = [inner] if level % 2 else {"in": inner}
    return inner


def _header(made: Corpus) -> None:
    base, target = _small()
    for name, why, metadata in (
        ("without_metadata", "`__metadata__` may be absent", None),
        ("empty_metadata", "`layer_names` may be absent there", {}),
        ("other_metadata", "further texts are ignored", {"format": "pt", "layer_names": '["w"]'}),
        ("names_with_spaces", "`layer_names` is JSON, in any writing", {"layer_names": '[ "\\u0077" ]'}),
    ):

        def change(parts: Draft, value: dict[str, str] | None = metadata) -> None:
            parts.header_metadata = value

        _loose(made, f"header/{name}", why, base, target, change)
    for name, why, text in (
        ("not_padded", "the data may start at any byte", lambda text: text.rstrip()),
        ("padded_more", "spaces at the end are no content", lambda text: text.rstrip() + 11 * " "),
        ("written_loosely", "keys in any order, with white space", _loosely),
    ):
        _rewritten(made, f"header/{name}", why, text)


def _loosely(text: str) -> str:
    header = json.loads(text)
    shuffled = {key: dict(sorted(header[key].items())) for key in sorted(header, reverse=True)}
    return json.dumps(shuffled, indent=1)


def _rewritten(made: Corpus, path: str, why: str, change: Callable[[str], str]) -> None:
    """The payload's header in other words."""
    base, target = _small()
    files = delta_files(draft_of(base, target))
    raw = files[f"delta/{DELTA_FILE}"]
    _, _, start = oracle.unpack(raw)
    text = change(raw[8:start].decode()).encode()
    files[f"delta/{DELTA_FILE}"] = len(text).to_bytes(8, "little") + text + raw[start:]
    states = {"base.safetensors": packed_state(base), "expected.safetensors": packed_state(target)}
    said = {"base_digest": digests.state_digest(base), "digest": digests.state_digest(target)}
    made.add(f"valid/{path}", why, {**states, **files}, **said)


# -- lineage, digests, inverse, composition --------------------------------------------------------------------------


def _lineage(made: Corpus) -> None:
    base, target = _small()
    full = lineage_of(base, target, 41)
    payload = hashlib.sha256(draft_of(base, target).files()[DELTA_FILE]).hexdigest()
    bare = {"run_id": "run-7", "version": 41}
    for name, why, lineage in (
        ("full", "versions, digests and the payload's SHA-256", {**full, "payload_sha256": payload}),
        ("run_and_version", "the two fields that a lineage must have", bare),
        ("nulls", "null stands for nothing", {**bare, "base_version": None, "digest": None, "part": None}),
        ("only_part", "one part of one", {**full, "part": [0, 1]}),
        ("unknown_fields", "kept and ignored", {**full, "later": {"a": 1}}),
        ("digests_alone", "no base version", lineage_of(base, target, 41, base_version=None)),
        ("version_0", "the first version there is", {"run_id": "run-7", "version": 0}),
    ):
        parts = draft_of(base, target)
        parts.metadata["lineage"] = lineage
        _loose(made, f"lineage/{name}", why, base, target, None, parts=parts, lineage=True)
    parts = draft_of(base, base)
    parts.metadata["lineage"] = lineage_of(base, base, 41)
    why = "an empty delta is a version of its own"
    _loose(made, "lineage/nothing_changed", why, base, base, None, parts=parts, lineage=True)


def _digests(made: Corpus) -> None:
    zeros = tensor("F16", (2, 3), *[0] * 6)
    one = tensor("F64", (1, 2), 0x3FF0000000000000, 0x4000000000000000)
    for name, why, state in (
        ("no_tensors", "the sum of nothing", {}),
        ("one_zero", "an element of zeros counts", {"w": tensor("U8", (1,), 0)}),
        ("zeros", "six of them", {"w": zeros}),
        ("zeros_renamed", "names count", {"v": zeros}),
        ("zeros_reshaped", "shapes count", {"w": tensor("F16", (3, 2), *[0] * 6)}),
        ("zeros_of_another_dtype", "dtypes count", {"w": tensor("BF16", (2, 3), *[0] * 6)}),
        ("zeros_and_no_elements", "a tensor without elements counts", {"none": tensor("F32", (0, 3)), "w": zeros}),
        ("scalar", "no axes", {"w": tensor("F32", (), 0x3F800000)}),
        ("two_floats", "before their signs are flipped", {"w": one}),
        ("two_floats_flipped", "two sign flips do not cancel", {"w": flipped(one, [0, 1], 1 << 63)}),
        ("two_tensors", "sums over tensors", {"a": tensor("BF16", (3, 5)), "é": tensor("F32", (2, 2), salt=3)}),
        ("two_tensors_swapped", "elements belong to names", {"é": tensor("BF16", (3, 5)), "a": tensor("F32", (2, 2))}),
    ):
        layers = {text: digests.text(digests.tensor_digest(text, t)) for text, t in state.items()}
        said = {"base_digest": digests.state_digest(state), "layer_digests": layers}
        files = {"base.safetensors": packed_state(state)}
        made.add(f"valid/digest/{name}", why, files, needs=needs_of(state), **said)


def _inverse(made: Corpus) -> None:
    base, target = _small()
    base["v"], target["v"] = tensor("F64", (2, 2), salt=7), tensor("F64", (2, 2), salt=8)
    parts = draft_of(base, target)
    patches = expected_patches(base, target)
    inverse = draft(inverse_patches(patches, base), total_elements(base))
    files = {
        "base.safetensors": packed_state(base),
        "expected.safetensors": packed_state(target),
        **delta_files(parts),
        **delta_files(inverse, "inverse"),
    }
    why = "the inverse holds the bits that were there"
    made.add("valid/inverse/old_bits", why, files, canonical=True)
    kept = Patch("w", (3, 5), "BF16", np.array([2, 4, 9]), oracle.bits(target["w"])[[2, 4, 9]])
    parts = draft([patches[0], kept], total_elements(base))
    inverse = draft(inverse_patches([patches[0], kept], base), total_elements(base))
    files |= {**delta_files(parts), **delta_files(inverse, "inverse")}
    made.add("valid/inverse/positions_that_keep_their_bits", "the inverse has the same positions", files)


def _compose(made: Corpus) -> None:
    a = {"u": tensor("F32", (2, 2), salt=60), "w": tensor("BF16", (3, 5))}
    b = {**a, "w": flipped(a["w"], [1, 4, 9])}
    c = {**a, "w": flipped(b["w"], [4, 8], 0x8000)}
    d = {"u": flipped(a["u"], [3]), "w": flipped(c["w"], [0, 14])}
    for name, why, chain in (
        ("later_wins", "a position that two deltas change", [a, b, c]),
        ("three", "and a tensor that only the last one changes", [a, b, c, d]),
        ("there_and_back", "positions that end as they began are kept", [a, b, a]),
        ("one", "a delta by itself", [a, b]),
        ("empty_between", "an empty delta in the middle", [a, b, b, d]),
        ("all_empty", "nothing changes", [a, a, a]),
    ):
        _chain(made, name, why, chain)
        _chain(made, f"{name}_with_lineage", f"{why}; the lineage spans the range", chain, lineage=True)
    _empty_layer(made, a, b)


def _empty_layer(made: Corpus, a: State, b: State) -> None:
    """Two deltas of which the second has a layer without positions."""
    (change,) = expected_patches(a, b)
    empty = Patch("u", (2, 2), "F32", np.array([], dtype=np.int64), np.array([], dtype=np.uint32))
    total = total_elements(a)
    files = {"base.safetensors": packed_state(a), "expected.safetensors": packed_state(b)}
    files |= {**delta_files(draft([change], total), "deltas/0"), **delta_files(draft([empty], total), "deltas/1")}
    files |= delta_files(draft([change], total), "composed")
    said = {"base_digest": digests.state_digest(a), "digest": digests.state_digest(b)}
    made.add("valid/compose/layer_without_positions", "the composition leaves it out", files, **said)


def _chain(made: Corpus, name: str, why: str, chain: Sequence[Mapping[str, Tensor]], *, lineage: bool = False) -> None:
    steps = [expected_patches(base, target) for base, target in pairwise(chain)]
    drafts = [draft(patches, total_elements(chain[0])) for patches in steps]
    composed = draft(composed_patches(steps), total_elements(chain[0]))
    if lineage:
        for number, (parts, (base, target)) in enumerate(zip(drafts, pairwise(chain), strict=True), start=1):
            parts.metadata["lineage"] = lineage_of(base, target, number)
        last = chain[-1]
        layers = {n: digests.text(digests.tensor_digest(n, last[n])) for n in composed.metadata["layer_names"]}
        composed.metadata["lineage"] = {
            **lineage_of(chain[0], last, len(steps), base_version=0),
            "layer_digests": layers,
        }
    files = {"base.safetensors": packed_state(chain[0]), "expected.safetensors": packed_state(chain[-1])}
    for number, parts in enumerate(drafts):
        files |= delta_files(parts, f"deltas/{number}")
    said = {"base_digest": digests.state_digest(chain[0]), "digest": digests.state_digest(chain[-1])}
    made.add(f"valid/compose/{name}", why, {**files, **delta_files(composed, "composed")}, lineage=lineage, **said)


# -- beyond 2^31 -----------------------------------------------------------------------------------------------------

LARGE = {
    "numel_2_to_31_minus_1": ((2**31 - 1,), [0, 2**31 - 2], "I32"),
    "numel_2_to_31": ((2**15, 2**16), [0, 2**31 - 2, 2**31 - 1], "I32"),
    "numel_2_to_31_plus_1": ((3, 715827883), [0, 2**31 - 1, 2**31], "I64"),
    "numel_2_to_31_plus_1_with_I32": ((3, 715827883), [0, 2**31 - 1], "I32"),
    "numel_2_to_31_with_I64": ((2**15, 2**16), [0, 2**31 - 1], "I64"),
}
"""Name -> shape, positions, width of the positions."""


def _large(made: Corpus) -> None:
    for name, (shape, at, code) in LARGE.items():
        patch = Patch("w", shape, "F8_E5M2", np.array(at), np.arange(1, len(at) + 1, dtype=np.uint8))
        zeros = {"w": {"dtype": "F8_E5M2", "shape": list(shape)}}
        after = {"w": {"positions": at, "bits": list(range(1, len(at) + 1))}}
        why = f"{patch.numel} elements, {code} positions; the base is all zeros, and lies in no file"
        files = delta_files(draft([patch], patch.numel, indices=code))
        canonical = code == oracle.index_code(patch.numel)
        made.add(f"valid/large/{name}", why, files, needs=["large"], canonical=canonical, zeros=zeros, after=after)
