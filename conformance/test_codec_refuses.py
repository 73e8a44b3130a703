"""refuses: a malformed or misplaced delta is refused with its reason, and the state stays bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

from . import oracle
from .driving.codec import Scratch, applied, assert_reason, must_refuse, refusal
from .engines.codecs import FullCodec
from .inputs.malformed import FAULTS, example_for
from .oracle import State, assert_bit_equal, expected_state, total_elements

pytestmark = pytest.mark.check("refuses")


def _needs(name: str) -> list[pytest.MarkDecorator]:
    """The capability without which a fault is none."""
    return [pytest.mark.needs("extensions")] if name.startswith("requires_") else []


def test_without_a_fault_it_is_taken(engine: FullCodec, scratch: Scratch) -> None:
    """The deltas below differ from this one in their fault alone."""
    state, patches = example_for(engine.capabilities)
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", patches, total_elements(state))
        assert_bit_equal(expected_state(state, patches), applied(engine, delta, state))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.level("strict" if fault.harmless else "safe"), *_needs(name)])
        for name, fault in FAULTS.items()
    ],
)
def test_malformed(engine: FullCodec, scratch: Scratch, name: str) -> None:
    """Refused, nothing changed, and a good delta is taken afterwards."""
    fault, (state, patches) = FAULTS[name], example_for(engine.capabilities)
    with scratch() as tmp:
        error = refusal(engine, fault.write(tmp / "bad", patches, total_elements(state)), state, *fault.reasons)
        assert_reason(engine, error, *fault.reasons)
        good = oracle.write_delta(tmp / "good", patches, total_elements(state))
        assert_bit_equal(expected_state(state, patches), applied(engine, good, state), "a good delta after a refusal")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"b.weight": None}, "unknown_tensor", id="tensor_missing"),
        pytest.param({"b.weight": ("", (2, 7))}, "shape_mismatch", id="tensor_transposed"),
        pytest.param({"b.weight": ("", (7, 3))}, "shape_mismatch", id="tensor_larger"),
        pytest.param({"b.weight": ("BF16", (7, 2))}, "dtype_mismatch", id="tensor_of_another_dtype"),
        pytest.param({"b.weight": ("F32", (7, 2))}, "dtype_mismatch", id="tensor_of_a_wider_dtype"),
    ],
)
def test_misplaced(
    engine: FullCodec, scratch: Scratch, change: dict[str, tuple[str, tuple[int, ...]] | None], reason: str
) -> None:
    """A good delta that meets a state which it was not made for, in its second tensor."""
    whole, patches = example_for(engine.capabilities)
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", patches, total_elements(whole))
        assert_reason(engine, refusal(engine, delta, _changed(whole, change), reason), reason)


def _changed(state: State, change: dict[str, tuple[str, tuple[int, ...]] | None]) -> State:
    """``state`` with other tensors under some names; without a dtype they have that of the one before (else F16)."""
    found = {name: tensor for name, tensor in state.items() if name not in change}
    for name, what in change.items():
        if what is not None:
            own = oracle.CODES[state["b.weight"].dtype]
            code = what[0] or own
            found[name] = _zeros("F16" if what[0] == own else code, what[1])
    return found


def test_scalar_is_not_a_vector_of_one(engine: FullCodec, scratch: Scratch) -> None:
    scalar, vector = {"s": _zeros("F32", ())}, {"s": _zeros("F32", (1,))}
    one = oracle.delta_patch("s", scalar["s"], [0], oracle.from_bits([7], "F32", (1,)))
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", [one], 1)
        assert_bit_equal({"s": oracle.from_bits([7], "F32", ())}, applied(engine, delta, scalar))
        assert_reason(engine, refusal(engine, delta, vector, "shape_mismatch"), "shape_mismatch")


@pytest.mark.needs("non_floating")
@pytest.mark.parametrize("code", ["I64", "U8", "BOOL", "C64"])
def test_values_need_their_extension(engine: FullCodec, scratch: Scratch, code: str) -> None:
    """Integer, bool and complex values without `requires` in the metadata."""
    plain, patches = example_for(engine.capabilities)
    state: State = {**plain, "steps": _zeros(code, (2, 3))}
    patch = oracle.delta_patch("steps", state["steps"], [4], oracle.from_bits([1], code, (1,)))
    with scratch() as tmp:
        total = total_elements(state)
        declared = oracle.write_delta(tmp / "declared", [*patches, patch], total)
        assert_bit_equal(expected_state(state, [*patches, patch]), applied(engine, declared, state))
        bare = oracle.draft([*patches, patch], total)
        del bare.metadata["requires"]
        error = refusal(engine, bare.write(tmp / "bare"), state)
        assert_reason(engine, error, "unsupported_dtype", "unsupported_extension")


@pytest.mark.level("writer")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"b.weight": None}, "unknown_tensor", id="tensor_missing"),
        pytest.param({"new": ("", (7, 2))}, "unknown_tensor", id="tensor_added"),
        pytest.param({"b.weight": ("", (2, 7))}, "shape_mismatch", id="shape"),
        pytest.param({"b.weight": ("BF16", (7, 2))}, "dtype_mismatch", id="dtype"),
    ],
)
def test_encode_refuses_states_that_do_not_match(
    engine: FullCodec, scratch: Scratch, change: dict[str, tuple[str, tuple[int, ...]] | None], reason: str
) -> None:
    if "new" in change and "new_tensors" in engine.capabilities:
        pytest.skip("the engine takes new tensors")
    state, _ = example_for(engine.capabilities)
    with scratch() as tmp:
        target = _changed(state, change)
        assert_reason(engine, must_refuse(lambda: engine.encode(state, target, tmp / "delta"), reason), reason)
        assert not (tmp / "delta").exists(), "encode refused, and yet wrote something"


def _zeros(code: str, shape: tuple[int, ...]) -> Tensor:
    return oracle.from_bits(np.zeros(int(np.prod(shape))), code, shape)
