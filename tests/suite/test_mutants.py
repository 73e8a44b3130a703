"""Every broken engine is killed by the test that is meant for it; the stored kill matrix and its document are whole.

The whole matrix is made by ``python -m conformance.mutants --write``; here each mutant of a codec, and of what refdelta
has beside codec and engine, runs under one seed against its own test alone. Live ones are in tests/live.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.driving.checks import CHECKS, CODEC_CHECKS
from conformance.mutants import ci, report
from conformance.mutants.beside import beside
from conformance.mutants.cells import Cell, Judged
from conformance.mutants.codec_run import methods_of
from conformance.mutants.live import ROWS
from conformance.mutants.readers import SwallowsErrors
from conformance.mutants.registry import CODEC, LIVE, OWN, RUNS, Mutant, mutants
from conformance.mutants.report import Result
from conformance.mutants.right import Plain
from tests.suite.runs import CONFORMANCE, QUIET, REPOSITORY, command, run

ALL = mutants()
STORED = Result.read()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", [["--ci"], pytest.param([], marks=pytest.mark.nightly)], ids=["ci", "all"])
def test_every_mutant_is_killed_by_its_own_test(which: list[str]) -> None:
    words = [sys.executable, "-m", "conformance.mutants", "--kind", CODEC, "--kind", OWN, "--quick", "--seeds", "1"]
    done = command([*words, *which], cwd=REPOSITORY)
    assert done.code == 0, done.text[-3000:]
    assert "survivors: none" in done.text
    told = {line.partition(":")[0] for line in done.text.splitlines()}
    wanted = {mutant.name for mutant in ALL if mutant.run != LIVE}
    assert (wanted & ci.NAMES if which else wanted) <= told


def test_those_of_ci_stand_for_everything() -> None:
    """Every part, check, row and kind of fault that some mutant stands for; each name is a mutant's."""
    assert ci.missing(ALL) == set()
    assert {mutant.name for mutant in ALL} >= ci.NAMES
    assert 30 < len(ci.NAMES) < len(ALL)


@pytest.mark.timeout(900)
def test_the_right_codec_passes(tmp_path: Path) -> None:
    """Every check, and what it cannot do is said."""
    # It passes its hundreds of examples in the run of the mutants; here every check is to run.
    few = "--hypothesis-profile=smoke"
    outcome = run(*QUIET, few, str(CONFORMANCE), "--engine", "conformance.mutants.right:Plain", cwd=tmp_path)
    assert outcome.code == pytest.ExitCode.OK, outcome.text[-3000:]
    assert outcome.words().keys() == CODEC_CHECKS.keys()
    assert set(outcome.words().values()) <= {"pass", "pass*"}, outcome.words()
    assert "does not declare the capability 'large'" in outcome.text
    assert not list(tmp_path.iterdir()), "the suite wrote into the working directory"


def test_there_are_mutants_of_every_part_and_of_every_check() -> None:
    assert len(ALL) >= 40
    kinds = {mutant.kind for mutant in ALL}
    assert kinds == {
        *("encoder", "applier", "reader", "history", "router", "publisher", "rank", "version", "client"),
        *("session", "undo", "fence", "account"),
    }, kinds
    assert {mutant.check for mutant in ALL if mutant.run == CODEC} == CODEC_CHECKS.keys()
    assert len({mutant.fault for mutant in ALL} - {None}) >= 30


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_stands_where_it_says(mutant: Mutant) -> None:
    """A place that leads nowhere breaks the process otherwise than was meant, which counts as killed."""
    module, _, name = mutant.place.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert (found.__module__, found.__name__) == (module, name)


def test_the_matrix_holds_every_mutant_and_every_check() -> None:
    """A mutant, or a check, that is new has not been run yet: make the matrix again."""
    assert {mutant.name for mutant in ALL} | {report.UNBROKEN} == STORED.cells.keys()
    for run_ in (CODEC, LIVE):
        cells = [cell for mutant in ALL if mutant.run == run_ for cell in STORED.cells[mutant.name].values()]
        ran = {cell.check for cell in cells if cell.ran}
        assert ran == report.checks_of(run_).keys()
    assert {check for checks in ROWS.values() for check in checks} <= report.checks_of(LIVE).keys()


def test_nothing_survives_in_the_matrix() -> None:
    assert [mutant.name for mutant in ALL if report.survives(mutant, STORED.cells[mutant.name])] == []
    unbroken = STORED.cells[report.UNBROKEN]
    assert all(cell.ran and not cell.killed for cell in unbroken.values())
    assert {cell.check for cell in unbroken.values()} == report.checks_of(LIVE).keys()


def test_checks_that_never_kill_alone_are_justified() -> None:
    for run_ in (CODEC, LIVE):
        single = report.alone(STORED, [mutant for mutant in ALL if mutant.run == run_])
        never = report.checks_of(run_).keys() - single.keys()
        assert never == {check for check in report.checks_of(run_) if CHECKS[check].never_alone}


def test_the_document_is_made_of_the_matrix() -> None:
    assert report.DOCUMENT.read_text() == report.document(STORED, ALL)


def test_a_survivor_is_told() -> None:
    """A cell that killed under some seeds alone, or another test's, does not count."""
    mutant = next(mutant for mutant in ALL if mutant.name == "SwallowsErrors")
    assert report.survives(mutant, {})
    assert report.survives(mutant, {"refuses::test_malformed": Cell("refuses", killed=1, ran=2)})
    assert report.survives(mutant, {"vectors::test_refused": Cell("refuses", killed=2, ran=2)})
    assert not report.survives(mutant, {"refuses::test_malformed": Cell("refuses", killed=2, ran=2)})


def test_only_tests_that_reach_a_mutation_are_left_out() -> None:
    assert methods_of(SwallowsErrors, Plain) == {"read"}
    assert methods_of(Plain, Plain) == {"name"}


def _judged(*names: str) -> Callable[[], Iterator[Judged]]:
    def source() -> Iterator[Judged]:
        for name in names:
            yield Judged(name, {"t": Cell("refuses", 1, 1)}, 0.5)
            if name == "fails":
                raise ValueError(name)

    return source


def test_runs_side_by_side_lose_nothing() -> None:
    found = list(beside([_judged("a", "b"), _judged("c"), _judged()]))
    assert sorted(judged.name for judged in found) == ["a", "b", "c"]
    assert all(judged.cells == {"t": Cell("refuses", 1, 1)} for judged in found)


def test_a_run_that_fails_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="source failed"):
        list(beside([_judged("a", "b"), _judged("fails")]))


@pytest.mark.parametrize(
    "arguments", [["--only", "Nobody"], ["--write", "--quick"], ["--kind", "none"], ["--seeds", "x"]]
)
def test_bad_usage(arguments: list[str]) -> None:
    done = command([sys.executable, "-m", "conformance.mutants", *arguments], cwd=REPOSITORY)
    assert done.code == 2
    assert "error: " in done.text


def test_runs_are_known() -> None:
    assert {mutant.run for mutant in ALL} == {*RUNS}
