"""The suite's side of an engine in a child process: requests over a socket, a limit on each, nothing left behind."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ..inputs.checkpoints import Checkpoint
from . import probe
from .processes import Plain, Process, zygote
from .watch import TimedOut, Watch

T = TypeVar("T")
START_TIMEOUT = 240.0
CALL_TIMEOUT = 120.0

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Equal thread counts make equal sums: truth and live engine must not differ here.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # vLLM's own limits are wall clocks; the suite's counts the time that an engine could work (`watch`).
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",
    "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
    # A plugin may lie in the working directory, where nothing is to be written.
    "PYTHONDONTWRITEBYTECODE": "1",
    # Eager everywhere: vLLM compiles one small logprobs kernel even then, which costs every engine 2 seconds.
    "TORCHDYNAMO_DISABLE": "1",
}


class HostError(Exception):
    """The engine answered a request with an error; the text is vLLM's."""


class HostDied(Exception):
    """The host process ended, or did not answer in time and was killed."""


class HostTimedOut(HostDied):
    """It did not answer in time. ``starved``: others had the cores, so it says nothing of the engine."""

    def __init__(self, text: str, *, starved: bool) -> None:
        super().__init__(text)
        self.starved = starved


def environment(*, plugins: str, modules: Sequence[str] = (), unpack: bool = False) -> dict[str, str]:
    """The environment of a host: ``VLLM_PLUGINS``, what every process loads (`probe.load`), the suite's CPU switch."""
    return {
        **os.environ,
        **_ENVIRONMENT,
        "VLLM_PLUGINS": plugins,
        probe.PLUGINS: ",".join(modules),
        probe.UNPACK: "1" if unpack else "0",
    }


def start_arguments(
    checkpoint: Checkpoint | str, tp: int = 1, backend: str | None = None, **arguments: object
) -> dict[str, Any]:
    """What `engine.Engine.start` takes, as JSON carries it: in a call of a host, and in the jobs of ``forked_truths``.

    Args:
        checkpoint: one of the suite's, or a path or hub id without overrides.
        arguments: further ones for ``LLM``.
    """
    ours = checkpoint if isinstance(checkpoint, Checkpoint) else None
    return {
        "checkpoint": str(ours.directory if ours else checkpoint),
        "tp": tp,
        "backend": backend,
        "hf_overrides": dict(ours.hf_overrides) if ours else {},
        "arguments": arguments,
    }


def twice_if_late(work: Callable[[], T]) -> T:
    """What ``work`` gives; where a host in it did not answer in time, once more."""
    try:
        return work()
    except HostTimedOut:
        return work()


class Host:
    """A child that runs `conformance.live.host`, in its own process group; a context manager.

    It is forked from a zygote at its first call; a ``plain`` one is started now and imports vLLM itself.
    """

    def __init__(self, env: Mapping[str, str], log: Path, *, plain: bool = False) -> None:
        self.log = log
        log.touch()
        self._env = dict(env)
        self._socket, self._theirs = socket.socketpair()
        self._process: Process | None = None
        self._pending = b""
        if plain:
            with self._theirs:
                self._process = Plain(f"{__package__}.host", self._theirs, self._env, log)
        else:
            zygote(self._env)

    @property
    def pid(self) -> int:
        """Of the child, which leads its group; 0 before it is forked."""
        return self._process.pid if self._process else 0

    def call(self, command: str, *, timeout: float = CALL_TIMEOUT, **arguments: Any) -> Any:
        """Send one request and return its answer.

        Raises `HostError` with vLLM's text, `HostTimedOut` when ``timeout`` seconds passed in which the child could
        have worked (`watch`), or `HostDied` when it ended. It is killed in both cases, with its workers.
        """
        try:
            process = self._started(timeout)
            self._socket.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            answer = json.loads(self._line(Watch(process.pid, timeout)))
        except (OSError, EOFError) as error:
            self.kill()
            text = f"{command}: {type(error).__name__} {error}; {self._last_words()}"
            if isinstance(error, TimedOut):
                raise HostTimedOut(text, starved=error.starved) from error
            raise HostDied(text) from error
        if "error" in answer:
            raise HostError(answer["error"])
        return answer["ok"]

    def start(self, checkpoint: Checkpoint | str, tp: int = 1, backend: str | None = None, **arguments: object) -> None:
        """Start the child's engine; the arguments are those of `start_arguments`."""
        self.call("start", timeout=START_TIMEOUT, **start_arguments(checkpoint, tp, backend, **arguments))

    def kill(self) -> None:
        """End the child and everything in its process group; safe to call twice."""
        if self._process is not None:
            self._process.end()
        self._socket.close()
        self._theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _started(self, timeout: float) -> Process:
        if self._process is None:
            with self._theirs:
                self._process = zygote(self._env).fork(self._env, self._theirs, self.log, max(timeout, START_TIMEOUT))
        return self._process

    def _line(self, watch: Watch) -> bytes:
        while b"\n" not in self._pending:
            watch.wait_for(self._socket)
            received = self._socket.recv(1 << 16)
            if not received:
                raise EOFError("the host closed its socket")
            self._pending += received
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        return f"log {self.log}, ending: " + " | ".join(self.log.read_text(errors="replace").splitlines()[-8:])
