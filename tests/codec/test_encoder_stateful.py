"""A `DeltaEncoder` and a receiver that keep digests, over any history of events, against plain states."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from conformance.inputs import strategies
from conformance.inputs.memory import Aliased
from refdelta import Delta, DeltaEncoder, DeltaError, Reason, apply_delta, diff
from refdelta.apply import compose
from refdelta.digest import state_digest
from tests.codec.support import State, assert_same

SEEN: Counter[str] = Counter()
EVENTS = {"commit", "lost", "refused", "undone", "resumed", "composed"}


class Run(RuleBasedStateMachine):
    """One run: what the receiver took it acknowledges; what is not its next version it refuses, unchanged."""

    waiting: Bundle[tuple[Delta, State]] = Bundle("waiting")

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.trainer: State = data.draw(strategies.states(min_tensors=1))
        self.encoder = DeltaEncoder(self.trainer, run_id="run", version=3)
        self.held = {name: t.clone() for name, t in self.trainer.items()}
        self.digest = state_digest(self.held)
        self.version = 3
        self.last: tuple[Delta, Delta] | None = None

    @rule(target=waiting, data=st.data())
    def encode(self, data: st.DataObject) -> tuple[Delta, State]:
        self.trainer = data.draw(strategies.changes_of(self.trainer))
        delta = self.encoder.encode(self.trainer)
        assert delta.lineage is not None
        assert (delta.lineage.base_version, delta.lineage.version) == (self.version, self.version + 1)
        assert (delta.lineage.base_digest, delta.lineage.digest) == (self.digest, state_digest(self.trainer))
        return delta, self.trainer

    @rule(sent=consumes(waiting))
    def deliver(self, sent: tuple[Delta, State]) -> None:
        delta, target = sent
        assert delta.lineage is not None
        before = {name: t.clone() for name, t in self.held.items()}
        if delta.lineage.base_digest != self.digest:
            with pytest.raises(DeltaError) as caught:
                apply_delta(delta, self.held, digest=self.digest)
            assert caught.value.reason is Reason.BASE_MISMATCH
            assert_same(self.held, before)
            SEEN["refused"] += 1
            return
        inverse = apply_delta(delta, self.held, digest=self.digest)
        assert_same(self.held, target)
        if delta.lineage.base_version != self.version:
            # The same state under an older number: the encoder does not take it for its own.
            with pytest.raises(DeltaError):
                self.encoder.commit(delta)
            apply_delta(inverse, self.held)
            SEEN["refused"] += 1
            return
        self.encoder.commit(delta)
        self.digest, self.version = state_digest(target), self.version + 1
        self.last = delta, inverse
        assert (self.encoder.version, self.encoder.digest) == (self.version, self.digest)
        SEEN["commit"] += 1

    @rule(sent=consumes(waiting))
    def lose(self, sent: tuple[Delta, State]) -> None:
        SEEN["lost"] += 1

    @precondition(lambda self: self.last is not None)
    @rule()
    def undo_and_redo(self) -> None:
        """The inverse leads to the state before, which the delta takes again; together they change nothing."""
        assert self.last is not None
        delta, inverse = self.last
        assert delta.lineage is not None
        before = {name: t.clone() for name, t in self.held.items()}
        apply_delta(inverse, self.held, digest=self.digest)
        assert state_digest(self.held) == delta.lineage.base_digest
        apply_delta(delta, self.held, digest=delta.lineage.base_digest)
        assert_same(self.held, before)
        apply_delta(compose([inverse, delta]), self.held, digest=self.digest)
        assert_same(self.held, before)
        SEEN["undone"] += bool(delta.patches)
        SEEN["composed"] += bool(delta.patches)

    @precondition(lambda self: self.version >= 5)
    @rule()
    def resume(self) -> None:
        """The trainer starts again from what the receiver holds."""
        self.encoder = DeltaEncoder(self.held, run_id="run", version=self.version)
        assert self.encoder.digest == self.digest
        SEEN["resumed"] += 1


def test_any_run() -> None:
    profile = settings.default
    assert profile is not None
    examples = max(20, profile.max_examples // 3)
    run(Run, settings=settings(profile, max_examples=examples, stateful_step_count=25))
    assert SEEN.keys() == EVENTS, f"events that never came: {EVENTS - SEEN.keys()}"


@given(strategies.aliased())
def test_a_change_under_some_names_of_shared_memory_is_refused(drawn: Aliased) -> None:
    """Exactly where what other names hold would change, and nothing is written then."""
    weights, base = drawn.tied(drawn.base), drawn.tied(drawn.base)
    target = drawn.tied(drawn.target)
    whole = diff({n: t.clone() for n, t in base.items()}, {n: t.clone() for n, t in target.items()})
    patches = tuple(patch for patch in whole.patches if patch.name not in drawn.aliases)
    shared = {patch.name for patch in whole.patches} & drawn.aliases.keys()
    partial = Delta(patches, whole.total_elements)
    if not shared:
        apply_delta(partial, weights)
        assert_same(weights, target)
        return
    with pytest.raises(DeltaError) as caught:
        apply_delta(partial, weights)
    assert caught.value.reason is Reason.ALIAS_CONFLICT
    assert_same(weights, base)
    apply_delta(whole, weights)
    assert_same(weights, target)


def test_tensors_of_the_machine_are_not_those_of_the_encoder() -> None:
    """What the trainer does to its tensors after encoding changes no baseline."""
    w = torch.zeros(2, 3)
    encoder = DeltaEncoder({"w": w}, run_id="run")
    w += 1
    delta = encoder.encode({"w": w})
    w += 1
    encoder.commit(delta)
    assert encoder.digest == state_digest({"w": torch.ones(2, 3)})
