"""bit_exact, feature by feature: the smallest change that has one feature alone, before anything else is judged.

A feature that fails here is withdrawn (`conformance.driving.features`): what needs it is not judged, the rest is.
"""

from __future__ import annotations

import pytest

from . import oracle
from .driving.codec import Scratch, applied, encoded, skip_for
from .driving.features import FEATURES, PLAIN, small, trying
from .engines.codecs import FullCodec
from .oracle import assert_bit_equal, expected_patches, expected_state, total_elements

pytestmark = [pytest.mark.check("bit_exact"), pytest.mark.parametrize("feature", FEATURES)]


def _offered(engine: FullCodec, feature: str) -> None:
    if feature != PLAIN and feature not in engine.capabilities:
        skip_for(feature)


@pytest.mark.level("applier")
def test_applied(engine: FullCodec, scratch: Scratch, feature: str) -> None:
    """What the oracle wrote."""
    _offered(engine, feature)
    base, target = small(feature, engine.capabilities)
    with scratch() as tmp, trying(engine, feature):
        delta = oracle.write_delta(tmp / "delta", expected_patches(base, target), total_elements(base))
        assert_bit_equal(target, applied(engine, delta, base), feature)


@pytest.mark.level("writer")
def test_written(engine: FullCodec, scratch: Scratch, feature: str) -> None:
    """Read by the oracle."""
    _offered(engine, feature)
    base, target = small(feature, engine.capabilities)
    with scratch() as tmp, trying(engine, feature):
        written = oracle.read_delta(encoded(engine, base, target, tmp / "delta"))
        assert_bit_equal(target, expected_state(base, written.patches), feature)
