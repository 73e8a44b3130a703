"""The oracle against bytes computed by hand, and against the safetensors library."""

from __future__ import annotations

import ast
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from conformance import oracle
from conformance.inputs import strategies
from conformance.oracle import OracleError, Patch, bits, difference, expected_patches, expected_state, from_bits
from tests.suite.runs import CONFORMANCE, REPOSITORY, environment


def test_bits_of_known_values() -> None:
    assert bits(torch.tensor([1.0, -0.0, float("inf")], dtype=torch.bfloat16)).tolist() == [0x3F80, 0x8000, 0x7F80]
    assert bits(torch.tensor([1.0, -2.0])).tolist() == [0x3F800000, 0xC0000000]
    assert bits(torch.tensor([-1, 2], dtype=torch.int8)).tolist() == [0xFF, 0x02]
    assert bits(torch.tensor([True, False])).tolist() == [1, 0]
    assert bits(torch.tensor([1 + 2j], dtype=torch.complex64)).tolist() == [0x40000000_3F800000]
    assert bits(torch.tensor(1.0, dtype=torch.float16)).tolist() == [0x3C00]
    assert bits(torch.zeros(0, 3)).tolist() == []


def test_bits_follow_the_logical_order() -> None:
    square = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    assert bits(square.t()).tolist() == [0, 3, 1, 4, 2, 5]
    assert bits(square[:, ::2]).tolist() == [0, 2, 3, 5]
    conjugate = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    assert bits(conjugate).tolist() == [0xC0000000_3F800000]


def test_bits_are_a_copy() -> None:
    tensor = torch.zeros(2)
    bits(tensor)[0] = 7
    assert tensor.tolist() == [0, 0]


@pytest.mark.parametrize("code", list(oracle.DTYPES))
def test_from_bits_gives_the_bits_back(code: str) -> None:
    specials = strategies.SPECIALS[code]
    shape = (1, len(specials))
    tensor = from_bits(specials, code, shape)
    assert (tensor.dtype, tuple(tensor.shape)) == (oracle.DTYPES[code], shape)
    assert bits(tensor).tolist() == specials.tolist()
    assert from_bits([], code, (0, 3)).shape == (0, 3)
    assert from_bits(specials[:1], code, ()).shape == ()


@pytest.mark.parametrize(
    ("expected", "found", "finding"),
    [
        (torch.tensor([0.0]), torch.tensor([0.0]), ""),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), ""),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "expected 0x00000000, found 0x80000000 (1 of 1 elements"),
        (torch.zeros(2, 3, dtype=torch.uint8), torch.eye(2, 3, dtype=torch.uint8), "flat 0 [0, 0]: expected 0x00"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "expected torch.float32 [2, 3], found torch.float32 [3, 2]"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "expected torch.float32 [2], found torch.int32 [2]"),
        ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, "missing ['a'], unexpected ['b']"),
        (
            {"a": torch.zeros(1), "b": torch.ones(3)},
            {"a": torch.zeros(1), "b": torch.tensor([1.0, 1, 2])},
            "b at flat 2",
        ),
    ],
)
def test_difference(expected: Tensor, found: Tensor, finding: str) -> None:
    text = difference(expected, found)
    assert text == "" if not finding else finding in text
    if finding:
        with pytest.raises(AssertionError, match=r"^context: "):
            oracle.assert_bit_equal(expected, found, "context")


def test_state_hash_sees_names_dtypes_shapes_and_bits() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(3)}
    others = [
        {"a": torch.zeros(3, 2), "b": base["b"]},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": base["b"]},
        {"a": -torch.zeros(2, 3), "b": base["b"]},
        {"a": base["b"], "b": base["a"]},
        {"ab": base["a"], "b": base["b"]},
        {"a": base["a"]},
    ]
    hashes = {oracle.state_hash(state) for state in (base, *others)}
    assert len(hashes) == 1 + len(others)
    reordered = {"b": base["b"].clone(), "a": base["a"].t().contiguous().t()}
    assert oracle.state_hash(reordered) == oracle.state_hash(base)


def _pair() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    base = {
        "bc": torch.tensor([[1.0, 0.0, 2.0], [3.0, 4.0, 5.0]], dtype=torch.bfloat16),
        "a": torch.tensor(7, dtype=torch.int64),
        "same": torch.tensor([float("nan")]),
    }
    target = {name: tensor.clone() for name, tensor in base.items()}
    target["bc"][0, 1] = -0.0
    target["bc"][1, 2] = 1.0
    target["a"] = torch.tensor(-1, dtype=torch.int64)
    return base, target


def test_expected_patches_by_hand() -> None:
    first, second = expected_patches(*_pair())
    assert (first.name, first.shape, first.code, first.indices.tolist()) == ("a", (), "I64", [0])
    assert first.bits.tolist() == [2**64 - 1]
    assert (second.name, second.shape, second.code, second.indices.tolist()) == ("bc", (2, 3), "BF16", [1, 5])
    assert second.bits.tolist() == [0x8000, 0x3F80]


def test_expected_state_replaces_and_leaves_the_base() -> None:
    base, target = _pair()
    before = oracle.state_hash(base)
    assert difference(target, expected_state(base, expected_patches(base, target))) == ""
    assert oracle.state_hash(base) == before


HEADER = (
    '{"__metadata__":{"layer_names":"[\\"a\\",\\"bc\\"]"},'
    '"0.indices":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},'
    '"0.values":{"dtype":"I64","shape":[1],"data_offsets":[4,12]},'
    '"1.indices":{"dtype":"I32","shape":[2],"data_offsets":[12,20]},'
    '"1.values":{"dtype":"BF16","shape":[2],"data_offsets":[20,24]}}'
)


