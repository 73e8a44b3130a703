"""The vLLM weight-transfer backend ``delta_snapshot``: sparse deltas in place, on all ranks or on none.

``update_info`` is ``{"target_weights_path": DIR}``. A session is start, one or more updates, finish.
`update_from` reads, validates and routes a delta and writes nothing; `finish_weight_update` writes. The ranks agree
before the first write and after the last; one failure undoes all. Whatever fails, every rank reaches the agreement
and only the highest rank raises, because vLLM's RPC channel falls out of step otherwise.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
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
from refdelta.vllm import compat
from refdelta.vllm.allowlist import check_engine
from refdelta.vllm.options import check_options
from refdelta.vllm.ranks import Agreed, RankGroup, StepFailed
from refdelta.vllm.session import Session, Target
from refdelta.vllm.startup import prove

__all__ = ["DeltaInitInfo", "DeltaSnapshotEngine", "DeltaUpdateInfo"]

logger = init_logger("vllm.refdelta")  # under vLLM's logger, so that its handlers show it


@dataclass
class DeltaInitInfo(WeightTransferInitInfo):
    """The backend needs no connection: ``{}``."""


@dataclass
class DeltaUpdateInfo(WeightTransferUpdateInfo):
    """Where the delta lies, on a file system that every rank reads."""

    target_weights_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.target_weights_path, str) or not self.target_weights_path:
            raise ValueError("target_weights_path must be a path")


class DeltaSnapshotEngine(WeightTransferEngine[DeltaInitInfo, DeltaUpdateInfo]):
    """One rank's side of the backend. Construction proves the engine or refuses it (see `refdelta.vllm.startup`)."""

    init_info_cls = DeltaInitInfo
    update_info_cls = DeltaUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        compat.check_version()
        check_engine(vllm_config, model)
        check_options(vllm_config.additional_config)
        compat.wrap_worker()
        self.ranks = RankGroup.world()
        self.target: Target = prove(model, compat.checkpoint_directory(self.model_config), self.ranks)
        self.session: Session | None = None
        self._sessions = 0
        self._fence: str | None = None

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
        self._step("start", self._open)

    def update_from(self, update_info: Any, rank: int) -> None:
        """Stage one delta. ``update_info`` is a mapping, or a list of them by global rank."""
        self._step("update", lambda: self._stage(_of_rank(update_info, rank)))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage one delta; vLLM's entry point where the Worker is not wrapped."""
        self.update_from(update_info, 0)

    def receive_weights(self, update_info: DeltaUpdateInfo) -> None:
        """Stage one delta from typed info."""
        self.update_from({"target_weights_path": update_info.target_weights_path}, 0)

    def finish_weight_update(self) -> None:
        """Write what was staged, on every rank or on none, and close the session."""
        session = self.session
        if not self._step("prepare", self._prepared) or session is None:
            return  # the rank that speaks has raised
        try:
            self.ranks.together("write", session.write)
        except StepFailed as failure:
            self._undo(session, failure)
            self._raise(failure)
        finally:
            self.session = None
        if session.dropped:
            logger.info("refdelta: changes that this engine does not hold: %s", session.dropped)

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

    def base_lost(self, why: str) -> None:
        """The weights are no longer those that were attested: refuse deltas from now on."""
        self.session = None
        self._fence = why

    # --- steps ---

    def _open(self) -> list[int | str]:
        if self._fence is not None:
            raise DeltaError(Reason.FENCED, self._fence)
        self.session = Session(self._sessions, self.target)
        return [self._sessions]

    def _opened(self) -> Session:
        if self.session is None:
            raise DeltaError(Reason.NO_SESSION, "no update session is open; call start_weight_update first")
        return self.session

    def _stage(self, update_info: Any) -> list[int | str]:
        session = self._opened()
        info = _parsed(self.parse_update_info, update_info)
        return [session.number, session.stage(Path(info.target_weights_path))]

    def _prepared(self) -> list[int | str]:
        session = self._opened()
        return [session.number, *session.payloads]

    def _step(self, name: str, action: Callable[[], Agreed]) -> bool:
        """A step on all ranks that writes nothing. Where it fails anywhere, the session ends everywhere."""
        try:
            self.ranks.together(name, action)
        except StepFailed as failure:
            self.session = None
            self._raise(failure)
            return False
        return True

    def _raise(self, failure: StepFailed) -> None:
        if self.ranks.speaks:
            raise failure
        logger.error("refdelta: %s (rank %d raises it)", failure, self.ranks.size - 1)

    def _undo(self, session: Session, failure: StepFailed) -> None:
        try:
            self.ranks.together("undo", session.undo)
        except StepFailed as second:
            _end_engine(f"{failure}; then {second}")


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
