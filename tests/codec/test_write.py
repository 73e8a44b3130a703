"""write_delta: the bytes it writes, and how they come to be there."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from refdelta import (
    DELTA_FILE,
    INVARIANTS,
    METADATA_FILE,
    Delta,
    DeltaError,
    Lineage,
    Reason,
    TensorPatch,
    diff,
    read_delta,
    write_delta,
)
from refdelta.files import writing
from tests.codec.support import DTYPES, bf16, bytes_of, change, random_tensor, split_container, write_v2


def small() -> Delta:
    """Two layers out of name order; the first one's values are 3 bytes, so that all after it is unaligned."""
    odd = TensorPatch("odd", (3, 1), torch.tensor([0, 1, 2]), torch.tensor([7, 8, 9], dtype=torch.uint8))
    late = TensorPatch("w.values", (2, 3), torch.tensor([1, 5], dtype=torch.int32), bf16(0x8000, 0x7FC1))
    return Delta((late, odd), 9, extra={"created_at": "then", "timestamp": 12.5, "zz": [1, {"é": None}]})


GOLDEN = (
    b'\x38\x01\x00\x00\x00\x00\x00\x00{"__metadata__":{"layer_names":"[\\"odd\\",\\"w.values\\"]"},'
    b'"0.indices":{"dtype":"I32","shape":[3],"data_offsets":[0,12]},'
    b'"0.values":{"dtype":"U8","shape":[3],"data_offsets":[12,15]},'
    b'"1.indices":{"dtype":"I32","shape":[2],"data_offsets":[15,23]},'
    b'"1.values":{"dtype":"BF16","shape":[2],"data_offsets":[23,27]}}      '
    b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x07\x08\x09"
    b"\x01\x00\x00\x00\x05\x00\x00\x00\x00\x80\xc1\x7f"
)
"""The 306 bytes of JSON are padded to 312, so that the data starts at a multiple of 8."""


def test_the_bytes_are_the_canonical_ones(tmp_path: Path) -> None:
    folder = write_delta(small(), tmp_path / "d")
    assert folder == tmp_path / "d"
    assert sorted(os.listdir(folder)) == [DELTA_FILE, METADATA_FILE]
    assert (folder / DELTA_FILE).read_bytes() == GOLDEN


def test_the_metadata_is_what_the_format_says(tmp_path: Path) -> None:
    metadata = json.loads((write_delta(small(), tmp_path / "d") / METADATA_FILE).read_text())
    assert metadata == {
        "format": "sparse_delta",
        "format_version": 2,
        "layer_names": ["odd", "w.values"],
        "layer_shapes": [[3, 1], [2, 3]],
        "changed_elements": 5,
        "total_elements": 9,
        "density_pct": 55.556,
        "requires": ["non_floating_values"],
        "created_at": "then",
        "timestamp": 12.5,
        "zz": [1, {"é": None}],
    }


def test_the_time_is_now_where_none_is_given(tmp_path: Path) -> None:
    metadata = json.loads((write_delta(Delta((), 5), tmp_path / "d") / METADATA_FILE).read_text())
    assert metadata["timestamp"] > 1.7e9
    assert metadata["created_at"].startswith("20")
    assert metadata["density_pct"] == 0.0
    assert "requires" not in metadata


def test_the_same_states_give_the_same_bytes(tmp_path: Path) -> None:
    """Whatever the order of names and the number of threads; large enough that work is split."""
    rng = np.random.default_rng(11)
    base = {name: random_tensor(rng, "BF16", (1031, 2053)) for name in ("b", "a", "c")}
    target = {name: change(rng, t, np.arange(0, t.numel(), 97)) for name, t in base.items()}
    made: list[Path] = []

    def produce() -> bytes:
        states = [dict(reversed(state.items())) if len(made) % 2 else state for state in (base, target)]
        made.append(write_delta(diff(*states), tmp_path / f"d{len(made)}"))
        return (made[-1] / DELTA_FILE).read_bytes()

    INVARIANTS["deterministic"].check(produce)
    assert len(made) == 6


def test_fault_09_unaligned_data_is_read_alike_by_the_library(tmp_path: Path) -> None:
    folder = write_delta(small(), tmp_path / "d")
    ours, theirs = read_delta(folder), load_file(folder / DELTA_FILE)
    assert len(theirs) == 4
    for number, patch in enumerate(ours.patches):
        assert torch.equal(theirs[f"{number}.indices"], patch.indices)
        assert np.array_equal(bytes_of(theirs[f"{number}.values"].clone()), bytes_of(patch.values))
    with safe_open(folder / DELTA_FILE, "pt") as file:
        assert json.loads(file.metadata()["layer_names"]) == ["odd", "w.values"]


