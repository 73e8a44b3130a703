"""Every feature that the strategies promise is really drawn, and often enough to matter."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from conformance import oracle, strategies
from conformance.oracle import DTYPES, State
from conformance.strategies import PAIR_FEATURES, STATE_FEATURES

DRAWS = 100
"""As many as the profile `ci` of the suite draws for one property."""


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    """Label -> draws of `pairs()` that hold it, in one property's worth of draws."""
    found: Counter[str] = Counter()

    @settings(max_examples=DRAWS, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
    @given(strategies.pairs())
    def draw(pair: tuple[State, State]) -> None:
        found.update(strategies.state_features(pair[0]) | strategies.pair_features(*pair))

    draw()
    return found


@pytest.mark.parametrize("label", sorted(STATE_FEATURES | PAIR_FEATURES))
def test_feature_is_drawn(counts: Counter[str], label: str) -> None:
    assert counts[label] >= 3, f"{label!r} in {counts[label]} of {DRAWS} draws"


def test_labels_are_declared(counts: Counter[str]) -> None:
    assert counts.keys() <= STATE_FEATURES | PAIR_FEATURES


def test_labels_by_hand() -> None:
    """A label that is given to everything would count nothing."""
    zeros, negative = oracle.from_bits([0, 0, 0], "F32", (1, 3)), oracle.from_bits([0, 0x80000000, 0], "F32", (1, 3))
    assert strategies.state_features({"w": zeros}) == {"dtype F32", "2-D"}
    assert strategies.state_features({"a.b": negative}) == {"dtype F32", "2-D", "-0", "name with dots"}
    nan = oracle.from_bits([0x7F800001, 0x7F800000, 0x00000001], "F32", (3,))
    assert strategies.state_features({"w": nan}) == {
        "dtype F32", "1-D", "signalling NaN", "NaN payload", "infinity", "subnormal",
    }  # fmt: skip
    assert strategies.pair_features({"w": zeros}, {"w": zeros}) == {"nothing changed"}
    assert strategies.pair_features({"w": zeros}, {"w": negative}) == {
        "density between 5 and 95 %", "only the sign", "lowest byte kept", "+0 to -0",
    }  # fmt: skip
    assert strategies.state_features({}) == {"no tensors"}


@settings(deadline=None)
@given(strategies.pairs())
def test_pairs_differ_in_bits_alone(pair: tuple[State, State]) -> None:
    base, target = pair
    assert [*base] == [*target]
    for name in base:
        assert (base[name].dtype, base[name].shape) == (target[name].dtype, target[name].shape)
        if base[name].dtype == DTYPES["BOOL"]:
            assert set(oracle.bits(target[name]).tolist()) <= {0, 1}, "no bool has other bits"
        shape = [size for size in base[name].shape if size != 1]
        assert len(set(shape)) == len(shape), f"a square shape hides a missing transpose: {shape}"


@settings(deadline=None)
@given(strategies.round_trips())
def test_round_trips_return(states: tuple[State, State, State]) -> None:
    assert oracle.difference(states[0], states[2]) == ""


@settings(deadline=None)
@given(strategies.chains(length=4))
def test_chains_have_their_length(chain: list[State]) -> None:
    assert len(chain) == 4
    assert all([*state] == [*chain[0]] for state in chain)


def test_loose_deltas_are_loose() -> None:
    """Layers out of name order, positions that keep their bits, and I64 where I32 would do are all drawn."""
    found: Counter[str] = Counter()

    @settings(max_examples=DRAWS, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
    @given(strategies.loose_deltas())
    def draw(loose: tuple[State, tuple[oracle.Patch, ...], str]) -> None:
        base, patches, indices = loose
        names = [patch.name for patch in patches]
        found["out of order"] += names != sorted(names)
        found["bits kept"] += any((oracle.bits(base[p.name])[p.indices] == p.bits).any() for p in patches)
        found[indices] += bool(patches)

    draw()
    assert min(found[label] for label in ("out of order", "bits kept", "I32", "I64")) >= 10, found


def test_codes_for_capabilities() -> None:
    assert set(strategies.codes_for(())) == oracle.FLOATING - {"F4"}
    assert set(strategies.codes_for({"non_floating", "sub_byte"})) == DTYPES.keys()
