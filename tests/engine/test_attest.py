"""`attest`: only parameters whose mapped bits equal the checkpoint's are ever written in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from refdelta.layout_map import Box, LayoutMap, Region, TensorInfo
from refdelta.vllm.attest import attest, packed_layers

BF16 = torch.bfloat16
INFO = TensorInfo((4, 6), BF16)
WHOLE = Box(0, (4, 6), (6, 1))


def words(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (4, 6), generator=generator, dtype=torch.int16).view(BF16)


def layout(*names: str) -> LayoutMap:
    """Every named checkpoint tensor in a parameter of the same name."""
    infos = dict.fromkeys(names, INFO)
    return LayoutMap(infos, infos, tuple(Region(name, WHOLE, name, WHOLE) for name in names))


def test_equal_bits_are_attested_nan_payloads_included() -> None:
    """Random bit patterns hold NaNs: comparing values would fail here."""
    found = attest({"a": words(1).clone()}, layout("a"), {"a": words(1)})
    assert list(found.proved) == ["a"]
    assert not found.failed
    assert found.unproven == ()
    assert found.moved() == []


def test_one_bit_is_enough_to_fail() -> None:
    """A flipped sign in the last element."""
    live = words(1).clone()
    live.view(torch.int16)[-1, -1] ^= -0x8000
    found = attest({"a": live, "b": words(2).clone()}, layout("a", "b"), {"a": words(1), "b": words(2)})
    assert list(found.proved) == ["b"]
    assert "bits differ" in found.failed["a"]


@pytest.mark.parametrize(
    ("live", "why"),
    [
        (words(1).flip(0), "bits differ"),
        (torch.empty(0, dtype=BF16), "empty"),
        (words(1).float(), "dtype"),
        (words(1).t().contiguous().t(), "contiguous"),
    ],
)
def test_repacked_parameters_fail(live: Tensor, why: str) -> None:
    """Permuted, emptied, converted, transposed."""
    found = attest({"a": live}, layout("a"), {"a": words(1)})
    assert not found.proved
    assert why in found.failed["a"]


def test_uncovered_parameters_fail() -> None:
    """A parameter that no checkpoint tensor fills must not be patched."""
    infos = {"a": INFO}
    half = LayoutMap(infos, infos, (Region("a", Box(0, (2, 6), (6, 1)), "a", Box(0, (2, 6), (6, 1))),))
    found = attest({"a": words(1).clone()}, half, {"a": words(1)})
    assert "12 elements" in found.failed["a"]


def test_look_alikes_are_reported() -> None:
    """Equal tensors and constant ones match whatever their places: reported, not hidden."""
    ones = torch.ones(4, 6, dtype=BF16)
    weights = {"a": words(1), "b": words(1), "c": ones, "d": words(4)}
    found = attest({name: tensor.clone() for name, tensor in weights.items()}, layout(*weights), weights)
    assert found.unproven == ("a", "b", "c")
    assert sorted(found.proved) == ["a", "b", "c", "d"]


def test_replaced_storage_is_noticed() -> None:
    """`param.data = ...` after attestation."""
    parameter = nn.Parameter(words(1).clone(), requires_grad=False)
    found = attest({"a": parameter}, layout("a"), {"a": words(1)})
    parameter.data = words(1).clone()
    assert found.moved() == ["a"]


def test_packed_gemm_is_shown_by_behaviour() -> None:
    """A layer that keeps its weight but multiplies by a copy is named; a plain one is not."""
    plain, packed = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    copy = packed.weight.detach().clone()
    setattr(plain, "cpu_linear", torch.nn.functional.linear)  # noqa: B010  # vLLM adds this attribute
    setattr(packed, "cpu_linear", lambda x, weight, bias: x @ copy.t())  # noqa: B010
    model = nn.ModuleDict({"plain": plain, "packed": packed})
    assert packed_layers(model) == ["packed"]
