"""What an engine may say that it passed: levels, each a set of tests, some on top of others.

A test belongs to the levels that ``@pytest.mark.level("applier", "writer")`` names, else to those of its check
(`driving.checks`). A level is passed when every one of its tests passed, but for those that need a capability which it
does not ask for, and when the levels below it are passed. A test that is expected to fail (`--xfails-file`) fails its
level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from .checks import CHECKS

PASSED, FAILED, DECLINED, NOT_RUN, NOT_JUDGED = "passed", "failed", "declined", "not run", "not judged"
INFRASTRUCTURE = "infrastructure"
"""The outcome of a test that failed without a verdict on the engine."""


@dataclass(frozen=True, slots=True)
class Level:
    """One thing that an engine may be."""

    id: str
    promise: str
    """What an engine of this level does."""
    live: bool = False
    """Whether it is of live engines; otherwise of codecs."""
    on: tuple[str, ...] = ()
    """Levels that must be passed, too."""
    own: bool = True
    """Whether it has tests of its own, beside those of the levels below."""
    needs: frozenset[str] = frozenset()
    """Capabilities without which it is declined."""
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Capability -> what was not judged where it is passed by an engine without it."""


LEVELS = (
    Level("applier", "applies every well-formed delta bit for bit, once or again"),
    Level("safe", "takes nothing that would harm weights, and changes nothing in a refusal", on=("applier",)),
    Level("strict", "refuses deltas whose metadata contradicts them, or is not as SPEC.md says", on=("applier",)),
    Level(
        "reader", "refuses every malformed or misplaced delta with nothing changed", on=("safe", "strict"), own=False
    ),
    Level("writer", "writes exactly what changed, counted, small, and the same every time"),
    Level("codec", "applies what it writes, over any history", on=("reader", "writer")),
    Level("canonical", "writes the bytes that the format prescribes", on=("writer",), needs=frozenset({"canonical"})),
    Level(
        "versioned",
        "follows digests, composes and undoes deltas",
        on=("codec",),
        needs=frozenset({"inverts", "composes", "digests", "lineage"}),
    ),
    Level("router", "routes a delta to every rank's parameters", needs=frozenset({"routes"})),
    Level("live", "leaves every rank of a live engine with the bits of a fresh one", live=True),
    Level(
        "transactional",
        "refuses bad updates on every rank with the old weights in place, and takes the next good one",
        live=True,
        on=("live",),
        needs=frozenset({"rollback"}),
        unseen={"fail_at": "not judged after the agreement: no write was made to fail"},
    ),
    Level("served", "does the same behind an HTTP server", live=True, on=("live",), needs=frozenset({"http"})),
)
BY_ID: Mapping[str, Level] = {level.id: level for level in LEVELS}


def levels_of(item: pytest.Item, check: str | None) -> tuple[str, ...]:
    """The levels that a test belongs to; UsageError for a name that is not a level."""
    marker = item.get_closest_marker("level")
    names = tuple(map(str, marker.args)) if marker else _of_check(check)
    unknown = [name for name in names if name not in BY_ID]
    if unknown:
        raise pytest.UsageError(f"{item.nodeid} names no level: {unknown[0]!r}; levels are {', '.join(BY_ID)}.")
    return names


def _of_check(check: str | None) -> tuple[str, ...]:
    return CHECKS[check].levels if check is not None and check in CHECKS else ()


def closure(names: Iterable[str]) -> set[str]:
    """The levels, and those that they stand on."""
    found = set(names)
    for name in list(found):
        found |= closure(BY_ID[name].on)
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run says of a level."""

    level: Level
    word: str
    """PASSED, FAILED, DECLINED, NOT_RUN or NOT_JUDGED."""
    why: str = ""
    """What is missing where it is not passed."""
    tests: int = 0
    """Tests of the level itself that passed."""

    def line(self) -> str:
        """For the terminal."""
        said = f" ({self.why})" if self.why else ""
        return f"{self.level.id.ljust(14)} {self.word.ljust(10)} {self.level.promise}{said}"


def judge(outcomes: Mapping[str, Sequence[str]], *, live: bool, capabilities: Iterable[str]) -> list[Verdict]:
    """The verdict on every level of live engines or of codecs.

    outcomes: level -> outcome of each of its tests: `passed`, `failed`, `skipped`, `xfailed`, `not run`, or `not
    judged` where the infrastructure failed.
    """
    offered, found = set(capabilities), dict[str, Verdict]()
    for level in LEVELS:
        if level.live == live:
            found[level.id] = _judge(level, outcomes.get(level.id, ()), offered, found)
    return list(found.values())


def _judge(level: Level, outcomes: Sequence[str], offered: set[str], known: Mapping[str, Verdict]) -> Verdict:
    passed, missing = outcomes.count("passed"), sorted(level.needs - offered)
    bad = {word: outcomes.count(word) for word in ("failed", "xfailed", "not judged", "not run")}
    below = [name for name in level.on if known[name].word != PASSED]
    if missing:
        return Verdict(level, DECLINED, f"the engine does not declare {', '.join(missing)}")
    if bad["failed"] or bad["xfailed"]:
        counts = [f"{count} {word}" for word, count in bad.items() if count]
        return Verdict(level, FAILED, ", ".join(counts), passed)
    if unjudged := outcomes.count(INFRASTRUCTURE):
        return Verdict(level, NOT_JUDGED, f"of {unjudged} tests: the infrastructure failed", passed)
    if unjudged := outcomes.count(NOT_JUDGED):
        return Verdict(level, NOT_JUDGED, f"{unjudged} tests need what failed elsewhere", passed)
    if level.own and (bad["not run"] or not passed):
        missing_tests = f"{bad['not run']} of {len(outcomes)} tests did not run" if outcomes else "no tests"
        return Verdict(level, NOT_RUN, missing_tests, passed)
    if below:
        return Verdict(level, known[below[0]].word, f"stands on {', '.join(below)}", passed)
    return Verdict(level, PASSED, "; ".join(text for name, text in level.unseen.items() if name not in offered), passed)
