"""The counts of a delta, as `counted` judges them in what is written and in what is read."""

from __future__ import annotations

from .. import oracle
from ..engines.codecs import Codec
from ..findings import require
from ..oracle import State, assert_bit_equal, expected_patches, total_elements
from .codec import Scratch, applied, encoded, refusal


def assert_counted(engine: Codec, base: State, target: State, scratch: Scratch) -> None:
    """What the engine writes has the counts of the two states; of a tie of densities either neighbour."""
    with scratch() as tmp:
        written = oracle.read_delta(encoded(engine, base, target, tmp / "delta"))
    changed, total = sum(len(patch.indices) for patch in expected_patches(base, target)), total_elements(base)
    expected = {"changed_elements": changed, "total_elements": total}
    found = {key: written.metadata[key] for key in expected}
    require(found == expected, "counts", expected=expected, found=found)
    density = written.metadata["density_pct"]
    wanted = f"{oracle.density_pct(changed, total)}, or the other neighbour of a tie"
    require(oracle.is_density(density, changed, total), "density_pct", expected=wanted, found=density)


def assert_right_densities_are_taken(engine: Codec, base: State, target: State, scratch: Scratch) -> None:
    """Of the two densities of three decimals around the exact one: a right one is taken, a wrong one refused."""
    patches, total = expected_patches(base, target), total_elements(base)
    changed = sum(len(patch.indices) for patch in patches)
    lower = 100_000 * changed // total
    for density in (lower / 1000, (lower + 1) / 1000):
        with scratch() as tmp:
            delta = oracle.write_delta(tmp / "delta", patches, total, density_pct=density)
            if oracle.is_density(density, changed, total):
                assert_bit_equal(target, applied(engine, delta, base), f"a density of {density}")
            else:
                refusal(engine, delta, base)
