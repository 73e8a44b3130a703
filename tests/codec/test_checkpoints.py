"""Checkpoints: read strictly, compared and patched run by run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import memory_bound
import numpy as np
import pytest
import torch
from torch import Tensor

from refdelta import Delta, DeltaError, Lineage, Reason, TensorPatch, apply_to_checkpoint, diff, read_delta, write_delta
from refdelta.checkpoints.diffing import diff_checkpoints
from refdelta.checkpoints.patching import patch_checkpoint
from refdelta.checkpoints.reading import Checkpoint
from refdelta.digest import state_digest
from refdelta.encode import DeltaEncoder
from tests.codec.checkpoints import INDEX, changed, every_dtype, safetensors, split, write
from tests.codec.support import assert_same, bf16, bytes_of


@pytest.fixture(params=[1 << 21, 48, 8], ids=["whole", "48 bytes", "8 bytes"])
def runs_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes that are streamed at once: tensors come in one run, in several with a rest, in many."""
    monkeypatch.setattr("refdelta.checkpoints.reading.RUN_BYTES", request.param)
    return int(request.param)


def refusal(attempt: Callable[[], object]) -> DeltaError:
    with pytest.raises(DeltaError) as caught:
        attempt()
    return caught.value


# Reading


def test_a_directory_holds_its_shards_tensors(tmp_path: Path) -> None:
    state = every_dtype()
    one, two = split(state, "m.BF16", "odd", "none")
    for index in (True, False):
        with Checkpoint(write(tmp_path / str(index), one, two, index=index)) as checkpoint:
            assert list(checkpoint) == [*one, *two]
            assert_same(dict(checkpoint), {**one, **two})
            assert [shard.name for shard in checkpoint.shards] == ["model-1.safetensors", "model-2.safetensors"]
            assert checkpoint.total_elements == sum(t.numel() for t in state.values())
            assert checkpoint.total_bytes == sum(t.nbytes for t in state.values())
            infos = {name: (info.shape, info.dtype) for name, info in checkpoint.infos().items()}
        assert infos == {name: (tuple(t.shape), t.dtype) for name, t in state.items()}


def test_a_file_is_a_checkpoint(tmp_path: Path) -> None:
    state = every_dtype()
    (tmp_path / "x.safetensors").write_bytes(safetensors(state))
    with Checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.is_file
        assert_same(dict(checkpoint), state)


def test_tensors_come_in_runs(tmp_path: Path, runs_of: int) -> None:
    state = every_dtype()
    with Checkpoint(write(tmp_path / "x", state)) as checkpoint:
        for name, t in state.items():
            runs = list(checkpoint.runs(name))
            starts = [start for start, _ in runs]
            assert starts == list(range(0, t.numel(), runs_of // t.element_size()))
            assert all(run.nbytes <= runs_of for _, run in runs)
            if t.numel():
                joined = np.concatenate([bytes_of(run) for _, run in runs])
                assert np.array_equal(joined, bytes_of(t)), name


def test_shapes_are_known_without_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "x", every_dtype())
    with Checkpoint(folder) as checkpoint:
        monkeypatch.setattr(os, "preadv", None)
        assert checkpoint.infos()["m.F64"].shape == (5, 7)


def test_hub_caches_are_directories_of_links(tmp_path: Path) -> None:
    state = every_dtype()
    real, snapshot = write(tmp_path / "blobs", state), tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for path in real.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    with Checkpoint(snapshot) as checkpoint:
        assert_same(dict(checkpoint), state)


@pytest.mark.parametrize(
    "place",
    [
        *("../model-2.safetensors", "/etc/passwd", "a/../model-2.safetensors", "./model-2.safetensors", "", ".", ".."),
        *("model-2.safetensors/", "a\0b", "a//b", 7, None, ["model-2.safetensors"]),
    ],
)
def test_entries_of_an_index_stay_beside_it(tmp_path: Path, place: object) -> None:
    one, two = split(every_dtype(), "m.BF16")
    folder = write(tmp_path / "d" / "x", one, two)
    (tmp_path / "d" / "model-2.safetensors").write_bytes((folder / "model-2.safetensors").read_bytes())
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["odd"] = place
    (folder / INDEX).write_text(json.dumps(index))
    error = refusal(lambda: Checkpoint(folder))
    assert (error.reason, error.tensor) == (Reason.BAD_METADATA, "odd")


def test_shards_may_lie_deeper(tmp_path: Path) -> None:
    state = every_dtype()
    folder = write(tmp_path / "x", {}, index=False)
    (folder / "deep").mkdir()
    (folder / "deep" / "w.safetensors").write_bytes(safetensors(state))
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, "deep/w.safetensors")}))
    write_delta(Delta((), sum(t.numel() for t in state.values())), tmp_path / "delta")
    apply_to_checkpoint(tmp_path / "delta", folder, tmp_path / "out")
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert_same(dict(checkpoint), state)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", Reason.BAD_METADATA),
        ("[]", Reason.BAD_METADATA),
        ("{}", Reason.BAD_METADATA),
        ('{"weight_map": []}', Reason.BAD_METADATA),
        ('{"weight_map": {}}', Reason.BAD_METADATA),
        ('{"weight_map": {"w": "x"}, "weight_map": {"w": "x"}}', Reason.BAD_METADATA),
        ('{"weight_map": {"": "model-1.safetensors"}}', Reason.BAD_NAME),
        ('{"weight_map": {"w": "model-1.safetensors"}, "x": NaN}', Reason.BAD_METADATA),
        ('{"weight_map": {"w": "none.safetensors"}}', Reason.NOT_A_CHECKPOINT),
        ('{"weight_map": {"w": "other"}}', Reason.UNREADABLE),
        ("[" * 100_000, Reason.BAD_METADATA),
    ],
)
def test_indices_that_are_none(tmp_path: Path, text: str, reason: Reason) -> None:
    folder = write(tmp_path / "x", {"w": torch.zeros(2, 3)})
    (folder / "other").mkdir()
    (folder / INDEX).write_text(text)
    assert refusal(lambda: Checkpoint(folder)).reason is reason


