"""A slice of `scripts/fuzz_reader.py`, and that it would see what it looks for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fuzz_reader
import pytest

from refdelta import read_delta
from refdelta.spec import DeltaError

SCRIPT = Path(fuzz_reader.__file__)
READS = 6000
"""More than the seeds have bytes, so that random faults come after every truncation."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In a process of its own, whose memory is limited."""
    kept = str(tmp_path_factory.mktemp("kept"))
    command = [sys.executable, str(SCRIPT), "--reads", str(READS), "--keep", kept]
    done: subprocess.CompletedProcess[str] = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_read_ends_in_a_delta_error_or_in_what_the_bytes_say(report: str) -> None:
    assert report.startswith(f"{READS} reads, 0 failures")


def test_every_fault_is_put_in_and_most_reasons_come_up(report: str) -> None:
    """A fuzzer that broke nothing, or everything alike, would show nothing."""
    for fault, _ in fuzz_reader.FAULTS:
        assert f" {fault.__name__} " in report
    outcomes = next(line for line in report.splitlines() if line.startswith("by outcome: "))
    counts = dict(part.rsplit(" ", 1) for part in outcomes.removeprefix("by outcome: ").split(", "))
    assert int(counts["read"]) > READS / 50, "too few reads got through"
    reasons = {outcome.removeprefix("refused: ") for outcome in counts if outcome.startswith("refused: ")}
    expected = {"bad_header", "bad_metadata", "bad_shape", "unsupported_dtype", "index_order", "index_range"}
    expected |= {"keys_mismatch", "unsupported_version", "unsupported_format", "not_a_delta", "not_a_checkpoint"}
    assert reasons >= expected | {"unreadable", "count_mismatch", "bad_name"}


def test_seeds_are_read(tmp_path: Path) -> None:
    import random

    for number, files in enumerate(fuzz_reader.seeds(tmp_path / "seeds")):
        place = tmp_path / str(number)
        fuzz_reader.place(files, None, random.Random(0), place)
        assert fuzz_reader.read(place, fuzz_reader._looks_like_delta(files)) == "read"


def _ignores_order(path: Path) -> object:
    """A reader that forgets one check."""
    from unittest.mock import patch

    with patch("refdelta.spec.TensorPatch.check_indices"):
        return read_delta(path)


def _fails_otherwise(path: Path) -> object:
    """A reader that lets another exception through."""
    try:
        return read_delta(path)
    except DeltaError as error:
        raise KeyError("layer_names") from error


def _allocates(path: Path) -> object:
    """A reader that trusts the header's length."""
    for file in path.glob("*.safetensors"):
        bytearray(int.from_bytes(file.read_bytes()[:8].ljust(8, b"\0"), "little") % 2**40)
    return read_delta(path)


@pytest.mark.parametrize("broken", [_ignores_order, _fails_otherwise, _allocates])
def test_the_fuzzer_sees_broken_readers(tmp_path: Path, broken: Callable[[Path], object]) -> None:
    program = (
        "import sys, pathlib, fuzz_reader; from tests.codec import test_fuzz; "
        f"fuzz_reader.read_delta = test_fuzz.{broken.__name__}; "
        "tally = fuzz_reader.fuzz(800, 1, pathlib.Path(sys.argv[1]), truncations=False); "
        "print(len(tally.failures))"
    )
    environment = {"PYTHONPATH": f"{SCRIPT.parent}:{SCRIPT.parent.parent}", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
