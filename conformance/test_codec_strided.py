"""bit_exact for views: positions are logical and row-major, whatever the strides of the tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .driving.codec import Scratch
from .engines.codecs import FullCodec
from .inputs import strategies
from .inputs.memory import Placed
from .oracle import assert_bit_equal, bits, expected_patches, expected_state, total_elements

pytestmark = pytest.mark.check("bit_exact")


@pytest.mark.level("writer")
@pytest.mark.needs("strided")
@given(st.data())
def test_encode_from_views(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    base, target = data.draw(strategies.pairs(codes, min_tensors=1))
    placed = [data.draw(strategies.placements(state)) for state in (base, target)]
    with scratch() as tmp:
        engine.encode(placed[0].views, placed[1].views, tmp / "delta")
        written = oracle.read_delta(tmp / "delta")
    kinds = f"encoded from {placed[0].kinds} and {placed[1].kinds}"
    assert_bit_equal(target, expected_state(base, written.patches), kinds)
    found = {patch.name: patch.indices.tolist() for patch in written.patches}
    assert found == {patch.name: patch.indices.tolist() for patch in expected_patches(base, target)}


@pytest.mark.level("applier")
@pytest.mark.needs("in_place")
@given(st.data())
def test_apply_through_views(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    """The views and their buffers: what lies between and around a view's elements stays."""
    base, patches, indices = data.draw(strategies.loose_deltas(codes))
    target = expected_state(base, patches)
    placed = data.draw(strategies.placements(base))
    weights = dict(placed.views)
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", patches, total_elements(base), indices=indices)
        engine.apply(delta, weights)
    assert all(weights[name] is tensor for name, tensor in placed.views.items()), "apply replaced a tensor"
    assert_bit_equal(target, weights, f"applied to {placed.kinds}")
    expected = Placed.of(target, placed.kinds).buffers
    for name, buffer in placed.buffers.items():
        wrong = (bits(buffer) != bits(expected[name])).nonzero()[0]
        assert not wrong.size, f"{name}: apply wrote beside the view, at {wrong[:5]} of its buffer"


@pytest.mark.level("applier")
@pytest.mark.needs("in_place")
@given(st.data())
def test_apply_through_aliases(
    engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject
) -> None:
    """Several names of the same memory, each of which states the change."""
    drawn = data.draw(strategies.aliased(codes))
    weights, patches = drawn.tied(drawn.base), drawn.patches()
    with scratch() as tmp:
        engine.apply(oracle.write_delta(tmp / "delta", patches, total_elements(weights)), weights)
    assert_bit_equal(drawn.tied(drawn.target), weights, f"applied where {dict(drawn.aliases)}")
