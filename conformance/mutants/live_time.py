"""refdelta's backend, broken in what lasts beyond one call: sessions, undoing, the fence, what it says of itself.

As `conformance.mutants.live`; each fault stands alone, with everything else that the backend checks of itself in place.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from refdelta.apply import read_delta
from refdelta.spec import Delta
from refdelta.vllm.backend import DeltaSnapshotEngine
from refdelta.vllm.proof.attest import Attestation
from refdelta.vllm.update import session
from refdelta.vllm.update.anchor import AnchorUpdate
from refdelta.vllm.update.engine_state import EngineState
from refdelta.vllm.update.ledger import Account, Ledger
from refdelta.vllm.update.updating import DeltaUpdate, Update

from .live import caught_by

_ABANDONED, _UNDONE = "test_an_abandoned_session_is_not_written", "test_a_delta_that_fails_is_undone"
_FLIPPED, _STATUS = "test_a_flipped_bit_is_found", "test_status_follows_every_step"
_MARKED, _MEMORY = "test_sleep_and_reload_leave_a_mark", "test_other_memory_takes_no_update"


# --- sessions ---------------------------------------------------------------------------------------------------------


@caught_by("sessions", "test_a_path_is_used_again", kind="session", fault=19)
def deltas_known_by_path(patch: pytest.MonkeyPatch) -> None:
    """A delta that was read once is not read again, where path, size and time are the same."""
    known: dict[tuple[object, ...], Delta] = {}

    def remembering(path: Path) -> Delta:
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(path.iterdir())]
        return known.setdefault((path, *stats), read_delta(path))

    patch.setattr(session, "read_delta", remembering)


@caught_by("sessions", "test_a_path_is_used_again", kind="session", fault=20)
def deltas_removed_when_read(patch: pytest.MonkeyPatch) -> None:
    """What was applied is cleaned up, though other engines have still to read it."""

    def removing(path: Path) -> Delta:
        found = read_delta(path)
        kept = [
            replace(tensor, indices=tensor.indices.clone(), values=tensor.values.clone()) for tensor in found.patches
        ]
        shutil.rmtree(path)
        return replace(found, patches=tuple(kept))

    patch.setattr(session, "read_delta", removing)


@caught_by("sessions", _ABANDONED, kind="session", fault=36)
def abandoned_deltas_written(patch: pytest.MonkeyPatch) -> None:
    """What an unfinished session has staged is written with the next one."""
    start = DeltaSnapshotEngine.start_weight_update

    def keeping(self: DeltaSnapshotEngine) -> None:
        left = self.session
        start(self)
        if left is not None and self.session is not None:
            self.session.deltas += left.deltas
            self.session.fingerprints += left.fingerprints

    patch.setattr(DeltaSnapshotEngine, "start_weight_update", keeping)


@caught_by("sessions", "test_two_deltas_in_one_session", kind="session", fault=21)
def second_delta_lost(patch: pytest.MonkeyPatch) -> None:
    """Of several whole deltas in a session the first is written."""
    combined = session._combined

    def first(deltas: Sequence[Delta]) -> Delta:
        partial = any(session._is_partial(delta) for delta in deltas)
        return combined(deltas if partial else deltas[:1])

    patch.setattr(session, "_combined", first)


@caught_by("in_place", "test_weights_stay_where_they_are", kind="applier", fault=None)
def whole_tensors_written(patch: pytest.MonkeyPatch) -> None:
    """Every parameter is written whole at each update, with the right values."""
    write = DeltaUpdate.write

    def reloading(self: DeltaUpdate) -> None:
        write(self)
        with torch.no_grad():
            for tensor in self.proven.attestation.live().values():
                tensor.copy_(tensor.clone())

    patch.setattr(DeltaUpdate, "write", reloading)


# --- undoing ----------------------------------------------------------------------------------------------------------


@caught_by("failed_write", _UNDONE, kind="undo", fault=36)
def delta_not_undone(patch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves its delta behind on the ranks that wrote."""
    patch.setattr(DeltaUpdate, "undo", lambda self: None)


