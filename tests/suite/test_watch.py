"""Limits count the time in which an engine could work: a busy machine is no hang, and a hang is one on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conformance.live import watch
from conformance.live.watch import STILL_S, WALL_FACTOR, TimedOut, Watch, cpu_seconds


@dataclass
class Machine:
    """A clock whose seconds pass at each reading: CPU seconds of the engine and idle core seconds a second."""

    worked: float
    idle: float
    clock: float = 0.0

    def read(self, root: int) -> watch._Reading:
        self.clock += 1
        return watch._Reading(self.clock, self.clock * self.worked, self.clock * self.idle)


def waited(monkeypatch: pytest.MonkeyPatch, machine: Machine, limit_s: float) -> tuple[float, TimedOut]:
    """After how many seconds a wait ends on this machine, and with what."""
    monkeypatch.setattr(watch, "_read", machine.read)
    patience = Watch(1, limit_s, _began=0.0, _moved=0.0)

    def wait() -> None:
        while True:
            patience.tick()

    with pytest.raises(TimedOut) as caught:
        wait()
    return machine.clock, caught.value


@pytest.mark.parametrize(
    ("what", "machine", "limit_s", "seconds", "starved"),
    [
        ("waits for something on a free machine", Machine(worked=0.0, idle=2.0), 30, 30, False),
        ("works with both cores", Machine(worked=2.0, idle=0.0), 30, 30, False),
        ("works with one core, the other is free", Machine(worked=1.0, idle=1.0), 30, 30, False),
        ("gets an eighth of a core of a busy machine", Machine(worked=0.125, idle=0.0), 30, 240, True),
        ("gets three quarters of a core of a busy machine", Machine(worked=0.75, idle=0.1), 30, 40, False),
        ("gets next to nothing", Machine(worked=0.001, idle=0.0), 30, 30 * WALL_FACTOR, True),
        ("does nothing on a busy machine", Machine(worked=0.0, idle=0.0), 300, STILL_S + 1, False),
        ("does nothing on a free machine", Machine(worked=0.0, idle=2.0), 300, STILL_S + 1, False),
    ],
)
def test_what_counts(
    what: str, machine: Machine, limit_s: float, seconds: float, starved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, late = waited(monkeypatch, machine, limit_s)
    assert abs(found - seconds) <= 2 + seconds // 20, f"an engine that {what}"
    assert late.starved == starved, f"an engine that {what}"


def test_without_proc_the_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(root: int) -> float:
        raise FileNotFoundError("/proc")

    monkeypatch.setattr(watch, "cpu_seconds", none)
    reading = watch._read(1)
    assert reading.clock == reading.worked == reading.idle


BURN = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\n"


@pytest.fixture
def family() -> Iterator[int]:
    """A process whose child uses 0.4 CPU seconds, while it waits."""
    outer = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {BURN!r}])\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", outer])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc here")
def test_work_of_descendants_counts_and_that_of_others_does_not(family: int) -> None:
    deadline = time.monotonic() + 60
    while cpu_seconds(family) < 0.4:
        assert time.monotonic() < deadline, "the child's work is not seen"
        time.sleep(0.05)
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert cpu_seconds(family) < 0.75, "somebody else's work counts"
