"""The child process that holds a vLLM engine: forked by `zygote`, or ``python -m conformance.live.host FD``.

It reads one JSON request a line from a socket and answers each with one JSON line: ``{"ok": value}`` or
``{"error": text}``. `runner.Host` is the other end. A host that holds no engine forks one child for every truth.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import shared_memory
from .engine import Engine
from .watch import TimedOut, Watch


class Server:
    """Answers the requests of one `runner.Host` until its socket closes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def serve(self, channel: Any) -> None:
        """Answer every line of ``channel``."""
        for line in channel:
            request = json.loads(line)
            channel.write(json.dumps(self._answer(request.pop("command"), request)) + "\n")
            channel.flush()

    def _answer(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            method: Callable[..., Any] = getattr(self, command, None) or getattr(self.engine, command)
            return {"ok": method(**arguments)}
        except BaseException as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}

    def warm(self) -> float:
        """Import everything that an engine needs, start no thread; return the seconds it took."""
        began = time.monotonic()
        self.engine.import_vllm()
        return time.monotonic() - began

    def forked_truths(self, jobs: list[dict[str, Any]], at_once: int, limit_s: float) -> None:
        """Fork a child for each job (the arguments of `write_truth`), ``at_once`` at a time; kill each one's group."""
        gc.freeze()  # vLLM collects several times while it starts; what the imports left need not be visited again
        waiting, running = list(jobs), dict[int, Watch]()
        while waiting or running:
            while waiting and len(running) < at_once:
                child = fork(partial(_truth, waiting.pop(0)))
                running[child] = Watch(child, limit_s)
            for child, watch in list(running.items()):
                if (status := _ended(child, watch)) is None:
                    continue
                del running[child]
                kill_group(child)
                if status != 0:
                    for other in running:
                        kill_group(other)
                    raise RuntimeError(f"a truth engine ended with status {status}; see the log of the host")
            time.sleep(0.005)

    def run(self, function: str, arguments: Sequence[Any]) -> Any:
        """What ``MODULE:FUNCTION`` gives for ``arguments``, in this process: any work that needs vLLM imported."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments)

    def plain_truth(self, **job: Any) -> None:
        """The same in this process, for comparison with a forked child."""
        write_truth(self.engine, **job)


def write_truth(
    engine: Engine,
    start: dict[str, Any],
    prompts: list[list[int]],
    out: str,
    changes: tuple[str, ...] = (),
    adapter: str | None = None,
) -> None:
    """Start ``engine`` and write its dumps and, where there are prompts, its outputs (see `Engine.generate`).

    Then, for each file of ``changes``, load the checkpoint again with the file's tensors in place of its own and write
    the outputs, of one token, to ``changed{i}.json``.
    """
    engine.start(**start)
    engine.dump(out)
    outputs = engine.generate(prompts, adapter=adapter) if prompts else []
    (Path(out) / "outputs.json").write_text(json.dumps(outputs))
    for number, file in enumerate(changes):
        engine.load(start["checkpoint"], file)
        (Path(out) / f"changed{number}.json").write_text(json.dumps(engine.generate(prompts, tokens=1)))


_ENGINES: list[Engine] = []
"""Engines of this process; one that is let go shuts down, which costs more than it did to start, before the kill."""


def _truth(job: dict[str, Any]) -> None:
    _ENGINES.append(Engine(worker_start="fork"))
    write_truth(_ENGINES[-1], **job)


def fork(work: Callable[[], object]) -> int:
    """The pid of a child, leader of its own group, that does ``work`` and ends with 0, or with 1 after a traceback."""
    child = os.fork()
    if child == 0:
        os.setsid()
        die_with_parent()
        os._exit(_in_fork(work))  # no shutdown: the group is killed
    return child


def die_with_parent() -> None:
    """From now on this process is killed when its parent ends, however that ends, and whatever group it leads."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _in_fork(work: Callable[[], object]) -> int:
    try:
        work()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _ended(child: int, watch: Watch) -> int | str | None:
    """The exit status of ``child``, why it was killed where it was late, None while it runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        return os.waitstatus_to_exitcode(status)
    try:
        watch.tick_if_due()
    except TimedOut as late:
        kill_group(child)
        os.waitpid(child, 0)
        return str(late)
    return None


def kill_group(leader: int) -> None:
    """Kill a process that leads its group, and all that are in it; their shared memory goes too."""
    shared_memory.remove(leader)
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def serve(descriptor: int, engine: Engine) -> None:
    """Serve on a socket until it closes; then end this process and its group."""
    with socket.socket(fileno=descriptor) as end, end.makefile("rw") as channel:
        Server(engine).serve(channel)
    kill_group(os.getpgrp())


def main() -> None:
    """Serve on the socket whose descriptor is the first argument."""
    die_with_parent()
    serve(int(sys.argv[1]), Engine())


if __name__ == "__main__":
    main()
