"""`conformance.live.shared_memory`: an engine that is killed leaves no shared memory, and takes nobody else's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.live.host import kill_group
from conformance.live.shared_memory import segments

HOLDER = """
import os, time
from multiprocessing.shared_memory import SharedMemory
if os.fork():  # the leader of the group holds nothing; its child does
    time.sleep(600)
held = SharedMemory(create=True, size=12345)
print(held._name, flush=True)
time.sleep(600)
"""

if not Path("/dev/shm").is_dir() or not Path("/proc/self/maps").exists():
    pytest.skip("this system shows no shared memory under /dev/shm", allow_module_level=True)


@pytest.fixture
def holders() -> Iterator[list[tuple[int, Path]]]:
    """Two process groups: the leader of each, and the segment that a child of it has made."""
    processes = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(2)
    ]
    made = []
    for process in processes:
        assert process.stdout is not None
        made.append((process.pid, Path("/dev/shm", process.stdout.readline().strip().removeprefix("/"))))
    yield made
    for process in processes:
        kill_group(process.pid)
        process.communicate()


def test_a_killed_group_leaves_no_segment_and_takes_no_other(holders: list[tuple[int, Path]]) -> None:
    (first, its), (second, others) = holders
    assert segments(first) == {its}
    assert its.exists()
    kill_group(first)
    assert not its.exists()
    assert segments(second) == {others}
    assert others.exists()
