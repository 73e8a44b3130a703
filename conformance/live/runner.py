"""The suite's side of an engine in a child process: requests over a socket, a time-out on each, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from conformance.live import probe

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
    # A plugin may lie in the working directory, where nothing is to be written.
    "PYTHONDONTWRITEBYTECODE": "1",
    # Eager everywhere: vLLM compiles one small logprobs kernel even then, which costs every engine 2 seconds.
    "TORCHDYNAMO_DISABLE": "1",
}


class HostError(Exception):
    """The engine answered a request with an error; the text is vLLM's."""


class HostDied(Exception):
    """The host process ended, or did not answer in time and was killed."""


def environment(*, plugins: str, modules: Sequence[str] = (), unpack: bool = False) -> dict[str, str]:
    """The environment of a host: ``VLLM_PLUGINS``, what every process loads (`probe.load`), the suite's CPU switch."""
    return {
        **os.environ,
        **_ENVIRONMENT,
        "VLLM_PLUGINS": plugins,
        probe.PLUGINS: ",".join(modules),
        probe.UNPACK: "1" if unpack else "0",
    }


class Host:
    """A child that runs `conformance.live.host`, in its own process group; a context manager."""

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        ours, theirs = socket.socketpair()
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "conformance.live.host", str(theirs.fileno())],
                env=dict(env),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        theirs.close()
        self._socket = ours
        self._pending = b""

    def call(self, command: str, *, timeout: float = CALL_TIMEOUT, **arguments: Any) -> Any:
        """Send one request and return its answer.

        Raises `HostError` with vLLM's text, or `HostDied` when the child ended or ``timeout`` seconds passed (it is
        killed then, with its workers).
        """
        try:
            self._socket.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            answer = json.loads(self._line(time.monotonic() + timeout))
        except (OSError, EOFError, TimeoutError) as error:
            self.kill()
            raise HostDied(f"{command}: {type(error).__name__} {error}; {self._last_words()}") from error
        if "error" in answer:
            raise HostError(answer["error"])
        return answer["ok"]

    def kill(self) -> None:
        """End the child and everything in its process group; safe to call twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._pending:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            received = self._socket.recv(1 << 16)
            if not received:
                raise EOFError("the host closed its socket")
            self._pending += received
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        return f"log {self.log}, ending: " + " | ".join(self.log.read_text(errors="replace").splitlines()[-8:])
