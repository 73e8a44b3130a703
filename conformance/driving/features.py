"""What is in a state or a delta beyond plain BF16 numbers, and how an engine is spared what it does not offer.

A *feature* is a capability that names something in a state: a dtype, a NaN, a scalar. `Guarded` stands between a test
and the engine under test: a call whose input has a feature that the engine does not declare skips the test, or lets
Hypothesis draw again; so no check puts into an engine what it never promised. Where a feature was tried alone
(`conformance.test_codec_features`) and failed, it is *withdrawn*: after that, what needs it is not judged, and all else
is. So one fault is one finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import currently_in_test_context, reject
from torch import Tensor

from .. import oracle
from ..engines.capabilities import SETS
from ..engines.codecs import FullCodec
from ..inputs.strategies import is_nan, is_negative_zero
from ..oracle import CODES, Bits, State
from ..oracle.layouts import Layout
from .codec import skip_for

PLAIN = "plain"
"""BF16 numbers in tensors of one dtype that have elements and axes: what every engine takes."""
OF_CODE: Mapping[str, str] = {
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F4": "sub_byte",
    "BOOL": "bool",
    "C64": "complex",
    **{code: code.lower().replace("f8_", "float8_") for code in oracle.DTYPES if code.startswith("F8")},
    **{code: "integers" for code in oracle.DTYPES if code[0] in "IU"},
}
"""Dtype code -> the feature that it is; BF16 is none."""
FEATURES = (
    PLAIN,
    *dict.fromkeys(OF_CODE.values()),
    "nan_values",
    "signed_zero",
    "scalars",
    "empty_tensors",
    "mixed_dtypes",
)


def of_tensors(tensors: Sequence[tuple[str, tuple[int, ...], Bits]]) -> set[str]:
    """The features of tensors: of each its dtype code, its shape, and the patterns of all elements, or of some."""
    codes = {code for code, _, _ in tensors}
    found = {PLAIN, *(OF_CODE[code] for code in codes if code in OF_CODE)}
    found |= {"mixed_dtypes"} if len(codes) > 1 else set()
    for code, shape, patterns in tensors:
        found |= {"scalars"} if not shape else set()
        found |= {"empty_tensors"} if 0 in shape else set()
        found |= {"nan_values"} if is_nan(code, patterns).any() else set()
        found |= {"signed_zero"} if is_negative_zero(code, patterns).any() else set()
    return found


def of_state(state: Mapping[str, Tensor]) -> set[str]:
    """The features of a state; of a dtype that the format lacks, none."""
    known = [tensor for tensor in state.values() if tensor.dtype in CODES]
    return of_tensors([(CODES[t.dtype], tuple(t.shape), oracle.bits(t)) for t in known])


def of_delta(delta: Path) -> set[str]:
    """The features of a delta's values; none of one that cannot be read."""
    try:
        patches = oracle.read_delta(delta).patches
    except Exception:  # malformed on purpose: what it holds does not matter
        return set()
    return of_tensors([(patch.code, patch.shape, patch.bits) for patch in patches])


