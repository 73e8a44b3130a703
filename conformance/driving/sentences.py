"""A run read by the sentences of SPEC.md: which of them its tests judged, and what came of it.

`sentences.json` has every sentence with the tests of the suite that are linked to it: each was seen to fail for an
engine that breaks the sentence. `conformance.mutants.sentences` makes the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PASSED, FAILED, NOT_JUDGED = "passed", "failed", "not judged"
STORED = Path(__file__).parents[1] / "sentences.json"


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence that requires, advises or permits something."""

    id: str
    text: str
    tests: tuple[str, ...]
    """`FILE::TEST`, with parameters where the link is one case of it: a golden vector, a row of a table."""
    not_judged: str
    """Why the suite has no test of it, where it has none."""


@cache
def table() -> tuple[Sentence, ...]:
    """Every sentence, in the order of SPEC.md."""
    found = json.loads(STORED.read_text(encoding="utf-8"))
    return tuple(Sentence(one["id"], one["sentence"], tuple(one["tests"]), one["not_judged"]) for one in found)


def read(outcomes: Iterable[tuple[str, str]]) -> list[dict[str, object]]:
    """Each sentence with its verdict, for a report; ``outcomes`` are ids of tests with "passed", "failed" or else.

    A sentence is judged where one of its tests passed or failed, and fails with any of them, an expected
    failure included.
    """
    words = dict[str, list[tuple[str, str]]]()
    for test, word in outcomes:
        for name in {test, test.partition("[")[0]}:
            words.setdefault(name, []).append((test, word))
    return [
        _read(sentence, [found for test in sentence.tests for found in words.get(test, ())]) for sentence in table()
    ]


def _read(sentence: Sentence, found: list[tuple[str, str]]) -> dict[str, object]:
    failed = [test for test, word in found if word in (FAILED, "xfailed")]
    passed = sum(word == PASSED for _, word in found)
    word = FAILED if failed else PASSED if passed else NOT_JUDGED
    why = "" if word != NOT_JUDGED else sentence.not_judged or "none of its tests judged this engine in this run"
    return {
        "id": sentence.id,
        "sentence": sentence.text,
        "verdict": word,
        "tests_passed": passed,
        "tests_failed": failed,
        "why": why,
    }


def line(read_: Iterable[dict[str, object]]) -> str:
    """For the terminal."""
    words = [str(one["verdict"]) for one in read_]
    counts = ", ".join(f"{words.count(word)} {word}" for word in (PASSED, FAILED, NOT_JUDGED))
    return f"sentences of SPEC.md: {counts}"
