"""What a failing test may cost: shrinking is bounded in properties, in state machines, and where a program hangs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from conformance.suite import plugin, shrinking
from tests.suite.runs import CONFORMANCE, QUIET, command

ENGINE: Any = importlib.import_module(shrinking.MODULE)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shrinking ends as soon as it begins; the profile is the suite's."""
    monkeypatch.setattr(shrinking, "SECONDS", 0)
    monkeypatch.setattr(ENGINE, shrinking.NAME, getattr(ENGINE, shrinking.NAME))
    before = settings.get_current_profile_name()
    settings.load_profile("program")
    assert shrinking.bound(), "this Hypothesis has no such constant: see conformance/suite/shrinking.py"
    yield
    settings.load_profile(before)


def check(numbers: list[int], seen: list[object]) -> None:
    """Fails where the sum is large, which leaves much to shrink; what is seen begins with the first failure."""
    if seen or sum(numbers) > 1000:
        seen.append(numbers)
    assert sum(numbers) <= 1000


def fails_as_property(seen: list[object]) -> None:
    @given(st.lists(st.integers()))
    def test(numbers: list[int]) -> None:
        check(numbers, seen)

    test()


def fails_as_machine(seen: list[object]) -> None:
    class Machine(RuleBasedStateMachine):
        @rule(numbers=st.lists(st.integers()))
        def step(self, numbers: list[int]) -> None:
            check(numbers, seen)

    run_state_machine_as_test(Machine)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("fails", [fails_as_property, fails_as_machine])
def test_shrinking_ends(fails: Callable[[list[object]], None]) -> None:
    """The example that failed, again as shrinking begins, and to show it."""
    seen: list[object] = []
    with pytest.raises(AssertionError):
        fails(seen)
    assert 2 <= len(seen) <= 20


def test_hypothesis_has_the_constant() -> None:
    """It is internal: where it goes away, the suite still runs, and this test says so."""
    assert plugin.PROFILES
    assert getattr(ENGINE, shrinking.NAME) == shrinking.SECONDS


def test_a_hypothesis_without_it_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ENGINE, shrinking.NAME)
    assert not shrinking.bound()
    assert not hasattr(ENGINE, shrinking.NAME)
    monkeypatch.setattr(shrinking, "MODULE", "hypothesis.no_such_module")
    assert not shrinking.bound()


@pytest.mark.parametrize("name", plugin.PROFILES)
def test_no_profile_explains(name: str) -> None:
    profile = settings.get_profile(name)
    assert Phase.explain not in profile.phases
    assert (Phase.shrink in profile.phases) == (name not in ("quick", "smoke"))


HANGS = """#!/bin/sh
echo "$1" >> calls
sleep 60
"""
RUN = """
import sys
from conformance.suite import shrinking
shrinking.SECONDS = 1
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("test", ["test_codec_bit_exact.py::test_round_trip", "test_codec_stateful.py"])
def test_a_program_that_hangs_is_not_started_often(tmp_path: Path, test: str) -> None:
    """Each start costs a time-out: one to see it, two within the second of shrinking, and those that bound it."""
    (tmp_path / "hang.sh").write_text(HANGS)
    asked = ("--engine", "exec:sh hang.sh", "--capabilities", "", "--exec-timeout", "0.5")
    arguments = [word for word in QUIET if not word.startswith("--hypothesis-profile")]
    found = command([sys.executable, "-c", RUN, *arguments, str(CONFORMANCE / test), *asked], tmp_path)
    assert found.code == 1, found.text[-3000:]
    assert "hung: no end after 0.5 seconds" in found.text
    assert "five minutes" not in found.text
    assert "shrinking ends after 1 s" in found.text
    calls = (tmp_path / "calls").read_text().split()
    assert set(calls) == {"encode"}
    assert len(calls) <= 8
