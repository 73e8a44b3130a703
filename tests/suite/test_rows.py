"""`--row`: the columns that were asked for and no other; the gate's set covers what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.driving.options import GATE_ROWS
from tests.suite.runs import CONFORMANCE, Outcome, run_all

COLLECT = ("--engine", "vllm", "--collect-only", "-q", "-p", "no:cacheprovider", str(CONFORMANCE))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    cases = (("--row", "gate"), ("--row", "gemma4-moe tp=2"), ("--row", "gemma4-moe tp=3"), (), ("--tp", "1"))
    return run_all([[*COLLECT, *case] for case in cases], tmp_path_factory.mktemp("rows"))


def collected(outcome: Outcome) -> list[str]:
    return [line for line in outcome.text.splitlines() if "::" in line]


def test_one_row(outcomes: list[Outcome]) -> None:
    names = collected(outcomes[1])
    assert len(names) == 16
    assert all(name.endswith("[gemma4-moe-tp2]") for name in names)


def test_a_row_that_is_none(outcomes: list[Outcome]) -> None:
    assert outcomes[2].code == 2
    assert "--row takes gate or a column of the matrix" in outcomes[2].text
    assert "got 'gemma4-moe tp=3'" in outcomes[2].text


def test_the_gate_takes_all_checks_of_its_rows(outcomes: list[Outcome]) -> None:
    """No test of the whole suite is missing in every row."""
    gate, whole = ({Path(name).name.partition("[")[0] for name in collected(outcomes[i])} for i in (0, 3))
    assert whole
    assert not whole - gate
    assert len(set(GATE_ROWS)) == len(GATE_ROWS)


def test_one_rank_alone_has_no_column_of_two(outcomes: list[Outcome]) -> None:
    names = collected(outcomes[4])
    assert names
    assert not [name for name in names if "tp2" in name]
