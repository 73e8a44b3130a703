"""SIGTERM ends a run as Ctrl-C does, so that what the run started and made is cleared away.

    restore = interrupts.install()      while a run lasts
    with interrupts.held(): ...         a SIGTERM in the block is raised at its end

Nothing is installed where somebody else handles SIGTERM or ignores it, or outside the main thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_AGAIN_S = 2.0
"""Signals that follow each other more closely are one: `timeout` sends two, and the second must not end the tidying."""


@dataclass(slots=True)
class _State:
    held: int = 0
    """How many blocks are being run that must not be interrupted."""
    waiting: bool = False
    last: float = float("-inf")


_STATE = _State()


def install() -> Callable[[], None]:
    """Handle SIGTERM from now on; what undoes it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return lambda: None
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a child that was forked ends as it would have
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        _interrupt()

    def restore() -> None:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)
    return restore


def _interrupt() -> None:
    if _STATE.held:
        _STATE.waiting = True
        return
    before, _STATE.last = _STATE.last, time.monotonic()
    if _STATE.last - before > _AGAIN_S:
        raise KeyboardInterrupt("SIGTERM")


@contextmanager
def held() -> Iterator[None]:
    """Put off a SIGTERM to the end of the block."""
    _STATE.held += 1
    try:
        yield
    finally:
        _STATE.held -= 1
        if _STATE.waiting and not _STATE.held:
            _STATE.waiting = False
            _interrupt()
