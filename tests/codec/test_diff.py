"""diff and DeltaEncoder. Tests named fault_NN show a fault seen in public; see the list of fault kinds."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from refdelta import Delta, DeltaEncoder, DeltaError, Reason, TensorPatch, apply_delta, diff
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


def only(delta: Delta) -> TensorPatch:
    (patch,) = delta.patches
    return patch


def emitted(base: Tensor, target: Tensor) -> list[int]:
    delta = diff({"w": base}, {"w": target})
    return only(delta).indices.tolist() if delta.patches else []


def test_fault_01_numeric_comparison_instead_of_bits() -> None:
    base = bf16(0x0000, 0x7FC1, 0x7FC1, 0x3F80, 0x0001, 0x7F80)
    target = bf16(0x8000, 0x7FC2, 0x7FC1, 0x3F80, 0x8001, 0x7F80)  # -0.0, other NaN, the same NaN, 1.0, subnormal, inf
    patch = only(diff({"w": base.view(2, 3)}, {"w": target.view(2, 3)}))
    assert patch.indices.tolist() == [0, 1, 4]
    assert patterns(patch.values) == [0x8000, 0x7FC2, 0x8001]


@pytest.mark.parametrize("code", DTYPES)
def test_fault_01_every_dtype_is_compared_by_bits(code: str) -> None:
    """Float8 has no numeric comparison on CPU, and every bit of every byte counts, a bool's too."""
    rng = np.random.default_rng(5)
    base = random_tensor(rng, code, (7, 11))
    at = np.array([0, 3, 40, 76])
    target = change(rng, base, at)
    patch = only(diff({"w": base}, {"w": target}))
    assert patch.dtype == DTYPES[code]
    assert patch.indices.tolist() == at.tolist()
    assert np.array_equal(bytes_of(patch.values), bytes_of(target)[at])


def least_changes(bits: int, mantissa: int) -> list[tuple[int, int]]:
    """Pairs of bit patterns between which there is none, in a float of ``bits`` with ``mantissa`` of them."""
    sign, normal = 1 << bits - 1, 1 << mantissa
    one, infinity = (sign >> 1) - normal, sign - normal
    around = [(one, one + 1), (one, one - 1), (infinity - 2, infinity - 1), (normal, normal + 1), (normal, normal - 1)]
    subnormal = [(0, 1), (1, 0), (1, 2), (normal - 2, normal - 1), (1, sign | 1)]
    return [*around, *subnormal, (0, sign), (sign, 0), (sign, sign | 1)]


@pytest.mark.parametrize(("code", "mantissa"), [("BF16", 7), ("F16", 10), ("F32", 23), ("F64", 52)])
def test_no_change_is_too_small_to_be_sent(code: str, mantissa: int) -> None:
    """No epsilon and no threshold: units in the last place, subnormals and signs of zero, beside a large change."""
    size = DTYPES[code].itemsize
    pairs = [*least_changes(8 * size, mantissa), (0, (1 << 8 * size - 2) + 5), (7, 7)]
    assert torch.tensor([1.0], dtype=DTYPES[code]).view(torch.uint8).tolist() == list(
        pairs[0][0].to_bytes(size, "little")
    )
    base, target = (
        {"w": torch.from_numpy(np.array(words, dtype=f"<u{size}")).view(DTYPES[code]).view(3, 5)}
        for words in zip(*pairs, strict=True)
    )
    for delta in (diff(base, target), DeltaEncoder(base).encode(target), DeltaEncoder(base, run_id="r").encode(target)):
        assert only(delta).indices.tolist() == list(range(14))
        held = {"w": base["w"].clone()}
        apply_delta(delta, held)
        assert_same(held, target)


def test_fault_02_detector_that_looks_at_part_of_the_bits() -> None:
    base = bf16(0x3F80, 0x3F80, 0x3F80, 0x3F80)
    assert emitted(base, bf16(0x4080, 0x3F80, 0xBF80, 0x3F81)) == [0, 2, 3]  # same low byte; sign; lowest bit
    first, second = bf16(0x3F80, 0x3F81, 0x3F80, 0x3F80), bf16(0x3F80, 0x3F81, 0x3F80, 0x3F82)
    assert emitted(base, second) == [1, 3], "changed in the first of two steps"
    assert emitted(first, second) == [3]


