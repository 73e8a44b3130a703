"""apply_delta: in place, all or nothing, its inverse, shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from refdelta import Delta, DeltaError, Lineage, Reason, TensorPatch, apply_delta, diff
from refdelta.codec import bits
from tests.codec.support import (
    DTYPES,
    LAYOUTS,
    assert_same,
    bf16,
    bytes_of,
    change,
    patterns,
    random_tensor,
    strided_like,
)


def patch(name: str, shape: tuple[int, ...], at: list[int], values: Tensor) -> TensorPatch:
    return TensorPatch(name, shape, torch.tensor(at, dtype=torch.int32), values)


def snapshot(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in weights.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("code", DTYPES)
def test_fault_06_strided_destinations_are_written_in_place(code: str, layout: str) -> None:
    rng = np.random.default_rng(9)
    base = random_tensor(rng, code, (5, 7))
    target = change(rng, base, np.array([0, 6, 7, 20, 34]))
    weights = {"w": strided_like(base, layout)}
    held, address = weights["w"], weights["w"].data_ptr()
    inverse = apply_delta(diff({"w": base}, {"w": target}), weights)
    assert weights["w"] is held
    assert held.data_ptr() == address
    assert_same(weights, {"w": target})
    apply_delta(inverse, weights)
    assert_same(weights, {"w": base})


def test_the_inverse_holds_the_old_bits_and_swaps_the_lineage() -> None:
    weights = {"w": bf16(0x8000, 0x7FC1, 0x3F80)}
    lineage = Lineage("run", 8, base_version=7, base_digest="old", digest="new", payload_sha256="0" * 64)
    delta = Delta((patch("w", (3,), [0, 1], bf16(0, 0x7FC2)),), 11, lineage)
    inverse = apply_delta(delta, weights)
    assert patterns(inverse.patches[0].values) == [0x8000, 0x7FC1]
    assert inverse.total_elements == 11
    assert inverse.lineage == Lineage("run", 7, base_version=8, base_digest="new", digest="old")
    assert apply_delta(Delta(delta.patches, 11, Lineage("run", 8)), weights).lineage is None


def test_a_module_is_written_in_place_under_its_names() -> None:
    module = nn.Linear(3, 5).to(torch.bfloat16)
    parameter = module.weight
    apply_delta(Delta((patch("weight", (5, 3), [7], bf16(0x7FC1)),), 20), module)
    assert module.weight is parameter
    assert patterns(parameter)[7] == 0x7FC1


REFUSED: dict[str, tuple[Reason, Callable[[], TensorPatch]]] = {
    "unknown name": (Reason.UNKNOWN_TENSOR, lambda: patch("c", (2, 3), [0], torch.ones(1))),
    "other shape, same numel": (Reason.SHAPE_MISMATCH, lambda: patch("b", (3, 2), [0], torch.ones(1))),
    "scalar for a vector": (Reason.SHAPE_MISMATCH, lambda: patch("b", (), [0], torch.ones(1))),
    "fault 12: other float": (Reason.DTYPE_MISMATCH, lambda: patch("b", (2, 3), [0], bf16(1))),
    "fault 12: same size": (Reason.DTYPE_MISMATCH, lambda: patch("b", (2, 3), [0], torch.ones(1, dtype=torch.int32))),
    "fault 5: numel": (Reason.INDEX_RANGE, lambda: patch("b", (2, 3), [5, 6], torch.ones(2))),
    "fault 4: negative": (Reason.INDEX_RANGE, lambda: patch("b", (2, 3), [-1, 2], torch.ones(2))),
    "fault 5: unsorted": (Reason.INDEX_ORDER, lambda: patch("b", (2, 3), [3, 1], torch.ones(2))),
    "fault 5: duplicate": (Reason.INDEX_ORDER, lambda: patch("b", (2, 3), [3, 3], torch.ones(2))),
    "meta": (Reason.UNKNOWN_TENSOR, lambda: patch("m", (2,), [1], torch.ones(1))),
    "expanded": (Reason.ALIAS_CONFLICT, lambda: patch("e", (2, 3), [1], torch.ones(1))),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_nothing_is_written_when_a_later_patch_is_refused(fault: str) -> None:
    reason, make = REFUSED[fault]
    weights = {
        "a": torch.zeros(4, 2),
        "b": torch.zeros(2, 3),
        "e": torch.zeros(1, 3).expand(2, 3),
        "m": torch.zeros(2, device="meta"),
    }
    delta = Delta((patch("a", (4, 2), [1], torch.ones(1)), make()), 100)
    with pytest.raises(DeltaError) as caught:
        apply_delta(delta, weights)
    assert caught.value.reason is reason
    assert caught.value.tensor == delta.patches[1].name
    assert not any(t.any() for name, t in weights.items() if name != "m")


class Breaks:
    """`bits.scatter_` that fails on its nth call, after half of the write."""

    def __init__(self, *failing: int, error: BaseException) -> None:
        self.calls, self.failing, self.error, self.scatter = 0, failing, error, bits.scatter_

    def __call__(self, t: Tensor, indices: Tensor, values: Tensor) -> None:
        self.calls += 1
        half = len(indices) // 2 if self.calls in self.failing else len(indices)
        self.scatter(t, indices[:half], values[:half])
        if self.calls in self.failing:
            raise self.error


def three() -> tuple[dict[str, Tensor], Delta]:
    rng = np.random.default_rng(10)
    base = {name: random_tensor(rng, "BF16", (5, 4)) for name in "abc"}
    target = {name: change(rng, t, np.array([0, 3, 8, 19])) for name, t in base.items()}
    return base, diff(base, target)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_write_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    weights, delta = three()
    before = snapshot(weights)
    monkeypatch.setattr(bits, "scatter_", Breaks(call, error=RuntimeError("device lost")))
    with pytest.raises(DeltaError) as caught:
        apply_delta(delta, weights)
    assert (caught.value.reason, caught.value.tensor) == (Reason.WRITE_FAILED, "abc"[call - 1])
    assert "device lost" in caught.value.detail
    assert_same(weights, before)


def test_an_interrupt_is_undone_and_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, delta = three()
    before = snapshot(weights)
    monkeypatch.setattr(bits, "scatter_", Breaks(2, error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        apply_delta(delta, weights)
    assert_same(weights, before)


def test_a_failed_undo_says_that_the_state_is_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, delta = three()
    monkeypatch.setattr(bits, "scatter_", Breaks(2, 3, error=RuntimeError("device lost")))
    with pytest.raises(DeltaError) as caught:
        apply_delta(delta, weights)
    assert caught.value.reason is Reason.WRITE_FAILED
    assert "mixture" in caught.value.detail


# Shared memory


def conflict(delta: Delta, weights: dict[str, Tensor] | nn.Module) -> bool:
    """Whether the delta is refused as a conflict; nothing may have changed then."""
    tensors = weights if isinstance(weights, dict) else weights.state_dict()
    before = snapshot(tensors)
    try:
        apply_delta(delta, weights)
    except DeltaError as error:
        refused = error.reason
    else:
        return False
    assert refused is Reason.ALIAS_CONFLICT
    assert_same(tensors, before)
    return True


def test_two_names_of_one_tensor_must_change_alike() -> None:
    def weights() -> dict[str, Tensor]:
        shared = torch.zeros(3, 4)
        return {"a": shared, "b": shared}

    one = patch("a", (3, 4), [2, 7], torch.tensor([1.0, 2.0]))
    assert not conflict(Delta((one, patch("b", (3, 4), [2, 7], torch.tensor([1.0, 2.0]))), 24), weights())
    assert conflict(Delta((one,), 24), weights()), "b would change without the delta saying so"
    assert conflict(Delta((one, patch("b", (3, 4), [2, 7], torch.tensor([1.0, 3.0]))), 24), weights())
    assert conflict(Delta((one, patch("b", (3, 4), [2, 8], torch.tensor([1.0, 2.0]))), 24), weights())
    assert conflict(Delta((one, patch("b", (3, 4), [2], torch.tensor([1.0]))), 24), weights())
    assert conflict(Delta((one, patch("b", (3, 4), [], torch.tensor([]))), 24), weights())


def test_conflicts_are_a_matter_of_bits() -> None:
    shared = bf16(0, 0, 0)
    weights = {"a": shared, "b": shared}
    assert conflict(Delta((patch("a", (3,), [1], bf16(0)), patch("b", (3,), [1], bf16(0x8000))), 6), weights)
    assert not conflict(Delta((patch("a", (3,), [1], bf16(0x7FC1)), patch("b", (3,), [1], bf16(0x7FC1))), 6), weights)


def test_views_of_one_matrix() -> None:
    """A part and its whole, by address; columns that interleave without sharing an element are no conflict."""

    def weights() -> dict[str, Tensor]:
        fused = torch.zeros(4, 6)
        return {"whole": fused, "left": fused[:, :2], "right": fused[:, 2:]}

    def without(name: str) -> dict[str, Tensor]:
        return {key: t for key, t in weights().items() if key != name}

    left, right = patch("left", (4, 2), [3], torch.ones(1)), patch("right", (4, 4), [5], torch.ones(1))
    whole = patch("whole", (4, 6), [7, 9], torch.ones(2))
    assert not conflict(Delta((left, right), 24), without("whole"))
    assert not conflict(Delta((left, right, whole), 48), weights())
    assert conflict(Delta((left, whole), 48), weights()), "right changes with the whole, and does not say so"
    assert conflict(Delta((left, right), 48), weights()), "the whole changes with its parts, and does not say so"
    assert conflict(Delta((left, patch("whole", (4, 6), [7], torch.zeros(1))), 32), without("right"))
    assert not conflict(Delta((left,), 24), without("whole"))
    transposed = {"left": (one := torch.zeros(4, 2)), "turned": one.T}
    assert not conflict(Delta((left, patch("turned", (2, 4), [5], torch.ones(1))), 16), transposed)
    assert conflict(Delta((left, patch("turned", (2, 4), [3], torch.ones(1))), 16), transposed)


def test_memory_shared_between_dtypes_is_refused() -> None:
    shared = torch.zeros(8)
    weights = {"a": shared[:4], "b": shared.view(torch.int32)}
    assert conflict(Delta((patch("a", (4,), [1], torch.ones(1)),), 12), weights)
    assert not conflict(Delta((patch("a", (4,), [1], torch.ones(1)),), 12), {"a": shared[:4], "b": shared[4:]})


def test_views_of_other_dtypes_conflict_even_where_both_state_the_same_bits() -> None:
    """Position 1 with bits 5 is bytes 4 to 7 of one and bytes 2 and 3 of the other."""
    wide = torch.zeros(2, 2)
    weights = {"narrow": wide.view(torch.float16), "wide": wide}
    five = torch.tensor([5], dtype=torch.int32).view(torch.float32), torch.tensor([5], dtype=torch.int16)
    patches = patch("wide", (2, 2), [1], five[0]), patch("narrow", (2, 4), [1], five[1].view(torch.float16))
    assert conflict(Delta(patches, 12), weights)


def test_views_that_begin_in_the_middle_of_an_element_conflict() -> None:
    """One byte apart, with bits under which every statement looks repeated."""
    raw = bytearray(10)
    weights = {name: torch.frombuffer(raw, dtype=torch.int16, count=4, offset=at) for name, at in (("a", 0), ("b", 1))}
    five = torch.tensor([5, 5], dtype=torch.int16)
    assert conflict(Delta((patch("a", (4,), [0, 1], five), patch("b", (4,), [0], five[:1])), 8), weights)


def test_an_expanded_view_of_what_changes_is_a_conflict() -> None:
    plain = torch.zeros(3)
    weights = {"expanded": plain[1:2].expand(4), "plain": plain}
    assert conflict(Delta((patch("plain", (3,), [1], torch.ones(1)),), 7), weights)


def test_conflicts_are_found_whatever_the_order_of_names() -> None:
    """a and b overlap; c lies behind both, and comes between them in the mapping."""
    fused = torch.zeros(8)
    weights = {"a": fused[:3], "c": fused[6:], "b": fused[2:5]}
    for names in itertools.permutations(weights):
        ordered = {name: weights[name] for name in names}
        assert conflict(Delta((patch("a", (3,), [2], torch.ones(1)),), 8), ordered), names
        assert not conflict(Delta((patch("a", (3,), [1], torch.zeros(1)),), 8), ordered), names


def test_tensors_that_no_delta_reaches_are_left_alone() -> None:
    """Sparse, on the meta device, without elements: they share no memory that could be looked at."""
    weights = {
        "coo": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 3),
        "meta": torch.empty(2, 3, device="meta"),
        "w": torch.zeros(2, 3),
    }
    apply_delta(Delta((patch("w", (2, 3), [4], torch.ones(1)),), 21), weights)
    assert weights["w"].flatten().tolist() == [0, 0, 0, 0, 1, 0]
    assert torch.equal(weights["coo"].to_dense(), torch.eye(3))


def test_names_that_a_module_ties_change_under_any_of_them() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    one, two = (patch(name, (5, 3), [7], torch.ones(1)) for name in ("embed.weight", "head.weight"))
    module = Tied()
    for patches in ((one,), (two,), (one, two)):
        assert not conflict(Delta(patches, 30), module)
    assert module.head.weight.flatten()[7] == 1
    other = patch("head.weight", (5, 3), [7], torch.zeros(1))
    assert conflict(Delta((one, other), 30), module)


def test_idempotent_when_repeated() -> None:
    weights, delta = three()
    apply_delta(delta, weights)
    once = snapshot(weights)
    second = apply_delta(delta, weights)
    assert_same(weights, once)
    for old, new in zip(second.patches, delta.patches, strict=True):
        assert np.array_equal(bytes_of(old.values), bytes_of(new.values))
