"""What writers leave that are killed, that fail, or that meet; what readers see meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import kill_writer
import pytest

from refdelta import DELTA_FILE, DeltaError, Reason, read_delta, write_delta
from refdelta.checkpoints.reading import Checkpoint
from refdelta.files import atomic as files
from refdelta.files import opening
from tests.codec.versioned import refusal, version_at, versioned


def test_kills_leave_the_old_or_the_new_and_nothing_between(tmp_path: Path) -> None:
    """Real ones; `scripts/kill_writer.py` makes as many as it is asked for."""
    tally = kill_writer.run(kills=24, seed=3, directory=tmp_path)
    assert tally.failures == []
    assert tally.kills == 24
    assert {what.split(":")[0] for what in tally.left} == {scene.name for scene in scenes_of(tmp_path)}
    assert sum(tally.seen.values()) > 100, "nobody was reading"


def scenes_of(tmp_path: Path) -> list[kill_writer.Scene]:
    return kill_writer.scenes(tmp_path / "again")


def test_any_line_of_a_writing_can_be_the_last(tmp_path: Path) -> None:
    """A kill before one line after the other, of a delta that replaces another one; before all of the last ones."""
    scene = scenes_of(tmp_path)[1]
    scene.prepare()
    lines = kill_writer.lines_of(scene.write)
    assert lines > 50
    states = []
    for line in (*range(1, lines - 40, 7), *range(lines - 40, lines + 1)):
        kill_writer.put_back(scene)
        child = os.fork()
        if not child:
            kill_writer._traced(scene.write, line)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        states.append(scene.look())
    assert set(states) == {"old", "new"}
    assert states == sorted(states, reverse=True), f"once the new one is there, it stays: {states}"


def test_readers_see_whole_deltas_while_they_are_replaced(tmp_path: Path) -> None:
    target, done, seen, failures = tmp_path / "d", threading.Event(), set(), []
    write_delta(versioned(0, 4000), target)

    def watch() -> None:
        while not done.is_set():
            try:
                patch = read_delta(target).patches[0]
                seen.add((version_at(target) >= 0, len(set(patch.values.tolist()))))
            except DeltaError as error:
                failures.append(str(error))

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for version in range(1, 60):
        write_delta(versioned(version, 4000), target, overwrite=True)
    done.set()
    for watcher in watchers:
        watcher.join()
    assert failures == []
    assert seen == {(True, 1)}, "values of two versions in one delta"
    assert version_at(target) == 59


def test_a_reader_starts_again_where_the_delta_was_replaced_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_delta(versioned(1), tmp_path / "d")
    opened: list[str] = []
    original = opening.open_file

    def replacing(path: Path, missing: Reason, name: str | None = None, dir_fd: int | None = None) -> object:
        opened.append(str(name))
        if len(opened) == 2:  # metadata.json has been read, the payload is next
            write_delta(versioned(2), target, overwrite=True)
        return original(path, missing, name, dir_fd)

    monkeypatch.setattr(opening, "open_file", replacing)
    assert version_at(target) == 2
    assert len(opened) == 4


def test_fault_20_a_delta_that_is_pruned_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it read, the rest gone: no delta, and no waiting for another one."""
    target = write_delta(versioned(1), tmp_path / "d")
    original = opening.open_file

    def pruning(path: Path, missing: Reason, name: str | None = None, dir_fd: int | None = None) -> object:
        if name == DELTA_FILE:
            for held in target.iterdir():
                held.unlink()
            target.rmdir()
        return original(path, missing, name, dir_fd)

    monkeypatch.setattr(opening, "open_file", pruning)
    assert refusal(lambda: read_delta(target)).reason is Reason.NOT_A_DELTA


# Targets


