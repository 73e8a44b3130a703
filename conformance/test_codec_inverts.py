"""inverts: the inverse restores the state that apply saw, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .driving.codec import Scratch, applied, encoded
from .engines.codecs import FullCodec
from .inputs import strategies
from .oracle import State, assert_bit_equal, clone, expected_state, total_elements

pytestmark = [pytest.mark.check("inverts"), pytest.mark.needs("inverts")]


def _assert_inverts(engine: FullCodec, delta: Path, base: State, target: State, inverse: Path) -> None:
    weights = clone(base)
    engine.invert(delta, weights, inverse)
    assert_bit_equal(target, weights, "invert applies the delta, too")
    back = expected_state(weights, oracle.read_delta(inverse).patches)
    assert_bit_equal(base, back, "the inverse, applied by the oracle")
    assert_bit_equal(base, applied(engine, inverse, weights), "the inverse, applied by the engine")


@given(st.data())
def test_own_delta(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    base, target = data.draw(strategies.pairs(codes))
    with scratch() as tmp:
        _assert_inverts(engine, encoded(engine, base, target, tmp / "delta"), base, target, tmp / "inverse")


@given(st.data())
def test_delta_of_another_writer(
    engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject
) -> None:
    base, patches, indices = data.draw(strategies.loose_deltas(codes))
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", patches, total_elements(base), indices=indices)
        _assert_inverts(engine, delta, base, expected_state(base, patches), tmp / "inverse")
