"""The golden vectors: made anew they are the same, none is missing, and each says what it is named after."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

from conformance import oracle
from conformance.golden import corpus, writing
from conformance.golden import invalid as golden_invalid
from conformance.golden import parts as golden
from conformance.golden.corpus import CORPUS, Vector
from conformance.inputs.malformed import FAULTS
from conformance.oracle import digests
from refdelta import DELTA_FILE, DeltaError, Reason, apply_delta, read_delta
from refdelta.digest import state_digest
from tests.codec.support import assert_same

VECTORS = {vector.name: vector for vector in corpus.load()}
LIMIT_BYTES = 2_000_000


def files(directory: Path) -> dict[str, bytes]:
    """Content of every generated file, by path below the corpus."""
    found = [path for kind in corpus.KINDS for path in (directory / kind).rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def test_made_anew_they_are_the_same(tmp_path: Path) -> None:
    assert writing.write(tmp_path) == len(VECTORS)
    stored, made = files(CORPUS), files(tmp_path)
    assert stored.keys() == made.keys(), sorted(stored.keys() ^ made.keys())[:10]
    changed = [name for name, content in made.items() if stored[name] != content]
    assert not changed, f"run `python -m conformance.golden`: {changed[:10]}"


def test_writing_replaces_what_is_no_longer_made(tmp_path: Path) -> None:
    stray = tmp_path / "valid" / "bits" / "stray" / "expected.json"
    stray.parent.mkdir(parents=True)
    stray.write_text("{}")
    (tmp_path / "README.md").write_text("by hand")
    writing.write(tmp_path)
    assert not stray.exists()
    assert (tmp_path / "README.md").read_text() == "by hand"


def test_they_are_made_without_refdelta() -> None:
    program = "import conformance.golden.writing, sys; conformance.golden.writing.corpus(); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "conformance.golden.invalid" in found.stdout
    assert not [name for name in found.stdout.split() if name.split(".")[0] == "refdelta"]


def test_they_are_small() -> None:
    assert sum(map(len, files(CORPUS).values())) < LIMIT_BYTES


def test_an_empty_corpus_fails(tmp_path: Path) -> None:
    everything = list(VECTORS.values())
    corpus.assert_whole(everything)
    assert corpus.load(tmp_path) == []
    only_valid = [vector for vector in everything if vector.name.startswith("valid/")]
    few_features = [vector for vector in everything if "/names/" in vector.name] * 40
    for left in ([], only_valid, everything[:100], 3 * only_valid, few_features):
        with pytest.raises(AssertionError):
            corpus.assert_whole(left)


def test_a_vector_without_its_expectation_fails(tmp_path: Path) -> None:
    (tmp_path / "valid" / "bits" / "some").mkdir(parents=True)
    with pytest.raises(FileNotFoundError):
        corpus.load(tmp_path)


def test_every_malformed_delta_has_a_vector_or_a_reason_for_none() -> None:
    for fault in FAULTS.values():
        vector = VECTORS.get(f"invalid/{fault.feature}/{fault.name}")
        assert (vector is None) == bool(fault.no_vector), fault.name
        assert vector is None or vector.expected["reason"] == fault.reason, fault.name


def test_reasons_are_reason_codes_and_none_of_a_reader_is_missing() -> None:
    found = {vector.expected["reason"] for name, vector in VECTORS.items() if name.startswith("invalid/")}
    assert found <= {str(reason) for reason in Reason}
    of_a_reader = [str(reason) for reason in Reason][: [str(reason) for reason in Reason].index("unmapped")]
    no_file_can_show = {
        "unreadable",
        "target_exists",
        "alias_conflict",
        "unsupported_tensor",
        "write_failed",
        "not_a_checkpoint",
    }
    assert set(of_a_reader) - no_file_can_show == found


def test_the_invalid_ones_are_made_of_a_good_delta(tmp_path: Path) -> None:
    parts = golden.draft_of(golden_invalid.BASE, golden_invalid.TARGET)
    parts.metadata["lineage"] = golden.lineage_of(golden_invalid.BASE, golden_invalid.TARGET, 41)
    state = oracle.clone(golden_invalid.BASE)
    apply_delta(read_delta(parts.write(tmp_path / "good")), state, digest=state_digest(golden_invalid.BASE))
    assert_same(state, golden_invalid.TARGET)


def test_no_two_invalid_ones_are_alike() -> None:
    by_content: dict[object, list[str]] = defaultdict(list)
    for name, vector in VECTORS.items():
        held = {path.relative_to(vector.path): path.read_bytes() for path in vector.path.rglob("*.*")}
        del held[Path("expected.json")]
        asked = vector.expected.get("digest") if name.startswith("invalid/") else None
        by_content[asked, *sorted(held.items())].append(name)
    twice = [names for names in by_content.values() if len(names) > 1 and any(n.startswith("invalid") for n in names)]
    assert not twice


# What each feature promises


def case(name: str) -> Vector:
    return VECTORS[name]


def header_of(vector: Vector, folder: str = "delta") -> dict[str, oracle.Entry]:
    entries, _, _ = oracle.unpack((vector.path / folder / DELTA_FILE).read_bytes())
    return {entry.key: entry for entry in entries}


def test_every_dtype_has_one() -> None:
    assert {name.split("/")[2] for name in VECTORS if name.startswith("valid/dtypes/")} == oracle.DTYPES.keys()
    for code in oracle.DTYPES:
        assert header_of(case(f"valid/dtypes/{code}"))["0.values"].code == code


def test_boundaries_have_one_below_one_at_and_one_above() -> None:
    def large(kind: str) -> list[int]:
        found = [vector for name, vector in VECTORS.items() if name.startswith(f"{kind}/large/numel")]
        return sorted({math.prod(vector.expected["zeros"]["w"]["shape"]) for vector in found})

    sizes = [2**31 - 1, 2**31, 2**31 + 1]
    assert large("valid") == large("invalid") == sizes
    widths = [
        header_of(case(f"valid/large/numel_2_to_31{end}"))["0.indices"].code for end in ("_minus_1", "", "_plus_1")
    ]
    assert widths == ["I32", "I32", "I64"]
    thirds = [
        case(f"valid/density/{name}").expected["data_bytes"] for name in ("below_a_third", "a_third", "above_a_third")
    ]
    assert [value - 2 * 30 for value in thirds] == [-6, 0, 6]
    for name, expected in (("last_but_one", [13]), ("last", [14]), ("none", [])):
        layers = oracle.read_delta(case(f"valid/positions/{name}").delta).patches
        assert [at for patch in layers for at in patch.indices.tolist()] == expected
    assert [header_of(case(f"valid/indices/{code}"))["0.indices"].code for code in ("I32", "I64")] == ["I32", "I64"]
    beyond = oracle.disassemble(case("invalid/indices/index_equals_size").delta).entry("1.indices")
    assert int.from_bytes(beyond.data[-4:], "little") == 14


def test_digests_tell_all_states_apart() -> None:
    by_digest: dict[str, set[str]] = defaultdict(set)
    for vector in VECTORS.values():
        for file, key in (("base.safetensors", "base_digest"), ("expected.safetensors", "digest")):
            if key in vector.expected and vector.has(file):
                state = vector.state(file)
                assert digests.state_digest(state) == vector.expected[key], vector.name
                by_digest[vector.expected[key]].add(oracle.state_hash(state))
    assert len(by_digest) > 100
    assert {len(states) for states in by_digest.values()} == {1}
    for name, vector in VECTORS.items():
        if name.startswith("valid/digest/"):
            layers = {
                text: digests.text(digests.tensor_digest(text, t))
                for text, t in vector.state("base.safetensors").items()
            }
            assert vector.expected["layer_digests"] == layers


def test_the_safetensors_library_reads_every_file_of_a_valid_one() -> None:
    """Readable from any language: the library is written in Rust, and shared by most."""
    count = 0
    for path in sorted((CORPUS / "valid").rglob("*.safetensors")):
        entries, _, _ = oracle.unpack(path.read_bytes())
        tensors = load_file(path)
        assert sorted(tensors) == sorted(entry.key for entry in entries), path
        for entry in entries:
            assert oracle.bits(tensors[entry.key]).tobytes() == entry.data, (path, entry.key)
        count += 1
    assert count > 300


@pytest.mark.parametrize("name", [name for name in VECTORS if name.startswith("invalid/") and "/compose/" not in name])
def test_a_refusal_names_the_tensor_where_there_is_one(name: str) -> None:
    """What was found is said in one line, with the tensor's name for faults of one tensor."""
    vector = case(name)
    state = {} if "zeros" in vector.expected else vector.state("base.safetensors")
    with pytest.raises(DeltaError) as caught:
        apply_delta(read_delta(vector.delta), state, digest=vector.expected.get("digest"))
    assert caught.value.reason == vector.expected["reason"]
    assert len(caught.value.detail) > 5
    of_one = {"index_order", "index_range", "bad_indices", "bad_values", "length_mismatch", "unknown_tensor"}
    of_one |= {"shape_mismatch", "dtype_mismatch", "duplicate_name", "bad_shape"}
    if caught.value.reason in of_one:
        assert caught.value.tensor, caught.value
