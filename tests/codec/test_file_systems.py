"""File systems that lack an operation: what is written all the same, and what a reader sees of it.

Errors are put in where Python calls the operating system. The last tests are on a real overlay, where one can be made.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refdelta import DELTA_FILE, METADATA_FILE, Delta, DeltaError, Reason, TensorPatch, apply_to_checkpoint, write_delta
from refdelta.checkpoints.reading import INDEX_FILE, Checkpoint
from refdelta.files import atomic as files
from refdelta.files import opening
from tests.codec.versioned import refusal, version_at, versioned

WITHOUT_SYNC = [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS]
WITHOUT_FLAGS = [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM]


# Things to write: a delta, and checkpoints in the forms that they have


@dataclass(frozen=True, slots=True)
class Thing:
    """What lies at `target` and is to be replaced."""

    target: Path
    write: Callable[[], object]
    """Replaces version 1 by version 2."""
    look: Callable[[], int | None]
    """The version at `target`, None where there is nothing; raises for anything else."""


def a_delta(folder: Path) -> Thing:
    target = folder / "d"
    write_delta(versioned(1), target)
    return Thing(target, lambda: write_delta(versioned(2), target, overwrite=True), lambda: looked(target, version_at))


def looked(target: Path, version: Callable[[Path], int]) -> int | None:
    try:
        return version(target)
    except DeltaError as error:
        if error.reason in (Reason.NOT_A_DELTA, Reason.NOT_A_CHECKPOINT):
            return None
        raise


def a_checkpoint(folder: Path, shards: tuple[str, ...], *, index: bool) -> Thing:
    """One tensor a shard, each full of the version; a tokenizer beside them."""
    target, change = folder / "checkpoint", folder / "change"
    names = {f"w{number}": shard for number, shard in enumerate(shards)}
    for name, shard in names.items():
        (target / shard).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: torch.full((2, 3), 1.0)}, target / shard)
    (target / "tokenizer").mkdir()
    (target / "tokenizer" / "vocabulary.json").write_text("{}")
    (target / "a.json").write_text("{}")
    if index:
        (target / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    patches = tuple(TensorPatch(name, (2, 3), torch.arange(6), torch.full((6,), 2.0)) for name in names)
    write_delta(Delta(patches, 6 * len(names)), change)

    def version(path: Path) -> int:
        with Checkpoint(path) as found:
            versions = {value for name in found for value in found[name].flatten().tolist()}
            assert found.keys() == names.keys(), "seen in part"
        assert len(versions) == 1, f"a mixture: {versions}"
        return int(versions.pop())

    return Thing(
        target, lambda: apply_to_checkpoint(change, target, target, overwrite=True), lambda: looked(target, version)
    )


THINGS: dict[str, Callable[[Path], Thing]] = {
    "delta": a_delta,
    "checkpoint of one file": lambda folder: a_checkpoint(folder, ("model.safetensors",), index=False),
    "checkpoint with an index": lambda folder: a_checkpoint(folder, ("a.safetensors", "b.safetensors"), index=True),
    "checkpoint with shards below": lambda folder: a_checkpoint(
        folder, ("x/a.safetensors", "y.safetensors"), index=True
    ),
}


@pytest.fixture(params=list(THINGS.values()), ids=list(THINGS))
def thing(request: pytest.FixtureRequest, tmp_path: Path) -> Thing:
    make: Callable[[Path], Thing] = request.param
    return make(tmp_path)


# fsync


def without_sync(monkeypatch: pytest.MonkeyPatch, number: int, which: Callable[[str], bool]) -> list[str]:
    """`os.fsync` answers ``number`` for the paths that ``which`` chooses; the list of those."""
    refused, fsync = [], os.fsync

    def answer(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if which(path):
            refused.append(path)
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", answer)
    return refused


@pytest.mark.parametrize("number", WITHOUT_SYNC)
def test_directories_that_cannot_be_synced(thing: Thing, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    refused = without_sync(monkeypatch, number, os.path.isdir)
    thing.write()
    assert thing.look() == 2
    assert str(thing.target.parent) in refused
    assert not list(thing.target.parent.glob(".*"))


@pytest.mark.parametrize("number", WITHOUT_SYNC)
def test_nothing_that_can_be_synced(thing: Thing, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    without_sync(monkeypatch, number, lambda _: True)
    thing.write()
    assert thing.look() == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("what", ["a file", "its directory"])
def test_a_sync_that_fails_is_a_failure(thing: Thing, monkeypatch: pytest.MonkeyPatch, number: int, what: str) -> None:
    which = os.path.isfile if what == "a file" else os.path.isdir
    without_sync(monkeypatch, number, lambda path: which(path) and path != str(thing.target.parent))
    error = refusal(thing.write)
    assert (error.reason, os.strerror(number) in error.detail) == (Reason.WRITE_FAILED, True)
    assert thing.look() == 1
    assert not list(thing.target.parent.glob(".*"))


def test_a_sync_that_fails_after_the_move_says_what_is_there(thing: Thing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too late to undo: what is at the target is whole, and may not survive a power failure."""
    without_sync(monkeypatch, errno.EIO, lambda path: path == str(thing.target.parent))
    error = refusal(thing.write)
    assert error.reason is Reason.WRITE_FAILED
    assert error.detail.startswith(f"{thing.target} is there and whole, but {thing.target.parent} could not be synced")
    assert thing.look() == 2
    assert not list(thing.target.parent.glob(".*"))


