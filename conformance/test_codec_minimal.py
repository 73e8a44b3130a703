"""minimal: encode emits exactly the positions whose bits differ, in ascending order; unchanged tensors are absent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from . import oracle
from .driving.codec import Scratch, encoded
from .engines.codecs import FullCodec
from .findings import Finding, Mismatch, require
from .inputs import strategies
from .oracle import State, expected_patches

pytestmark = pytest.mark.check("minimal")
_NAN = pytest.mark.needs("nan_values")


def _assert_minimal(engine: FullCodec, base: State, target: State, scratch: Scratch) -> None:
    with scratch() as tmp:
        found = oracle.read_delta(encoded(engine, base, target, tmp / "delta")).patches
    positions = {patch.name: patch.indices.tolist() for patch in found}
    expected = {patch.name: patch.indices.tolist() for patch in expected_patches(base, target)}
    for name in sorted(expected.keys() | positions.keys()):
        wanted, got = {*expected.get(name, ())}, {*positions.get(name, ())}
        for what, wrong in (
            ("changed and not in the delta", sorted(wanted - got)),
            ("in the delta and not changed", sorted(got - wanted)),
        ):
            if wrong:
                raise Mismatch(_misplaced(f"positions {what}: {wrong[:20]}", name, wrong, base[name], target[name]))
    require(positions.keys() == expected.keys(), "layers", expected=sorted(expected), found=sorted(positions))


def _misplaced(what: str, name: str, wrong: list[int], base: Tensor, target: Tensor) -> Finding:
    """The first of several positions: the bits that the target has there, and those of the base."""
    at, shape = wrong[0], tuple(base.shape)
    place = tuple(int(axis) for axis in np.unravel_index(at, shape)) if shape else ()
    expected, found = (f"0x{int(oracle.bits(tensor)[at]):0{2 * tensor.itemsize}x}" for tensor in (target, base))
    count, dtype = base.numel(), str(base.dtype)
    return Finding("positions", name, place, at, expected, found, dtype, len(wrong), count, context=what)


@given(st.data())
def test_minimal(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    _assert_minimal(engine, *data.draw(strategies.pairs(codes)), scratch)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(0x0000, 0x8000, id="zero_to_negative_zero"),
        pytest.param(0x8000, 0x0000, id="negative_zero_to_zero"),
        pytest.param(0x7FC1, 0x7FC2, id="NaN_payload", marks=_NAN),
        pytest.param(0x7FC1, 0xFFC1, id="NaN_sign", marks=_NAN),
        pytest.param(0x3F80, 0x7FC0, id="one_to_NaN", marks=_NAN),
        pytest.param(0x7FC0, 0x7FC0, id="NaN_kept", marks=_NAN),
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
