"""A check with a late engine runs once more: then it passes, fails, or was not judged; the matrix and levels say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suite.runs import Outcome, run

TESTS = '''
import pytest
from conformance.findings import Late

pytestmark = pytest.mark.row("tiny tp=1")


class Row:
    """Counts how often its engine is made ready."""

    def __init__(self):
        self.readied = self.asked = 0

    def ready(self):
        self.readied += 1

    def answer(self, *late):
        """`late`: for each time that it is asked, whether it is starved, hangs or answers."""
        self.asked += 1
        word = late[self.asked - 1]
        if word != "answers":
            raise Late(f"no answer ({word})", starved=word == "starved")


@pytest.fixture
def row():
    return Row()


@pytest.mark.check("base")
def test_late_once(row):
    row.answer("hangs", "answers")
    assert (row.readied, row.asked) == (1, 2)


@pytest.mark.check("twice")
def test_hangs_twice(row):
    row.answer("starved", "hangs")


@pytest.mark.check("empty")
def test_starved_twice(row):
    row.answer("hangs", "starved")


@pytest.mark.check("every_tensor")
def test_wrong_the_second_time(row):
    row.answer("starved", "answers")
    raise AssertionError("wrong bits")
'''


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The four tests as live checks."""
    home = tmp_path_factory.mktemp("again")
    (home / "conftest.py").write_text("from conformance.conftest import *\n\nfrom pathlib import Path\n" + HOME)
    (home / "test_live_late.py").write_text(TESTS)
    return run("-p", "conformance.suite.plugin", "-p", "no:cacheprovider", "--engine", "vllm", str(home), cwd=home)


HOME = """
from conformance.suite import plugin
import pytest

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    plugin.run_of(config).homes.add(Path(__file__).parent)

def pytest_addoption(pluginmanager):
    pass
"""


def test_matrix(outcome: Outcome) -> None:
    words = outcome.words()
    assert words["base"] == "pass"
    assert words["twice"] == "FAIL"
    assert words["empty"] == "infra"
    assert words["every_tensor"] == "FAIL"


def test_said(outcome: Outcome) -> None:
    assert "The first time: no answer (starved)" in outcome.text
    assert "twice no answer while other processes had the cores: no answer (starved)" in outcome.text
    assert "wrong bits" in outcome.text
    assert outcome.code == 1, outcome.text


def test_a_run_in_which_nothing_but_the_infrastructure_failed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from conformance.conftest import *\n\nfrom pathlib import Path\n" + HOME)
    (tmp_path / "test_live_late.py").write_text(TESTS)
    words = (
        "-p",
        "conformance.suite.plugin",
        "-p",
        "no:cacheprovider",
        "--engine",
        "vllm",
        "-k",
        "starved_twice or once",
    )
    found = run(*words, str(tmp_path), cwd=tmp_path)
    assert found.code == 3, found.text
    assert "level live           not judged" in found.text, found.text