def test_a_parent_that_may_be_written_but_not_read(thing: Thing, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def answer(path: str | Path, flags: int, *rest: int, **more: int) -> int:
        if Path(path) == thing.target.parent:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", answer)
    thing.write()
    assert thing.look() == 2


# renameat2


def without_flags(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "_rename", refuse)


@pytest.mark.parametrize("number", WITHOUT_FLAGS)
def test_without_exchange(thing: Thing, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    without_flags(monkeypatch, number)
    seen = watched(thing, monkeypatch)
    thing.write()
    assert seen == [1, None, 2]
    assert not list(thing.target.parent.glob(".*"))


@pytest.mark.parametrize("number", WITHOUT_FLAGS)
def test_without_exchange_a_file_is_replaced_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    thing = a_checkpoint(tmp_path, ("model.safetensors",), index=False)
    source, target = thing.target / "model.safetensors", tmp_path / "file.safetensors"
    without_flags(monkeypatch, number)
    apply_to_checkpoint(tmp_path / "change", source, target)
    assert refusal(lambda: apply_to_checkpoint(tmp_path / "change", source, target)).reason is Reason.TARGET_EXISTS
    before = target.read_bytes()
    target.write_bytes(source.read_bytes())
    apply_to_checkpoint(tmp_path / "change", source, target, overwrite=True)
    assert target.read_bytes() == before
    assert target.stat().st_nlink == 1
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("links", [True, False])
def test_without_flags_a_file_that_appears_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """It stays where the file system has hard links; a plain rename would replace it."""
    source = a_checkpoint(tmp_path, ("model.safetensors",), index=False).target / "model.safetensors"
    target = tmp_path / "file.safetensors"

    def late(_: Path, moved_to: Path, __: int) -> None:
        moved_to.write_text("mine")
        raise OSError(errno.EINVAL, "Invalid argument")

    def no_link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files, "_rename", late)
    if not links:
        monkeypatch.setattr(os, "link", no_link)
        apply_to_checkpoint(tmp_path / "change", source, target)
        assert target.read_bytes() != b"mine"
        return
    assert refusal(lambda: apply_to_checkpoint(tmp_path / "change", source, target)).reason is Reason.TARGET_EXISTS
    assert target.read_text() == "mine"


def test_where_the_second_rename_fails_the_first_is_undone(thing: Thing, monkeypatch: pytest.MonkeyPatch) -> None:
    without_flags(monkeypatch, errno.ENOSYS)
    failing_move(monkeypatch, thing.target, lambda source: source.name == "new")
    error = refusal(thing.write)
    assert (error.reason, error.detail) == (Reason.WRITE_FAILED, f"{thing.target}: Input/output error")
    assert thing.look() == 1
    assert not list(thing.target.parent.glob(".*"))


def test_what_cannot_be_put_back_is_kept_and_named(thing: Thing, monkeypatch: pytest.MonkeyPatch) -> None:
    without_flags(monkeypatch, errno.ENOSYS)
    failing_move(monkeypatch, thing.target, lambda source: True)
    error = refusal(thing.write)
    (staging,) = thing.target.parent.glob(".*.tmp")
    assert error.detail == f"{thing.target}: Input/output error; what was there lies in {staging}/old"
    assert thing.look() is None
    monkeypatch.undo()
    os.utime(staging, (0, 0))
    files._remove_leftovers(thing.target)
    (staging / "old").rename(thing.target)
    assert thing.look() == 1


def failing_move(monkeypatch: pytest.MonkeyPatch, target: Path, which: Callable[[Path], bool]) -> None:
    """Nothing that ``which`` chooses can be moved to the target."""
    rename = os.rename

    def answer(source: Path, moved_to: Path) -> None:
        if Path(moved_to) == target and which(Path(source)):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, moved_to)

    monkeypatch.setattr(os, "rename", answer)


