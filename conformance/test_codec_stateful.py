"""A trainer and a receiver over many versions, in any order of events, against a model in plain numpy.

The trainer steps and encodes against what was acknowledged; deltas arrive, get lost, arrive twice or late; some are
composed, some are undone; the receiver starts again from the trainer's state. After each event the receiver holds, bit
for bit, what overwriting the stated positions in order gives.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from . import oracle
from .driving.codec import encoded
from .engines.codecs import FullCodec
from .findings import require
from .inputs import strategies
from .oracle import Patch, State, assert_bit_equal, bits, clone, expected_patches, expected_state

pytestmark = pytest.mark.check("bit_exact")

EVENTS = {
    "step": None,
    "encode": None,
    "commit": None,
    "lose": None,
    "repeat": None,
    "reorder": None,
    "restart": None,
    "compose": "composes",
    "invert": "inverts",
}
"""Everything that can happen, and the capability that it needs. Compositions and inverses of nothing do not count."""


@dataclass(frozen=True, eq=False)
class Sent:
    """A delta on disk, and what the model knows of it."""

    path: Path
    patches: tuple[Patch, ...]
    base: State
    """The very states that it was made from: two deltas follow each other when one's target is the other's base."""
    target: State


class History(RuleBasedStateMachine):
    """One run's events; `engine`, `codes` and `seen` are set in a subclass."""

    engine: FullCodec
    codes: tuple[str, ...]
    seen: Counter[str]

    waiting: Bundle[Sent] = Bundle("waiting")
    """Deltas on their way to the receiver that they were made for."""
    known: Bundle[Sent] = Bundle("known")
    """Every delta that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="refdelta-history-"))
        self.made = 0
        self.arrived: list[Sent] = []

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    def offers(self, capability: str) -> bool:
        return capability in self.engine.capabilities

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.trainer: State = data.draw(strategies.states(self.codes, min_tensors=1))
        self.baseline = self.trainer
        self._receive(self.trainer)

    def _receive(self, state: State) -> None:
        """A receiver that has just loaded `state`; the engine's tensors and the model's bits share nothing."""
        self.receiver = clone(state)
        self.model = clone(state)

    def _new_path(self) -> Path:
        self.made += 1
        return self.directory / str(self.made)

    def _apply(self, sent: Sent) -> None:
        self.arrived.append(sent)
        self.engine.apply(sent.path, self.receiver)
        self.model = expected_state(self.model, sent.patches)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.seen["step"] += 1
        self.trainer = data.draw(strategies.changes_of(self.trainer, codes=self.codes))

    @rule(targets=(waiting, known))
    def encode(self) -> Sent:
        """Everything since the baseline, whatever was encoded or lost since."""
        self.seen["encode"] += 1
        path = encoded(self.engine, self.baseline, self.trainer, self._new_path())
        patches = expected_patches(self.baseline, self.trainer)
        _assert_patches(patches, oracle.read_delta(path).patches)
        return Sent(path, patches, self.baseline, self.trainer)

    @rule(sent=consumes(waiting))
    def commit(self, sent: Sent) -> None:
        """It arrives at the receiver that it was made for, which acknowledges it; any other one is lost."""
        if sent.base is not self.baseline:
            self.seen["lose"] += 1
            return
        self.seen["commit"] += 1
        in_step = not oracle.difference(self.model, self.baseline)
        self._apply(sent)
        self.baseline = sent.target
        if in_step:
            assert_bit_equal(sent.target, self.receiver, "after a delta that arrived in order")

    @rule(sent=consumes(waiting))
    def lose(self, sent: Sent) -> None:
        self.seen["lose"] += 1

    @rule(sent=known)
    def arrive(self, sent: Sent) -> None:
        """Again, late, or before its turn; nobody acknowledges it."""
        self.seen["repeat" if any(sent is other for other in self.arrived) else "reorder"] += 1
        self._apply(sent)

    @precondition(lambda self: len(self.arrived) >= 4)
    @rule()
    def restart(self) -> None:
        """The receiver loads the trainer's state, and the trainer knows."""
        self.seen["restart"] += 1
        self.arrived.clear()
        self.baseline = self.trainer
        self._receive(self.trainer)

    @precondition(lambda self: self.offers("composes"))
    @rule(target=known, data=st.data(), last=known)
    def compose(self, data: st.DataObject, last: Sent) -> Sent:
        """A delta, and one that starts where it ends."""
        after = data.draw(strategies.changes_of(last.target))
        path = encoded(self.engine, last.target, after, self._new_path())
        composed = self._new_path()
        self.engine.compose([last.path, path], composed)
        patches = _merged(last.patches, expected_patches(last.target, after))
        _assert_patches(patches, oracle.read_delta(composed).patches)
        self.seen["compose"] += bool(last.patches and patches)
        return Sent(composed, patches, last.base, after)

    @precondition(lambda self: self.offers("inverts"))
    @rule(target=known, sent=known)
    def invert(self, sent: Sent) -> Sent:
        """Apply, keep the inverse, undo at once: it is as if nothing had happened."""
        before = clone(self.model)
        path = self._new_path()
        self.engine.invert(sent.path, self.receiver, path)
        self.model = expected_state(self.model, sent.patches)
        assert_bit_equal(self.model, self.receiver, "invert applies the delta, too")
        inverse = Sent(path, tuple(_at(patch, before) for patch in sent.patches), self.model, before)
        self.seen["invert"] += bool(oracle.difference(before, self.model))
        self._apply(inverse)
        assert_bit_equal(before, self.receiver, "after a delta and its inverse")
        return inverse

    @invariant()
    def the_receiver_holds_what_the_model_does(self) -> None:
        if hasattr(self, "receiver"):
            assert_bit_equal(self.model, self.receiver)


