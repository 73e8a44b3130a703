"""How the process of an engine is started and ended: forked from a warmed zygote, or a plain one of its own.

A zygote lives as long as this process; there is one for every environment that vLLM's import could depend on.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .host import kill_group
from .watch import Watch
from .zygote import MESSAGE_BYTES

_LATE = ("VLLM_PLUGINS", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "PYTEST_CURRENT_TEST")
_LATE_PREFIXES = ("CONFORMANCE_", "REFDELTA_")
"""Variables that nothing reads while vLLM is imported: engines that differ in these alone share a zygote."""


class Process(Protocol):
    """A running process that leads its group."""

    pid: int

    def end(self) -> None:
        """Kill it and everything in its group, and wait for it; safe to call twice."""


class Plain:
    """``python -m MODULE ARGUMENT`` in a group of its own; it imports everything itself."""

    def __init__(self, module: str, end: socket.socket, env: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(end.fileno())],
                env=dict(env),
                pass_fds=(end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def end(self) -> None:
        kill_group(self.pid)
        self._process.wait()


class Zygote:
    """Has imported vLLM, or is about to; see `conformance.live.zygote`."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="conformance-zygote-")
        self.log = Path(self._home.name) / "log"
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = Plain(f"{__package__}.zygote", theirs, env, self.log)

    def fork(self, env: Mapping[str, str], end: socket.socket, log: Path, timeout: float) -> Forked:
        """A child that serves on ``end``. Raises TimeoutError, OSError or EOFError where the zygote does not answer.

        Its temporary files lie beside the zygote's log: killed engines leave their sockets there.
        """
        with log.open("ab") as output:
            request = json.dumps({"fork": {**env, "TMPDIR": self._home.name}}).encode()
            socket.send_fds(self._channel, [request], [end.fileno(), output.fileno()])
        Watch(self._process.pid, timeout).wait_for(self._channel)
        return Forked(self, self._answer()["pid"])

    def end_child(self, pid: int) -> None:
        """Kill a child's group and reap it; a zygote that is gone took its children along."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.send(json.dumps({"end": pid}).encode())
            self._answer()

    def close(self) -> None:
        """End it, and the children that are left."""
        self._channel.close()
        self._process.end()
        self._home.cleanup()

    def _answer(self) -> dict[str, Any]:
        message = self._channel.recv(MESSAGE_BYTES)
        if not message:
            words = " | ".join(self.log.read_text(errors="replace").splitlines()[-8:])
            raise EOFError(f"the process that imports vLLM ended: {words}")
        answer: dict[str, Any] = json.loads(message)
        return answer


class Forked:
    """A child of a zygote."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote: Zygote | None = zygote

    def end(self) -> None:
        if self._zygote is not None:
            self._zygote.end_child(self.pid)
        self._zygote = None


_ZYGOTES: dict[tuple[str, ...], Zygote] = {}


def zygote(env: Mapping[str, str]) -> Zygote:
    """The zygote for an environment; a new one imports vLLM from now on, while the caller does something else."""
    early = {key: value for key, value in env.items() if key not in _LATE and not key.startswith(_LATE_PREFIXES)}
    key = (str(os.getpid()), os.getcwd(), *(f"{name}={value}" for name, value in sorted(early.items())))
    if key not in _ZYGOTES:
        _ZYGOTES[key] = Zygote({**early, "VLLM_PLUGINS": ""})
    return _ZYGOTES[key]


def close_zygotes() -> None:
    """End every zygote of this process; a later engine makes a new one."""
    for key in [key for key in _ZYGOTES if key[0] == str(os.getpid())]:
        _ZYGOTES.pop(key).close()


atexit.register(close_zygotes)
