"""Several runs at once, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Iterator, Sequence

from .cells import Judged

_POLL_S = 1.0


def beside(sources: Sequence[Callable[[], Iterator[Judged]]]) -> Iterator[Judged]:
    """What all of them yield, as it comes. Raises RuntimeError where one of the processes fails."""
    context = multiprocessing.get_context("fork")
    found: multiprocessing.Queue[Judged] = context.Queue()

    def work(source: Callable[[], Iterator[Judged]]) -> None:
        for judged in source():
            found.put(judged)

    running = [context.Process(target=work, args=(source,), name=source.__name__) for source in sources]
    try:
        for process in running:
            process.start()
        while True:
            alive = any(process.is_alive() for process in running)  # before looking: what ends has put everything
            try:
                yield found.get(timeout=_POLL_S)
            except queue.Empty:
                if not alive:
                    break
            if failed := [process.name for process in running if process.exitcode]:
                raise RuntimeError(f"{failed[0]} failed")
    finally:
        for process in running:
            process.terminate()
