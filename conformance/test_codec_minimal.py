"""minimal: encode emits exactly the positions whose bits differ, in ascending order; unchanged tensors are absent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import oracle, strategies
from conformance.driving import Scratch, encoded
from conformance.engines import FullCodec
from conformance.oracle import State, expected_patches

pytestmark = pytest.mark.check("minimal")


def _assert_minimal(engine: FullCodec, base: State, target: State, scratch: Scratch) -> None:
    with scratch() as tmp:
        found = oracle.read_delta(encoded(engine, base, target, tmp / "delta")).patches
    positions = {patch.name: patch.indices.tolist() for patch in found}
    expected = {patch.name: patch.indices.tolist() for patch in expected_patches(base, target)}
    assert positions.keys() == expected.keys(), f"layers: expected {sorted(expected)}, found {sorted(positions)}"
    for name, wanted in expected.items():
        missed, needless = sorted({*wanted} - {*positions[name]}), sorted({*positions[name]} - {*wanted})
        assert not missed, f"{name}: positions that changed and are not in the delta: {missed[:20]}"
        assert not needless, f"{name}: positions in the delta that did not change: {needless[:20]}"


@given(st.data())
def test_minimal(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    _assert_minimal(engine, *data.draw(strategies.pairs(codes)), scratch)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(0x0000, 0x8000, id="zero_to_negative_zero"),
        pytest.param(0x8000, 0x0000, id="negative_zero_to_zero"),
        pytest.param(0x7FC1, 0x7FC2, id="NaN_payload"),
        pytest.param(0x7FC1, 0xFFC1, id="NaN_sign"),
        pytest.param(0x3F80, 0x7FC0, id="one_to_NaN"),
        pytest.param(0x7FC0, 0x7FC0, id="NaN_kept"),
        pytest.param(0x3F80, 0x4080, id="low_byte_kept"),
        pytest.param(0x3F80, 0xBF80, id="sign_flip"),
        pytest.param(0x0001, 0x0002, id="subnormal"),
        pytest.param(0x7F80, 0xFF80, id="infinity_sign"),
    ],
)
def test_bf16_example(engine: FullCodec, scratch: Scratch, before: int, after: int) -> None:
    """One element of a bf16 tensor among equal ones."""
    old = np.full(6, before, np.uint16)
    new = old.copy()
    new[4] = after
    base, target = {"w": oracle.from_bits(old, "BF16", (2, 3))}, {"w": oracle.from_bits(new, "BF16", (2, 3))}
    _assert_minimal(engine, base, target, scratch)