def test_only_deltas_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / DELTA_FILE).write_text("x")
    (tmp_path / "mine" / "letter").write_text("dear")
    (tmp_path / "empty").mkdir()
    real = write_delta(versioned(1), tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    for name in ("file", "mine", "link"):
        write = partial(write_delta, versioned(2), tmp_path / name, overwrite=True)
        assert refusal(write).reason is Reason.TARGET_EXISTS, name
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "mine" / "letter").read_text() == "dear"
    assert version_at(real) == 1
    for name in ("empty", "real", "new"):
        write_delta(versioned(2), tmp_path / name, overwrite=True)
        assert version_at(tmp_path / name) == 2
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_writers_one_wins(tmp_path: Path, overwrite: bool) -> None:
    """Without being asked nobody replaces what the other one has just written."""
    target, outcomes = tmp_path / "d", []
    barrier = threading.Barrier(4)

    def write(version: int) -> None:
        barrier.wait()
        try:
            write_delta(versioned(version), target, overwrite=overwrite)
            outcomes.append("written")
        except DeltaError as error:
            outcomes.append(error.reason.value)

    writers = [threading.Thread(target=write, args=(version,)) for version in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    refused = 0 if overwrite else 3
    assert sorted(outcomes) == ["target_exists"] * refused + ["written"] * (4 - refused)
    assert 0 <= version_at(target) < 4
    assert os.listdir(tmp_path) == ["d"]


def test_an_empty_directory_that_appears_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain rename would replace it."""
    target, rename = tmp_path / "d", files._rename

    def late(source: Path, moved_to: Path, flag: int) -> None:
        target.mkdir()
        rename(source, moved_to, flag)

    monkeypatch.setattr(files, "_rename", late)
    assert refusal(lambda: write_delta(versioned(1), target)).reason is Reason.TARGET_EXISTS
    assert list(target.iterdir()) == []
    assert os.listdir(tmp_path) == ["d"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EPERM])
@pytest.mark.parametrize("libc", ["refuses the flags", "has no such call"])
def test_file_systems_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, libc: str) -> None:
    """The same outcome by plain renames; for a moment there is no delta."""
    if libc == "has no such call":
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    else:

        def refuse(*_: object) -> None:
            raise OSError(number, "not here")

        monkeypatch.setattr(files, "_rename", refuse)
    target = tmp_path / "d"
    write_delta(versioned(1), target)
    assert refusal(lambda: write_delta(versioned(2), target)).reason is Reason.TARGET_EXISTS
    assert version_at(target) == 1
    write_delta(versioned(2), target, overwrite=True)
    assert version_at(target) == 2
    assert os.listdir(tmp_path) == ["d"]


# What is left


def left_over(tmp_path: Path, age_s: float) -> Path:
    """What a writer of ``d`` leaves that is killed just before the rename."""
    staging = tmp_path / ".d.0123456789abcdef.tmp"
    staging.mkdir()
    write_delta(versioned(7), staging / "new")
    os.utime(staging, (time.time() - age_s,) * 2)
    return staging


def test_what_is_left_is_no_delta_and_no_checkpoint(tmp_path: Path) -> None:
    staging = left_over(tmp_path, 0)
    assert refusal(lambda: read_delta(staging)).reason is Reason.NOT_A_DELTA
    assert refusal(lambda: Checkpoint(staging)).reason is Reason.NOT_A_CHECKPOINT


def test_the_next_writer_of_the_target_removes_what_is_left_and_old(tmp_path: Path) -> None:
    staging = left_over(tmp_path, files.LEFTOVER_AGE_S + 10)
    others = tmp_path / ".e.0123456789abcdef.tmp"
    others.mkdir()
    os.utime(others, (0, 0))
    write_delta(versioned(1), tmp_path / "d")
    assert not staging.exists()
    assert others.exists(), "another target's"


def test_what_may_be_in_use_stays(tmp_path: Path) -> None:
    """Young, locked by its writer, or holding what was replaced."""
    young = left_over(tmp_path, files.LEFTOVER_AGE_S - 600)
    write_delta(versioned(1), tmp_path / "d")
    assert young.exists()
    os.utime(young, (0, 0))
    fd = os.open(young, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    write_delta(versioned(2), tmp_path / "d", overwrite=True)
    assert young.exists()
    os.close(fd)
    (young / "old").mkdir()
    os.utime(young, (0, 0))
    write_delta(versioned(3), tmp_path / "d", overwrite=True)
    assert young.exists()
    (young / "old").rmdir()
    os.utime(young, (0, 0))
    write_delta(versioned(4), tmp_path / "d", overwrite=True)
    assert not young.exists()


def test_a_writer_holds_its_lock_to_the_end(tmp_path: Path) -> None:
    with files.new_directory(tmp_path / "d") as place:
        os.utime(place.parent, (0, 0))
        write_delta(versioned(1), tmp_path / "d")
        assert place.parent.exists(), "taken for a leftover while its writer is at work"
        (tmp_path / "d" / DELTA_FILE).unlink()
        (tmp_path / "d" / "metadata.json").unlink()
        (tmp_path / "d").rmdir()
    assert os.listdir(tmp_path) == ["d"]