@pytest.mark.parametrize("code", DTYPES)
def test_the_library_reads_every_dtype(tmp_path: Path, code: str) -> None:
    rng = np.random.default_rng(12)
    base = random_tensor(rng, code, (3, 5))
    delta = diff({"w": base}, {"w": change(rng, base, np.array([0, 4, 14]))})
    theirs = load_file(write_delta(delta, tmp_path / "d") / DELTA_FILE)
    assert theirs["0.values"].dtype == DTYPES[code]
    assert theirs["0.values"].shape == (3,)
    assert np.array_equal(bytes_of(theirs["0.values"].clone()), bytes_of(delta.patches[0].values))


def test_index_dtype_follows_from_the_shape(tmp_path: Path) -> None:
    """Around 2^31 elements, whatever dtype the patch holds; only positions are stored, no tensor of that size."""
    shapes = {"below": (2**31 - 1,), "at": (2, 2**30), "above": (2**31 + 1,), "wide": (3, 2**40)}
    patches = [
        TensorPatch(name, shape, torch.tensor([0, min(int(np.prod(shape)), 2**41) - 1]), bf16(1, 2))
        for name, shape in shapes.items()
    ]
    delta = Delta(tuple(patches), sum(patch.numel for patch in patches))
    found = {patch.name: patch for patch in read_delta(write_delta(delta, tmp_path / "d")).patches}
    narrow = {name for name, patch in found.items() if patch.indices.dtype == torch.int32}
    assert narrow == {"below", "at"}
    assert found["at"].indices.tolist() == [0, 2**31 - 1]
    assert found["above"].indices.tolist() == [0, 2**31]


# Atomic


def test_an_existing_target_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    write_delta(Delta((), 3), tmp_path / "delta")
    before = (tmp_path / "delta" / METADATA_FILE).read_bytes()
    for name in ("file", "empty", "dangling", "delta"):
        with pytest.raises(DeltaError) as caught:
            write_delta(small(), tmp_path / name)
        assert caught.value.reason is Reason.TARGET_EXISTS
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "empty").iterdir()) == []
    assert (tmp_path / "delta" / METADATA_FILE).read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 4, "something temporary was left behind"


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """A full disk shows when data is synced: payload, metadata, directory."""
    calls, fsync = [], os.fsync

    def full(fd: int) -> None:
        calls.append(fd)
        if len(calls) == call:
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DeltaError) as caught:
        write_delta(small(), tmp_path / "d")
    assert caught.value.reason is Reason.WRITE_FAILED
    assert list(tmp_path.iterdir()) == []


def test_everything_is_synced_before_and_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, log, fsync = tmp_path / "d", [], os.fsync

    def logged(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        log.append(
            (name if name.endswith(("json", "safetensors")) else os.path.isdir(f"/proc/self/fd/{fd}"), target.exists())
        )
        fsync(fd)

    monkeypatch.setattr(os, "fsync", logged)
    write_delta(small(), target)
    assert sorted(log[:2], key=str) == [(DELTA_FILE, False), (METADATA_FILE, False)]
    assert log[2:] == [(True, False), (True, True)]


def test_a_reader_meanwhile_sees_the_whole_delta_or_none(tmp_path: Path) -> None:
    target, done, seen = tmp_path / "d", threading.Event(), set()

    def watch() -> None:
        while not done.is_set():
            seen.add(tuple(sorted(os.listdir(target))) if target.exists() else None)

    rng = np.random.default_rng(13)
    base = random_tensor(rng, "F32", (1024, 1025))
    delta = diff({"w": base}, {"w": change(rng, base, np.arange(0, base.numel(), 2))})
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        write_delta(delta, target)
    finally:
        done.set()
        watcher.join()
    assert seen <= {None, (DELTA_FILE, METADATA_FILE)}


def test_a_missing_parent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeltaError) as caught:
        write_delta(small(), tmp_path / "no" / "d")
    assert caught.value.reason is Reason.WRITE_FAILED
    with pytest.raises(DeltaError) as caught:
        write_delta(small(), tmp_path / "nul\0byte")
    assert caught.value.reason is Reason.WRITE_FAILED


def test_other_users_may_read_as_far_as_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = write_delta(small(), tmp_path / "d")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / DELTA_FILE, folder / METADATA_FILE)]
    assert modes == [0o750, 0o640, 0o640]


