"""Every broken engine fails in the check that is meant for it; the right one that they are made from passes all.

The reference, which some are made from, has a run of its own: `pytest conformance/`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.matrix import CODEC_CHECKS
from tests.suite import broken
from tests.suite.broken import MUTANTS, Mutant
from tests.suite.runs import CONFORMANCE, QUIET, Outcome, run_all


def _arguments(engine: str, chapter: str) -> list[str]:
    return [*QUIET, "-x", str(CONFORMANCE / f"test_codec_{chapter}.py"), "--engine", engine]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Engine -> how the suite judged it."""
    runs = {m.name: _arguments(f"tests.suite.broken:{m.name}", m.chapter) for m in MUTANTS}
    runs["Plain"] = [*QUIET, str(CONFORMANCE), "--engine", "tests.suite.broken:Plain"]
    cwd = tmp_path_factory.mktemp("cwd")
    found = dict(zip(runs, run_all(list(runs.values()), cwd), strict=True))
    assert not list(cwd.iterdir()), "the suite wrote into the working directory"
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(outcomes: dict[str, Outcome], mutant: Mutant) -> None:
    outcome = outcomes[mutant.name]
    assert outcome.code == pytest.ExitCode.TESTS_FAILED, outcome.text[-3000:]
    assert mutant.check in outcome.failed(), outcome.text[-3000:]


def test_right_engine_passes(outcomes: dict[str, Outcome]) -> None:
    """Every check, and what it cannot do is said."""
    outcome = outcomes["Plain"]
    assert outcome.code == pytest.ExitCode.OK, outcome.text[-3000:]
    assert outcome.words().keys() == CODEC_CHECKS.keys()
    assert set(outcome.words().values()) <= {"pass", "pass*"}, outcome.words()
    assert "does not declare the capability 'large'" in outcome.text


def test_every_broken_engine_is_listed() -> None:
    public = {
        name for name, value in vars(broken).items() if isinstance(value, type) and value.__module__ == broken.__name__
    }
    listed = {mutant.name for mutant in MUTANTS}
    helpers = {"Plain", "Mutant"}
    assert {name for name in public if not name.startswith("_")} - helpers == listed
    assert {mutant.check for mutant in MUTANTS} == CODEC_CHECKS.keys(), "a check that no broken engine fails"


def test_mutants_say_what_they_do() -> None:
    for mutant in MUTANTS:
        own = getattr(broken, mutant.name).__dict__.get("__doc__")
        assert own, f"{mutant.name} has no description"
        assert Path(CONFORMANCE / f"test_codec_{mutant.chapter}.py").exists()