def test_written_bytes_by_hand(tmp_path: Path) -> None:
    patches = expected_patches(*_pair())
    assert len(HEADER) == 297
    header = HEADER.encode() + b" " * 7
    data = struct.pack("<iqiiHH", 0, -1, 1, 5, 0x8000, 0x3F80)
    payload = struct.pack("<Q", len(header)) + header + data
    directory = oracle.write_delta(tmp_path / "delta", patches, 8, model_id="m")
    assert (directory / "delta.safetensors").read_bytes() == payload
    assert oracle.canonical_payload(patches[::-1]) == payload
    assert json.loads((directory / "metadata.json").read_text()) == {
        "format": "sparse_delta",
        "format_version": 2,
        "layer_names": ["a", "bc"],
        "layer_shapes": [[], [2, 3]],
        "changed_elements": 3,
        "total_elements": 8,
        "density_pct": 37.5,
        "requires": ["non_floating_values"],
        "model_id": "m",
    }
    raw = oracle.read_delta(directory)
    assert (raw.header_bytes, raw.data_bytes, raw.index_codes) == (8 + len(header), len(data), ("I32", "I32"))
    assert [patch.indices.tolist() for patch in raw.patches] == [[0], [1, 5]]


def test_index_dtype_changes_beyond_2_to_31() -> None:
    assert [oracle.index_code(n) for n in (0, 2**31 - 1, 2**31, 2**31 + 1)] == ["I32", "I32", "I32", "I64"]
    assert Patch("w", (2**16, 2**16), "U8", np.array([]), np.array([])).numel == 2**32


@given(strategies.pairs())
def test_library_reads_what_the_oracle_writes(pair: tuple[oracle.State, oracle.State]) -> None:
    """The safetensors library loads every dtype but F4 and F8_E8M0."""
    patches = [p for p in expected_patches(*pair) if p.code not in ("F4", "F8_E8M0")]
    loaded = load(oracle.canonical_payload(patches))
    assert len(loaded) == 2 * len(patches)
    for number, patch in enumerate(patches):
        assert loaded[f"{number}.indices"].tolist() == patch.indices.tolist()
        assert loaded[f"{number}.values"].dtype == oracle.DTYPES[patch.code]
        assert bits(loaded[f"{number}.values"]).tolist() == patch.bits.tolist()


@given(strategies.states())
def test_oracle_reads_what_the_library_writes(state: dict[str, Tensor]) -> None:
    storable = {name: tensor for name, tensor in state.items() if name != "__metadata__" and not _is_f4_scalar(tensor)}
    entries, _, _ = oracle.unpack(save(storable))
    found = {entry.key: entry for entry in entries}
    assert found.keys() == storable.keys()
    for name, tensor in storable.items():
        assert found[name].data == bits(tensor).tobytes()


def _is_f4_scalar(tensor: Tensor) -> bool:
    return tensor.dtype == oracle.DTYPES["F4"] and tensor.ndim == 0


@given(st.data())
def test_states_survive_their_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    state = data.draw(strategies.states())
    storable = {n: t for n, t in state.items() if n != "__metadata__" and not _is_f4_scalar(t)}
    path = oracle.save_state(tmp_path_factory.getbasetemp() / "state.safetensors", storable)
    assert difference(storable, oracle.load_state(path)) == ""


@given(strategies.loose_deltas())
def test_deltas_survive_their_directory(
    tmp_path_factory: pytest.TempPathFactory, loose: tuple[oracle.State, tuple[Patch, ...], str]
) -> None:
    base, patches, indices = loose
    total = oracle.total_elements(base)
    directory = oracle.write_delta(tmp_path_factory.getbasetemp() / "delta", patches, total, indices=indices)
    raw = oracle.read_delta(directory)
    assert difference(expected_state(base, patches), expected_state(base, raw.patches)) == ""
    assert set(raw.index_codes) <= {indices}
    again = oracle.disassemble(directory)
    assert again.files()["delta.safetensors"] == (directory / "delta.safetensors").read_bytes()


@pytest.mark.parametrize("raw", [b"", b"\0" * 7, struct.pack("<Q", 9) + b"{}", struct.pack("<Q", 2) + b"{}x"])
def test_unpack_refuses_broken_files(raw: bytes) -> None:
    with pytest.raises(OracleError):
        oracle.unpack(raw)


def test_only_the_reference_adapter_imports_refdelta() -> None:
    """By its text: no module of the suite names refdelta in an import, but for the adapter of its codec."""
    for path in CONFORMANCE.glob("*.py"):
        imported = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert "refdelta" not in imported or path.name == "engines.py", f"{path.name} imports refdelta"


def test_oracle_loads_without_refdelta() -> None:
    """By running: what the oracle imports does not import it, either."""
    code = "import sys, conformance.oracle.layouts, conformance.inputs.malformed, conformance.inputs.strategies"
    code += "; sys.exit(any(name.partition('.')[0] in ('refdelta', 'vllm') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment(), check=True, timeout=120)


@pytest.mark.parametrize("stated", [{"shape": [True]}, {"shape": [1.0]}, {"data_offsets": [False, 4]}])
def test_true_is_no_number_in_a_header(stated: dict[str, object]) -> None:
    """Found by a nightly run (seed of 2026-12-01): Python counts ``true`` as 1, and the oracle took such a header."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | stated
    head = json.dumps({"x": entry}).encode()
    with pytest.raises(oracle.OracleError, match="not all integers"):
        oracle.unpack(len(head).to_bytes(8, "little") + head + bytes(4))
