"""The definitions: errors and their text, reasons, patches, deltas, lineage."""

from __future__ import annotations

import json
import pickle
import re
import traceback
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from refdelta import Delta, DeltaError, Lineage, Reason, TensorPatch, spec
from tests.codec.support import DTYPES


def test_constants() -> None:
    assert (spec.FORMAT, spec.FORMAT_VERSION) == ("sparse_delta", 2)
    assert (spec.DELTA_FILE, spec.METADATA_FILE) == ("delta.safetensors", "metadata.json")
    assert dict(spec.DTYPES) == DTYPES


def test_dtypes_are_those_of_the_safetensors_library() -> None:
    from safetensors import torch as library

    assert DTYPES.items() >= library._TYPES.items()
    assert set(DTYPES.values()) == set(library._SIZE)


def test_reasons_are_documented_and_snake_case() -> None:
    for reason in Reason:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", reason.value)
        assert reason.name == reason.value.upper()
        assert len(reason.meaning) > 20
        assert Reason(reason.value) is reason
        assert pickle.loads(pickle.dumps(reason)) is reason
    assert len({reason.meaning for reason in Reason}) == len(Reason)


def test_text_of_an_error() -> None:
    assert str(DeltaError(Reason.INDEX_RANGE, "position 7", "m.w")) == "refdelta[index_range] tensor=m.w: position 7"
    assert str(DeltaError(Reason.FENCED, "no")) == "refdelta[fenced]: no"


texts = st.text(max_size=30) | st.sampled_from(
    ["a: b", 'q"q', "back\\slash", "two\nlines", "50 %", "%41", "x tensor=y: z"]
)


@given(st.sampled_from(list(Reason)), texts, st.none() | texts)
@example(Reason.FENCED, "", "")
@example(Reason.FENCED, "\ud800", "\udcff")
def test_text_is_parsed_back_from_anything_that_carries_it(reason: Reason, detail: str, tensor: str | None) -> None:
    error = DeltaError(reason, detail, tensor)
    line = str(error)
    assert line.isascii()
    assert line.isprintable()
    carriers = [
        line,
        f"500: {line}\nmore: lines",
        f"refdelta[no_such_reason] tensor=x: y\n{line}",
        f"{line}\nrefdelta[fenced]: a later one",
        json.dumps({"error": {"message": f"EngineError: {line}\n  at x", "type": "y"}}),
        json.dumps({"message": line}, indent=1),
        "".join(traceback.format_exception(error)),
    ]
    for text in carriers:
        found = DeltaError.parse(text)
        assert found is not None, text
        assert (found.reason, found.detail, found.tensor) == (reason, detail, tensor), text


def test_text_without_an_error() -> None:
    for text in ("", "refdelta", "refdelta[index_order]", "refdelta[INDEX_ORDER]: x", "refdelta[no_such_reason]: x"):
        assert DeltaError.parse(text) is None


def test_errors_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(DeltaError(Reason.UNMAPPED, "no place", "m.w")))
    assert (error.reason, error.detail, error.tensor) == (Reason.UNMAPPED, "no place", "m.w")
    assert isinstance(error, ValueError)


ONE = torch.tensor([0], dtype=torch.int32)


@pytest.mark.parametrize(
    ("reason", "name", "shape", "indices", "values"),
    [
        (Reason.BAD_NAME, "", (2,), ONE, torch.ones(1)),
        (Reason.BAD_NAME, "\ud800", (2,), ONE, torch.ones(1)),
        (Reason.BAD_SHAPE, "w", (-2,), ONE, torch.ones(1)),
        (Reason.BAD_SHAPE, "w", (True,), ONE, torch.ones(1)),
        (Reason.BAD_SHAPE, "w", (2**32, 2**31), ONE, torch.ones(1)),
        (Reason.BAD_INDICES, "w", (2,), ONE.short(), torch.ones(1)),
        (Reason.BAD_INDICES, "w", (2,), ONE[None], torch.ones(1)),
        (Reason.BAD_VALUES, "w", (2,), ONE, torch.ones(1, 1)),
        (Reason.UNSUPPORTED_DTYPE, "w", (2,), ONE, torch.ones(1, dtype=torch.complex128)),
        (Reason.LENGTH_MISMATCH, "w", (2,), ONE, torch.ones(2)),
    ],
)
def test_patches_that_cannot_be(
    reason: Reason, name: str, shape: tuple[int, ...], indices: Tensor, values: Tensor
) -> None:
    with pytest.raises(DeltaError) as caught:
        TensorPatch(name, shape, indices, values)
    assert caught.value.reason is reason


def test_sizes_of_a_patch() -> None:
    patch = TensorPatch("w", (3, 5), torch.tensor([1, 2]), torch.ones(2, dtype=torch.bfloat16))
    assert (patch.numel, patch.changed, patch.density_pct, patch.payload_bytes) == (15, 2, 13.333, 2 * 10)
    assert TensorPatch("s", (), ONE, torch.ones(1)).numel == 1
    assert TensorPatch("big", (2**32, 2**31 - 1), ONE, torch.ones(1)).numel == 2**32 * (2**31 - 1)


