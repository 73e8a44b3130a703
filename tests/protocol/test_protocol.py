"""refdelta's update protocol has no counterexample; vLLM's own and each mutation of refdelta's have."""

from __future__ import annotations

import inspect

import pytest

from tests.protocol.chance import Chance, outcomes
from tests.protocol.explore import ANYTHING, LIE, MIXTURE, PROPERTIES, REPLY, STUCK, Found, Protocol, Trace, explore
from tests.protocol.model import Native, Refdelta

MUTANTS = {
    "lowest rank raises": {REPLY, STUCK},
    "no first agreement": {STUCK},
    "no second agreement": {MIXTURE, REPLY, STUCK},
    "write in update": {MIXTURE},
    "no undo": {MIXTURE},
    "flag not reset": {STUCK},
    "payloads not compared": {MIXTURE},
    "refuses before the agreement": {REPLY, STUCK},
    "audits before the agreement": {STUCK},
    "survives a failed undo": {MIXTURE},
}
"""Mutation of refdelta's protocol -> properties that it must break, at least."""


def shown(found: Found) -> str:
    return "\n".join(str(trace) for trace in found.traces.values())


@pytest.mark.parametrize(
    ("protocol", "states"),
    [
        (Protocol(clients=1, budget=3), 250),
        (Protocol(clients=2, budget=2), 5000),
        (Protocol(clients=1, budget=2, programs=("sync", "recover", *ANYTHING)), 200),
    ],
    ids=["one client, three faults", "two clients, two faults", "calls in any order"],
)
def test_refdelta_has_no_counterexample(protocol: Protocol, states: int) -> None:
    """Everything reachable was seen, updates succeed in it, and no property breaks."""
    found = explore(protocol)
    assert not found.traces, shown(found)
    assert found.states >= states, "the search was cut short"
    assert found.updates > 0


def test_vllm_alone_breaks_every_property() -> None:
    """One fault is enough for each."""
    found = explore(Protocol(Native, programs=("plain",), clients=1, budget=1))
    assert set(found.traces) == set(PROPERTIES), shown(found)
    print(shown(found))
    for trace in found.traces.values():
        assert sum(len(step.faults) for step in trace.steps) == 1
        assert len(trace.steps) <= 4


@pytest.mark.parametrize("mutation", sorted(Refdelta.MUTATIONS))
def test_each_mutation_has_a_counterexample(mutation: str) -> None:
    found = explore(Protocol(mutations=frozenset({mutation}), clients=1))
    print(shown(found))
    assert set(found.traces) >= MUTANTS[mutation], shown(found)


def test_a_client_that_does_not_read_what_was_committed_reports_falsely() -> None:
    """Without a fault: another client's start drops the session, and an empty one finishes."""
    found = explore(Protocol(programs=("plain", "recover"), budget=0))
    assert set(found.traces) == {LIE}, shown(found)


def test_vllm_alone_needs_no_fault_where_a_client_stops() -> None:
    """The next start raises on every rank, and one of the two replies stays behind."""
    found = explore(Protocol(Native, programs=("plain",), clients=1, budget=0))
    assert set(found.traces) == {REPLY, STUCK}, shown(found)
    assert [step.call for step in found.traces[STUCK].steps] == ["pause", "start", "stops", "pause", "start"]


def test_the_properties_do_not_break_by_themselves() -> None:
    """vLLM's own protocol, one client that is never interrupted, and no fault."""
    found = explore(Protocol(Native, programs=("plain",), clients=1, budget=0, stops=False))
    assert not found.traces, shown(found)
    assert found.updates > 0


def test_a_trace_reads_as_a_list_of_steps() -> None:
    found = explore(Protocol(mutations=frozenset({"no undo"}), clients=1))
    lines = str(found.traces[MIXTURE]).splitlines()
    assert lines[0] == "a mixture serves:"
    assert lines[4] == "  4. client 0: finish [rank 1, write: fails in the middle] -> error"
    assert lines[-1] == "  ranks hold a, mixed; alive"
    assert isinstance(found.traces[MIXTURE], Trace)


def test_every_combination_of_faults_is_tried() -> None:
    """Two points of two kinds each: nothing, four single faults, four pairs; with a budget of one, no pair."""

    def step(chance: Chance) -> tuple[str | None, str | None]:
        return chance.fault(0, "a", "x", "y"), chance.fault(1, "b", "x", "y")

    assert len({result for _, result in outcomes(step, 2)}) == 9
    assert len({result for _, result in outcomes(step, 1)}) == 5


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "refdelta.vllm.backend",
            "start_weight_update update_from finish_weight_update abort_weight_update audit _step _tell _undo _open "
            "_stage _write _one_rank_raises",
        ),
        ("refdelta.vllm.update.ranks", "run_on_all_ranks is_reporting_rank"),
        ("refdelta.vllm.worker", "wrap_worker _for_this_backend"),
    ],
)
def test_the_names_that_the_model_stands_for_exist(module: str, names: str) -> None:
    """A part that was renamed or removed must be looked at again here."""
    pytest.importorskip("vllm", reason="the backend imports vLLM")
    from importlib import import_module

    source = inspect.getsource(import_module(module))
    assert [name for name in names.split() if f"def {name}(" not in source] == []
