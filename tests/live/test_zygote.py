"""The process that engines are forked from: it starts no thread, it keeps nothing of an engine, and it ends with us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance.inputs import checkpoints
from conformance.live.processes import zygote
from conformance.live.runner import START_TIMEOUT, Host, environment

PROC = Path("/proc")
pytestmark = pytest.mark.skipif(not PROC.is_dir(), reason="there is no /proc here")


def parent(pid: int) -> int:
    return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def variable(pid: int, name: str) -> str | None:
    """As the process was started with it, whatever it has set since."""
    pairs = (entry.partition("=") for entry in (PROC / str(pid) / "environ").read_text().split("\0"))
    return next((value for key, _, value in pairs if key == name), None)


@pytest.mark.timeout(1800)
def test_it_has_one_thread_and_forks_second_ranks(tmp_path: Path) -> None:
    """A second thread would be dead in every child; ranks would then be spawned, and the log would say so."""
    checkpoint = checkpoints.make("qwen3-tied", tmp_path / "base")
    env = environment(plugins="refdelta")
    with Host(env, tmp_path / "log") as host:
        host.call("warm", timeout=START_TIMEOUT)
        home = parent(host.pid)
        assert len(list((PROC / str(home) / "task").iterdir())) == 1
        host.start(checkpoint, 2, "delta_snapshot")
        assert "second ranks are spawned" not in host.log.read_text()
        assert len(list((PROC / str(home) / "task").iterdir())) == 1
        with Host(env | {"CONFORMANCE_PLUGINS": "json"}, tmp_path / "other") as other:
            other.call("warm", timeout=START_TIMEOUT)
            assert parent(other.pid) == home, "engines that differ in their plugins alone share the imports"
    assert variable(home, "CONFORMANCE_PLUGINS") is None
    assert variable(home, "VLLM_PLUGINS") == ""


def test_what_imports_may_depend_on_has_another_one() -> None:
    env = environment(plugins="")
    assert zygote(env) is zygote(env | {"VLLM_PLUGINS": "refdelta", "PYTEST_CURRENT_TEST": "x"})
    other = zygote(env | {"TORCHDYNAMO_DISABLE": "0"})
    assert other is not zygote(env)


PROGRAM = """
import sys, time
from pathlib import Path
from conformance.live.runner import Host, environment
host = Host(environment(plugins=""), Path(sys.argv[1]))
host.call("warm", timeout=240)
print(host.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(600)
def test_a_killed_suite_leaves_nothing(tmp_path: Path) -> None:
    """Neither the zygote nor a child of it, though nobody could tidy."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "log")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    home = parent(child)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30
    while any(runs(pid) for pid in (child, home)):
        assert time.monotonic() < deadline, "something is left"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether it is there and no zombie: nobody may have waited for it."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_threads_are_told_from_the_main_one_and_from_zeromq_s() -> None:
    program = (
        "import threading, time\n"
        "from conformance.live.engine import other_threads\n"
        "before = other_threads()\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "import zmq; context = zmq.Context(); socket = context.socket(zmq.PAIR)\n"
        "end = time.monotonic() + 20\n"  # a thread gets its name only after it has started
        "while len(other_threads()) > 1 and time.monotonic() < end: time.sleep(0.05)\n"
        "print(len(before), len(other_threads()))\n"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == ["0", "1"], done.stderr
