"""The sizes that the suite plans to drive an engine with are those that it drives one with."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from torch import Tensor

from conformance import oracle
from conformance.driving.options import Options
from conformance.driving.ranges import (
    APPLY,
    CHANGES,
    ELEMENTS,
    IN_PROCESS,
    POSITIONS,
    RANGES,
    THREADS,
    WORDS,
    Record,
    Recorder,
)
from conformance.engines.codecs import FullCodec, Reference
from conformance.inputs import sizes
from conformance.suite import plugin
from conformance.suite.results import FAILED, NOT_RUN, PASSED, Result
from conformance.suite.run import Exit, Run
from tests.suite.runs import CONFORMANCE

ALL = Reference.capabilities | {IN_PROCESS}


class _Keeper:
    """Holds the record of a run in this process."""

    record: Record | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.record = plugin.run_of(session.config).record


@pytest.fixture(scope="module")
def record() -> Record:
    """What the reference saw in the two chapters that are about sizes."""
    keeper = _Keeper()
    chapters = [str(CONFORMANCE / f"test_codec_{name}.py") for name in ("sizes", "large")]
    assert pytest.main(["-q", "-p", "no:cacheprovider", *chapters, "--engine", "reference"], [keeper]) == 0
    assert keeper.record is not None
    return keeper.record


@pytest.mark.nightly  # the run with the reference in `make test` holds itself to it (`Run.undriven`)
@pytest.mark.timeout(300)
def test_the_chapters_on_sizes_drive_the_whole_plan(record: Record) -> None:
    lacking = [(row.verb, row.quantity, lack) for row, lack in record.missing(ALL)]
    assert not lacking, f"planned in RANGES, and driven by no test: {lacking}"
    lines = {line.partition(":")[0]: line for line in record.lines()}
    assert "2^31 + 65,536 elements in a tensor" in lines["range apply"]
    assert "2^20 + 1 changes in a tensor" in lines["range encode"]
    assert "2^24 elements in a region" in lines["range route"]
    assert "2^8 + 1 deltas in one" in lines["range compose"]


def planned() -> Record:
    """A record of just what is planned."""
    record = Record()
    for row in RANGES:
        record.note(row.verb, row.quantity, row.sizes)
    return record


def _run(record: Record, outcome: str = PASSED) -> Run:
    codec = cast(FullCodec, Reference())
    run = Run(cast(Options, SimpleNamespace(live=False)), codec, Reference.capabilities, record=record)
    chapters = [path.name for path in CONFORMANCE.glob("test_codec_*.py")]
    run.results = {name: Result(f"{name}::test", "bit_exact", outcome=outcome) for name in chapters}
    return run


def test_a_run_of_some_chapters_is_not_held_to_the_plan() -> None:
    run = _run(Record({(APPLY, ELEMENTS): {3}}))
    assert run.undriven()
    del run.results["test_codec_sizes.py"]
    assert not run.undriven()


def test_a_size_that_no_test_drives_fails_the_run() -> None:
    """Each row alone, each of its sizes alone; not of a run that is not whole, or that found a fault."""
    assert planned().missing(ALL) == []
    assert _run(planned()).exit(0) == Exit.PASSED
    for row in RANGES:
        for size in row.sizes:
            record = planned()
            record.seen[row.verb, row.quantity].discard(size)
            assert dict(record.missing(ALL))[row] == [size]
            (said,) = _run(record).undriven()
            assert f"plans {row.quantity} of [{size}] for {row.verb}" in said
            assert _run(record).exit(0) == Exit.INFRASTRUCTURE
            assert not _run(record, NOT_RUN).undriven()
            assert _run(record, FAILED).exit(1) == Exit.FAILED
    assert not _run(Record()).undriven(), "the record of a run whose workers keep their own"
    assert {row.quantity for row in RANGES} <= WORDS.keys()


def test_what_an_engine_cannot_is_not_missed() -> None:
    """Its capabilities, and for a program the suite's number of threads."""
    for offered, quantities in (({"digests"}, set()), ({"digests", IN_PROCESS}, {THREADS}), ({IN_PROCESS}, {THREADS})):
        lacking = [row for row, _ in Record().missing(offered)]
        assert {row.needs for row in lacking} == {"", *(offered - {IN_PROCESS})}
        assert {row.quantity for row in lacking} & {THREADS} == quantities


def test_the_lines_of_a_run() -> None:
    lines = planned().lines()
    assert any(line.startswith("range encode: ") and "2^20 + 1 changes in a tensor" in line for line in lines)
    assert lines[-1] == "Beyond these ranges nothing was judged."
    assert Record().lines() == []


class _Refuses(Reference):
    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        raise ValueError("refused")


@pytest.mark.parametrize("engine", [Reference, _Refuses])
def test_what_is_refused_was_not_judged(engine: type[Reference], tmp_path: Path) -> None:
    at, record = np.array([2, 255, 256]), Record()
    base, target = ({"w": t} for t in sizes.changed((7, 41), "BF16", at, sizes.generator(1)))
    delta = oracle.write_delta(tmp_path / "delta", oracle.expected_patches(base, target), 287)
    recorder = Recorder(cast(FullCodec, engine()), record)
    if engine is Reference:
        recorder.apply(delta, oracle.clone(base))
        assert record.seen[APPLY, ELEMENTS] == {287}
        assert record.seen[APPLY, CHANGES] == {3}
        assert record.seen[APPLY, POSITIONS] == {255, 256}
    else:
        with pytest.raises(ValueError, match="refused"):
            recorder.apply(delta, oracle.clone(base))
        assert not record.seen


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0"), (12, "12"), (255, "2^8 - 1"), (256, "2^8"), (300, "300"), (4096, "2^12"), (12_288, "12,288")),
        *(
            (2**16 + 4096, "2^16 + 4,096"),
            (70_000, "70,000"),
            (2**24 - 1, "2^24 - 1"),
            (2**31 + 2**16, "2^31 + 65,536"),
            (2**20 + 2**16, "1,114,112"),
        ),
    ],
)
def test_sizes_in_words(number: int, text: str) -> None:
    assert sizes.power(number) == text
