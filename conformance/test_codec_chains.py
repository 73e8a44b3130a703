"""bit_exact over several versions: there and back, and a chain."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .driving.codec import Scratch, applied, encoded
from .engines.codecs import FullCodec
from .inputs import strategies
from .oracle import State, assert_bit_equal

pytestmark = pytest.mark.check("bit_exact")


def _follow(engine: FullCodec, versions: list[State], scratch: Scratch) -> None:
    """One engine state is carried from version to version, and compared after each."""
    state = versions[0]
    with scratch() as tmp:
        for number, (old, new) in enumerate(pairwise(versions)):
            state = applied(engine, encoded(engine, old, new, tmp / str(number)), state)
            assert_bit_equal(new, state, f"after delta {number} of a chain")


@given(st.data())
def test_there_and_back(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    _follow(engine, [*data.draw(strategies.round_trips(codes))], scratch)


@given(st.data())
def test_chain(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    _follow(engine, data.draw(strategies.chains(codes)), scratch)
