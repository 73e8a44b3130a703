"""Run a step of the engine in a copy of this process, because native code may abort the process that it runs in."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

__all__ = ["ChildFailed", "in_child"]

LIMIT_S = 120.0


class ChildFailed(Exception):
    """The step raised, ended its process, or did not end; the text says which."""


def in_child(step: Callable[[], Any], *, limit_s: float = LIMIT_S) -> Any:
    """The result of ``step`` (tensors in lists and dicts), run in a forked child on one thread.

    A fork, so that the step sees the engine's own objects, at no cost of imports or copies. The child must not touch a
    GPU. Raises `ChildFailed`.
    """
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            os._exit(_run(step, file))
        status = _wait(child, limit_s)
        file.seek(0)
        if status == 0:
            return torch.load(file, weights_only=True)
        if status == _RAISED:
            raise ChildFailed(file.read().decode(errors="replace"))
    raise ChildFailed(f"no end within {limit_s:.0f} s" if status is None else f"its process ended with status {status}")


_RAISED = 3


def _run(step: Callable[[], Any], file: BinaryIO) -> int:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a worker's memory is not worth a dump
        faulthandler.disable()  # an abort is an answer here
        torch._C.set_num_threads(1)  # a pool's threads do not survive a fork; vLLM's CPU workers disarm torch's own
        torch.save(step(), file)
        file.flush()
    except BaseException as error:  # whatever it is, the parent must learn of it, and nothing here may go on
        file.seek(0)
        file.truncate()
        file.write(f"{type(error).__name__}: {error}".encode())
        file.flush()
        return _RAISED
    return 0


def _wait(child: int, limit_s: float) -> int | None:
    """The exit status (negative: the signal that ended it), or None after it was killed for being late."""
    deadline = time.monotonic() + limit_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.002)
