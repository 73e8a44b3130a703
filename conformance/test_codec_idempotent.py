"""idempotent: applying a delta twice equals applying it once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .driving.codec import Scratch, applied, encoded
from .engines.codecs import FullCodec
from .inputs import strategies
from .oracle import assert_bit_equal, expected_state, total_elements

pytestmark = pytest.mark.check("idempotent")


@pytest.mark.level("codec")
@given(st.data())
def test_own_delta_twice(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    base, target = data.draw(strategies.pairs(codes, min_tensors=1))
    with scratch() as tmp:
        delta = encoded(engine, base, target, tmp / "delta")
        assert_bit_equal(target, applied(engine, delta, applied(engine, delta, base)), "after the second application")


@given(st.data())
def test_delta_of_another_writer_twice(
    engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject
) -> None:
    base, patches, indices = data.draw(strategies.loose_deltas(codes))
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", patches, total_elements(base), indices=indices)
        twice = applied(engine, delta, applied(engine, delta, base))
    assert_bit_equal(expected_state(base, patches), twice, "after the second application")
