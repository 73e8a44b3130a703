"""bit_exact for views: positions are logical and row-major, whatever the strides of the tensors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conformance import oracle, strategies
from conformance.driving import Scratch
from conformance.engines import FullCodec
from conformance.oracle import State, assert_bit_equal, bits, expected_patches, expected_state, total_elements

pytestmark = pytest.mark.check("bit_exact")

KINDS = ("stepped", "transposed", "offset")
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _strides(kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides: every other element, column-major, or contiguous behind an offset."""
    order = range(len(shape)) if kind == "transposed" else range(len(shape) - 1, -1, -1)
    strides, step = [0] * len(shape), 2 if kind == "stepped" else 1
    for axis in order:
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


def view_of(tensor: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A view with the elements of `tensor` and the strides of `kind`, and the buffer of ones that it lies in."""
    carrier = _CARRIERS[tensor.dtype.itemsize]
    buffer = torch.ones(2 * tensor.numel() + 5, dtype=carrier)
    view = buffer.as_strided(tuple(tensor.shape), _strides(kind, tensor.shape), 3)
    view.copy_(tensor.view(carrier))
    return view.view(tensor.dtype), buffer


def _views(state: State, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    both = {name: view_of(tensor, kind) for name, tensor in state.items()}
    return {name: view for name, (view, _) in both.items()}, {name: buffer for name, (_, buffer) in both.items()}


@pytest.mark.needs("strided")
@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_encode_from_views(
    engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, kind: str, data: st.DataObject
) -> None:
    base, target = data.draw(strategies.pairs(codes, min_tensors=1))
    other = data.draw(st.sampled_from([*KINDS, "contiguous"]))
    with scratch() as tmp:
        strided = target if other == "contiguous" else _views(target, other)[0]
        engine.encode(_views(base, kind)[0], strided, tmp / "delta")
        written = oracle.read_delta(tmp / "delta")
    assert_bit_equal(target, expected_state(base, written.patches), f"encoded from {kind} and {other} tensors")
    found = {patch.name: patch.indices.tolist() for patch in written.patches}
    assert found == {patch.name: patch.indices.tolist() for patch in expected_patches(base, target)}


@pytest.mark.needs("in_place")
@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_apply_through_views(
    engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, kind: str, data: st.DataObject
) -> None:
    """The view and its buffer: what lies between and around the view's elements stays."""
    base, patches, indices = data.draw(strategies.loose_deltas(codes))
    target = expected_state(base, patches)
    weights, buffers = _views(base, kind)
    given_tensors = dict(weights)
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", patches, total_elements(base), indices=indices)
        engine.apply(delta, weights)
    assert all(weights[name] is tensor for name, tensor in given_tensors.items()), "apply replaced a tensor"
    assert_bit_equal(target, weights, f"applied to {kind} tensors")
    expected_buffers = _views(target, kind)[1]
    for name, buffer in buffers.items():
        wrong = (bits(buffer) != bits(expected_buffers[name])).nonzero()[0]
        assert not wrong.size, f"{name}: apply wrote beside the view, at {wrong[:5]} of its buffer"
