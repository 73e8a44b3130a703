"""One step of a check: call the engine under test on copies, and give back what it did."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis.errors import UnsatisfiedAssumption
from torch import Tensor

from ..engines.capabilities import BY_ID
from ..engines.codecs import Codec
from ..findings import EngineFailed, Finding, InfrastructureFailed, Mismatch, require
from ..oracle import State, assert_bit_equal, clone

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


def refusal(engine: Codec, delta: Path, base: State, *reasons: str) -> Exception:
    """The exception with which the engine refuses the delta, the weights being as they were.

    reasons: for which it should, as far as they are known.
    """
    return raised(lambda weights: engine.apply(delta, weights), base, *reasons)


def raised(attempt: Callable[[dict[str, Tensor]], object], base: State, *reasons: str) -> Exception:
    """The exception with which an attempt on a copy of `base` ends, the copy being as it was."""
    weights = clone(base)
    error = must_refuse(lambda: attempt(weights), *reasons)
    assert_bit_equal(base, weights, f"refused ({error}), and yet the state changed")
    return error


def refused(attempt: Callable[[], object]) -> Exception | None:
    """The exception with which an engine refuses, None where it takes. Crashes, hangs and skipped draws are neither."""
    try:
        attempt()
    except (EngineFailed, InfrastructureFailed, UnsatisfiedAssumption):
        raise
    except Exception as error:
        return error
    return None


def must_refuse(attempt: Callable[[], object], *reasons: str) -> Exception:
    """The exception with which an engine refuses; a Mismatch where it takes."""
    error = refused(attempt)
    if error is None:
        wanted = f"a refusal ({' or '.join(sorted(reasons))})" if reasons else "a refusal"
        raise Mismatch(Finding("refusal", expected=wanted, found="taken, and should be refused"))
    return error


def assert_reason(engine: Codec, error: Exception, *reasons: str) -> None:
    """An engine that states reasons has stated one of these."""
    if "reasons" in engine.capabilities:
        found = str(getattr(error, "reason", None))
        require(
            found in reasons, "reason", expected=" or ".join(sorted(reasons)), found=found, context=f"refused ({error})"
        )


def assert_same_bytes(expected: bytes, found: bytes, what: str = "payload") -> None:
    """Two payloads are equal; otherwise the finding holds the bytes around the first difference."""
    pairs = zip(expected, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    wanted, got = (f"{raw[at : at + 32]!r} of {len(raw)} bytes" for raw in (expected, found))
    require(expected == found, f"{what} at byte {at}", expected=wanted, found=got)


def skip_for(capability: str) -> NoReturn:
    """Skip the running test, which needs something that the engine does not declare."""
    skipped = pytest.skip.Exception(
        f"the engine does not declare the capability {capability!r}: {BY_ID[capability].promise}"
    )
    skipped.capability = capability  # type: ignore[attr-defined]  # for `results.details`
    raise skipped
