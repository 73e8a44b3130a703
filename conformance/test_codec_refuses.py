"""refuses: a malformed or misplaced delta is refused with its reason, and the state stays bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

from . import oracle
from .driving.codec import Scratch, applied, assert_reason, must_refuse, refusal
from .engines.codecs import FullCodec
from .inputs.malformed import FAULTS, PATCHES, STATE
from .oracle import State, assert_bit_equal, expected_state, total_elements

pytestmark = pytest.mark.check("refuses")


def test_without_a_fault_it_is_taken(engine: FullCodec, scratch: Scratch) -> None:
    """The deltas below differ from this one in their fault alone."""
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", PATCHES, total_elements(STATE))
        assert_bit_equal(expected_state(STATE, PATCHES), applied(engine, delta, STATE))


@pytest.mark.parametrize("name", list(FAULTS))
def test_malformed(engine: FullCodec, scratch: Scratch, name: str) -> None:
    """Refused, nothing changed, and a good delta is taken afterwards."""
    fault = FAULTS[name]
    with scratch() as tmp:
        error = refusal(engine, fault.write(tmp / "bad", PATCHES, total_elements(STATE)), STATE)
        assert_reason(engine, error, *fault.reasons)
        good = oracle.write_delta(tmp / "good", PATCHES, total_elements(STATE))
        assert_bit_equal(expected_state(STATE, PATCHES), applied(engine, good, STATE), "a good delta after a refusal")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"b.weight": None}, "unknown_tensor", id="tensor_missing"),
        pytest.param({"b.weight": ("F16", (2, 7))}, "shape_mismatch", id="tensor_transposed"),
        pytest.param({"b.weight": ("F16", (7, 3))}, "shape_mismatch", id="tensor_larger"),
        pytest.param({"b.weight": ("BF16", (7, 2))}, "dtype_mismatch", id="tensor_of_another_dtype"),
        pytest.param({"b.weight": ("F32", (7, 2))}, "dtype_mismatch", id="tensor_of_a_wider_dtype"),
    ],
)
def test_misplaced(
    engine: FullCodec, scratch: Scratch, change: dict[str, tuple[str, tuple[int, ...]] | None], reason: str
) -> None:
    """A good delta that meets a state which it was not made for, in its second tensor."""
    state = {name: tensor for name, tensor in STATE.items() if name not in change}
    state |= {name: _zeros(*what) for name, what in change.items() if what}
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", PATCHES, total_elements(STATE))
        assert_reason(engine, refusal(engine, delta, state), reason)


def test_scalar_is_not_a_vector_of_one(engine: FullCodec, scratch: Scratch) -> None:
    scalar, vector = {"s": _zeros("F32", ())}, {"s": _zeros("F32", (1,))}
    one = oracle.delta_patch("s", scalar["s"], [0], oracle.from_bits([7], "F32", (1,)))
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", [one], 1)
        assert_bit_equal({"s": oracle.from_bits([7], "F32", ())}, applied(engine, delta, scalar))
        assert_reason(engine, refusal(engine, delta, vector), "shape_mismatch")


@pytest.mark.needs("non_floating")
@pytest.mark.parametrize("code", ["I64", "U8", "BOOL", "C64"])
def test_values_need_their_extension(engine: FullCodec, scratch: Scratch, code: str) -> None:
    """Integer, bool and complex values without `requires` in the metadata."""
    state: State = {**STATE, "steps": _zeros(code, (2, 3))}
    patch = oracle.delta_patch("steps", state["steps"], [4], oracle.from_bits([1], code, (1,)))
    with scratch() as tmp:
        total = total_elements(state)
        declared = oracle.write_delta(tmp / "declared", [*PATCHES, patch], total)
        assert_bit_equal(expected_state(state, [*PATCHES, patch]), applied(engine, declared, state))
        bare = oracle.draft([*PATCHES, patch], total)
        del bare.metadata["requires"]
        error = refusal(engine, bare.write(tmp / "bare"), state)
        assert_reason(engine, error, "unsupported_dtype", "unsupported_extension")


@pytest.mark.level("writer")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"b.weight": None}, "unknown_tensor", id="tensor_missing"),
        pytest.param({"new": ("F16", (7, 2))}, "unknown_tensor", id="tensor_added"),
        pytest.param({"b.weight": ("F16", (2, 7))}, "shape_mismatch", id="shape"),
        pytest.param({"b.weight": ("BF16", (7, 2))}, "dtype_mismatch", id="dtype"),
    ],
)
def test_encode_refuses_states_that_do_not_match(
    engine: FullCodec, scratch: Scratch, change: dict[str, tuple[str, tuple[int, ...]] | None], reason: str
) -> None:
    target = {name: tensor for name, tensor in STATE.items() if name not in change}
    target |= {name: _zeros(*what) for name, what in change.items() if what}
    with scratch() as tmp:
        assert_reason(engine, must_refuse(lambda: engine.encode(STATE, target, tmp / "delta")), reason)
        assert not (tmp / "delta").exists(), "encode refused, and yet wrote something"


def _zeros(code: str, shape: tuple[int, ...]) -> Tensor:
    return oracle.from_bits(np.zeros(int(np.prod(shape))), code, shape)