@pytest.mark.parametrize(
    "edit",
    [
        lambda index: index.update(more="model-1.safetensors"),
        lambda index: index.pop("odd"),
        lambda index: index.update(odd="model-2.safetensors"),
    ],
    ids=["tensor that no shard holds", "tensor that the index has not", "tensor of another shard"],
)
def test_shards_hold_what_the_index_says(tmp_path: Path, edit: Callable[[dict[str, str]], object]) -> None:
    one, two = split(every_dtype(), "odd", "scalar")
    folder = write(tmp_path / "x", one, two)
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    error = refusal(lambda: Checkpoint(folder))
    assert error.reason is Reason.KEYS_MISMATCH
    assert error.tensor in ("odd", "more")


def test_without_an_index_names_stand_in_one_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {"w": torch.zeros(2, 3)}, {"w": torch.zeros(2, 3)}, index=False)
    error = refusal(lambda: Checkpoint(folder))
    assert (error.reason, error.tensor) == (Reason.DUPLICATE_NAME, "w")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "hidden", index=False)
    (tmp_path / "hidden" / "._model.safetensors").write_bytes(b"metadata of a desktop")
    (tmp_path / "gone").symlink_to("nowhere")
    write_delta(Delta((), 3), tmp_path / "delta")
    for name in ("none", "empty", "hidden", "gone", "delta", "nul\0byte"):
        assert refusal(lambda name=name: Checkpoint(tmp_path / name)).reason is Reason.NOT_A_CHECKPOINT, name  # type: ignore[misc]
    os.mkfifo(tmp_path / "fifo")
    assert refusal(lambda: Checkpoint(tmp_path / "fifo")).reason is Reason.UNREADABLE


@pytest.mark.parametrize("name", ["model-1.safetensors", INDEX])
def test_only_regular_files_are_read(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "x", {"w": torch.zeros(2, 3)})
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert refusal(lambda: Checkpoint(folder)).reason is Reason.UNREADABLE


@pytest.mark.parametrize("lost", ["model-1.safetensors", "model-2.safetensors"])
def test_fault_22_a_shard_that_is_missing_is_an_error(tmp_path: Path, lost: str) -> None:
    """A download that skipped a file: refused by name, whether or not the delta reaches it; nothing is written."""
    base, target, _, delta = small(tmp_path)
    source = write(tmp_path / "x", *split(base, "b"))
    apply_to_checkpoint(delta, source, tmp_path / "out")
    (source / lost).unlink()
    for attempt in (
        lambda: apply_to_checkpoint(delta, source, tmp_path / "again"),
        lambda: diff_checkpoints(Checkpoint(source), Checkpoint(write(tmp_path / "t", target))),
    ):
        error = refusal(attempt)
        assert error.reason is Reason.NOT_A_CHECKPOINT
        assert lost in error.detail
    assert not (tmp_path / "again").exists()


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {"w": torch.zeros(2, 3)}, {"v": torch.zeros(4)})
    (folder / "model-2.safetensors").write_bytes((folder / "model-2.safetensors").read_bytes()[:-1])
    error = refusal(lambda: Checkpoint(folder))
    assert error.reason is Reason.BAD_HEADER
    assert "model-2.safetensors" in error.detail


