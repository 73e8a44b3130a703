"""refuses, for engines that keep a digest: a delta that was not made for this state is refused before it is written.

The digests are computed by `conformance.oracle.digests`, from the text alone; malformed lineages are among the
vectors.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from . import oracle
from .driving.codec import Scratch, assert_reason, raised
from .engines.codecs import FullCodec
from .findings import require
from .inputs import strategies
from .oracle import State, assert_bit_equal, clone, digests, expected_patches, total_elements

pytestmark = [pytest.mark.check("refuses"), pytest.mark.level("versioned")]


@given(st.data())
@pytest.mark.needs("digests")
def test_digest_of_any_state(engine: FullCodec, codes: tuple[str, ...], data: st.DataObject) -> None:
    state = data.draw(strategies.states(codes))
    expected, found = digests.state_digest(state), engine.digest(clone(state))
    require(found == expected, f"digest of {sorted(state)}", expected=expected, found=found)


def _version(directory: Path, base: State, target: State, version: int, **fields: object) -> Path:
    """A delta whose lineage says all that there is to say."""
    lineage = {
        "run_id": "run",
        "version": version,
        "base_version": version - 1,
        "base_digest": digests.state_digest(base),
        "digest": digests.state_digest(target),
    }
    patches = expected_patches(base, target)
    return oracle.write_delta(directory, patches, total_elements(base), lineage=lineage | fields)


@given(st.data())
@pytest.mark.needs("lineage")
def test_chain_is_followed(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    chain = data.draw(strategies.chains(codes))
    weights, digest = clone(chain[0]), digests.state_digest(chain[0])
    with scratch() as tmp:
        for version, (base, target) in enumerate(pairwise(chain), start=1):
            digest = engine.follow(_version(tmp / str(version), base, target, version), weights, digest)
            assert_bit_equal(target, weights, f"after version {version}")
            expected = digests.state_digest(target)
            require(digest == expected, f"digest after version {version}", expected=expected, found=digest)


@given(st.data())
@pytest.mark.needs("lineage")
def test_what_does_not_fit_is_refused(
    engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject
) -> None:
    """A missed delta, a repeated one, one whose digest is another's."""
    first, second, third = data.draw(strategies.chains(codes, 3))
    one, two, three = map(digests.state_digest, (first, second, third))
    assume(len({one, two, three}) == 3)
    with scratch() as tmp:
        step = _version(tmp / "step", first, second, 1)
        _assert_refused(engine, _version(tmp / "later", second, third, 2), first, one, "base_mismatch")
        _assert_refused(engine, step, second, two, "base_mismatch")
        _assert_refused(engine, _version(tmp / "wrong", first, second, 1, digest=three), first, one, "digest_mismatch")
        weights = clone(first)
        found = engine.follow(step, weights, one)
        require(found == two, "digest after refusals", expected=two, found=found)
        assert_bit_equal(second, weights, "after refusals")


def _assert_refused(engine: FullCodec, delta: Path, state: State, digest: str, reason: str) -> None:
    error = raised(lambda weights: engine.follow(delta, weights, digest), state)
    assert_reason(engine, error, reason)