def test_fault_10_held_tensors_survive_what_happens_to_the_file(tmp_path: Path) -> None:
    folder = write_delta(small(), tmp_path / "d")
    held = read_delta(folder)
    values = [bytes_of(patch.values).copy() for patch in held.patches]
    file = folder / DELTA_FILE
    file.write_bytes(b"\xff" * len(file.read_bytes()))
    os.truncate(file, 4)
    assert all(np.array_equal(bytes_of(p.values), v) for p, v in zip(held.patches, values, strict=True))


def test_fault_10_a_delta_is_saved_over_the_one_that_it_was_read_from(tmp_path: Path) -> None:
    folder = write_delta(small(), tmp_path / "d")
    before, held = (folder / DELTA_FILE).read_bytes(), read_delta(folder)
    assert_equal(read_delta(write_delta(held, folder, overwrite=True)), held)
    assert (folder / DELTA_FILE).read_bytes() == before
    zeros = tuple(replace(patch, values=torch.zeros_like(patch.values)) for patch in held.patches)
    write_delta(Delta(zeros, 9), folder, overwrite=True)
    assert_equal(held, Delta(small().patches[::-1], 9))


# What is refused


@pytest.mark.parametrize(
    "extra",
    [
        {"format_version": 3},
        {"requires": []},
        {"kind": 3},
        {"timestamp": "now"},
        {"timestamp": True},
        {"x": float("nan")},
        {"x": float("inf")},
        {"x": {1, 2}},
        {"x": "\ud800"},
    ],
)
def test_metadata_that_a_reader_would_refuse_is_not_written(tmp_path: Path, extra: dict[str, object]) -> None:
    with pytest.raises(DeltaError) as caught:
        write_delta(Delta((), 1, extra=extra), tmp_path / "d")
    assert caught.value.reason is Reason.BAD_METADATA
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("at", "reason"), [([2, 1], Reason.INDEX_ORDER), ([1, 6], Reason.INDEX_RANGE)])
def test_positions_that_a_reader_would_refuse_are_not_written(tmp_path: Path, at: list[int], reason: Reason) -> None:
    patch = TensorPatch("w", (2, 3), torch.tensor(at), bf16(1, 2))
    with pytest.raises(DeltaError) as caught:
        write_delta(Delta((patch,), 6), tmp_path / "d")
    assert (caught.value.reason, caught.value.tensor) == (reason, "w")
    assert list(tmp_path.iterdir()) == []


# Round trips


def assert_equal(found: Delta, expected: Delta) -> None:
    assert (found.total_elements, found.lineage) == (expected.total_elements, expected.lineage)
    for one, two in zip(found.patches, expected.patches, strict=True):
        assert (one.name, one.shape, one.dtype) == (two.name, two.shape, two.dtype)
        assert one.indices.tolist() == two.indices.tolist()
        assert np.array_equal(bytes_of(one.values), bytes_of(two.values))


def test_lineage_gets_the_hash_of_the_payload(tmp_path: Path) -> None:
    lineage = Lineage("run", 8, 7, "rd1:a", "rd1:b", {"odd": "rd1:c"}, "0" * 64, (0, 2), {"later": [1]})
    delta = Delta(small().patches, 9, lineage)
    folder = write_delta(delta, tmp_path / "d")
    sha256 = hashlib.sha256((folder / DELTA_FILE).read_bytes()).hexdigest()
    stored = json.loads((folder / METADATA_FILE).read_text())["lineage"]
    assert stored == {
        "run_id": "run",
        "version": 8,
        "base_version": 7,
        "base_digest": "rd1:a",
        "digest": "rd1:b",
        "layer_digests": {"odd": "rd1:c"},
        "payload_sha256": sha256,
        "part": [0, 2],
        "later": [1],
    }
    found = read_delta(folder).lineage
    assert found == Lineage("run", 8, 7, "rd1:a", "rd1:b", {"odd": "rd1:c"}, sha256, (0, 2), {"later": [1]})


def test_what_is_read_is_written_again(tmp_path: Path) -> None:
    """Names as fault 14 has them; unknown keys kept."""
    names = ["a.b.indices", "a.values", "0.indices", "üñ 模型", "x" * 200, 'with space: "quoted"\n', "a"]
    patches = [
        TensorPatch(name, (4, 2), torch.tensor([i], dtype=torch.int32), torch.tensor([float(i)]))
        for i, name in enumerate(names)
    ]
    lineage = Lineage("run", 0)
    once = read_delta(write_delta(Delta(tuple(patches), 100, lineage, {"mine": {"k": [None, 1.5]}}), tmp_path / "one"))
    twice = read_delta(write_delta(once, tmp_path / "two"))
    assert [patch.name for patch in once.patches] == sorted(names)
    assert once.extra["mine"] == {"k": [None, 1.5]}
    assert once.extra == twice.extra
    assert_equal(twice, once)
    assert (tmp_path / "one" / DELTA_FILE).read_bytes() == (tmp_path / "two" / DELTA_FILE).read_bytes()