def test_fault_08_sizes_that_wrap_in_a_tensor_without_elements(tmp_path: Path) -> None:
    header = {"w": {"dtype": "U8", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    error = refusal(lambda: Checkpoint(tmp_path / "x.safetensors"))
    assert (error.reason, error.tensor) == (Reason.BAD_SHAPE, "w")


def test_fault_20_files_that_are_pruned_meanwhile_are_read_to_the_end(tmp_path: Path) -> None:
    state = every_dtype()
    folder = write(tmp_path / "x", state)
    with Checkpoint(folder) as checkpoint:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        assert_same(dict(checkpoint), state)


def test_a_file_that_gets_shorter_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {"w": torch.zeros(20, 30)})
    with Checkpoint(folder) as checkpoint:
        os.truncate(folder / "model-1.safetensors", 200)
        assert refusal(lambda: checkpoint["w"]).reason is Reason.UNREADABLE


# Diff


def assert_equal(found: Delta, expected: Delta) -> None:
    assert found.total_elements == expected.total_elements
    assert [patch.name for patch in found.patches] == [patch.name for patch in expected.patches]
    for one, two in zip(found.patches, expected.patches, strict=True):
        assert one.shape == two.shape
        assert one.indices.dtype == two.indices.dtype
        assert one.indices.tolist() == two.indices.tolist()
        assert np.array_equal(bytes_of(one.values), bytes_of(two.values))


def test_the_difference_of_checkpoints_is_that_of_their_states(tmp_path: Path, runs_of: int) -> None:
    """Shards are cut differently, and bytes of every dtype change on both sides of every cut."""
    base = every_dtype()
    target = changed(base, [name for name in base if name not in ("m.F16", "odd")])
    one, two = split(base, "m.I8", "scalar", "none")
    (tmp_path / "t.safetensors").write_bytes(safetensors(target))
    with Checkpoint(write(tmp_path / "b", one, two)) as old, Checkpoint(tmp_path / "t.safetensors") as new:
        assert_equal(diff_checkpoints(old, new), diff(base, target))
        assert diff_checkpoints(old, old).patches == ()


def test_the_lineage_gets_the_digests_of_both_states(tmp_path: Path, runs_of: int) -> None:
    base = every_dtype()
    target = changed(base, ["m.BF16", "scalar", "m.U8"])
    encoder = DeltaEncoder(base, run_id="run", version=4)
    with Checkpoint(write(tmp_path / "b", base)) as old, Checkpoint(write(tmp_path / "t", target)) as new:
        found = diff_checkpoints(old, new, lineage=Lineage("run", 5, 4)).lineage
    assert found == encoder.encode(target).lineage
    assert found is not None
    assert (found.base_digest, found.digest) == (state_digest(base), state_digest(target))


def test_everything_that_differs_between_checkpoints_is_listed(tmp_path: Path) -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(5), "gone": torch.zeros(1)}
    target = {"a": torch.zeros(3, 2), "b": torch.zeros(4).bfloat16(), "c": torch.zeros(5), "new": torch.zeros(1)}
    with Checkpoint(write(tmp_path / "b", base)) as old, Checkpoint(write(tmp_path / "t", target)) as new:
        error = refusal(lambda: diff_checkpoints(old, new))
    assert error.reason is Reason.UNKNOWN_TENSOR
    for finding in ("gone only in base", "new only in target", "a has shape [2, 3]", "b is torch.float32"):
        assert finding in error.detail
    assert "c " not in error.detail.replace("float32 in base", "")


# Apply


