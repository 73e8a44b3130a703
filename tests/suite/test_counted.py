"""A density half way between two of three decimals: every way to round is right, cutting off is not; of readers too."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import ROUND_HALF_DOWN, ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from conformance import oracle
from conformance.driving.counting import assert_counted, assert_right_densities_are_taken
from conformance.findings import Mismatch
from conformance.mutants.right import Plain

TIES = [(1, (4, 16)), (3, (4, 16)), (1, (400, 500))]
NO_TIE = (2, (1, 3))


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


class Rounds(Plain):
    """Writes the density in its own way."""

    how = ROUND_HALF_EVEN

    def density(self, changed: int, total: int) -> float:
        return float((Decimal(100 * changed) / Decimal(total)).quantize(Decimal("0.001"), self.how))

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        super().encode(base, target, out)
        metadata = json.loads((out / oracle.METADATA_FILE).read_text())
        metadata["density_pct"] = self.density(metadata["changed_elements"], metadata["total_elements"])
        (out / oracle.METADATA_FILE).write_text(json.dumps(metadata))


class Truncates(Rounds):
    """Cuts off after three decimals."""

    def density(self, changed: int, total: int) -> float:
        return math.floor(100_000 * changed / total) / 1000


class OneNeighbour(Plain):
    """Reads what Python's rounding gives, and refuses the other neighbour."""

    def read(self, delta: Path) -> object:  # type: ignore[override]
        patches = super().read(delta)
        found = json.loads((delta / oracle.METADATA_FILE).read_text())
        if found["density_pct"] != oracle.density_pct(found["changed_elements"], found["total_elements"]):
            raise ValueError("another density")
        return patches


def pair(changed: int, shape: tuple[int, int]) -> tuple[oracle.State, oracle.State]:
    total = shape[0] * shape[1]
    states = (np.zeros(total), np.arange(total) < changed)
    base, target = ({"w": oracle.from_bits(patterns, "BF16", shape)} for patterns in states)
    return base, target


def judge(engine: Plain, changed: int, shape: tuple[int, int]) -> None:
    """As `test_codec_counted.test_density_half_way` does."""
    assert_counted(engine, *pair(changed, shape), scratch)
    assert_right_densities_are_taken(engine, *pair(changed, shape), scratch)


@pytest.mark.parametrize("how", [ROUND_HALF_UP, ROUND_HALF_DOWN, ROUND_HALF_EVEN])
@pytest.mark.parametrize(("changed", "shape"), [*TIES, NO_TIE])
def test_any_rounding_passes(how: str, changed: int, shape: tuple[int, int]) -> None:
    engine = Rounds()
    engine.how = how
    judge(engine, changed, shape)


def test_cutting_off_fails() -> None:
    with pytest.raises((Mismatch, oracle.OracleError), match="density_pct"):
        judge(Truncates(), *NO_TIE)


@pytest.mark.parametrize(("changed", "shape"), TIES)
def test_a_reader_of_one_neighbour_fails(changed: int, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="another density"):
        judge(OneNeighbour(), changed, shape)


def test_what_is_a_density() -> None:
    right = {(1, 64): (1.562, 1.563), (1, 200_000): (0.0, 0.001), (2, 3): (66.667,), (1, 2): (50, 50.0), (0, 0): (0,)}
    for counts, densities in right.items():
        assert all(oracle.is_density(density, *counts) for density in densities)
        assert not any(oracle.is_density(density + 0.001, *counts) for density in densities[-1:])
    for wrong in (1.561, 1.5625, True, "1.562", None, float("nan"), float("inf"), 10**400, -1.562):
        assert not oracle.is_density(wrong, 1, 64), wrong
