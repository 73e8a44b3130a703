"""declines: what an engine does not offer it refuses, with nothing changed, or does right; never wrong in silence.

For an engine that offers all of it there is nothing to refuse, and the same deltas must be written and taken.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from torch import Tensor

from . import oracle
from .driving.codec import Scratch, refused
from .driving.features import OF_CODE, spare, unguarded
from .engines.codecs import FullCodec
from .findings import require
from .oracle import State, assert_bit_equal, clone, expected_patches, expected_state, total_elements

pytestmark = pytest.mark.check("declines")

Pair = tuple[State, State]


def _beside(code: str, old: list[int], new: list[int]) -> Pair:
    """A change of a tensor of this dtype between changes of two bf16 tensors, of which nothing may be written."""
    plain = oracle.from_bits(np.arange(6), "BF16", (2, 3)), oracle.from_bits(np.arange(6) + 1, "BF16", (2, 3))
    before, after = (oracle.from_bits(patterns, code, (1, len(patterns))) for patterns in (old, new))
    return (
        {"a.weight": plain[0], "m.special": before, "z.weight": plain[0].clone()},
        {"a.weight": plain[1], "m.special": after, "z.weight": plain[1].clone()},
    )


_DTYPES = [(feature, code) for code, feature in OF_CODE.items()]
CASES: list[tuple[str, str, Callable[[], Pair]]] = [
    *((feature, code, lambda code=code: _beside(code, [0, 1, 1], [0, 0, 1])) for feature, code in _DTYPES),
    ("signed_zero", "BF16", lambda: _beside("BF16", [0, 0x8000, 2], [0x8000, 0, 2])),
    ("nan_values", "BF16", lambda: _beside("BF16", [0, 0x3F80, 2], [0, 0x7FC1, 2])),
    ("nan_values", "F16", lambda: _beside("F16", [0, 0x7E00, 2], [0, 0xFE00, 2])),
    ("nan_values", "F32", lambda: _beside("F32", [0, 0x3F800000, 2], [0, 0x7F800001, 2])),
    ("i64_positions", "I64", lambda: _beside("BF16", [0, 1, 2], [0, 3, 2])),
]
_OF_WRITERS = [case for case in CASES if case[0] != "i64_positions"]
"""No writer chooses I64 positions where I32 would do."""


def _each(cases: list[tuple[str, str, Callable[[], Pair]]]) -> pytest.MarkDecorator:
    params = [pytest.param(capability, make, id=f"{capability}-{code}") for capability, code, make in cases]
    return pytest.mark.parametrize(("capability", "make"), params)


@_each(CASES)
@pytest.mark.level("safe")
def test_apply(engine: FullCodec, scratch: Scratch, capability: str, make: Callable[[], Pair]) -> None:
    base, target = make()
    spare(engine, base, target)
    weights = clone(base)
    with scratch() as tmp:
        indices = "I64" if capability == "i64_positions" else None
        delta = oracle.write_delta(tmp / "delta", expected_patches(base, target), total_elements(base), indices=indices)
        error = refused(lambda: unguarded(engine).apply(delta, weights))
    _judge(engine, capability, error, base if error else target, weights)


@_each(_OF_WRITERS)
@pytest.mark.level("writer")
def test_encode(engine: FullCodec, scratch: Scratch, capability: str, make: Callable[[], Pair]) -> None:
    base, target = make()
    spare(engine, base, target)
    with scratch() as tmp:
        error = refused(lambda: unguarded(engine).encode(clone(base), clone(target), tmp / "delta"))
        require(not error or not (tmp / "delta").exists(), "refusal", expected="nothing written", found="a delta")
        after = base if error else expected_state(base, oracle.read_delta(tmp / "delta").patches)
    _judge(engine, capability, error, base if error else target, after)


@pytest.mark.level("safe")
def test_apply_new_tensor(engine: FullCodec, scratch: Scratch) -> None:
    """A whole tensor that the state lacks: added (`new_tensors`), or refused with nothing changed."""
    base, target = _beside("BF16", [0, 1, 2], [0, 3, 2])
    added = oracle.from_bits(np.arange(1, 7), "BF16", (3, 2))
    new = oracle.delta_patch("n.new", added, list(range(6)), added.reshape(-1))
    weights = clone(base)
    with scratch() as tmp:
        patches = [*expected_patches(base, target), new]
        delta = oracle.write_delta(tmp / "delta", sorted(patches, key=lambda patch: patch.name), 21)
        error = refused(lambda: unguarded(engine).apply(delta, weights))
    _judge(engine, "new_tensors", error, base if error else {**target, "n.new": added}, weights)


@pytest.mark.level("writer")
@pytest.mark.needs("new_tensors")
def test_encode_new_tensor(engine: FullCodec, scratch: Scratch) -> None:
    """All of its elements are in the delta, also those whose bits are zero."""
    base, target = _beside("BF16", [0, 1, 2], [0, 3, 2])
    added = oracle.from_bits(np.array([0, 1, 2, 0, 4, 5]), "BF16", (3, 2))
    with scratch() as tmp:
        engine.encode(clone(base), {**clone(target), "n.new": added}, tmp / "delta")
        (new,) = (patch for patch in oracle.read_delta(tmp / "delta").patches if patch.name == "n.new")
    assert_bit_equal(added, oracle.from_bits(new.bits, new.code, new.shape), "the new tensor, whole")
    assert len(new.indices) == 6


def _judge(
    engine: FullCodec, capability: str, error: Exception | None, expected: State, found: dict[str, Tensor] | State
) -> None:
    declared = capability in engine.capabilities
    require(not (declared and error), "refusal", expected=f"taken: {capability} is declared", found=f"refused: {error}")
    assert_bit_equal(expected, found, "refused" if error else f"taken, declared or not: {capability}")
