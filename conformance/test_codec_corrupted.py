"""refuses: whatever is wrong in a delta's files, it is refused with nothing changed, or means what the files say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .driving.codec import Scratch, refused
from .engines.codecs import FullCodec
from .findings import Finding, Mismatch, require
from .inputs import strategies
from .inputs.corruptions import change_of
from .oracle import CODES, State, assert_bit_equal, clone, expected_state

pytestmark = [pytest.mark.check("refuses"), pytest.mark.level("strict")]


def _meaning(delta: Path, base: State) -> State | str:
    """The state after the delta, or why it should be refused."""
    try:
        patches = oracle.read_delta(delta).patches
    except Exception:
        return "malformed"
    held = {name: (CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in base.items()}
    for patch in patches:
        if patch.name not in held:
            return "unknown_tensor"
        if held[patch.name] != (patch.code, patch.shape):
            return "dtype_mismatch" if held[patch.name][0] != patch.code else "shape_mismatch"
    return expected_state(base, patches)


@given(st.data())
def test_anything_wrong(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    base, broken = data.draw(strategies.corrupted(codes))
    for label, files in broken.items():
        change = change_of(broken["nothing"], files)
        kind = f"{label} ({change})" if change else label
        with scratch() as tmp:
            for name, raw in files.items():
                (tmp / name).write_bytes(raw)
            expected, weights = _meaning(tmp, base), clone(base)
            error = refused(lambda at=tmp, held=weights: engine.apply(at, held))  # type: ignore[misc]  # bound early
        if error is None:
            if isinstance(expected, str):
                raise Mismatch(Finding("refusal", expected=f"a refusal ({expected})", found="taken", context=kind))
            assert_bit_equal(expected, weights, kind)
            continue
        assert_bit_equal(base, weights, f"{kind}: refused ({error}), and yet the state changed")
        found = f"refused ({error})"
        require(
            isinstance(expected, str),
            "refusal",
            expected="taken",
            found=found,
            context=f"{kind}: nothing is wrong with it",
        )
        if "reasons" in engine.capabilities:
            reason = getattr(error, "reason", None)
            require(reason, "reason", expected="a reason code", found=reason, context=f"{kind}: refused ({error!r})")
