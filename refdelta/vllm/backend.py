"""The vLLM weight-transfer backend ``delta_snapshot``: sparse deltas in place.

All ranks hold the new version or all the old one; where a rank dies or cannot undo its write, the engine ends.
``update_info`` is ``{"target_weights_path": DIR}``, a delta or a whole checkpoint. A session is start, one or more
updates, finish. `update_from` reads, validates and routes and writes nothing; `finish_weight_update` writes. The ranks
agree before the first write and after the last; one failure undoes all. Whatever fails, every rank reaches the
agreement and only the highest rank raises, because vLLM's RPC channel falls out of step otherwise.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from refdelta.spec import DeltaError, Reason, is_int
from refdelta.vllm.assumptions import versions
from refdelta.vllm.assumptions.allowlist import check_engine
from refdelta.vllm.assumptions.loaded_files import LoadedFiles
from refdelta.vllm.startup import prove
from refdelta.vllm.update.anchor import AnchorUpdate, Stated, is_checkpoint
from refdelta.vllm.update.ledger import Ledger
from refdelta.vllm.update.options import options_of
from refdelta.vllm.update.ranks import AgreedValue, RankGroup, StepFailed, StepReport
from refdelta.vllm.update.session import Session
from refdelta.vllm.update.updating import Update
from refdelta.vllm.worker import wrap_worker

__all__ = ["DeltaInitInfo", "DeltaSnapshotEngine", "DeltaUpdateInfo"]

logger = init_logger("vllm.refdelta")  # under vLLM's logger, so that its handlers show it

_UNPROVEN = "refdelta: unproven: %s: no live test ever ran on such an engine; what is checked elsewhere is checked here"
_RESTART = "nothing is known of what reads it: restart the engine"


@dataclass
class DeltaInitInfo(WeightTransferInitInfo):
    """The backend needs no connection: ``{}``."""


@dataclass
class DeltaUpdateInfo(WeightTransferUpdateInfo):
    """Where a delta, or a checkpoint as an anchor, lies, on a file system that every rank reads."""

    target_weights_path: str
    lineage: str | None = None
    """See `Options`; for this session."""
    repeat: str | None = None
    mode: str | None = None
    run_id: str | None = None
    """Of an anchor: the run whose version it is."""
    version: int | None = None
    digest: str | None = None
    """Of an anchor: the state digest that it must have."""

    def __post_init__(self) -> None:
        if not isinstance(self.target_weights_path, str) or not self.target_weights_path:
            raise ValueError("target_weights_path must be a path")
        if self.version is not None and (not is_int(self.version) or self.version < 0):
            raise ValueError("version must be an integer >= 0")
        if (self.run_id is None) != (self.version is None):
            raise ValueError("run_id and version come together")


@dataclass
class LastUpdate:
    """What the last update did on this rank; part of `DeltaSnapshotEngine.status`."""

    sources: list[str]
    """What was staged in it, in the client's words: how a client knows that it was its own."""
    changed: int
    written: int
    dropped: dict[str, str]
    audited: int
    seconds: dict[str, float]
    unproven: list[str]
    """See `DeltaSnapshotEngine.status`."""


