"""Waiting for an engine's answer, with a limit that counts only time in which the engine could have worked.

A wall clock fails engines on a busy machine. So while the machine has a free core, or the engine's processes use what
they get, time counts; where others take the cores, only the CPU time that the engine got counts. What hangs is told by
progress: no CPU time in any of its processes for `STILL_S`. Without ``/proc`` the wall clock alone counts.
"""

from __future__ import annotations

import os
import select
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

STILL_S = 90.0
"""Seconds without CPU time in any process after which an engine hangs, however busy the machine is."""
WALL_FACTOR = 15.0
"""So many times the limit on the wall clock is the end of patience even with a starved engine."""
TICK_S = 1.0
_FREE_CORES = 0.5
"""A machine with less than this idle is busy."""
_PROC = Path("/proc")


class TimedOut(TimeoutError):
    """No answer in time. ``starved``: others had the cores, so it says nothing of the engine."""

    def __init__(self, text: str, *, starved: bool) -> None:
        super().__init__(text)
        self.starved = starved


@dataclass(frozen=True, slots=True)
class _Reading:
    """Seconds, all of them growing."""

    clock: float
    worked: float
    """CPU time of the processes."""
    idle: float
    """Idle time of all cores of the machine."""


@dataclass(slots=True)
class Watch:
    """Patience with the process ``root`` and its descendants: ``limit_s`` seconds in which it could have worked."""

    root: int
    limit_s: float
    _began: float = field(default_factory=time.monotonic)
    _counted: float = 0.0
    _moved: float = field(default_factory=time.monotonic)
    _last: _Reading | None = None

    def wait_for(self, end: socket.socket) -> None:
        """Return when ``end`` can be read. Raises TimedOut."""
        while True:
            tick = min(TICK_S, max(0.01, self.limit_s - self._counted))
            if select.select([end], [], [], tick)[0]:
                return
            self.tick()

    def tick_if_due(self) -> None:
        """`tick`, unless the last one was less than `TICK_S` ago."""
        if time.monotonic() - (self._last.clock if self._last else self._began) >= TICK_S:
            self.tick()

    def tick(self) -> None:
        """Count the time since the last tick. Raises TimedOut where it was too much."""
        now = _read(self.root)
        # Most answers come within the first tick, and read nothing of this.
        before, self._last = self._last or _Reading(self._began, now.worked, now.idle - (now.clock - self._began)), now
        wall, worked, idle = now.clock - before.clock, now.worked - before.worked, now.idle - before.idle
        self._counted += wall if idle >= _FREE_CORES * wall else min(wall, max(0.0, worked))
        if worked > 0:
            self._moved = now.clock
        self._judge(now.clock)

    def _judge(self, now: float) -> None:
        wall, still = now - self._began, now - self._moved
        said = f"no answer within {self.limit_s:g} s (waited {wall:.0f} s, of which {self._counted:.0f} s count)"
        if still > STILL_S:
            raise TimedOut(f"none of its processes used the CPU for {still:.0f} s", starved=False)
        if self._counted >= self.limit_s:
            raise TimedOut(said, starved=self._counted < wall / 2)
        if wall >= self.limit_s * WALL_FACTOR:
            raise TimedOut(said, starved=True)


def _read(root: int) -> _Reading:
    now = time.monotonic()
    try:
        return _Reading(now, cpu_seconds(root), _idle_seconds())
    except (OSError, ValueError, IndexError):
        return _Reading(now, now, now)  # no /proc: every second counts, and none is without progress


def cpu_seconds(root: int) -> float:
    """CPU seconds of a process and of all its descendants, those that have ended and were waited for among them."""
    parents, used = dict[int, int](), dict[int, float]()
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            try:
                fields = (_PROC / entry.name / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return sum(seconds for pid, seconds in used.items() if _descends(pid, root, parents))


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid != root:
        if pid not in parents:
            return False
        pid = parents[pid]
    return True


def _idle_seconds() -> float:
    fields = (_PROC / "stat").read_text().partition("\n")[0].split()
    return sum(map(int, fields[4:6])) / os.sysconf("SC_CLK_TCK")
