"""counted: changed, total and density in the metadata equal what the payload holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .driving.codec import Scratch, applied, encoded
from .driving.counting import assert_counted, assert_right_densities_are_taken
from .engines.codecs import FullCodec
from .inputs import strategies
from .oracle import assert_bit_equal, total_elements

pytestmark = pytest.mark.check("counted")


@given(st.data())
def test_counts(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    assert_counted(engine, *data.draw(strategies.pairs(codes)), scratch)


def test_density_is_over_every_tensor(engine: FullCodec, scratch: Scratch) -> None:
    """Two tensors of 100 elements, one element changed: 0.5 %, and not 1 %."""
    zeros = oracle.from_bits(np.zeros(100), "F32", (4, 25))
    one = oracle.from_bits(np.eye(1, 100, 7), "F32", (4, 25))
    with scratch() as tmp:
        delta = encoded(engine, {"a": zeros, "b": zeros}, {"a": one, "b": zeros}, tmp / "delta")
        metadata = json.loads((delta / oracle.METADATA_FILE).read_text())
    found = {key: metadata[key] for key in ("changed_elements", "total_elements", "density_pct")}
    assert found == {"changed_elements": 1, "total_elements": 200, "density_pct": 0.5}


@pytest.mark.parametrize(("changed", "shape"), [(1, (4, 16)), (3, (4, 16)), (1, (400, 500)), (2, (1, 3))])
def test_density_half_way(engine: FullCodec, scratch: Scratch, changed: int, shape: tuple[int, int]) -> None:
    """1 of 64 is 1.5625 %: 1.562 and 1.563 are both right, in what is written and in what is read. 2 of 3 is no tie."""
    total = shape[0] * shape[1]
    base = {"w": oracle.from_bits(np.zeros(total), "BF16", shape)}
    target = {"w": oracle.from_bits(np.arange(total) < changed, "BF16", shape)}
    assert_counted(engine, base, target, scratch)
    assert_right_densities_are_taken(engine, base, target, scratch)


def test_empty_delta_is_a_version(engine: FullCodec, scratch: Scratch) -> None:
    """Equal states give a delta without layers, which is applied like any other."""
    state = {"w": oracle.from_bits(np.full(6, 0x7FC1), "BF16", (2, 3)), "scalar": oracle.from_bits([5], "F32", ())}
    with scratch() as tmp:
        own = encoded(engine, state, state, tmp / "own")
        assert oracle.read_delta(own).metadata["layer_names"] == []
        other = oracle.write_delta(tmp / "other", (), total_elements(state))
        for delta in (own, other):
            assert_bit_equal(state, applied(engine, delta, state), "after an empty delta")