def test_shards_keep_all_but_the_changed_elements(tmp_path: Path, runs_of: int) -> None:
    """Names, order, dtypes, header metadata and padding: the files are those of the target, made in the same way."""
    base = every_dtype()
    target = changed(base)
    cut = ("m.F4", "m.BOOL", "none", "odd", "scalar")
    others = {"config.json": "{}", "tokenizer.model": "x", "sub/deep/notes.txt": "y"}
    write_delta(diff(base, target), tmp_path / "delta")
    source = write(tmp_path / "b", *split(base, *cut), others=others)
    expected = write(tmp_path / "t", *split(target, *cut), others=others)
    apply_to_checkpoint(tmp_path / "delta", source, tmp_path / "out")
    assert files(tmp_path / "out") == files(expected)
    assert files(source) == files(write(tmp_path / "again", *split(base, *cut), others=others)), "the source changed"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_fault_18_what_apply_writes_is_a_whole_checkpoint(tmp_path: Path) -> None:
    """Tensors and shards that the delta does not touch are there too: it can stand in for an anchor."""
    base = {"a": bf16(1, 2, 3).view(1, 3), "b": torch.arange(6.0).view(2, 3), "c": torch.ones(4, 2)}
    target = changed(base, ["a"])
    source = write(tmp_path / "base", *split(base, "b"))
    apply_to_checkpoint(write_delta(diff(base, target), tmp_path / "delta"), source, tmp_path / "out")
    assert sorted(files(tmp_path / "out")) == sorted(files(source))
    with Checkpoint(tmp_path / "out") as out:
        assert_same(dict(out), target)


def test_a_file_becomes_a_file(tmp_path: Path) -> None:
    base = every_dtype()
    target = changed(base, ["m.F32"])
    for name, state in (("b", base), ("t", target)):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors(state, {"k": "v"}, padding=5))
    write_delta(diff(base, target), tmp_path / "delta")
    apply_to_checkpoint(tmp_path / "delta", tmp_path / "b.safetensors", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "t.safetensors").read_bytes()


def small(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], Path, Path]:
    """base, target, the base's directory, the delta's."""
    base = {"a": torch.arange(6.0).reshape(2, 3), "b": bf16(1, 2, 3, 4, 5)}
    target = changed(base)
    source = write(tmp_path / "base", base, others={"config.json": "{}"})
    return base, target, source, write_delta(diff(base, target), tmp_path / "delta")


