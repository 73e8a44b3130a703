"""Verdicts of a live row on what an engine answers, with an engine that answers what it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.findings import Mismatch
from conformance.live.refusals import words
from conformance.live.row import Backend, Row

MUTE = ["", "  \n", "RuntimeError", "RuntimeError()"]
"""What an error may hold that says nothing."""


def as_raised(text: str) -> str:
    """As `Engine.sync` answers where the backend runs in its own process."""
    return f"ValueError: {text}"


def over_the_core(text: str) -> str:
    return f"Exception: Call to update_weights method failed: {text}"


def over_workers(text: str) -> str:
    worker = f"Worker failed with error '{text}', please check the stack trace above for the root cause"
    return f"Exception: Call to collective_rpc method failed: {worker}"


def over_http(text: str) -> str:
    return json.dumps({"error": {"message": text, "type": "InternalServerError", "param": None, "code": 500}})


WAYS: list[Callable[[str], str]] = [str, as_raised, over_the_core, over_workers, over_http]


class Told(Row):
    """A row whose engine answers what it is told to, and is what it should be unless told otherwise."""

    name = "told"

    def __init__(self, answer: str | None, *capabilities: str, ranks: object = None, tp: int = 2) -> None:
        self.answer, self.ranks, self.tp = answer, ranks, tp
        self.backend = Backend(capabilities=frozenset(capabilities))
        self.current: Any = "before"
        self._settled = True
        self.judged: list[str] = []

    def delta(self, target: Any) -> Path:
        return Path("delta")

    def call(self, command: str, **arguments: Any) -> Any:
        if command == "echo":
            return [[rank, arguments["nonce"]] for rank in range(self.tp)] if self.ranks is None else self.ranks
        assert command == "sync"
        return self.answer

    def holds_current(self) -> None:
        self.judged.append(f"holds {self.current}")

    def answers_as_truth(self) -> None:
        self.judged.append("answers")


REASONS = frozenset({"index_range"})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", MUTE)
@pytest.mark.parametrize("capabilities", [(), ("rollback",), ("rollback", "reasons")])
def test_a_refusal_without_words_is_found(way: Callable[[str], str], text: str, capabilities: tuple[str, ...]) -> None:
    row = Told(way(text), *capabilities)
    with pytest.raises(Mismatch, match="a refusal without text"):
        row.refuses({}, REASONS)
    with pytest.raises(Mismatch, match="a refusal without text"):
        row.declines("after")  # type: ignore[arg-type]
    assert not row._settled, "the next check would go on with this engine"


@pytest.mark.parametrize("way", WAYS)
def test_a_refusal_in_words_is_taken(way: Callable[[str], str]) -> None:
    row = Told(way("refdelta[index_range] tensor=w: no"), "rollback", "reasons")
    row.refuses({}, REASONS)
    assert row.judged == ["holds before", "answers"]
    row.declines("after")  # type: ignore[arg-type]
    assert row.judged[2:] == ["holds before"]
    assert Told(way("no"), "rollback").refuses({}, REASONS) is None  # type: ignore[func-returns-value]
    assert words(way("no such thing: w")) in ("no such thing: w",)


def test_what_else_a_refusal_is_judged_by() -> None:
    with pytest.raises(Mismatch, match="the update succeeded"):
        Told(None, "rollback").refuses({}, REASONS)
    for answer in ("ValueError: no reason", "ValueError: refdelta[index_order]: no"):
        with pytest.raises(Mismatch, match="reason"):
            Told(answer, "reasons").refuses({}, REASONS)
    for ranks in ([[0, "stale"], [1, "stale"]], [], [[0, "one rank"]]):
        with pytest.raises(Mismatch, match="echo"):
            Told("ValueError: no", "rollback", ranks=ranks).refuses({}, REASONS)
        with pytest.raises(Mismatch, match="echo"):
            Told("ValueError: no", "rollback", ranks=ranks).declines("after")  # type: ignore[arg-type]


def test_what_was_taken_must_have_been_done() -> None:
    """Done where it was not declined: then the state after is judged, not the one before."""
    row = Told(None, "rollback")
    row.declines("after")  # type: ignore[arg-type]
    assert row.judged == ["holds after"]
    with pytest.raises(Mismatch, match="a good delta was refused"):
        Told("ValueError: no").accepts("after")  # type: ignore[arg-type]


def test_a_backend_without_rollback_is_used_no_more() -> None:
    row = Told("ValueError: no")
    row.refuses({}, REASONS)
    assert (row.judged, row._settled) == ([], False)