@caught_by("failed_write", "test_an_anchor_that_fails_is_undone", kind="undo", fault=36)
def anchor_not_undone(patch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves its anchor behind on the ranks that wrote."""
    patch.setattr(AnchorUpdate, "undo", lambda self: None)


@caught_by("failed_write", _UNDONE, kind="undo", fault=16)
def version_moves_before_the_write(patch: pytest.MonkeyPatch) -> None:
    """The version is that of the update as soon as all ranks have agreed, whatever becomes of the write."""
    write = DeltaSnapshotEngine._write_and_commit

    def early(self: DeltaSnapshotEngine, opened: session.Session, update: Update, reports: Sequence[Any]) -> None:
        known = self.state.ledger
        settled = update.settle(reports, known)
        try:
            write(self, opened, update, reports)
        except Exception:
            version = 1 if known.version is None else known.version + 1
            self.state.ledger = replace(known, run_id=settled.run_id or known.run_id or "run", version=version)
            raise

    patch.setattr(DeltaSnapshotEngine, "_write_and_commit", early)


# --- the fence and its marks ------------------------------------------------------------------------------------------


@caught_by("account", _FLIPPED, kind="fence", fault=36)
def fence_ignored(patch: pytest.MonkeyPatch) -> None:
    """A fenced engine takes deltas as any other."""
    stage = session.Session.stage

    def open_to_all(self: session.Session, path: Path) -> str:
        self.fence = None
        return stage(self, path)

    patch.setattr(session.Session, "stage", open_to_all)


@caught_by("account", _FLIPPED, kind="fence", fault=37)
def audit_always_clean(patch: pytest.MonkeyPatch) -> None:
    """An audit finds nothing."""
    patch.setattr(EngineState, "differing", lambda self: {})


@caught_by("account", _MARKED, kind="fence", fault=34)
def sleep_leaves_no_mark(patch: pytest.MonkeyPatch) -> None:
    """After a sleep the weights are taken for what they were."""
    patch.setattr(DeltaSnapshotEngine, "base_uncertain", lambda self, why: None)
    _unaudited(patch)


@caught_by("account", _MARKED, kind="fence", fault=34)
def reload_leaves_no_mark(patch: pytest.MonkeyPatch) -> None:
    """After vLLM's own reload the engine is taken for the same version as before."""
    patch.setattr(DeltaSnapshotEngine, "base_lost", lambda self, why: None)


@caught_by("account", _MEMORY, kind="fence", fault=28)
def other_memory_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether the parameters are still those that were proved."""
    patch.setattr(Attestation, "moved", lambda self: {})
    _unaudited(patch)


def _unaudited(patch: pytest.MonkeyPatch) -> None:
    """The audit of each update would find what the mark was to tell."""
    patch.setattr(EngineState, "check_written", lambda self, update, budget: 0)


# --- what the engine says of itself -----------------------------------------------------------------------------------


@caught_by("account", _STATUS, kind="account", fault=37)
def status_repeats_the_delta(patch: pytest.MonkeyPatch) -> None:
    """The status gives the digest that the last delta stated, not that of the weights."""
    after, plain = Ledger.after, EngineState.to_plain
    stated: dict[int, str | None] = {}

    def noting(self: Ledger, delta: Delta, accounts: Sequence[Account], *, repeated: bool) -> Ledger:
        found = after(self, delta, accounts, repeated=repeated)
        stated[id(found)] = delta.lineage.digest if delta.lineage else None
        return found

    def repeating(self: EngineState) -> dict[str, Any]:
        found = plain(self)
        return found | {"digest": stated.get(id(self.ledger), found["digest"])}

    patch.setattr(Ledger, "after", noting)
    patch.setattr(EngineState, "to_plain", repeating)


@caught_by("versions", "test_an_unversioned_delta_ends_the_version", kind="version", fault=16)
def unversioned_keeps_the_version(patch: pytest.MonkeyPatch) -> None:
    """After a delta without a version the engine still says the one before it."""
    after = Ledger.after

    def keeping(self: Ledger, delta: Delta, accounts: Sequence[Account], *, repeated: bool) -> Ledger:
        found = after(self, delta, accounts, repeated=repeated)
        return found if delta.lineage else replace(found, run_id=self.run_id, version=self.version)

    patch.setattr(Ledger, "after", keeping)


@caught_by("versions", "test_digests_of_layers_are_compared", kind="version", fault=35)
def layer_digests_not_compared(patch: pytest.MonkeyPatch) -> None:
    """What a delta states of single layers is not looked at."""
    rolled = Ledger._rolled

    def trusting(self: Ledger, name: str, accounts: Sequence[Account], stated: str | None) -> int | None:
        return rolled(self, name, accounts, None)

    patch.setattr(Ledger, "_rolled", trusting)
