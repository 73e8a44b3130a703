"""One step of a check: call the engine under test on copies, and give back what it did."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor

from conformance.engines import Codec
from conformance.oracle import State, assert_bit_equal, clone

Scratch = Callable[[], AbstractContextManager[Path]]
"""Makes an empty directory that is gone after its `with` block."""


def encoded(engine: Codec, base: State, target: State, out: Path) -> Path:
    """The delta that the engine writes; its inputs must come out unchanged."""
    given = clone(base), clone(target)
    engine.encode(*given, out)
    assert_bit_equal(base, given[0], "encode changed its base")
    assert_bit_equal(target, given[1], "encode changed its target")
    return out


def applied(engine: Codec, delta: Path, base: State) -> dict[str, Tensor]:
    """The state that the engine makes of a copy of `base`."""
    weights = clone(base)
    engine.apply(delta, weights)
    return weights


def refusal(engine: Codec, delta: Path, base: State) -> Exception:
    """The exception with which the engine refuses the delta, the weights being as they were."""
    weights = clone(base)
    try:
        engine.apply(delta, weights)
    except Exception as error:
        assert_bit_equal(base, weights, f"refused ({error}), and yet the state changed")
        return error
    raise AssertionError(f"taken, and should be refused: {delta}")
