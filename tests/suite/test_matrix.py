"""The matrix alone: cells, columns that do not fit, versions."""

from __future__ import annotations

import pytest

from conformance.suite.matrix import Matrix, header, version


def _report(check: str, row: str, outcome: str, when: str = "call", reason: str = "") -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=f"{check}::{row}",
        location=("file.py", 1, check),
        keywords={},
        outcome=outcome,  # type: ignore[arg-type]  # one of pytest's three words
        longrepr=("file.py", 1, f"Skipped: {reason}") if outcome == "skipped" else None,
        when=when,  # type: ignore[arg-type]  # one of pytest's three words
        user_properties=[("check", check), ("row", row)],
    )


def _filled(*reports: pytest.TestReport) -> Matrix:
    matrix = Matrix()
    for report in reports:
        matrix.add(report)
    return matrix


@pytest.mark.parametrize(
    ("phases", "word"),
    [
        ([("setup", "passed"), ("call", "passed"), ("teardown", "passed")], "pass"),
        ([("setup", "passed"), ("call", "failed"), ("teardown", "passed")], "FAIL"),
        ([("setup", "failed"), ("teardown", "passed")], "FAIL"),
        ([("setup", "passed"), ("call", "passed"), ("teardown", "failed")], "FAIL"),
        ([("setup", "skipped"), ("teardown", "passed")], "skip"),
        ([("call", "passed"), ("call", "skipped")], "pass*"),
        ([("call", "passed"), ("call", "failed"), ("call", "skipped")], "FAIL"),
    ],
)
def test_word_of_a_cell(phases: list[tuple[str, str]], word: str) -> None:
    matrix = _filled(*(_report("c", "r", outcome, when) for when, outcome in phases))
    assert matrix.cells["c", "r"].word == word


def test_set_up_alone_makes_no_cell() -> None:
    """A test that says its row while it runs would leave an empty column behind."""
    assert not _filled(_report("c", "r", "passed", "setup"), _report("c", "r", "passed", "teardown")).cells


def test_wide_matrix_is_broken_into_blocks() -> None:
    rows = [f"model-number-{n} tp={n}" for n in range(9)]
    matrix = _filled(*(_report("a_check", row, "passed") for row in rows))
    lines = matrix.table(60)
    assert max(map(len, lines)) <= 60
    assert [word for line in lines for word in line.split() if word.startswith("tp=")] == [f"tp={n}" for n in range(9)]
    assert sum(line.startswith("a_check") for line in lines) == len([line for line in lines if "model" in line]) == 3


def test_skips_are_counted_by_reason() -> None:
    matrix = _filled(*(_report("c", "r", "skipped", reason=reason) for reason in ("one", "two", "one")))
    assert matrix.skip_lines() == ["skip c [r]: one (tests: 2)", "skip c [r]: two (tests: 1)"]
    assert matrix.judged == 0


def test_reports_of_others_are_ignored() -> None:
    foreign = _report("c", "r", "failed")
    foreign.user_properties = []
    assert not _filled(foreign).cells


def test_versions_come_from_metadata() -> None:
    assert version("no-such-distribution", "numpy").startswith("numpy 2.")
    assert version("no-such-distribution") == "no-such-distribution not installed"
    text = "\n".join(header("an engine"))
    assert "an engine" in text
    for name in ("refdelta", "torch", "vllm", "python"):
        assert f"{name} " in text or f"{name}-cpu " in text
