"""Bit views, gather, scatter, comparison: every dtype, any strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from refdelta import DeltaError, Reason
from refdelta.codec import bits
from tests.codec.support import DTYPES, LAYOUTS, bf16, bytes_of, patterns, random_tensor, strided_like

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (5, 3), (2, 3, 4), (1, 9), (4, 1, 3)]


def views(code: str) -> list[Tensor]:
    rng = np.random.default_rng(1)
    made = [strided_like(random_tensor(rng, code, shape), layout) for shape in SHAPES for layout in LAYOUTS]
    wide = random_tensor(rng, code, (6, 10))
    return [*made, wide.T, wide[::2], wide.T[::3, 1::2], wide[2], wide[:, 4], wide.view(6, 5, 2).permute(2, 0, 1)]


@pytest.mark.parametrize("code", DTYPES)
def test_bit_view_shares_memory_and_layout(code: str) -> None:
    for t in views(code):
        view = bits.bit_view(t)
        assert view.dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
        assert (view.data_ptr(), view.shape, view.stride()) == (t.data_ptr(), t.shape, t.stride())
        assert np.array_equal(bytes_of(view), bytes_of(t))


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gather_takes_logical_positions(code: str, index_dtype: torch.dtype) -> None:
    for t in views(code):
        at = torch.arange(t.numel() - 1, -1, -2, dtype=index_dtype)
        found = bits.gather(t, at)
        assert found.dtype == t.dtype
        assert np.array_equal(bytes_of(found), bytes_of(t)[at.numpy()])


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_scatter_writes_logical_positions_and_nothing_else(code: str, index_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    for t in views(code):
        storage = torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage())
        before, expected = storage.clone(), bytes_of(t).copy()
        at = torch.arange(0, t.numel(), 2, dtype=index_dtype)
        values = random_tensor(rng, code, (len(at),))
        expected[at.numpy()] = bytes_of(values)
        bits.scatter_(t, at, values)
        assert np.array_equal(bytes_of(t), expected)
        assert int((storage != before).sum()) <= len(at) * t.element_size(), "wrote outside the view"


def test_scatter_takes_strided_values_and_parameters() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16))
    bits.scatter_(weight, torch.tensor([1, 14]), bf16(0x7FC1, 0, 0x8000, 0)[::2])
    assert patterns(weight)[1::13] == [0x7FC1, 0x8000]


def test_scatter_writes_inference_tensors_anywhere() -> None:
    with torch.inference_mode():
        made = torch.zeros(3, 5)
    bits.scatter_(made, torch.tensor([7]), torch.tensor([2.5]))
    with torch.inference_mode():
        bits.scatter_(made, torch.tensor([8]), torch.tensor([3.5]))
    assert made.flatten().tolist()[6:10] == [0, 2.5, 3.5, 0]


@pytest.mark.parametrize("make", [lambda: torch.zeros(1, 4).expand(3, 4), lambda: torch.zeros(9).unfold(0, 3, 1)])
def test_scatter_refuses_a_tensor_that_overlaps_itself(make: object) -> None:
    assert callable(make)
    with pytest.raises(DeltaError) as caught:
        bits.scatter_(make(), torch.tensor([1]), torch.ones(1))
    assert caught.value.reason is Reason.ALIAS_CONFLICT


@pytest.mark.parametrize(
    ("at", "values", "reason"),
    [
        ([0, 1, 2], torch.ones(1), Reason.LENGTH_MISMATCH),
        ([0], torch.ones(1, 1), Reason.LENGTH_MISMATCH),
        ([0], torch.ones(1, dtype=torch.float64), Reason.DTYPE_MISMATCH),
        ([0], torch.ones(1, dtype=torch.int32), Reason.DTYPE_MISMATCH),
    ],
)
def test_scatter_neither_broadcasts_nor_converts(at: list[int], values: Tensor, reason: Reason) -> None:
    t = torch.zeros(3, 2)
    with pytest.raises(DeltaError) as caught:
        bits.scatter_(t, torch.tensor(at), values)
    assert caught.value.reason is reason
    assert not t.any()


@pytest.mark.parametrize("make", [lambda: torch.zeros(2, dtype=torch.complex128), lambda: torch.eye(3).to_sparse()])
def test_dtypes_and_layouts_that_safetensors_has_not_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(DeltaError) as caught:
        bits.bit_view(make())
    assert caught.value.reason is Reason.UNSUPPORTED_DTYPE


def test_pending_conjugation_is_resolved_when_reading_and_refused_when_writing() -> None:
    t = torch.tensor([1 + 2j, 3 - 4j]).to(torch.complex64)
    assert bits.gather(t.conj(), torch.tensor([1])).tolist() == [3 + 4j]
    assert bits.differing(t.conj(), t).tolist() == [0, 1]
    with pytest.raises(DeltaError) as caught:
        bits.scatter_(t.conj(), torch.tensor([0]), t[:1])
    assert caught.value.reason is Reason.UNSUPPORTED_DTYPE


@pytest.mark.parametrize("code", DTYPES)
def test_differing_and_equal_see_every_element(code: str) -> None:
    rng = np.random.default_rng(3)
    for t in views(code):
        raw = bytes_of(t)
        for layout in LAYOUTS:
            other = strided_like(t, layout)
            assert bits.equal(t, other)
            assert bits.differing(t, other).tolist() == []
        for position in rng.permutation(t.numel())[:6]:
            other = t.clone(memory_format=torch.contiguous_format)
            changed = raw[position : position + 1].copy()
            changed[0, -1] ^= 1  # the last byte: a look at the first ones alone misses it
            other.view(-1)[position : position + 1] = torch.from_numpy(changed.reshape(-1)).view(t.dtype)
            assert bits.differing(t, other).tolist() == [position]
            assert bits.differing(other, t).tolist() == [position]
            assert not bits.equal(t, other)


@pytest.mark.parametrize("density", [0.0, 1e-4, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("code", ["U8", "BF16", "F32", "F64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_differing_over_many_pieces(code: str, density: float, layout: str) -> None:
    """Larger than the pieces it works in, and no multiple of them, with and without few differing words."""
    rng = np.random.default_rng(4)
    a = random_tensor(rng, code, (1031, 2053))
    at = np.flatnonzero(rng.random(a.numel()) < density)
    raw = bytes_of(a).copy()
    raw[at, -1] ^= 0x80
    b = torch.from_numpy(raw.reshape(-1)).view(a.dtype).view(a.shape)
    assert np.array_equal(bits.differing(strided_like(a, layout), b).numpy(), at)
    assert bits.equal(strided_like(a, layout), b) == (len(at) == 0)


def test_equal_wants_dtype_and_shape() -> None:
    t = torch.zeros(2, 3)
    assert not bits.equal(t, t.view(3, 2))
    assert not bits.equal(t, t.view(torch.int32))
    for other, reason in ((t.view(3, 2), Reason.SHAPE_MISMATCH), (t.view(torch.int32), Reason.DTYPE_MISMATCH)):
        with pytest.raises(DeltaError) as caught:
            bits.differing(t, other)
        assert caught.value.reason is reason


@pytest.mark.parametrize("code", ["U8", "BF16", "F64"])
def test_positions_are_found_back_from_memory(code: str) -> None:
    for t in views(code):
        at = torch.arange(t.numel())
        offsets = bits.offsets_in_storage(t, at)
        positions, inside = bits.positions_at(t, offsets)
        assert inside.all()
        assert torch.equal(positions, at)
        everywhere = torch.arange(-3, bits.extent(t) + 3)
        _, inside = bits.positions_at(t, everywhere)
        assert set(everywhere[inside].tolist()) == set(offsets.tolist())
