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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from refdelta.spec import DeltaError, Reason
from refdelta.values import is_int
from refdelta.vllm.assumptions import versions
from refdelta.vllm.assumptions.allowlist import check_engine
from refdelta.vllm.assumptions.loaded_files import LoadedFiles
from refdelta.vllm.startup import prove
from refdelta.vllm.update.anchor import Stated, is_checkpoint
from refdelta.vllm.update.engine_state import LastUpdate
from refdelta.vllm.update.ledger import Ledger
from refdelta.vllm.update.options import options_of
from refdelta.vllm.update.ranks import AgreedValue, RankGroup, StepFailed, StepReport
from refdelta.vllm.update.session import Session
from refdelta.vllm.update.updating import Update
from refdelta.vllm.worker import wrap_worker

__all__ = ["DeltaInitInfo", "DeltaSnapshotEngine", "DeltaUpdateInfo"]

logger = init_logger("vllm.refdelta")  # under vLLM's logger, so that its handlers show it

_UNPROVEN = "refdelta: unproven: %s: no live test ever ran on such an engine; what is checked elsewhere is checked here"


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
        self.state = prove(model, LoadedFiles(vllm_config, model), self.ranks)
        self.session: Session | None = None
        self._sessions = 0
        self._error: DeltaError | None = None
        self._unopened = False
        """Whether no session was opened since the last error. Then that error is the cause of a ``no_session``."""

    # --- the session: each call on all ranks together ---

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
        with self._one_rank_raises():
            if self.state.unaudited is not None:
                self._audit()
            self._step("start", self._open)
            self._unopened = False

    def update_from(self, update_info: Any, rank: int) -> None:
        """Stage one delta or anchor. ``update_info`` is a mapping, or a list of them by global rank."""
        with self._one_rank_raises():
            self._step("update", lambda: self._stage(_of_rank(update_info, rank)))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage one delta; vLLM's entry point where the Worker is not wrapped."""
        self.update_from(update_info, 0)

    def receive_weights(self, update_info: DeltaUpdateInfo) -> None:
        """Stage one delta from typed info."""
        self.update_from(vars(update_info), 0)

    def finish_weight_update(self) -> None:
        """Write what was staged, on every rank or on none, and close the session."""
        with self._one_rank_raises():
            reports = self._step("prepare", self._prepare)
            if self.session is not None and self.session.update is not None:
                self._write_and_commit(self.session, self.session.update, reports)
        self.session = None

    def abort_weight_update(self) -> None:
        """Drop the open session, if there is one; nothing of it was written."""
        with self._one_rank_raises():
            self._step("abort", self._drop)
            self._unopened = False

    def init_transfer_engine(self, init_info: DeltaInitInfo) -> None:
        """Nothing to connect."""

    def init_from(self, init_info: dict[str, Any]) -> None:
        """vLLM's ``init_weight_transfer_engine``: accepts ``{}``, refuses anything else on all ranks together."""

        def check() -> None:
            _parsed(self.parse_init_info, init_info)

        with self._one_rank_raises():
            self._step("init", check)

    def shutdown(self) -> None:
        """Drop an unfinished session. Nothing else is held."""
        self.session = None

    def refuse(self, detail: str) -> None:
        """Refuse a call on all ranks together."""

        def action() -> NoReturn:
            raise DeltaError(Reason.UNSUPPORTED_ENGINE, detail)

        with self._one_rank_raises():
            self._step("refuse", action)

    # --- what the worker tells ---

    def serves(self, model: nn.Module) -> None:
        """Called before each call: ``model`` is the one that the worker runs now."""
        self.state.served = model

    def base_lost(self, why: str) -> None:
        """The weights are no longer those of the ledger: refuse deltas until an anchor."""
        self.session = None
        self.state.fence = why

    def base_uncertain(self, why: str) -> None:
        """Something may have touched the weights (sleep and wake-up): audit all of them before the next update."""
        self.session = None
        self.state.unaudited = why

    def reload(self, load: Callable[[], None]) -> None:
        """Let vLLM load weights in its own way, on all ranks together; deltas are refused until an anchor."""
        self.base_lost("reload_weights replaced the weights")

        def action() -> None:
            load()

        with self._one_rank_raises():
            self._step("reload", action)

    # --- what the engine tells ---

    def status(self) -> dict[str, Any]:
        """The state of this rank as plain values. Only ``rank``, ``written`` and times differ between ranks.

        ``unproven``: properties of the engine on which no live test ever ran, as ``field=value``.
        """
        error = self._error
        return {
            "rank": self.ranks.rank,
            "backend": "delta_snapshot",
            "refdelta": versions.refdelta_version(),
            "vllm": versions.installed_version(),
            "unproven": list(self.unproven),
            **self.state.to_plain(),
            "session": self.session.number if self.session else None,
            "staged": self.session.staged if self.session else 0,
            "last_error": error and {"reason": error.reason.value, "detail": error.detail, "tensor": error.tensor},
        }

    def audit(self) -> dict[str, Any]:
        """Compare every block of this rank with its digest. A mismatch on any rank fences the engine."""
        found: dict[str, str] = {}
        with self._one_rank_raises():
            found = self._audit()
        state = self.state
        return {
            "rank": self.ranks.rank,
            "elements": state.block_digests.elements(state.readable_blocks(state.moved())),
            "mismatched": found,
            "unmapped": dict(state.ledger.unmapped),
            "unproven": list(self.unproven),
        }

    # --- steps: each raises `StepFailed` on every rank, or on none ---

    def _step(self, name: str, action: Callable[[], AgreedValue | StepReport]) -> list[Any]:
        """Run a step that writes nothing on all ranks; what each rank reports. Where it fails, the session ends."""
        try:
            return self.ranks.run_on_all_ranks(name, action)
        except StepFailed:
            self.session = None
            raise

    def _open(self) -> AgreedValue:
        state = self.state
        self.session = Session(
            self._sessions, state.proven, state.ledger, state.block_digests, self.options, fence=state.fence
        )
        return [self._sessions]

    def _drop(self) -> AgreedValue:
        self.session = None
        return []

    def _opened(self) -> Session:
        if self.session is None:
            raise DeltaError(Reason.NO_SESSION, "no update session is open; call start_weight_update first")
        return self.session

    def _stage(self, update_info: Any) -> AgreedValue:
        session = self._opened()
        self.state.check_memory()
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
        self.state.check_memory()
        update = session.prepared()
        with session.timed("prepare"):
            told = update.prepare() if update else {}
        return StepReport([session.number, *session.fingerprints], told)

    def _write_and_commit(self, session: Session, update: Update, reports: Sequence[Any]) -> None:
        """The only step that writes. Afterwards every rank holds the new state, or every rank the old one."""
        settled: list[Ledger] = []
        self._step("settle", lambda: settled.append(update.settle(reports, self.state.ledger)))
        try:
            self.ranks.run_on_all_ranks("write", lambda: self._write(session, update))
        except StepFailed as failure:
            self._undo(update, failure)
            raise
        self._error = None
        self.state.commit(update, settled[0], self._done(session, update))
        logger.info("refdelta: %s; %s", self.state.ledger.name, self.state.last_update)

    def _write(self, session: Session, update: Update) -> None:
        with session.timed("write"):
            update.write()
            self.state.check_memory()  # a loader of vLLM's may replace the tensors that it writes to
        with session.timed("audit"):
            session.audited = self.state.check_written(update, self.options.audit_budget(update.changed))

    def _done(self, session: Session, update: Update) -> LastUpdate:
        seconds = {phase: round(took, 6) for phase, took in session.seconds.items()}
        did = (update.changed, update.written, dict(update.dropped), session.audited)
        return LastUpdate(session.sources, *did, seconds, list(self.unproven))

    def _undo(self, update: Update, failure: StepFailed) -> None:
        """Write the old values back on every rank. An engine that cannot is a mixture of two states, and ends."""
        try:
            self.ranks.run_on_all_ranks("undo", update.undo)
        except StepFailed as second:
            _end_engine(f"{failure}; then {second}")
        if failure.reason is Reason.DIGEST_MISMATCH:
            self._audit()  # what differs without an update fences the engine

    def _audit(self) -> dict[str, str]:
        """Look at all weights on all ranks and fence the engine where any differ; what differs on this rank."""
        found: dict[str, str] = {}

        def look() -> StepReport:
            found.update(self.state.differing())
            return StepReport(None, found)

        found_by_rank = self._step("audit", look)
        self.state.unaudited = None
        self.state.fence_off("audit", found_by_rank)
        return found

    def _look_for_moved(self) -> None:
        """Fence the engine where memory was replaced. A refusal for one tensor alone fences nothing."""
        self.state.fence_off("memory", self._step("memory", lambda: StepReport(None, self.state.moved())))

    # --- the boundary: a step fails on every rank, and one rank tells the caller ---

    @contextmanager
    def _one_rank_raises(self) -> Iterator[None]:
        """Around each public call: a failed step ends it on every rank, and only the reporting rank raises.

        vLLM's RPC channel falls out of step where several ranks raise (see `refdelta.vllm.update.ranks`).
        """
        failed: StepFailed | None = None
        try:
            yield
        except StepFailed as failure:
            failed = failure
        if failed is not None:
            self.session = None
            self._tell(self._fenced_if_moved(failed))

    def _tell(self, failure: StepFailed) -> None:
        self._note(failure)
        if self.ranks.is_reporting_rank:
            raise failure
        logger.error("refdelta: %s (rank %d raises it)", failure, self.ranks.size - 1)

    def _fenced_if_moved(self, failure: StepFailed) -> StepFailed:
        """``failure``, or that of the look at memory which an ``unattested`` one calls for."""
        if failure.reason is Reason.UNATTESTED:
            try:
                self._look_for_moved()
            except StepFailed as second:
                return second
        return failure

    def _note(self, failure: StepFailed) -> None:
        """Keep the error for `status`. A call that only finds no session follows from the error that ended it."""
        if failure.reason is Reason.NO_SESSION and self._unopened:
            return
        self._error, self._unopened = failure, failure.reason is not Reason.NO_SESSION


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