def _at(patch: Patch, state: State) -> Patch:
    """The patch that puts back what `state` has at the positions."""
    return Patch(patch.name, patch.shape, patch.code, patch.indices, bits(state[patch.name])[patch.indices])


def _merged(first: tuple[Patch, ...], second: tuple[Patch, ...]) -> tuple[Patch, ...]:
    """Position by position, the later value; layers in name order."""
    values: dict[str, dict[int, Any]] = {}
    known = {patch.name: patch for patch in (*first, *second)}
    for patch in (*first, *second):
        values.setdefault(patch.name, {}).update(zip(patch.indices.tolist(), patch.bits, strict=True))
    return tuple(_patch_of(known[name], values[name]) for name in sorted(values) if values[name])


def _patch_of(like: Patch, values: dict[int, Any]) -> Patch:
    positions = np.array(sorted(values), dtype=np.int64)
    return Patch(like.name, like.shape, like.code, positions, np.array([values[at] for at in positions.tolist()]))


def _assert_patches(expected: tuple[Patch, ...], found: tuple[Patch, ...]) -> None:
    """The same positions and bits; a writer's order of layers is its own."""
    by_name = {patch.name: patch for patch in found}
    names = sorted(patch.name for patch in expected)
    require(sorted(by_name) == names, "layers", expected=names, found=sorted(by_name))
    for patch in expected:
        one, two = (each.indices.tolist() for each in (patch, by_name[patch.name]))
        require(one == two, "positions", tensor=patch.name, expected=one, found=two)
        one, two = (each.bits.tolist() for each in (patch, by_name[patch.name]))
        require(one == two, "values", tensor=patch.name, expected=one, found=two)


def history_of(engine: FullCodec, codes: tuple[str, ...], seen: Counter[str]) -> type[History]:
    """The machine for an engine; `seen` counts the events."""
    return type("EngineHistory", (History,), {"engine": engine, "codes": codes, "seen": seen})


def run(machine: type[RuleBasedStateMachine]) -> None:
    """A quarter of the profile's examples, each a history of up to 30 events."""
    profile = settings.default
    assert profile is not None
    examples = max(10, profile.max_examples // 4)
    run_state_machine_as_test(machine, settings=settings(profile, max_examples=examples, stateful_step_count=30))


def test_any_history(engine: FullCodec, codes: tuple[str, ...]) -> None:
    seen: Counter[str] = Counter()
    run(history_of(engine, codes, seen))
    missing = {event for event, needs in EVENTS.items() if needs is None or needs in engine.capabilities} - seen.keys()
    assert not missing, f"events that no history had: {sorted(missing)} of {dict(seen)}"