def test_fault_03_nan_that_means_unchanged() -> None:
    delta = diff({"w": bf16(0x3F80, 0x3F80)}, {"w": bf16(0x3F80, 0x7FC0)})
    weights = {"w": bf16(0x3F80, 0x3F80)}
    apply_delta(delta, weights)
    assert patterns(weights["w"]) == [0x3F80, 0x7FC0]


def test_fault_04_position_beyond_int32() -> None:
    """More than 2^31 elements; the zeros are mapped lazily and take no memory."""
    numel = 2**31 + 8
    base = torch.zeros(1, dtype=torch.uint8).expand(2, numel // 2)
    lazy = torch.from_numpy(np.zeros(numel, np.uint8)).view(2, numel // 2)
    lazy[0, 5], lazy[1, -1] = 3, 7
    delta = diff({"w": base}, {"w": lazy})
    patch = only(delta)
    assert patch.indices.dtype == torch.int64
    assert patch.indices.tolist() == [5, numel - 1]
    assert patch.payload_bytes == 2 * 9
    inverse = apply_delta(delta, {"w": lazy})
    assert only(inverse).values.tolist() == [3, 7]
    apply_delta(
        Delta((TensorPatch("w", (2, numel // 2), patch.indices, torch.zeros(2, dtype=torch.uint8)),), numel),
        {"w": lazy},
    )
    assert (int(lazy[0, 5]), int(lazy[1, -1])) == (0, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fault_06_strided_inputs(layout: str) -> None:
    rng = np.random.default_rng(6)
    base = random_tensor(rng, "BF16", (6, 10))
    at = np.array([1, 9, 10, 31, 59])
    target = change(rng, base, at)
    for one, two in ((strided_like(base, layout), target), (base, strided_like(target, layout))):
        patch = only(diff({"w": one}, {"w": two}))
        assert patch.indices.tolist() == at.tolist()
        assert np.array_equal(bytes_of(patch.values), bytes_of(target)[at])


def test_fault_07_density_over_changed_tensors_only() -> None:
    base = {"a": torch.zeros(4, 25), "b": torch.zeros(10, 10)}
    target = {"a": torch.zeros(4, 25), "b": torch.zeros(10, 10)}
    target["a"][2, 3] = 1.0
    delta = diff(base, target)
    assert (delta.changed_elements, delta.total_elements, delta.density_pct) == (1, 200, 0.5)


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (5, 3)])
def test_fault_13_scalars_empty_tensors_and_integers(code: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(7)
    base = random_tensor(rng, code, shape)
    target = change(rng, base, np.arange(base.numel()))
    delta = diff({"w": base}, {"w": target})
    assert delta.total_elements == delta.changed_elements == base.numel()
    weights = {"w": base.clone()}
    apply_delta(delta, weights)
    assert_same(weights, {"w": target})


def test_all_that_differs_is_listed_in_the_order_of_names() -> None:
    """Names only in one state, then shapes, then dtypes; sets, whose order differs from run to run, do not show."""
    names = ["a", "b", "c", "d", "e", "f"]
    base = {f"{kind}.{name}": torch.zeros(2, 3) for kind in ("old", "shape", "dtype") for name in names}
    target = {f"new.{name}": torch.zeros(2, 3) for name in names}
    target |= {f"shape.{name}": torch.zeros(3, 2) for name in names}
    target |= {f"dtype.{name}": torch.zeros(2, 3, dtype=torch.float16) for name in names}
    with pytest.raises(DeltaError) as caught:
        diff(base, target)
    assert caught.value.reason is Reason.UNKNOWN_TENSOR
    assert caught.value.detail.split("; ") == [
        *(f"old.{name} only in base" for name in names),
        *(f"new.{name} only in target" for name in names),
        *(f"shape.{name} has shape [2, 3] in base, [3, 2] in target" for name in names),
        *(f"dtype.{name} is torch.float32 in base, torch.float16 in target" for name in names),
    ]


def test_unchanged_tensors_are_absent_and_layers_in_name_order() -> None:
    base = {name: torch.zeros(2, 3) for name in ("b", "a.10", "a.9", "B", "é")}
    target = {name: torch.ones(2, 3) for name in ("é", "a.9", "b", "B")} | {"a.10": torch.zeros(2, 3)}
    assert [patch.name for patch in diff(base, target).patches] == ["B", "a.9", "b", "é"]
    assert diff(base, base).patches == ()


def test_indices_are_32_bit_up_to_2_to_31_elements() -> None:
    """Up to and including: the last position of 2^31 elements is 2^31 - 1."""
    base = torch.zeros(1, dtype=torch.uint8).expand(4, 2**29)
    lazy = torch.from_numpy(np.zeros(2**31, np.uint8)).view(4, 2**29)
    lazy[3, -1] = 1
    patch = only(diff({"w": base}, {"w": lazy}))
    assert (patch.indices.dtype, patch.indices.tolist()) == (torch.int32, [2**31 - 1])


def test_states_that_do_not_correspond_are_refused_with_everything_that_differs() -> None:
    base = {"same": torch.zeros(2, 3), "lost": torch.zeros(1), "shape": torch.zeros(2, 3), "dtype": torch.zeros(2)}
    target = {
        "same": torch.ones(2, 3),
        "new": torch.zeros(1),
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2).to(torch.bfloat16),
    }
    with pytest.raises(DeltaError) as caught:
        diff(base, target)
    assert caught.value.reason is Reason.UNKNOWN_TENSOR
    for part in ("lost only in base", "new only in target", "shape has shape [2, 3]", "[3, 2]", "dtype is", "bfloat16"):
        assert part in caught.value.detail
    assert "same" not in caught.value.detail
    for name, reason in (("shape", Reason.SHAPE_MISMATCH), ("dtype", Reason.DTYPE_MISMATCH)):
        with pytest.raises(DeltaError) as caught:
            diff({name: base[name]}, {name: target[name]})
        assert caught.value.reason is reason


def test_what_the_format_cannot_hold_is_refused_by_name() -> None:
    for bad in (torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(DeltaError) as caught:
            diff({"w": bad}, {"w": bad})
        assert (caught.value.reason, caught.value.tensor) == (Reason.UNSUPPORTED_DTYPE, "w")
    with pytest.raises(DeltaError) as caught:
        diff({"": torch.zeros(1)}, {"": torch.zeros(1)})
    assert caught.value.reason is Reason.BAD_NAME


class Tied(nn.Module):
    """An embedding and a head of one parameter, a buffer, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("scratch", torch.ones(9), persistent=False)


def test_a_module_is_its_state_dict_with_tied_tensors_once() -> None:
    module = Tied()
    encoder = DeltaEncoder(module)
    with torch.no_grad():
        module.head.weight[4, 1] += 1
        cast(Tensor, module.scale).fill_(2.0)
        cast(Tensor, module.scratch).fill_(2.0)
    delta = encoder.encode(module)
    assert [(patch.name, patch.indices.tolist()) for patch in delta.patches] == [("embed.weight", [13]), ("scale", [0])]
    assert delta.total_elements == 15 + 8 + 1


# DeltaEncoder


def states(steps: int) -> list[dict[str, Tensor]]:
    rng = np.random.default_rng(8)
    state = {"w": random_tensor(rng, "BF16", (6, 5)), "b": random_tensor(rng, "F32", (7,))}
    chain = [state]
    for step in range(1, steps):
        state = {name: change(rng, t, np.array([step, step + 2])) for name, t in state.items()}
        chain.append(state)
    return chain


def test_encoder_equals_diff() -> None:
    base, target = states(2)
    encoded, plain = DeltaEncoder(base).encode(target), diff(base, target)
    assert encoded.total_elements == plain.total_elements
    for one, two in zip(encoded.patches, plain.patches, strict=True):
        assert (one.name, one.shape) == (two.name, two.shape)
        assert torch.equal(one.indices, two.indices)
        assert np.array_equal(bytes_of(one.values), bytes_of(two.values))


def test_encoder_copies_its_baseline() -> None:
    base, target = states(2)
    live = {name: t.clone() for name, t in base.items()}
    encoder = DeltaEncoder(live)
    for name, t in live.items():
        t.view(torch.uint8).copy_(target[name].view(torch.uint8))
    assert len(encoder.encode(live).patches) == 2


def test_fault_16_an_empty_delta_is_a_version_and_a_failed_one_moves_nothing() -> None:
    base, target = states(2)
    encoder = DeltaEncoder(base)
    empty = encoder.encode(base)
    assert (empty.patches, empty.total_elements) == ((), 37)
    encoder.commit(empty)
    assert encoder.encode(target).changed_elements == 4


def test_fault_17_baseline_moves_on_acknowledgement_only() -> None:
    base, first, second = states(3)
    encoder = DeltaEncoder(base)
    encoder.encode(first)  # written, and lost on the way
    caught_up = {name: t.clone() for name, t in base.items()}
    delta = encoder.encode(second)
    apply_delta(delta, caught_up)
    assert_same(caught_up, second)
    encoder.commit(delta)
    assert encoder.encode(second).patches == ()
    assert encoder.encode(first).changed_elements == diff(second, first).changed_elements


def test_fault_21_everything_since_the_last_commit_is_sent() -> None:
    base, first, second = states(3)
    encoder = DeltaEncoder(base)
    encoder.commit(encoder.encode(base))
    encoder.encode(first)
    sent = {patch.name: patch.indices.tolist() for patch in encoder.encode(second).patches}
    assert sent == {patch.name: patch.indices.tolist() for patch in diff(base, second).patches}


@pytest.mark.parametrize("fault", ["total", "name", "shape", "dtype", "order", "second"])
def test_commit_of_a_delta_that_does_not_fit_leaves_the_baseline(fault: str) -> None:
    base, target = states(2)
    encoder = DeltaEncoder(base)
    good = encoder.encode(target)
    b, w = good.patches
    one = torch.tensor([1], dtype=torch.int32)
    bad = {
        "total": Delta(good.patches, 38),
        "name": Delta((b, TensorPatch("x", (1,), one - 1, torch.ones(1))), 37),
        "shape": Delta((b, TensorPatch("w", (5, 6), w.indices, w.values)), 37),
        "dtype": Delta((b, TensorPatch("w", (6, 5), one, torch.ones(1, dtype=torch.float16))), 37),
        "order": Delta((b, TensorPatch("w", (6, 5), w.indices.flip(0), w.values)), 37),
        "second": Delta((b, TensorPatch("w", (6, 5), one + 29, bf16(1))), 37),
    }[fault]
    with pytest.raises(DeltaError):
        encoder.commit(bad)
    assert encoder.encode(base).patches == ()


@pytest.mark.parametrize("value", [np.zeros(3), None, [1.0], "text"], ids=["array", "none", "list", "text"])
def test_what_is_no_tensor_is_refused_by_name(value: object) -> None:
    """A state of arrays would lose every update without a word; torch's extra state is no tensor and is left out."""
    good = torch.zeros(2, 3)
    for weights in ({"a": good, "b": value}, {"b": value}):
        with pytest.raises(DeltaError) as caught:
            DeltaEncoder(weights)  # type: ignore[arg-type]  # on purpose
        assert (caught.value.reason, caught.value.tensor) == (Reason.BAD_OPTION, "b")
    encoder = DeltaEncoder({"a": good, "layer._extra_state": value})  # type: ignore[dict-item]
    assert encoder.encode({"a": good + 1, "layer._extra_state": value}).total_elements == 6  # type: ignore[dict-item]
