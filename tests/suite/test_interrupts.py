"""A run that is ended from outside ends what it started, and leaves no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.engines import interrupts
from tests.suite.runs import environment

HANGS = """#!/bin/sh
sleep 300 &
echo $$ $! > started.tmp
mv started.tmp started
wait
"""
COMMAND = ("-c", "from refdelta.cli import main; main()", "conformance", "-q", "-k", "test_round_trip")


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether it holds before the time is up."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def runs(pid: str) -> bool:
    stat = Path("/proc") / pid / "stat"
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "numbers", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)], ids=["once", "twice", "ctrl-c"]
)
def test_a_run_ends_with_what_it_started(tmp_path: Path, numbers: tuple[signal.Signals, ...]) -> None:
    """`timeout` sends SIGTERM twice."""
    temporary, cwd = tmp_path / "temporary", tmp_path / "cwd"
    temporary.mkdir()
    cwd.mkdir()
    (cwd / "hang.sh").write_text(HANGS)
    words = [sys.executable, *COMMAND, "--engine", "exec:sh hang.sh", "--capabilities", ""]
    variables = {**environment(), "TMPDIR": str(temporary)}
    run = subprocess.Popen(words, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert until((cwd / "started").exists, 100)
        assert list(temporary.glob("refdelta-exec-*"))
        for number in numbers:
            run.send_signal(number)
        said, _ = run.communicate(timeout=60)
    finally:
        run.kill()
        pids = (cwd / "started").read_text().split() if (cwd / "started").exists() else []
        left = [pid for pid in pids if not until(lambda pid=pid: not runs(pid), 5)]  # type: ignore[misc]  # bound early
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
    assert run.returncode == 130, said
    assert len(pids) == 2
    assert not left
    assert not list(temporary.glob("refdelta-exec-*"))
    assert "KeyboardInterrupt" in said


@pytest.fixture
def by_default() -> Iterator[None]:
    """SIGTERM as it is in a new process, and no signal on its way."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    interrupts._STATE.last = float("-inf")
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("by_default")
def test_the_handler_goes_as_it_came() -> None:
    restore = interrupts.install()
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # at once: the same one
    restore()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("by_default")
def test_it_waits_for_the_end_of_a_block() -> None:
    restore = interrupts.install()
    reached = []

    def block() -> None:
        with interrupts.held():
            with interrupts.held():
                os.kill(os.getpid(), signal.SIGTERM)
                reached.append("inner")
            reached.append("outer")

    with pytest.raises(KeyboardInterrupt):
        block()
    restore()
    assert reached == ["inner", "outer"]


@pytest.mark.usefixtures("by_default")
def test_others_handlers_stay() -> None:
    """Before, and one that came later."""

    def other(*_: object) -> None:
        raise AssertionError

    for theirs in (other, signal.SIG_IGN):
        signal.signal(signal.SIGTERM, theirs)
        interrupts.install()()
        assert signal.getsignal(signal.SIGTERM) == theirs
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    restore = interrupts.install()
    signal.signal(signal.SIGTERM, other)
    restore()
    assert signal.getsignal(signal.SIGTERM) == other


@pytest.mark.usefixtures("by_default")
def test_a_thread_installs_nothing() -> None:
    thread = threading.Thread(target=interrupts.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("by_default")
def test_a_forked_child_dies_of_it() -> None:
    """As `multiprocessing` expects of its workers."""
    restore = interrupts.install()
    child = os.fork()
    if child == 0:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    restore()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
