"""What the file system refuses is refused with the reason of what it is, whichever of the reader's calls it refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refdelta import Delta, DeltaError, Reason, TensorPatch, read_delta, write_delta
from refdelta.checkpoints.reading import Checkpoint
from tests.codec.checkpoints import write

BROKEN = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE)
"""Something is there and cannot be read."""

CALLS = ("open", "stat", "fstat", "listdir", "preadv")
"""What readers ask of `os`."""


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    patch = TensorPatch("w", (2, 3), torch.tensor([1, 5], dtype=torch.int32), torch.tensor([1.0, 2.0]))
    return write_delta(Delta((patch,), 6), tmp_path / "delta")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", {"w": torch.zeros(2, 3)})


def outcome(read: Callable[[], object]) -> DeltaError | None:
    """How it was refused, if it was."""
    try:
        read()
    except DeltaError as found:
        return found
    return None


def refusal(read: Callable[[], object]) -> DeltaError:
    found = outcome(read)
    assert found is not None
    return found


def fail(patch: pytest.MonkeyPatch, call: str, number: int, after: int) -> list[int]:
    """Make every use of ``os.<call>`` fail from the one numbered ``after`` on; how many did, once it was used."""
    real, uses, failures = getattr(os, call), [0], [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        uses[0] += 1
        if uses[0] <= after:
            return real(*args, **kwargs)
        failures[0] += 1
        assert failures[0] < 1000, "the readers try again without end"
        raise OSError(number, os.strerror(number), args[0] if isinstance(args[0], str | Path) else None)

    patch.setattr(os, call, failing)
    return failures


@pytest.mark.parametrize("number", BROKEN, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_there_and_cannot_be_read(delta: Path, checkpoint: Path, call: str, number: int) -> None:
    """At every call of the readers, the first, the second and so on: unreadable, with the system's words."""
    one_file = checkpoint / "model-1.safetensors"
    for read in (lambda: read_delta(delta), lambda: _whole(checkpoint), lambda: _whole(one_file)):
        for after in range(100):
            with pytest.MonkeyPatch.context() as patch:
                failures = fail(patch, call, number, after)
                found = outcome(read)
            if found is None:
                assert after or not failures[0], "one that failed from the first on, and that nobody needs"
            else:
                assert (found.reason, os.strerror(number) in found.detail) == (Reason.UNREADABLE, True)
            if not failures[0]:
                break
        else:
            raise AssertionError("the readers call it without end")


def _whole(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(path) as source:
        return dict(source)


def test_every_call_is_used(delta: Path, checkpoint: Path) -> None:
    """The test above would pass if the readers used none of the calls."""
    for call in CALLS:
        with pytest.MonkeyPatch.context() as patch:
            failures = fail(patch, call, errno.EIO, 0)
            assert outcome(lambda: read_delta(delta)) or outcome(lambda: _whole(checkpoint))
            assert failures[0], call


def test_a_bad_delta_at_a_path_that_cannot_be_looked_at_again(delta: Path, checkpoint: Path) -> None:
    """Readers look whether another one was put in its place meanwhile; where that cannot be told, it is refused."""
    (delta / "metadata.json").write_text("{")
    (checkpoint / "model-1.safetensors").write_bytes(b"x")
    for read, reason in ((lambda: read_delta(delta), "bad_metadata"), (lambda: _whole(checkpoint), "bad_header")):
        with pytest.MonkeyPatch.context() as patch:
            fail(patch, "stat", errno.EIO, 0 if reason == "bad_metadata" else 1)
            assert refusal(read).reason == reason


def test_files_that_cannot_be_closed_were_read(delta: Path, checkpoint: Path) -> None:
    """Some file systems (of FUSE) answer a close with an error. What was read was read."""
    real = os.close

    def close(fd: int) -> None:
        real(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "close", close)
        assert read_delta(delta).changed_elements == 2
        assert list(_whole(checkpoint)) == ["w"]
    with Checkpoint(checkpoint) as source:
        real(source.shards[0].file.fileno())  # so that its own close fails


@pytest.mark.parametrize(
    ("name", "says"),
    [("n" * 5000, "too long"), ("n" * 300, "too long"), ("a\0b", "null"), ("a\ud800b", "surrogates"), ("none", "")],
    ids=["path", "component", "NUL", "surrogate", "absent"],
)
def test_names_that_nothing_can_have(tmp_path: Path, name: str, says: str) -> None:
    """Nothing is there, and nothing can be: the reason is that of what is missing."""
    found = refusal(lambda: read_delta(tmp_path / name))
    assert found.reason is Reason.NOT_A_DELTA
    assert says in found.detail
    for path in (tmp_path / name, tmp_path / name / "x"):
        found = refusal(lambda path=path: Checkpoint(path))  # type: ignore[misc]
        assert found.reason is Reason.NOT_A_CHECKPOINT
        assert says in found.detail
        assert len(found.detail) < 1000


def test_links_that_lead_nowhere(tmp_path: Path, delta: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (delta / "metadata.json").unlink()
    (delta / "metadata.json").symlink_to("metadata.json")
    for read in (
        lambda: read_delta(tmp_path / "loop"),
        lambda: read_delta(delta),
        lambda: Checkpoint(tmp_path / "loop"),
    ):
        found = refusal(read)
        assert found.reason is Reason.UNREADABLE
        assert os.strerror(errno.ELOOP) in found.detail
    (tmp_path / "dangling").symlink_to("none")
    assert refusal(lambda: read_delta(tmp_path / "dangling")).reason is Reason.NOT_A_DELTA