class DeltaSnapshotEngine(WeightTransferEngine[DeltaInitInfo, DeltaUpdateInfo]):
    """One rank's side of the backend. Construction proves the engine or refuses it (see `refdelta.vllm.startup`)."""

    init_info_cls = DeltaInitInfo
    update_info_cls = DeltaUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        versions.check_version()
        self.unproven = check_engine(vllm_config, model)
        if self.unproven:
            logger.warning(_UNPROVEN, ", ".join(self.unproven))
        self.options = options_of(vllm_config.additional_config)
        wrap_worker(DeltaSnapshotEngine)
        self.ranks = RankGroup.world()
        proved = prove(model, LoadedFiles(vllm_config, model), self.ranks)
        self.proven, self.block_digests, self.ledger = proved.proven, proved.block_digests, proved.ledger
        self.session: Session | None = None
        self._sessions = 0
        self._fence: str | None = None
        self._served = model
        self._unaudited: str | None = None
        self._cursors = (0, 0)
        self._last: LastUpdate | None = None
        self._error: DeltaError | None = None
        self._unopened = False
        """Whether no session was opened since the last error, which then is why there is none."""

    # --- the session, each step on all ranks together ---

    @property
    def is_open(self) -> bool:
        """Whether an update session is open on this rank; the same on every rank."""
        return self.session is not None

    def start_weight_update(self) -> None:
        """Open a session. One that was never finished is dropped: nothing of it was written."""
        if self.session is not None:
            logger.warning("refdelta: dropping update session %d, which was never finished", self.session.number)
        self._sessions += 1
        self.session = None
        if self._unaudited is not None and self._audit() is None:
            return  # the rank that speaks has raised
        if self._step("start", self._open) is not None:
            self._unopened = False

    def update_from(self, update_info: Any, rank: int) -> None:
        """Stage one delta or anchor. ``update_info`` is a mapping, or a list of them by global rank."""
        self._step("update", lambda: self._stage(_of_rank(update_info, rank)))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage one delta; vLLM's entry point where the Worker is not wrapped."""
        self.update_from(update_info, 0)

    def receive_weights(self, update_info: DeltaUpdateInfo) -> None:
        """Stage one delta from typed info."""
        self.update_from(vars(update_info), 0)

    def finish_weight_update(self) -> None:
        """Write what was staged, on every rank or on none, and close the session."""
        told = self._step("prepare", self._prepare)
        session = self.session
        if told is None or session is None:
            return  # the rank that speaks has raised
        update = session.update
        if update is None:
            self.session = None
            return  # nothing was staged
        ledger: list[Ledger] = []
        if self._step("settle", lambda: ledger.append(update.settle(told, self.ledger))) is None:
            return
        try:
            self.ranks.run_on_all_ranks("write", lambda: self._write(session, update))
        except StepFailed as failure:
            self._undo(update, failure)
            self._raise(failure)
        else:
            self._commit(session, update, ledger[0])
        finally:
            self.session = None

    def abort_weight_update(self) -> None:
        """Drop the open session, if there is one; nothing of it was written."""

        def drop() -> list[int | str]:
            self.session = None
            return []

        if self._step("abort", drop) is not None:
            self._unopened = False

    def init_transfer_engine(self, init_info: DeltaInitInfo) -> None:
        """Nothing to connect."""

    def init_from(self, init_info: dict[str, Any]) -> None:
        """vLLM's ``init_weight_transfer_engine``: accepts ``{}``, refuses anything else on all ranks together."""

        def check() -> None:
            _parsed(self.parse_init_info, init_info)

        self._step("init", check)

    def shutdown(self) -> None:
        """Drop an unfinished session. Nothing else is held."""
        self.session = None

    def refuse(self, detail: str) -> None:
        """Refuse a call on all ranks together."""

        def action() -> NoReturn:
            raise DeltaError(Reason.UNSUPPORTED_ENGINE, detail)

        self._step("refuse", action)

    # --- the state that is held ---

    def serves(self, model: nn.Module) -> None:
        """Told before each call: which model the worker runs now."""
        self._served = model

    def status(self) -> dict[str, Any]:
        """What this rank knows, as plain values; equal on every rank but for ``rank``, ``written`` and times.

        ``unproven``: what of the engine was let in though no live test ever ran on it, as ``field=value``.
        """
        error = self._error
        return {
            "rank": self.ranks.rank,
            "backend": "delta_snapshot",
            "refdelta": versions.refdelta_version(),
            "vllm": versions.installed_version(),
            "unproven": list(self.unproven),
            "run_id": self.ledger.run_id,
            "version": self.ledger.version,
            "digest": self.ledger.digest,
            "verified": self.ledger.verified,
            "unmapped": dict(self.ledger.unmapped),
            "fence": self._fence,
            "refused": dict(self.proven.refused),
            "session": self.session.number if self.session else None,
            "staged": self.session.staged if self.session else 0,
            "last_error": error and {"reason": error.reason.value, "detail": error.detail, "tensor": error.tensor},
            "last_update": self._last and asdict(self._last),
        }

    def audit(self) -> dict[str, Any]:
        """Hold every block of this rank against its digest. A mismatch on any rank fences the engine."""
        found = self._audit()
        elements = self.block_digests.elements(self._readable(self._moved()))
        return {
            "rank": self.ranks.rank,
            "elements": elements,
            "mismatched": found or {},
            "unmapped": dict(self.ledger.unmapped),
            "unproven": list(self.unproven),
        }

    def _audit(self) -> dict[str, str] | None:
        """What differs on this rank; None where some rank could not look."""
        found: dict[str, str] = {}

        def look() -> StepReport:
            moved = self._moved()
            differing = self.block_digests.differing(self.proven.attestation.live(), self._readable(moved))
            found.update({name: f"{where} changed without an update" for name, where in differing.items()})
            found.update(moved)
            return StepReport(None, found)

        told = self._step("audit", look)
        if told is None:
            return None
        self._unaudited = None
        self._fence_off("audit", told)
        return found

    def _moved(self) -> dict[str, str]:
        """Runtime parameter -> why what this rank serves under its name is not what was proved."""
        if self._served is not self.proven.model:
            return dict.fromkeys(self.proven.attestation.proved, f"the worker serves another model object; {_RESTART}")
        return {name: f"{why}; {_RESTART}" for name, why in self.proven.attestation.moved().items()}

    def _readable(self, moved: Mapping[str, str]) -> list[int]:
        """Blocks that an audit reads, by number."""
        return [
            number for number in self.block_digests.auditable if self.block_digests.blocks[number].param not in moved
        ]

    def _check_memory(self) -> None:
        for name, why in self._moved().items():
            raise DeltaError(Reason.UNATTESTED, why, name)

    def _fence_off(self, step: str, told: Sequence[Mapping[str, str]]) -> None:
        """What any rank has found lets the engine take nothing but an anchor, or, of other memory, nothing at all."""
        for rank, found in enumerate(told):
            for name, why in found.items():
                self._fence = self._fence or f"{step}: rank {rank}: {name}: {why}"

    def base_lost(self, why: str) -> None:
        """The weights are no longer those of the ledger: refuse deltas until an anchor."""
        self.session = None
        self._fence = why

    def reload(self, load: Callable[[], None]) -> None:
        """Let vLLM load weights in its own way, on all ranks together; deltas are refused until an anchor."""
        self.base_lost("reload_weights replaced the weights")

        def action() -> None:
            load()

        self._step("reload", action)

    def base_uncertain(self, why: str) -> None:
        """Something may have touched the weights (sleep and wake-up): audit all of them before the next update."""
        self.session = None
        self._unaudited = why

    # --- steps ---

    def _open(self) -> list[int | str]:
        self.session = Session(
            self._sessions, self.proven, self.ledger, self.block_digests, self.options, fence=self._fence
        )
        return [self._sessions]

    def _opened(self) -> Session:
        if self.session is None:
            raise DeltaError(Reason.NO_SESSION, "no update session is open; call start_weight_update first")
        return self.session

    def _stage(self, update_info: Any) -> list[int | str]:
        session = self._opened()
        self._check_memory()
        info = _parsed(self.parse_update_info, update_info)
        session.options = session.options.with_(vars(info))
        session.sources.append(info.target_weights_path)
        path, stated = Path(info.target_weights_path), Stated(info.run_id, info.version, info.digest)
        if is_checkpoint(path):
            return [session.number, session.stage_anchor(path, stated, (self.ranks.rank, self.ranks.size))]
        if stated != Stated():
            raise DeltaError(
                Reason.BAD_OPTION, "run_id, version and digest are said of anchors; a delta states its own"
            )
        return [session.number, session.stage(path)]

    def _prepare(self) -> StepReport:
        session = self._opened()
        self._check_memory()
        update = session.prepared()
        with session.timed("prepare"):
            told = update.prepare() if update else {}
        return StepReport([session.number, *session.fingerprints], told)

    def _write(self, session: Session, update: Update) -> None:
        with session.timed("write"):
            update.write()
            self._check_memory()  # a loader may replace what it writes
        with session.timed("audit"):
            self._check(session, update)

    def _check(self, session: Session, update: Update) -> None:
        """Hold what was touched, and a share of the rest, against the digests as they should be now."""
        after, budget = update.block_digests(), self.options.audit_budget(update.changed)
        numbers, self._cursors = after.blocks_to_audit(
            update.touched(), budget, self._cursors, whole=update.audit_whole
        )
        session.audited = after.elements(numbers)
        for name, where in after.differing(self.proven.attestation.live(), numbers).items():
            raise DeltaError(Reason.DIGEST_MISMATCH, f"{where} is not what the engine's digest says", name)

    def _commit(self, session: Session, update: Update, ledger: Ledger) -> None:
        self.ledger, self.block_digests = ledger, update.block_digests()
        if isinstance(update, AnchorUpdate):
            self._fence = self._unaudited = None
        self._error = None
        seconds = {phase: round(took, 6) for phase, took in session.seconds.items()}
        done = (update.changed, update.written, dict(update.dropped), session.audited)
        self._last = LastUpdate(session.sources, *done, seconds, list(self.unproven))
        logger.info("refdelta: %s; %s", ledger.name, self._last)

    def _step(self, name: str, action: Callable[[], AgreedValue | StepReport]) -> list[Any] | None:
        """A step on all ranks that writes nothing; what each rank told. Where it fails anywhere, the session ends."""
        try:
            return self.ranks.run_on_all_ranks(name, action)
        except StepFailed as failure:
            self.session = None
            if failure.reason is Reason.UNATTESTED:
                self._look_for_moved()
            self._raise(failure)
            return None

    def _look_for_moved(self) -> None:
        """Fence the engine where the refusal was for memory that some rank has replaced, not for a tensor alone."""
        told = self._step("memory", lambda: StepReport(None, self._moved()))
        self._fence_off("memory", told or [])

    def _raise(self, failure: StepFailed) -> None:
        follows = failure.reason is Reason.NO_SESSION and self._unopened
        if not follows:  # else the error that ended the session is the one to be known
            self._error, self._unopened = failure, failure.reason is not Reason.NO_SESSION
        if self.ranks.is_reporting_rank:
            raise failure
        logger.error("refdelta: %s (rank %d raises it)", failure, self.ranks.size - 1)

    def _undo(self, update: Update, failure: StepFailed) -> None:
        try:
            self.ranks.run_on_all_ranks("undo", update.undo)
        except StepFailed as second:
            _end_engine(f"{failure}; then {second}")
        if failure.reason is Reason.DIGEST_MISMATCH:
            self._audit()  # what differs without an update fences the engine
        if failure.reason is Reason.UNATTESTED:
            self._look_for_moved()


def _of_rank(update_info: Any, rank: int) -> Any:
    if not isinstance(update_info, list):
        return update_info
    if rank >= len(update_info):
        raise DeltaError(Reason.BAD_OPTION, f"update_info is a list of {len(update_info)}, none for rank {rank}")
    return update_info[rank]


def _parsed(parse: Callable[[dict[str, Any]], Any], info: Any) -> Any:
    if not isinstance(info, dict):
        raise DeltaError(Reason.BAD_OPTION, f"expected a mapping, found {type(info).__name__}")
    try:
        return parse(info)
    except ValueError as error:
        raise DeltaError(Reason.BAD_OPTION, str(error)) from error


def _end_engine(why: str) -> None:
    """The ranks hold a mixture and cannot restore it: end this engine process, so that health checks fail."""
    logger.critical("refdelta: the weights could not be restored; ending the engine. %s", why)
    if multiprocessing.parent_process() is not None:
        os._exit(70)
    raise SystemExit(f"refdelta: the weights could not be restored. {why}")
