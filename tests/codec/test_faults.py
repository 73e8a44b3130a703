"""Fault kinds seen in public that have no better place among the tests, each with its smallest input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from refdelta import (
    DELTA_FILE,
    Delta,
    DeltaError,
    Reason,
    TensorPatch,
    apply_delta,
    compose,
    diff,
    read_delta,
    write_delta,
)
from refdelta.digest import tensor_digest
from refdelta.spec import copy_state
from tests.codec.support import assert_same, bf16, container, split_container, write_v2


def refused(reason: Reason, folder: Path) -> DeltaError:
    with pytest.raises(DeltaError) as caught:
        read_delta(folder)
    assert caught.value.reason is reason, caught.value
    return caught.value


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        pytest.param([0, 6], Reason.INDEX_RANGE, id="equal to numel"),
        pytest.param([-1, 5], Reason.INDEX_RANGE, id="negative"),
        pytest.param([5, 0], Reason.INDEX_ORDER, id="unsorted"),
        pytest.param([5, 5], Reason.INDEX_ORDER, id="duplicated"),
        pytest.param([4, 5, 6], Reason.LENGTH_MISMATCH, id="longer than the values"),
        pytest.param([5], Reason.LENGTH_MISMATCH, id="shorter than the values"),
    ],
)
def test_fault_05_positions_that_cannot_be(tmp_path: Path, at: list[int], reason: Reason) -> None:
    """Refused where they are read, and before they are written."""
    good = TensorPatch("a", (3, 2), torch.tensor([1]), bf16(7))
    indices, values = torch.tensor(at, dtype=torch.int32), bf16(1, 2)
    layers = [("a", [3, 2], good.indices, good.values), ("b", [2, 3], indices, values)]
    error = refused(reason, write_v2(tmp_path / "d", layers, 12))
    assert error.tensor == "b"
    state = {"a": bf16(*range(6)).view(3, 2), "b": bf16(*range(6)).view(2, 3)}
    before = copy_state(state)
    with pytest.raises(DeltaError) as caught:
        apply_delta(Delta((good, TensorPatch("b", (2, 3), indices, values)), 12), state)
    assert caught.value.reason is reason
    assert_same(state, before)


ENTRY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
TWICE = (
    b'{"0.indices":{"dtype":"I32","shape":[0],"data_offsets":[0,0]},'
    + 2 * b'"0.values":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]},'
)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        pytest.param(container(TWICE[:-1] + b"}"), "duplicate key 0.values", id="duplicate key"),
        pytest.param((1000).to_bytes(8, "little") + b"{}", "beyond the file", id="length beyond the file"),
        pytest.param((10**8 + 1).to_bytes(8, "little") + b"{}", "more than 100000000", id="length over 100 MB"),
        pytest.param(container({"0.indices": {**ENTRY, "shape": [2**32, 2**32]}}), "does not fill", id="wraps"),
        pytest.param(container({"0.indices": {**ENTRY, "shape": [-1, 0]}}), "non-negative", id="negative"),
        pytest.param(container({"0.indices": {**ENTRY, "shape": [-1, -1]}}), "non-negative", id="negative twice"),
    ],
)
def test_fault_08_headers_that_lie(tmp_path: Path, raw: bytes, text: str) -> None:
    folder = write_v2(tmp_path / "d", [("w", [2, 3], torch.empty(0, dtype=torch.int32), bf16())], 6)
    (folder / DELTA_FILE).write_bytes(raw)
    assert text in refused(Reason.BAD_HEADER, folder).detail


@pytest.mark.parametrize(("held", "sent"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_fault_12_values_of_another_float_dtype(held: torch.dtype, sent: torch.dtype) -> None:
    """Refused both ways; nothing is converted."""
    state = {"norm": torch.ones(3), "w": torch.ones(2, 3, dtype=held)}
    before = copy_state(state)
    good = TensorPatch("norm", (3,), torch.tensor([1]), torch.tensor([5.0]))
    wrong = TensorPatch("w", (2, 3), torch.tensor([4]), torch.tensor([2.0], dtype=sent))
    with pytest.raises(DeltaError) as caught:
        apply_delta(Delta((good, wrong), 9), state)
    assert (caught.value.reason, caught.value.tensor) == (Reason.DTYPE_MISMATCH, "w")
    assert_same(state, before)


@pytest.mark.parametrize(
    "name",
    [
        "a.b.c",
        "w.indices",
        "w.values",
        "0.indices",
        "0.values",
        "層.β",
        "e\u0301",
        "x" * 200,
        "層" * 200,
        'q"\\\n',
        ".",
    ],
)
def test_fault_14_names(tmp_path: Path, name: str) -> None:
    """A name stands in the metadata only; payload keys are numbers, whatever it ends in."""
    base, target = {name: bf16(1, 2, 3), "0": bf16(4)}, {name: bf16(1, 9, 3), "0": bf16(5)}
    folder = write_delta(diff(base, target), tmp_path / "d")
    header, _ = split_container((folder / DELTA_FILE).read_bytes())
    assert header.keys() == {"__metadata__", "0.indices", "0.values", "1.indices", "1.values"}
    delta = read_delta(folder)
    assert sorted(patch.name for patch in delta.patches) == sorted([name, "0"])
    apply_delta(delta, base)
    assert_same(base, target)
    assert name in json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["layer_names"]


def test_fault_14_names_that_are_nearly_the_same(tmp_path: Path) -> None:
    """Each keeps its own change: through files, composed, inverted, and in digests."""
    names = ["w", "w.", "w.indices", "w.values", "w.indices.values", "W", "w ", "0", "0.indices", "0.values", "00"]
    names += ["a.b", "a_b", "a", "a.b.c", "\u00e9", "e\u0301", "x" * 199 + "a", "x" * 199 + "b", "x" * 199]
    base = {name: bf16(1, 2, 3) for name in names}
    first = {name: bf16(1, 10 + i, 3) for i, name in enumerate(names)}
    second = {name: bf16(100 + i, 10 + i, 3) for i, name in enumerate(names)}
    deltas = [
        read_delta(write_delta(diff(*pair), tmp_path / str(i)))
        for i, pair in enumerate([(base, first), (first, second)])
    ]
    held = copy_state(base)
    inverse = apply_delta(read_delta(write_delta(compose(deltas), tmp_path / "both")), held)
    assert_same(held, second)
    apply_delta(read_delta(write_delta(inverse, tmp_path / "back")), held)
    assert_same(held, base)
    assert len({tensor_digest(name, bf16(1, 2, 3)) for name in names}) == len(names)