def test_weights_that_the_delta_does_not_reach_are_left_out_and_named(tmp_path: Path) -> None:
    _, target, source, delta = small(tmp_path)
    for name in (
        "consolidated.safetensors",
        "pytorch_model.bin",
        "x.gguf",
        "original/consolidated.00.pth",
        ".git/HEAD",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("old weights")
    (source / ".gitattributes").write_text("kept")
    (source / "link").symlink_to("config.json")
    (source / "gone").symlink_to("nowhere")
    (source / "folder").symlink_to("original")
    os.mkfifo(source / "fifo")
    with Checkpoint(source) as checkpoint:
        left_out = patch_checkpoint(read_delta(delta), checkpoint, tmp_path / "out")
    expected = [".git", "consolidated.safetensors", "fifo", "folder", "gone", "original/consolidated.00.pth"]
    assert sorted(left_out) == [*expected, "pytorch_model.bin", "x.gguf"]
    assert sorted(files(tmp_path / "out")) == [".gitattributes", "config.json", "link", "model-1.safetensors", INDEX]
    assert not (tmp_path / "out" / "link").is_symlink()
    with Checkpoint(tmp_path / "out") as out:
        assert_same(dict(out), target)


def test_without_an_index_every_safetensors_file_is_a_shard(tmp_path: Path) -> None:
    base, target, _, delta = small(tmp_path)
    source = write(tmp_path / "x", *split(base, "b"), index=False)
    apply_to_checkpoint(delta, source, tmp_path / "out")
    with Checkpoint(tmp_path / "out") as out:
        assert_same(dict(out), target)


def test_all_that_does_not_fit_is_listed_and_nothing_written(tmp_path: Path) -> None:
    patches = (
        TensorPatch("a", (3, 2), torch.tensor([0]), torch.tensor([1.0])),
        TensorPatch("b", (5,), torch.tensor([0]), torch.tensor([1.0])),
        TensorPatch("c", (1,), torch.tensor([0]), torch.tensor([1.0])),
    )
    _, _, source, _ = small(tmp_path)
    delta = write_delta(Delta(patches, 12), tmp_path / "bad")
    before = sorted(os.listdir(tmp_path))
    error = refusal(lambda: apply_to_checkpoint(delta, source, tmp_path / "out"))
    assert error.reason is Reason.SHAPE_MISMATCH
    for finding in ("a has shape [2, 3]", "b is torch.bfloat16", "c is not in the checkpoint"):
        assert finding in error.detail
    assert sorted(os.listdir(tmp_path)) == before


def test_an_existing_output_is_refused(tmp_path: Path) -> None:
    _, target, source, delta = small(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    (tmp_path / "link").symlink_to(source)
    for name in ("file", "mine", "link", "base"):
        for overwrite in (False, True) if name != "base" else (False,):
            error = refusal(lambda n=name, o=overwrite: apply_to_checkpoint(delta, source, tmp_path / n, overwrite=o))  # type: ignore[misc]
            assert error.reason is Reason.TARGET_EXISTS, name
    assert (tmp_path / "mine" / "letter").read_text() == "dear"
    apply_to_checkpoint(delta, source, source, overwrite=True)
    with Checkpoint(source) as found:
        assert_same(dict(found), target)
    assert (source / "config.json").read_text() == "{}"
    assert sorted(os.listdir(tmp_path)) == ["base", "delta", "file", "link", "mine"]


def test_fault_10_a_checkpoint_in_use_is_replaced_and_not_written_into(tmp_path: Path) -> None:
    base, _, source, delta = small(tmp_path)
    with Checkpoint(source) as held:
        apply_to_checkpoint(delta, source, source, overwrite=True)
        assert_same(dict(held), base)


@pytest.mark.parametrize("out", ["base/out", "."])
def test_an_output_inside_or_around_the_checkpoint_is_refused(tmp_path: Path, out: str) -> None:
    _, _, source, delta = small(tmp_path)
    error = refusal(lambda: apply_to_checkpoint(delta, source, tmp_path / out, overwrite=True))
    assert error.reason is Reason.BAD_OPTION
    assert sorted(os.listdir(source)) == sorted(["config.json", "model-1.safetensors", INDEX])


def with_lineage(tmp_path: Path, **over: object) -> Path:
    _, target, source, _ = small(tmp_path)
    with Checkpoint(source) as old, Checkpoint(write(tmp_path / "t", target)) as new:
        delta = diff_checkpoints(old, new, lineage=Lineage("run", 2, 1))
    assert delta.lineage is not None
    fields = {name: getattr(delta.lineage, name) for name in ("base_digest", "digest")} | over
    return write_delta(Delta(delta.patches, delta.total_elements, Lineage("run", 2, 1, **fields)), tmp_path / "lined")


@pytest.mark.parametrize("runs", [8, 1 << 21])
def test_fault_15_a_delta_of_another_base_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    monkeypatch.setattr("refdelta.checkpoints.reading.RUN_BYTES", runs)
    delta = with_lineage(tmp_path)
    apply_to_checkpoint(delta, tmp_path / "base", tmp_path / "out")
    error = refusal(lambda: apply_to_checkpoint(delta, tmp_path / "out", tmp_path / "twice"))
    assert error.reason is Reason.BASE_MISMATCH
    assert "version 1 of run run" in error.detail
    assert not (tmp_path / "twice").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_delta_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    wrong: dict[str, object] = {"digest": "rd1:0000000000000001"}
    for number, over in enumerate((wrong, {**wrong, "base_digest": None})):
        place = tmp_path / str(number)
        place.mkdir()
        delta = with_lineage(place, **over)
        error = refusal(lambda p=place, d=delta: apply_to_checkpoint(d, p / "base", p / "out"))  # type: ignore[misc]
        assert error.reason is Reason.DIGEST_MISMATCH
        assert not (place / "out").exists()


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    _, _, source, _ = small(tmp_path)
    part = write_delta(Delta((), 11, Lineage("run", 1, part=(0, 2))), tmp_path / "part")
    assert refusal(lambda: apply_to_checkpoint(part, source, tmp_path / "out")).reason is Reason.INCOMPLETE


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """A full disk shows when data is synced: the shard, the index, config.json, the directory."""
    _, _, source, delta = small(tmp_path)
    before, calls, fsync = sorted(os.listdir(tmp_path)), [], os.fsync

    def full(fd: int) -> None:
        calls.append(fd)
        if len(calls) == call:
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    error = refusal(lambda: apply_to_checkpoint(delta, source, tmp_path / "out"))
    assert error.reason is Reason.WRITE_FAILED
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.nightly
def test_memory_stays_within_one_tensor_the_delta_and_256_mib(tmp_path: Path) -> None:
    """What `scripts/memory_bound.py` shows on 2 GiB, on checkpoints that are larger than the bound leaves room for."""
    assert memory_bound.measure(tmp_path, mib=320, density_pct=1.0)


def test_the_memory_script_sees_a_command_that_holds_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hoard = memory_bound.CHILD.replace("code = run", "hoard = bytearray(b'x') * (400 << 20)\ncode = run")
    monkeypatch.setattr(memory_bound, "CHILD", hoard)
    assert not memory_bound.measure(tmp_path, mib=64, density_pct=1.0)
    assert "ABOVE" in capsys.readouterr().out
