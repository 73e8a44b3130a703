"""counted: changed, total and density in the metadata equal what the payload holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import oracle, strategies
from conformance.driving import Scratch, applied, encoded
from conformance.engines import FullCodec
from conformance.findings import require
from conformance.oracle import State, assert_bit_equal, expected_patches, total_elements

pytestmark = pytest.mark.check("counted")


def _assert_counted(engine: FullCodec, base: State, target: State, scratch: Scratch) -> None:
    with scratch() as tmp:
        written = oracle.read_delta(encoded(engine, base, target, tmp / "delta"))
    changed, total = sum(len(patch.indices) for patch in expected_patches(base, target)), total_elements(base)
    expected = {
        "changed_elements": changed,
        "total_elements": total,
        "density_pct": round(100 * changed / total, 3) if total else 0.0,
    }
    found = {key: written.metadata[key] for key in expected}
    require(found == expected, "counts", expected=expected, found=found)


@given(st.data())
def test_counts(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    _assert_counted(engine, *data.draw(strategies.pairs(codes)), scratch)


def test_density_is_over_every_tensor(engine: FullCodec, scratch: Scratch) -> None:
    """Two tensors of 100 elements, one element changed: 0.5 %, and not 1 %."""
    zeros = oracle.from_bits(np.zeros(100), "F32", (4, 25))
    one = oracle.from_bits(np.eye(1, 100, 7), "F32", (4, 25))
    with scratch() as tmp:
        delta = encoded(engine, {"a": zeros, "b": zeros}, {"a": one, "b": zeros}, tmp / "delta")
        metadata = json.loads((delta / oracle.METADATA_FILE).read_text())
    found = {key: metadata[key] for key in ("changed_elements", "total_elements", "density_pct")}
    assert found == {"changed_elements": 1, "total_elements": 200, "density_pct": 0.5}


def test_empty_delta_is_a_version(engine: FullCodec, scratch: Scratch) -> None:
    """Equal states give a delta without layers, which is applied like any other."""
    state = {"w": oracle.from_bits(np.full(6, 0x7FC1), "BF16", (2, 3)), "scalar": oracle.from_bits([5], "F32", ())}
    with scratch() as tmp:
        own = encoded(engine, state, state, tmp / "own")
        assert oracle.read_delta(own).metadata["layer_names"] == []
        other = oracle.write_delta(tmp / "other", (), total_elements(state))
        for delta in (own, other):
            assert_bit_equal(state, applied(engine, delta, state), "after an empty delta")
