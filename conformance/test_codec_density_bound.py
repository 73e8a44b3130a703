"""density_bound: the payload costs the change, changed * (index size + value size), and a bounded header."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .driving.codec import Scratch, encoded
from .engines.codecs import FullCodec
from .findings import require
from .inputs import strategies
from .oracle import Patch, RawDelta, expected_patches

pytestmark = pytest.mark.check("density_bound")


def header_bound(patches: tuple[Patch, ...]) -> int:
    """Bytes of the payload file before its data: 512, and per layer 320 and 14 per character of its name.

    A character outside the basic plane, escaped twice (JSON text in JSON text), takes 14 bytes.
    """
    return 512 + sum(320 + 14 * len(patch.name) for patch in patches)


def _assert_bound(written: RawDelta) -> None:
    expected = sum(len(p.indices) * ((4 if p.numel <= 2**31 else 8) + oracle.width(p.code)) for p in written.patches)
    require(written.data_bytes == expected, "bytes of the payload", expected=expected, found=written.data_bytes)
    bound = header_bound(written.patches)
    found = written.header_bytes
    require(found <= bound, "bytes of the header", expected=f"at most {bound}", found=found)


@given(st.data())
def test_bytes_follow_from_the_change(
    engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject
) -> None:
    base, target = data.draw(strategies.pairs(codes))
    with scratch() as tmp:
        written = oracle.read_delta(encoded(engine, base, target, tmp / "delta"))
    found = sorted({*written.index_codes})
    require(found in ([], ["I32"]), "positions of at most 2^31 elements", expected="I32", found=found)
    _assert_bound(written)
    count = sum(len(patch.indices) for patch in expected_patches(base, target))
    assert sum(len(patch.indices) for patch in written.patches) == count, "not one entry per changed element"


@pytest.mark.parametrize(("changed", "cheaper"), [(999, True), (1000, False), (1001, False)])
def test_smaller_than_dense_below_one_third(engine: FullCodec, scratch: Scratch, changed: int, cheaper: bool) -> None:
    """bf16 with I32 positions: 6 bytes a change against 2 an element."""
    old = np.arange(3000, dtype=np.uint16)
    new = old.copy()
    new[:changed] ^= 0x4000
    base, target = ({"w": oracle.from_bits(patterns, "BF16", (30, 100))} for patterns in (old, new))
    with scratch() as tmp:
        written = oracle.read_delta(encoded(engine, base, target, tmp / "delta"))
    found = written.data_bytes
    require(found == 6 * changed, "bytes of the payload, 6 a change", expected=6 * changed, found=found)
    assert (written.data_bytes < 2 * 3000) == cheaper