def test_without_exchange_of_several_writers_each_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds another one's in the gap between two renames tries again."""
    without_flags(monkeypatch, errno.EINVAL)
    target, failures = write_delta(versioned(0), tmp_path / "d"), []

    def write(version: int) -> None:
        for _ in range(25):
            try:
                write_delta(versioned(version), target, overwrite=True)
            except DeltaError as error:
                failures.append(str(error))

    writers = [threading.Thread(target=write, args=(version,)) for version in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failures == []
    assert 0 <= version_at(target) < 4
    assert os.listdir(tmp_path) == ["d"]


def test_another_writer_in_the_gap_is_replaced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with the gap held open; what is no delta stays, and so does what was there before."""
    without_flags(monkeypatch, errno.EINVAL)
    target, rename = write_delta(versioned(1), tmp_path / "d"), os.rename
    appearing: list[Callable[[], object]] = []

    def gap(source: Path, moved_to: Path) -> None:
        if Path(moved_to) == target and appearing:
            appearing.pop()()
        rename(source, moved_to)

    monkeypatch.setattr(os, "rename", gap)
    appearing.append(lambda: write_delta(versioned(3), target))
    write_delta(versioned(2), target, overwrite=True)
    assert version_at(target) == 2
    assert os.listdir(tmp_path) == ["d"]

    def strangers() -> None:
        target.mkdir()
        (target / "letter").write_text("dear")

    appearing.append(strangers)
    error = refusal(lambda: write_delta(versioned(4), target, overwrite=True))
    assert error.reason is Reason.TARGET_EXISTS
    assert os.listdir(target) == ["letter"]
    (old,) = tmp_path.glob(".d.*.tmp/old")
    assert version_at(old) == 2


# Directories of a lower layer (overlay), which cannot be moved


@pytest.fixture
def overlay(thing: Thing, monkeypatch: pytest.MonkeyPatch) -> Thing:
    """The thing in a lower layer."""
    return in_lower_layer(thing, monkeypatch)


def in_lower_layer(thing: Thing, monkeypatch: pytest.MonkeyPatch) -> Thing:
    exchange, rename, lower = files._rename, os.rename, thing.target.stat().st_ino

    def refuse(*paths: Path) -> None:
        if any(os.path.isdir(path) and os.stat(path).st_ino == lower for path in paths):
            raise OSError(errno.EXDEV, "Invalid cross-device link")

    def moved(source: Path, target: Path) -> None:
        refuse(source)
        rename(source, target)

    def exchanged(source: Path, target: Path, flag: int) -> None:
        refuse(source, target)
        exchange(source, target, flag)

    monkeypatch.setattr(os, "rename", moved)
    monkeypatch.setattr(files, "_rename", exchanged)
    return thing


def watched(thing: Thing, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What a reader sees, changes alone, before and after each step by which files go and come."""
    seen = [thing.look()]

    def look() -> None:
        if (state := thing.look()) != seen[-1]:
            seen.append(state)

    def stepped(real: Callable[..., object]) -> Callable[..., None]:
        def step(*arguments: object, **more: object) -> None:
            look()
            real(*arguments, **more)
            look()

        return step

    for name in ("unlink", "rmdir", "rename"):
        monkeypatch.setattr(os, name, stepped(getattr(os, name)))
    return seen


def test_a_lower_layer_is_emptied_and_replaced(overlay: Thing, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(overlay, monkeypatch)
    overlay.write()
    assert seen == [1, None, 2]
    assert not list(overlay.target.parent.glob(".*"))


def test_a_reader_that_holds_the_lower_one_never_sees_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it read, then replaced: it starts again and reads the new one."""
    thing = in_lower_layer(a_delta(tmp_path), monkeypatch)
    original, opened = opening.open_file, []

    def replacing(path: Path, missing: Reason, name: str | None = None, dir_fd: int | None = None) -> object:
        opened.append(name)
        if len(opened) == 2:  # metadata.json has been read, the payload is next
            thing.write()
        return original(path, missing, name, dir_fd)

    monkeypatch.setattr(opening, "open_file", replacing)
    assert version_at(thing.target) == 2
    assert opened == [METADATA_FILE, DELTA_FILE] * 2


def test_wherever_emptying_ends_one_of_the_two_is_whole(tmp_path: Path) -> None:
    """A writer that fails at each step in turn: the old is at its place, or the new in the staging directory."""
    for name, make in THINGS.items():
        left = []
        for step in range(40):
            folder = tmp_path / f"{name} {step}"
            folder.mkdir()
            with pytest.MonkeyPatch.context() as monkeypatch:
                thing = in_lower_layer(make(folder), monkeypatch)
                done = stopped_at(thing, step, monkeypatch)
            if done:
                break
            left.append(what_is_left(thing))
        assert step < 39
        assert left[0] == "old"
        assert left[-1] == "new in the staging directory"
        assert len(left) > 3


def stopped_at(thing: Thing, step: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Write, with an error before this step of emptying; whether the writing had fewer steps."""
    count, place = iter(range(1000)), thing.target

    def stopping(real: Callable[..., object]) -> Callable[..., object]:
        def answer(path: str | Path, *arguments: object, **more: object) -> object:
            moved_to = Path(str(arguments[0])) if arguments else Path(path)
            inside = place in (Path(path), *Path(path).parents) or moved_to == place or "dir_fd" in more
            if inside and ".tmp" not in str(moved_to) and next(count) == step:
                raise OSError(errno.EIO, "Input/output error")
            return real(path, *arguments, **more)

        return answer

    for name in ("unlink", "rmdir", "rename"):
        monkeypatch.setattr(os, name, stopping(getattr(os, name)))
    try:
        thing.write()
    except DeltaError as error:
        failed = error
    else:
        return True
    assert failed.reason is Reason.WRITE_FAILED
    assert "Input/output error" in failed.detail
    return False


def what_is_left(thing: Thing) -> str:
    """And the next writer of the target must not remove it."""
    if thing.look() is not None:
        assert thing.look() == 1
        return "old"
    (staging,) = thing.target.parent.glob(".*.tmp")
    os.utime(staging, (0, 0))
    files._remove_leftovers(thing.target)
    shutil.rmtree(thing.target, ignore_errors=True)
    (staging / "new").rename(thing.target)
    assert thing.look() == 2
    return "new in the staging directory"


def test_a_failure_while_emptying_says_where_the_new_one_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thing = in_lower_layer(a_delta(tmp_path), monkeypatch)
    rmdir = os.rmdir

    def late(path: str | Path, **more: int) -> None:
        if Path(path) == thing.target:
            (thing.target / "letter").write_text("dear")
        rmdir(path, **more)

    monkeypatch.setattr(os, "rmdir", late)
    error = refusal(thing.write)
    (staging,) = tmp_path.glob(".d.*.tmp")
    assert error.detail.endswith(f"; what was there is gone in part, the new lies in {staging}/new")
    assert version_at(staging / "new") == 2
    assert (thing.target / "letter").read_text() == "dear"


def test_shards_without_an_index_are_not_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of them is a smaller checkpoint, which a reader would take."""
    thing = a_checkpoint(tmp_path, ("a.safetensors", "b.safetensors"), index=False)
    in_lower_layer(thing, monkeypatch)
    error = refusal(thing.write)
    assert error.reason is Reason.WRITE_FAILED
    assert error.detail.endswith("it would be seen in part; remove it before, or write elsewhere")
    assert thing.look() == 1
    assert not list(tmp_path.glob(".*"))


def test_a_mount_point_is_not_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thing = in_lower_layer(a_delta(tmp_path), monkeypatch)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == thing.target)
    assert refusal(thing.write).reason is Reason.WRITE_FAILED
    assert thing.look() == 1


# A real overlay


@pytest.fixture
def mounted(tmp_path: Path) -> Callable[[str], str]:
    """Runs a program in a mount namespace of its own, where ``lower`` is the lower layer of an overlay."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    mount = f"mount -t overlay overlay -o lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    wrapped = ["unshare", "--mount", "sh", "-c", f'{mount} {tmp_path}/merged && exec "$@"', "sh"]
    try:
        probe = subprocess.run([*wrapped, "true"], capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"no overlay can be mounted here: {error}")
    if probe.returncode:
        pytest.skip(f"no overlay can be mounted here: {probe.stderr.strip()}")

    def run(program: str) -> str:
        line = [*wrapped, sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "merged")]
        done = subprocess.run(line, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_on_a_real_overlay(mounted: Callable[[str], str], tmp_path: Path) -> None:
    for make in THINGS.values():
        folder = tmp_path / "lower" / str(len(os.listdir(tmp_path / "lower")))
        folder.mkdir()
        make(folder)
    found = mounted(
        """
        import os, sys
        from pathlib import Path
        from refdelta import apply_to_checkpoint, read_delta
        from refdelta.files import opening
        from refdelta.checkpoints.reading import Checkpoint
        from tests.codec.test_file_systems import version_at, versioned, write_delta

        merged = Path(sys.argv[1])
        target = merged / "0" / "d"
        try:
            target.rename(merged / "elsewhere")
        except OSError as error:
            print(error.strerror)
        with opening.Folder(target) as held:
            held.open("metadata.json").close()
            write_delta(versioned(2), target, overwrite=True)
            assert not held.is_current()
            print(os.listdir(held.fd))
        print(version_at(target))
        write_delta(versioned(3), target, overwrite=True)
        print(version_at(target))
        for number in ("1", "2", "3"):
            place = merged / number / "checkpoint"
            apply_to_checkpoint(merged / number / "change", place, place, overwrite=True)
            with Checkpoint(place) as after:
                print({value for name in after for value in after[name].flatten().tolist()})
            print(sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()))
        print([str(path) for path in merged.rglob(".*")])
        """
    )
    indexed = [INDEX_FILE, "tokenizer/vocabulary.json"]
    assert found.splitlines() == [
        "Invalid cross-device link",
        "[]",
        "2",
        "3",
        "{2.0}",
        "['a.json', 'model.safetensors', 'tokenizer/vocabulary.json']",
        "{2.0}",
        str(["a.json", "a.safetensors", "b.safetensors", *indexed]),
        "{2.0}",
        str(["a.json", *indexed, "x/a.safetensors", "y.safetensors"]),
        "[]",
    ]