def test_files_of_openrl_are_read_in_their_order_and_written_in_ours(tmp_path: Path) -> None:
    """Made with the safetensors library: other header order and padding, mixed dtypes, names not sorted."""
    one, two = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([2], dtype=torch.int64)
    layers = [("w.b", [2, 3], one, bf16(0x8000, 0x7FC1)), ("w.a", [4], two, torch.tensor([1.5]))]
    folder = write_v2(tmp_path / "theirs", layers, 10)
    delta = read_delta(folder)
    assert [(patch.name, patch.shape, patch.dtype) for patch in delta.patches] == [
        ("w.b", (2, 3), torch.bfloat16),
        ("w.a", (4,), torch.float32),
    ]
    assert (delta.changed_elements, delta.total_elements, delta.density_pct) == (3, 10, 30.0)
    assert delta.lineage is None
    assert delta.extra["model_id"] == "run-7"
    again = write_delta(delta, tmp_path / "ours")
    header, _ = split_container((again / DELTA_FILE).read_bytes())
    assert header["__metadata__"]["layer_names"] == '["w.a","w.b"]'
    theirs, ours = (json.loads((path / METADATA_FILE).read_text()) for path in (folder, again))
    kept = theirs.keys() - {"layer_names", "layer_shapes"}
    assert {key: theirs[key] for key in kept} == {key: ours[key] for key in kept}
    assert "requires" not in ours


def test_an_empty_delta_of_openrl_is_a_delta(tmp_path: Path) -> None:
    delta = read_delta(write_v2(tmp_path / "d", [], 10))
    assert (delta.patches, delta.total_elements, delta.density_pct) == ((), 10, 0.0)


def v2_reader(folder: Path) -> dict[str, tuple[list[int], torch.Tensor, torch.Tensor]]:
    """A reader of v2 from the format's description alone, with the checks that other readers make."""
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["format"], metadata["format_version"]) == ("sparse_delta", 2)
    names, shapes = metadata["layer_names"], metadata["layer_shapes"]
    assert len(names) == len(shapes) == len(set(names))
    tensors, layers = load_file(folder / "delta.safetensors"), {}
    assert tensors.keys() == {f"{i}.{part}" for i in range(len(names)) for part in ("indices", "values")}
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        indices, values = tensors[f"{i}.indices"], tensors[f"{i}.values"]
        assert indices.dtype in (torch.int32, torch.int64)
        assert indices.dim() == values.dim() == 1
        assert len(indices) == len(values)
        assert bool((indices[1:] > indices[:-1]).all())
        assert values.is_floating_point()
        layers[name] = (shape, indices, values)
    return layers


def test_other_readers_take_what_is_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(14)
    base = {"m.b": random_tensor(rng, "BF16", (3, 5)), "m.a": random_tensor(rng, "F32", (7, 2))}
    target = {name: change(rng, t, np.array([1, 2, 13])) for name, t in base.items()}
    layers = v2_reader(write_delta(diff(base, target), tmp_path / "d"))
    for name, (shape, indices, values) in layers.items():
        state = bytes_of(base[name]).copy()
        state[indices.numpy()] = bytes_of(values.clone())
        assert np.array_equal(state, bytes_of(target[name]))
        assert shape == list(base[name].shape)
    assert layers.keys() == base.keys()
    assert v2_reader(write_delta(Delta((), 29), tmp_path / "empty")) == {}


def test_a_header_longer_than_readers_take_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = small()
    length = int.from_bytes((write_delta(delta, tmp_path / "usual") / DELTA_FILE).read_bytes()[:8], "little")
    monkeypatch.setattr(writing, "MAX_HEADER_BYTES", length)
    write_delta(delta, tmp_path / "just")
    monkeypatch.setattr(writing, "MAX_HEADER_BYTES", length - 1)
    with pytest.raises(DeltaError) as caught:
        write_delta(delta, tmp_path / "over")
    assert caught.value.reason is Reason.BAD_HEADER
    assert sorted(path.name for path in tmp_path.iterdir()) == ["just", "usual"]
