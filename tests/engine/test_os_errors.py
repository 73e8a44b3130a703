"""What the file system refuses on the way of an update, on one rank without an engine: each with the reason of what it
is, never ``rank_failed``."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from refdelta.spec import DeltaError, Reason
from refdelta.vllm.update.ranks import RankGroup, StepFailed
from tests.codec.test_os_errors import BROKEN, CALLS, fail
from tests.engine.simulated import state_of
from tests.engine.test_last_error import backend, good
from tests.layout.models import QWEN3, Engine

pytest.importorskip("vllm", reason="the backend imports vLLM")

__all__ = ["backend"]


def staged(backend: Any, path: Path | str) -> DeltaError | None:
    """How the backend refuses a path in a fresh session."""
    backend.start_weight_update()
    try:
        backend.update_from({"target_weights_path": str(path)}, 0)
    except DeltaError as error:
        return error
    return None


@pytest.fixture
def anchor(tmp_path: Path) -> Path:
    path = tmp_path / "anchor"
    path.mkdir()
    save_file(state_of(Engine(QWEN3).rules(0), 2), path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", ["n" * 5000, "n/" * 2500, "n" * 300, "a\0b", "a\ud800b", "none"])
def test_paths_at_which_nothing_is(backend: Any, tmp_path: Path, name: str) -> None:
    found = staged(backend, f"{tmp_path}/{name}")
    assert found is not None
    assert found.reason is Reason.NOT_A_DELTA
    assert len(str(found)) < 4000


def test_links_in_a_circle(backend: Any, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    found = staged(backend, tmp_path / "loop")
    assert found is not None
    assert (found.reason, os.strerror(errno.ELOOP) in found.detail) == (Reason.UNREADABLE, True)


@pytest.mark.parametrize("number", BROKEN, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", CALLS)
def test_what_cannot_be_read(backend: Any, tmp_path: Path, anchor: Path, call: str, number: int) -> None:
    """At every call on the way of a delta and of an anchor."""
    for path in (good(tmp_path)["target_weights_path"], anchor):
        assert staged(backend, path) is None
        for after in range(200):
            with pytest.MonkeyPatch.context() as patch:
                failures = fail(patch, call, number, after)
                found = staged(backend, path)
            if not failures[0]:
                break
            if found is not None:
                assert (found.reason, os.strerror(number) in found.detail) == (Reason.UNREADABLE, True)
            else:
                assert after, "one that failed from the first on, and that nobody needs"
        assert not failures[0], "the backend calls it without end"


@pytest.mark.parametrize(
    ("error", "reason", "says"),
    [
        (OSError(errno.ESTALE, "Stale file handle", "/net/w"), Reason.UNREADABLE, "/net/w: Stale file handle"),
        (PermissionError(errno.EACCES, "Permission denied"), Reason.UNREADABLE, "the file system: Permission denied"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/net/w"), Reason.UNREADABLE, "no file /net/w"),
        (OSError("without a number"), Reason.UNREADABLE, "the file system: without a number"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Reason.RANK_FAILED, "ConnectionResetError"),
        (TimeoutError("late"), Reason.RANK_FAILED, "TimeoutError: late"),
    ],
)
def test_what_no_reader_has_caught(error: Exception, reason: Reason, says: str) -> None:
    """A call into somebody else's code; what is no file's stays what it was."""

    def action() -> None:
        raise error

    with pytest.raises(StepFailed) as caught:
        RankGroup().run_on_all_ranks("update", action)
    assert (caught.value.reason, says in caught.value.detail) == (reason, True)