class Guarded:
    """The engine under test, behind what it declares; other attributes are its own."""

    def __init__(self, engine: FullCodec) -> None:
        self.unguarded = engine
        self.withdrawn: dict[str, str] = {}
        """Feature -> what failed."""
        self._offered = frozenset(engine.capabilities)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)

    @property
    def capabilities(self) -> frozenset[str]:
        """What the engine declares and was not seen to lack."""
        gone = self.withdrawn.keys()
        sets = {name for name, members in SETS.items() if gone & set(members)}
        return frozenset(self._offered - gone - sets)

    def withdraw(self, feature: str, why: str) -> None:
        """From now on spare the engine this feature."""
        self.withdrawn.setdefault(feature, why)

    def check(self, found: set[str]) -> None:
        """Skip the running test, or drop this draw, unless the engine is to be judged on these features."""
        if failed := sorted(found & self.withdrawn.keys()):
            _leave(failed[0], self.withdrawn[failed[0]])
        if missing := sorted(found - self._offered - {PLAIN}):
            _draw_again()
            skip_for(missing[0])

    @property
    def _open(self) -> bool:
        """Whether there is nothing to be spared."""
        return not self.withdrawn and self._offered.issuperset(FEATURES[1:])

    def _state(self, *states: Mapping[str, Tensor]) -> None:
        if not self._open:
            self.check({feature for state in states for feature in of_state(state)})

    def _delta(self, delta: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        if not self._open:
            self.check(of_delta(delta) | (of_state(weights) if weights is not None else set()))

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        self._state(base, target)
        self.unguarded.encode(base, target, out)

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        self._delta(delta, weights)
        self.unguarded.apply(delta, weights)

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        self._delta(delta, weights)
        self.unguarded.invert(delta, weights, out)

    def compose(self, deltas: Sequence[Path], out: Path) -> None:
        for delta in deltas:
            self._delta(delta)
        self.unguarded.compose(deltas, out)

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        self._state(weights)
        return self.unguarded.digest(weights)

    def follow(self, delta: Path, weights: MutableMapping[str, Tensor], digest: str) -> str:
        self._delta(delta, weights)
        return self.unguarded.follow(delta, weights, digest)

    def route(self, layout: Layout, name: str, indices: Tensor, values: Tensor) -> Sequence[tuple[str, Tensor, Tensor]]:
        if not self._open and values.dtype in CODES:
            self.check(of_tensors([(CODES[values.dtype], (values.numel(),), oracle.bits(values))]))
        return self.unguarded.route(layout, name, indices, values)


def spare(engine: object, *states: Mapping[str, Tensor]) -> None:
    """End the test where these states need what failed alone."""
    if isinstance(engine, Guarded) and engine.withdrawn:
        engine.check({feature for state in states for feature in of_state(state)} & engine.withdrawn.keys())


def require_offered(engine: object, *states: Mapping[str, Tensor]) -> None:
    """End the test where these states need what the engine does not offer; for tests that go past the guard."""
    if isinstance(engine, Guarded):
        engine.check({feature for state in states for feature in of_state(state)})


def unguarded(engine: FullCodec) -> FullCodec:
    """The engine itself, to be given what it does not declare."""
    found: FullCodec = getattr(engine, "unguarded", engine)
    return found


def _draw_again() -> None:
    if currently_in_test_context():
        reject()


def _leave(feature: str, why: str) -> NoReturn:
    """End the running test, which needs a feature that was tried alone and failed."""
    _draw_again()
    error = pytest.skip.Exception(f"not judged: needs {feature}, which {why}")
    error.withdrawn = feature  # type: ignore[attr-defined]  # for `results.details`
    raise error


@contextmanager
def trying(engine: object, feature: str) -> Iterator[None]:
    """A test of one feature alone: where it fails, the engine is spared the feature from now on."""
    try:
        yield
    except pytest.skip.Exception:
        raise
    except BaseException as error:
        if isinstance(engine, Guarded):
            engine.withdraw(feature, f"failed alone ({type(error).__name__})")
        raise


def small(feature: str, offered: frozenset[str]) -> tuple[State, State]:
    """A change that has this feature and no other; of two dtypes the second is one that the engine offers."""
    codes = {of: code for code, of in reversed(list(OF_CODE.items()))}
    shape: tuple[int, ...] = (2, 3)
    old, new, code = [1, 2, 3, 4, 5, 6], [1, 7, 3, 4, 5, 9], codes.get(feature, "BF16")
    if feature == "bool":
        old, new = [1, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]
    if feature == "nan_values":
        new = [1, 0x7FC1, 3, 4, 5, 9]
    if feature == "signed_zero":
        old, new = [0, 0x8000, 3, 4, 5, 6], [0x8000, 0, 3, 4, 5, 9]
    if feature == "scalars":
        shape, old, new = (), [1], [7]
    base, target = ({"w": oracle.from_bits(np.array(patterns), code, shape)} for patterns in (old, new))
    if feature == "empty_tensors":
        for state in (base, target):
            state["e"] = torch.empty((3, 0), dtype=torch.bfloat16)
    if feature == "mixed_dtypes":
        second = next((code for code, of in OF_CODE.items() if of in offered), None)
        if second is None:
            pytest.skip("the engine takes one dtype alone")
        for state, patterns in ((base, [1, 2, 3]), (target, [1, 5, 3])):
            state["x"] = oracle.from_bits(np.array(patterns), second, (3, 1))
    return base, target
