"""Failures by what they have in common: one fault of an engine fails many tests, and is one cause.

A cause is known by what happened (wrong bits, a refusal that did not come, a crash, ...) and by what tells two faults
of that kind apart: the feature that was tried alone, the reason that should have been given, the line that crashed, the
class of the bits. `of(results)` gives the causes, the one that explains most tests first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .results import FAILED, NOT_JUDGED, Result

_FEATURE = re.compile(r"test_codec_features\.py::test_\w+\[(\w+)\]")
_SIGNS = {"0x8000", "0x80000000", "0x80", "0x8000000000000000"}


@dataclass(slots=True)
class Cause:
    """What several failures have in common."""

    kind: str
    """What happened, in words."""
    detail: str
    """What tells it from other causes of the kind."""
    tests: list[str] = field(default_factory=list)
    """The tests that fail by it."""
    not_judged: list[str] = field(default_factory=list)
    """The tests that could not be judged for it."""
    finding: Mapping[str, Any] = field(default_factory=dict)
    """That of its first test."""

    @property
    def title(self) -> str:
        """Kind and detail."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    def line(self) -> str:
        """For the terminal: how much it explains, what it is, what was expected and found, and the first test."""
        said = [f"{word} {value}" for word in ("expected", "found") if (value := self.finding.get(word))]
        place = self.finding.get("tensor")
        found = ", ".join([*([f"tensor {place}"] if place else []), *said])
        beside = f", {len(self.not_judged)} not judged for it" if self.not_judged else ""
        tests = f"{len(self.tests)} test{'s' if len(self.tests) != 1 else ''} failed{beside}"
        return f"{self.title} ({tests}){f': {found}' if found else ''}; first {self.tests[0]}"

    def fields(self) -> dict[str, object]:
        """For JSON."""
        names = {"tests": list(self.tests), "not_judged": list(self.not_judged)}
        return {"kind": self.kind, "detail": self.detail, **names, "finding": dict(self.finding) or None}


def of(results: Iterable[Result]) -> list[Cause]:
    """The causes of all failures that say something of the engine, the largest first."""
    found: dict[tuple[str, str], Cause] = {}
    held: dict[str, list[str]] = {}
    for result in results:
        if result.outcome == NOT_JUDGED and result.withdrawn:
            held.setdefault(result.withdrawn, []).append(result.id)
        if result.outcome != FAILED or result.infrastructure:
            continue
        kind, detail = _key(result)
        cause = found.setdefault((kind, detail), Cause(kind, detail, finding=next(iter(result.findings), {})))
        cause.tests.append(result.id)
    for (kind, detail), cause in found.items():
        if kind == FEATURE:
            cause.not_judged += held.get(detail, [])
    return sorted(found.values(), key=lambda cause: -len(cause.tests) - len(cause.not_judged))


FEATURE = "fails alone"
"""The kind of what a test of one feature found."""


def key_of(result: Result) -> tuple[str, str]:
    """Kind and detail of a failure's cause."""
    return _key(result)


def _key(result: Result) -> tuple[str, str]:
    if feature := _FEATURE.search(result.id):
        return FEATURE, feature.group(1)
    finding = next(iter(result.findings), {})
    what, context = str(finding.get("what", "")), str(finding.get("context") or "")
    if what == "crash":
        return "a crash", f"{str(finding.get('found')).partition(':')[0]} at {context}"
    if "and yet the state changed" in context:
        return "the state changed in a refusal", ""
    if what == "refusal" and str(finding.get("expected", "")).startswith("a refusal"):
        return "taken, and should be refused", _reason(str(finding["expected"]))
    if what == "refusal":
        return "refused, and should be taken", ""
    if what == "reason":
        return "another reason", f"{finding.get('expected')}, found {finding.get('found')}"
    if what == "bits":
        return "wrong bits", _bits(finding)
    if what == "delta":
        return "a delta that is none", str(finding.get("found")).partition(":")[0]
    if what == "engine":
        return "an engine that fails", str(finding.get("found")).partition(":")[0]
    if what == "assertion":
        return "an assertion", result.id.partition("[")[0]
    return f"wrong {what}", ""


def _reason(expected: str) -> str:
    return expected.partition("(")[2].rstrip(")")


def _bits(finding: Mapping[str, Any]) -> str:
    """The class of a difference: what it is by its bits, else the dtype."""
    both = {str(finding.get("expected")), str(finding.get("found"))}
    if len(both & _SIGNS) == 1 and not (both - _SIGNS).pop().strip("0x"):
        return "the sign of zero"
    return str(finding.get("dtype") or "").removeprefix("torch.")
