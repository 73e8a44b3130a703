"""refdelta's writer and encoder, broken where the suite has no check: caught by refdelta's own tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from refdelta.codec import bits
from refdelta.encode import DeltaEncoder
from refdelta.files import atomic as files
from refdelta.files import writing
from refdelta.spec import Delta, DeltaError, Reason

from .registry import own_mutants

caught_by = own_mutants("publisher", "tests/codec")


@contextmanager
def _in_place(target: Path, replaceable: object = None) -> Iterator[Path]:
    target.mkdir(exist_ok=True)
    try:
        yield target
    except OSError as error:
        raise DeltaError(Reason.WRITE_FAILED, str(error)) from error


@caught_by("test_write.py::test_a_failed_write_leaves_nothing", fault=20)
def written_in_place(patch: pytest.MonkeyPatch) -> None:
    """A delta's files are written where readers look for them, one after the other."""
    patch.setattr(writing, "new_directory", _in_place)


@caught_by("test_write.py::test_an_existing_target_is_refused_and_untouched", fault=19)
def earlier_runs_overwritten(patch: pytest.MonkeyPatch) -> None:
    """What lies in the place is removed, whatever it is."""
    new_directory = files.new_directory

    @contextmanager
    def clearing(target: Path, replaceable: object = None) -> Iterator[Path]:
        if target.exists():
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        with new_directory(target) as folder:
            yield folder

    patch.setattr(writing, "new_directory", clearing)


@caught_by("test_write.py::test_lineage_gets_the_hash_of_the_payload", fault=22)
def payload_not_hashed(patch: pytest.MonkeyPatch) -> None:
    """A lineage does not say what the payload's bytes are, so that a file cut short on the way is not seen."""
    written = writing._metadata_bytes
    patch.setattr(writing, "_metadata_bytes", lambda delta, patches, sha256: written(delta, patches, None))


@caught_by("test_diff.py::test_fault_17_baseline_moves_on_acknowledgement_only", fault=17)
def baseline_moves_when_encoded(patch: pytest.MonkeyPatch) -> None:
    """The baseline moves with every delta that is made, taken or not."""
    made, commit = DeltaEncoder.encode, DeltaEncoder.commit

    def committing(self: DeltaEncoder, weights: Any) -> Delta:
        delta = made(self, weights)
        commit(self, delta)
        return delta

    patch.setattr(DeltaEncoder, "encode", committing)


@caught_by("test_diff.py::test_fault_21_everything_since_the_last_commit_is_sent", fault=21)
def only_the_last_step_is_sent(patch: pytest.MonkeyPatch) -> None:
    """Changes since the last call are sent, not those since the last commit."""
    made = DeltaEncoder.encode

    def since_last(self: DeltaEncoder, weights: Any) -> Delta:
        delta = made(self, weights)
        for one in delta.patches:
            bits.scatter_(self._baseline[one.name], one.indices, one.values)
        return delta

    patch.setattr(DeltaEncoder, "encode", since_last)
