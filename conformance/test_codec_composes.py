"""composes: a composed delta applied once gives what its parts applied in order give."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .driving.codec import Scratch, applied
from .engines.codecs import FullCodec
from .inputs import strategies
from .oracle import assert_bit_equal, expected_patches, expected_state, total_elements

pytestmark = [pytest.mark.check("composes"), pytest.mark.needs("composes")]


@given(st.data())
def test_chain_in_one(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    versions = data.draw(strategies.chains(codes))
    with scratch() as tmp:
        parts = [
            oracle.write_delta(tmp / str(number), expected_patches(old, new), total_elements(old))
            for number, (old, new) in enumerate(pairwise(versions))
        ]
        engine.compose(parts, tmp / "composed")
        written = oracle.read_delta(tmp / "composed")
        assert_bit_equal(versions[-1], expected_state(versions[0], written.patches), "applied by the oracle")
        assert_bit_equal(versions[-1], applied(engine, tmp / "composed", versions[0]), "applied by the engine")
