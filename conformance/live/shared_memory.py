"""POSIX shared memory of a process group, so that killing the group leaves none of it behind.

vLLM's ranks exchange messages through shared memory. A killed process cannot remove its segments, and they stay in
``/dev/shm`` until the machine is restarted: after some thousand engines it is full, and no engine of two ranks starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["remove", "segments"]

_HOME = "/dev/shm/"
_PROCESSES = Path("/proc")


def remove(group: int) -> None:
    """Unlink every segment that a process of the group has mapped; where there is no ``/proc``, nothing is done.

    Processes that still run keep what they have mapped.
    """
    for segment in segments(group):
        with contextlib.suppress(OSError):
            segment.unlink()


def segments(group: int) -> set[Path]:
    """The segments that processes of the group have mapped."""
    return {segment for process in _members(group) for segment in _mapped(process)}


def _members(group: int) -> Iterator[Path]:
    for process in _PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold anything; after it come state, parent and group.
            if int((process / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                yield process


def _mapped(process: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            _, found, name = line.partition(_HOME)
            if found and not name.endswith(" (deleted)"):
                yield Path(_HOME + name)
