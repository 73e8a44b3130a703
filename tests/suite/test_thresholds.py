"""Codecs that go wrong from a size on: a sample is killed here, all of them in the nightly run."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from conformance.driving import ranges
from conformance.inputs import sizes
from conformance.mutants import thresholds
from conformance.mutants.thresholds import FAULTS, Threshold, generated, sample, table
from tests.suite.runs import REPOSITORY, command

ALL = generated()


@pytest.mark.timeout(600)
def test_a_sample_is_killed() -> None:
    done = command([sys.executable, "-m", "conformance.mutants.thresholds", "--sample"], cwd=REPOSITORY)
    assert done.code == 0, done.text[-3000:]
    assert f"{len(sample(ALL))} thresholds, 1 seeds" in done.text
    assert "survivors: none" in done.text


def test_the_sample_stands_for_every_operation_and_quantity() -> None:
    chosen = sample(ALL)
    assert {one.name for one in chosen} <= {one.name for one in ALL}
    assert {one.verb for one in chosen} == {one.verb for one in ALL}
    assert {one.quantity for one in chosen} == {one.quantity for one in ALL}
    assert {one.fault for one in chosen} == {one.fault for one in ALL} == FAULTS.keys()


def test_there_is_one_for_each_boundary_that_the_suite_reaches() -> None:
    """What the plan of sizes reaches has a codec that goes wrong there."""
    assert len({one.name for one in ALL}) == len(ALL) > 400
    boundaries = {*sizes.BOUNDARIES, sizes.FLOAT32}
    for verb in ("find", "write", "read", "compose", "invert", "digest", "follow", "route"):
        reached = {one.boundary for one in ALL if (one.verb, one.quantity) == (verb, "elements")}
        assert boundaries <= reached, verb
    assert {one.boundary for one in ALL if one.large} == {sizes.I32}
    quantities = {one.quantity for one in ALL} - {thresholds.COUNTED}
    assert quantities == {row.quantity for row in ranges.RANGES} - {ranges.POSITIONS}


FOUND = np.array([1, 255, 256, 257, 511, 600]), np.array([10, 11, 12, 13, 14, 15], np.uint16)
AFTER = {
    "lost": ([1, 255], [10, 11]),
    "wrapped": ([0, 1, 88, 255], [12, 13, 15, 14]),
    "last chunk skipped": ([1, 255, 256, 257, 511], [10, 11, 12, 13, 14]),
    "only the first block right": ([1, 255, 256, 257, 511, 600], [10, 11, 10, 11, 10, 11]),
    "rounded through float32": ([1, 255, 256, 257, 511, 600], [10, 11, 12, 13, 14, 15]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_fault_does(fault: str) -> None:
    one = Threshold("find", "elements", 256, fault, "test_encode")
    at, bits = one.elements(FOUND, 601)
    assert (at.tolist(), bits.tolist()) == AFTER[fault]
    below = replace(one, boundary=1024).elements(FOUND, 601)
    assert all(np.array_equal(a, b) for a, b in zip(below, FOUND, strict=True)), "right below its boundary"


def test_float32_holds_no_odd_integers_beyond_24_bits() -> None:
    one = Threshold("find", "elements", sizes.FLOAT32, "rounded through float32", "test_encode")
    places = np.array([2**24 - 1, 2**24, 2**24 + 1, 2**24 + 2])
    at, _ = one.elements((places, np.arange(4, dtype=np.uint8)), 2**24 + 5)
    assert at.tolist() == [2**24 - 1, 2**24, 2**24 + 2]


@pytest.mark.parametrize(
    ("fault", "boundary", "left"), [("lost", 2, 2), ("wrapped", 4, 1), ("wrapped", 6, 5), ("last chunk skipped", 2, 4)]
)
def test_changes_are_counted(fault: str, boundary: int, left: int) -> None:
    one = Threshold("find", "changes", boundary, fault, "test_encode")
    at, _ = one.elements((FOUND[0][:5], FOUND[1][:5]), 601)
    assert at.tolist() == FOUND[0][:left].tolist()


def test_a_survivor_is_told() -> None:
    """Of a codec that goes wrong only where no test comes, the table says so."""
    beyond = Threshold("find", "elements", 2**30, "lost", "test_encode", "elements")
    assert thresholds.Judge().finding(beyond) == ""
    assert table([beyond], {beyond.name: False})[1].split() == ["elements", "0/1", "0/1"]
