"""Malformed deltas: each has its fault and no other, and the oracle's own reader or state check sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import oracle
from conformance.driving.codec import refusal
from conformance.inputs.malformed import FAULTS, PATCHES, STATE
from conformance.mutants.right import Plain
from refdelta.spec import Reason

TOTAL = oracle.total_elements(STATE)


@pytest.mark.parametrize("name", list(FAULTS))
def test_fault_is_there(tmp_path: Path, name: str) -> None:
    """The strict reader or the state check refuses it; the good delta passes both."""
    Plain().apply(oracle.write_delta(tmp_path / "good", PATCHES, TOTAL), oracle.clone(STATE))
    refusal(Plain(), FAULTS[name].write(tmp_path / "bad", PATCHES, TOTAL), STATE)


@pytest.mark.parametrize("name", list(FAULTS))
def test_faults_differ(tmp_path: Path, name: str) -> None:
    """No two faults write the same delta."""
    mine = _content(FAULTS[name].write(tmp_path / "mine", PATCHES, TOTAL))
    others = [other for other in FAULTS if other < name and other != "header_above_100_MB"]
    for other in others:
        assert mine != _content(FAULTS[other].write(tmp_path / other, PATCHES, TOTAL)), f"{name} is {other}"


def _content(directory: Path) -> dict[str, bytes | None] | None:
    if not directory.exists():
        return None
    return {path.name: path.read_bytes() if path.is_file() else None for path in directory.iterdir()}


def test_reasons_are_reason_codes() -> None:
    codes = {str(reason) for reason in Reason}
    for fault in FAULTS.values():
        assert fault.reasons, f"{fault.name} has no reason"
        assert fault.reasons <= codes, f"{fault.name}: {fault.reasons - codes} are no reason codes"


def test_every_reason_of_a_reader_has_a_fault() -> None:
    """The reasons of files, metadata, payload and state that a reader of plain v2 deltas can give."""
    elsewhere = {
        "target_exists",
        "payload_mismatch",
        "alias_conflict",
        "unsupported_tensor",
        "base_mismatch",
        "digest_mismatch",
        "incomplete",
        "not_a_checkpoint",
        "write_failed",
    }
    codes = [str(reason) for reason in Reason]
    of_a_reader = set(codes[: codes.index("unmapped")]) - elsewhere
    assert set.union(*(set(fault.reasons) for fault in FAULTS.values())) == of_a_reader


def test_example_fits_its_description() -> None:
    assert len(PATCHES) >= 2
    assert len(STATE) > len(PATCHES)
    for patch in PATCHES:
        assert len(patch.shape) == 2
        assert patch.shape[0] != patch.shape[1]
        assert len(patch.indices) >= 3