def test_deltas_that_cannot_be() -> None:
    patch = TensorPatch("w", (3, 5), ONE, torch.ones(1))
    for patches, total, reason in (
        ((patch, patch), 30, Reason.DUPLICATE_NAME),
        ((patch,), 14, Reason.COUNT_MISMATCH),
        ((), -1, Reason.COUNT_MISMATCH),
        ((), 2**63, Reason.COUNT_MISMATCH),
        ((), True, Reason.COUNT_MISMATCH),
    ):
        with pytest.raises(DeltaError) as caught:
            Delta(patches, total)
        assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("changed", "total", "pct"),
    [(0, 0, 0.0), (1, 3, 33.333), (2, 3, 66.667), (7, 7, 100.0), (1, 64, 1.562), (3, 64, 4.688), (1, 200_000, 0.0)],
)
def test_density(changed: int, total: int, pct: float) -> None:
    assert spec.density_pct(changed, total) == pct


def test_index_dtype_around_2_to_31() -> None:
    wide = [spec.index_dtype(2**31 + by) is torch.int64 for by in (-1, 0, 1)]
    assert wide == [False, False, True]


versions = st.integers(0, 2**62)


@given(
    st.builds(
        Lineage,
        run_id=st.text(min_size=1),
        version=versions,
        base_version=st.none() | versions,
        base_digest=st.none() | st.text(),
        digest=st.none() | st.text(),
        layer_digests=st.none() | st.dictionaries(st.text(), st.text()),
        payload_sha256=st.none() | st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
        part=st.sampled_from([None, (0, 1), (2, 3)]),
        extra=st.dictionaries(st.text().map(lambda key: f"x{key}"), st.integers()),
    )
)
def test_lineage_goes_through_json(lineage: Lineage) -> None:
    assert Lineage.from_json(json.loads(json.dumps(lineage.to_json()))) == lineage
    assert None not in lineage.to_json().values()


@pytest.mark.parametrize(
    "shape", [(2**63 - 1,), (7, (2**63 - 1) // 7), (2**62, 1), (0, 2**63 - 1), (2**40, 0, 2**40), ()]
)
def test_shapes_up_to_2_to_63_minus_1_elements(shape: tuple[int, ...]) -> None:
    assert spec.check_shape(list(shape)) == shape


@pytest.mark.parametrize(
    "shape", [(2**63,), (7, (2**63 - 1) // 7 + 1), (2**62, 2), (0, 2**63), (2**32, 2**32), (2**63 - 1, 2)]
)
def test_shapes_beyond_2_to_63_minus_1_elements(shape: tuple[int, ...]) -> None:
    with pytest.raises(DeltaError) as caught:
        spec.check_shape(list(shape), "w")
    assert (caught.value.reason, caught.value.tensor) == (Reason.BAD_SHAPE, "w")


@pytest.mark.parametrize("shape", [[-1, 3], [2, -1], [True, 3], [2.0, 3], "23", 6, None])
def test_what_is_no_shape(shape: object) -> None:
    with pytest.raises(DeltaError) as caught:
        spec.check_shape(shape, "w")
    assert (caught.value.reason, caught.value.tensor) == (Reason.BAD_SHAPE, "w")


@pytest.mark.parametrize("key", [5, None, ("a",), "format", "layer_names", "lineage"])
def test_further_metadata_has_keys_that_are_texts_and_not_the_format_s(key: object) -> None:
    with pytest.raises(DeltaError) as caught:
        spec.check_extra({"fine": 1, key: 2})  # type: ignore[dict-item]  # on purpose
    assert caught.value.reason is Reason.BAD_METADATA


@pytest.mark.parametrize(("at", "wrong"), [([0, 6], 6), ([0, 5, 9], 9), ([-1, 0], -1), ([-3, 7], -3), ([6], 6)])
def test_a_position_out_of_range_is_named(at: list[int], wrong: int) -> None:
    patch = TensorPatch("w", (2, 3), torch.tensor(at), torch.zeros(len(at)))
    with pytest.raises(DeltaError) as caught:
        patch.check_indices()
    assert caught.value.reason is Reason.INDEX_RANGE
    assert caught.value.detail == f"position {wrong} outside [0, 6) of shape [2, 3]"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", ""),
        ("version", -1),
        ("base_version", True),
        ("base_digest", 1),
        ("digest", 1),
        ("layer_digests", {"w": 1}),
        ("payload_sha256", "0" * 63),
        ("part", (2, 2)),
    ],
)
def test_a_field_of_the_lineage_that_is_wrong_is_named(field: str, value: object) -> None:
    with pytest.raises(DeltaError) as caught:
        Lineage.from_json({"run_id": "run", "version": 3, field: value})
    assert caught.value.reason is Reason.BAD_METADATA
    assert caught.value.detail.startswith(f"lineage.{field}: expected ")


def test_values_do_not_change() -> None:
    """What was checked when it was made stays so."""
    patch = TensorPatch("w", (2, 3), torch.tensor([1]), torch.ones(1))
    for value in (patch, Delta((patch,), 6), Lineage("run", 1), spec.INVARIANTS["counted"]):
        for name in type(value).__slots__:
            with pytest.raises(FrozenInstanceError):
                setattr(value, name, None)
