"""canonical: delta.safetensors holds exactly the bytes that the format prescribes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .driving.codec import Scratch, assert_same_bytes, encoded
from .engines.codecs import FullCodec
from .inputs import strategies
from .oracle import DELTA_FILE, State, expected_patches

pytestmark = [pytest.mark.check("canonical"), pytest.mark.needs("canonical")]


def _assert_canonical(engine: FullCodec, base: State, target: State, scratch: Scratch) -> None:
    with scratch() as tmp:
        found = (encoded(engine, base, target, tmp / "delta") / DELTA_FILE).read_bytes()
    expected = oracle.canonical_payload(expected_patches(base, target))
    assert_same_bytes(expected, found)


@given(st.data())
def test_canonical_bytes(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    base, target = data.draw(strategies.pairs(codes))
    order = data.draw(st.permutations(list(base)))
    _assert_canonical(engine, {n: base[n] for n in order}, {n: target[n] for n in reversed(order)}, scratch)
