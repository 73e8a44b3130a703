"""What every test of a run came to, as data: filled from pytest's reports, read by levels, reports and the terminal."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..findings import EngineFailed, Finding, findings_of, is_infrastructure
from ..oracle import OracleError

PASSED, FAILED, SKIPPED, XFAILED, NOT_RUN = "passed", "failed", "skipped", "xfailed", "not run"
NOT_JUDGED = "not judged"
"""It needs something that failed alone (`driving.features`)."""
_BLOB = re.compile(r"@reproduce_failure\(.*\)")
_OFFER = re.compile(r"^.*\badding @reproduce_failure\(.*\n?", re.MULTILINE)
"""Hypothesis's line that offers the decorator: the test functions lie in the installed suite, not with the reader."""
_ORACLE = "restated.py"
"""The suite's own reader of deltas."""
_SUITE = Path(__file__).parents[1]
OUTCOMES = (PASSED, FAILED, SKIPPED, XFAILED, NOT_RUN, NOT_JUDGED)


@dataclass(slots=True)
class Result:
    """One test."""

    id: str
    """`FILE::TEST[PARAMETERS]`, the file relative to the suite."""
    check: str
    levels: tuple[str, ...] = ()
    row: str = ""
    outcome: str = NOT_RUN
    seconds: float = 0.0
    """Set-up, test and tear-down."""
    reason: str = ""
    """Why it failed or was skipped, in one line; of an expected failure, its issue."""
    capability: str | None = None
    """What the engine does not declare, where it was skipped for that."""
    withdrawn: str | None = None
    """The feature without which it was not judged."""
    site: str = ""
    """Where an exception came from that is no verdict: a crash of the engine."""
    infrastructure: bool = False
    """Whether the failure says nothing of the engine."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """`findings.Finding.fields` of a failure."""
    example: str = ""
    """The example that Hypothesis found."""
    blob: str = ""
    """The decorator with which Hypothesis draws that example again."""
    text: str = ""
    """The failure as pytest prints it."""
    statistics: str = ""
    """Hypothesis's own, as text."""

    @property
    def unjudged(self) -> bool:
        """Whether it failed without a verdict on the engine."""
        return self.outcome == FAILED and self.infrastructure


def details(item: pytest.Item, call: pytest.CallInfo[None]) -> dict[str, Any]:
    """What a report cannot say of itself, as plain values, so that it may travel to another process."""
    error = call.excinfo.value if call.excinfo else None
    failed = error is not None and not isinstance(error, pytest.skip.Exception)
    return {
        "findings": [finding.fields() for finding in findings_of(error) or _stated(error)] if failed else [],
        "infrastructure": is_infrastructure(error),
        "example": _without_offer("\n".join(_notes(error))) if failed else "",
        "blob": next(iter(_BLOB.findall("\n".join(_notes(error)))), "") if failed else "",
        "reason": _one_line(error) if failed else "",
        "capability": getattr(error, "capability", None),
        "withdrawn": getattr(error, "withdrawn", None),
        "site": crash.site if failed and (crash := crashed(error)) else "",
        "statistics": getattr(item, "hypothesis_statistics", "") if call.when == "call" else "",
    }


@dataclass(frozen=True, slots=True)
class Crash:
    """An exception that no check raised."""

    kind: str
    site: str
    """The innermost line that is the engine's: file, line and function."""


def crashed(error: BaseException | None) -> Crash | None:
    """The crash that an error is; None for one that a check raised."""
    error = _first(error)
    if error is None or isinstance(error, AssertionError):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_ours(frame.filename)] or list(frames)
    last = theirs[-1] if theirs else None
    return Crash(type(error).__name__, f"{Path(last.filename).name}:{last.lineno} in {last.name}" if last else "")


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_SUITE) or any(part in path.parts for part in ("_pytest", "pluggy", "hypothesis"))


def _first(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def _stated(error: BaseException | None) -> tuple[Finding, ...]:
    """A finding for whatever carries none: a crash with its place, or what an assertion says."""
    if error is None or is_infrastructure(error):
        return ()
    crash, first = crashed(error), _first(error)
    if isinstance(first, EngineFailed):
        return (Finding("engine", expected="done or refused", found=_one_line(error)),)
    if isinstance(first, OracleError) or (isinstance(first, OSError) and crash and crash.site.startswith(_ORACLE)):
        return (Finding("delta", expected="what the format prescribes", found=_one_line(error)),)
    if crash is None:
        return (Finding("assertion", found=_one_line(error)),)
    return (Finding("crash", expected="the call to be done, or refused", found=_one_line(error), context=crash.site),)


def _notes(error: BaseException | None) -> list[str]:
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*getattr(error, "__notes__", ()), *(note for part in inner for note in _notes(part))]


def _without_offer(text: str) -> str:
    return _OFFER.sub("", text).rstrip()


def _one_line(error: BaseException | None) -> str:
    if isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    lines = [line for line in str(error).splitlines() if line.strip()]
    name = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return f"{name}{lines[0]}" if lines else type(error).__name__


def update(result: Result, report: pytest.TestReport) -> None:
    """Take in one phase of the test; the worst outcome stays."""
    result.seconds += report.duration
    extra: dict[str, Any] = getattr(report, "conformance", {})
    result.statistics = extra.get("statistics") or result.statistics
    result.site = extra.get("site") or result.site
    if report.failed:
        result.outcome, result.text = FAILED, result.text or _without_offer(report.longreprtext)
        result.reason = result.reason or extra.get("reason") or "passed, and is expected to fail"
        result.infrastructure = bool(extra.get("infrastructure"))
        result.findings += extra.get("findings", [])
        result.example = result.example or extra.get("example", "")
        result.blob = result.blob or extra.get("blob", "")
    elif report.skipped and result.outcome != FAILED:
        expected = hasattr(report, "wasxfail")
        result.withdrawn = extra.get("withdrawn")
        result.outcome = XFAILED if expected else NOT_JUDGED if result.withdrawn else SKIPPED
        result.reason, result.capability = skip_reason(report), extra.get("capability")
        if expected:
            result.findings += extra.get("findings", [])
    elif report.when == "call" and result.outcome == NOT_RUN:
        result.outcome = PASSED


def skip_reason(report: pytest.TestReport) -> str:
    """Why a test was skipped, or is expected to fail."""
    if hasattr(report, "wasxfail"):
        return f"expected failure: {report.wasxfail}"
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
