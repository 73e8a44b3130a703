"""A truth that is asked for early is the one that was asked for, is asked for once, and one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.checkpoints import State
from conformance.findings import InfrastructureFailed
from conformance.live.row import Row
from conformance.live.truth import Truth

ONE: State = {}
OTHER: State = {}


class Asked(Row):
    """A row without an engine, whose truths are named after the state that was asked for."""

    def __init__(self, fails: int = 0) -> None:
        self._last_truth = self._early = None
        self.asked: list[str] = []
        self.fails = fails
        self.running = threading.Semaphore(1)

    def _ask(self, states: Sequence[State]) -> list[Truth]:
        assert self.running.acquire(blocking=False), "two at once"
        time.sleep(0.05)
        names = ["one" if state is ONE else "other" for state in states]
        self.asked += names
        self.running.release()
        if len(self.asked) <= self.fails:
            raise InfrastructureFailed("no truth")
        return [Truth(Path(name)) for name in names]


def test_asked_once() -> None:
    row = Asked()
    row.ask_early(ONE)
    assert row.truth(ONE).directory == Path("one")
    row.ask_early(ONE)
    assert row.truth(ONE).directory == Path("one")
    assert row.asked == ["one"]


def test_another_state_is_asked_for() -> None:
    row = Asked()
    row.ask_early(ONE)
    assert row.truth(OTHER).directory == Path("other")
    assert row.truth(ONE).directory == Path("one")


def test_one_at_a_time() -> None:
    row = Asked()
    row.ask_early(ONE)
    assert [truth.directory for truth in row.truths_of([OTHER, ONE])] == [Path("other"), Path("one")]
    assert row.truth(ONE).directory == Path("one")
    assert row.asked == ["one", "other", "one"]


@pytest.mark.parametrize("fails", [1, 2])
def test_a_failure_is_told_to_whoever_needs_it(fails: int) -> None:
    row: Any = Asked(fails)
    row.ask_early(ONE)
    if fails == 1:
        assert row.truth(ONE).directory == Path("one")
        return
    with pytest.raises(InfrastructureFailed, match="no truth"):
        row.truth(ONE)
