"""An engine that is let in though no live test ever ran on such a one says so wherever it speaks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from refdelta import Delta, TensorPatch, write_delta
from refdelta.vllm.calls.status import read_audit, read_status
from refdelta.vllm.update.engine_state import EngineState
from refdelta.vllm.update.ranks import RankGroup
from tests.engine.simulated import Simulated, state_of
from tests.engine.test_allowlist import Qwen3ForCausalLM, departed, proven
from tests.layout.models import QWEN3, Engine

pytest.importorskip("vllm", reason="the backend imports vLLM")


def started(monkeypatch: pytest.MonkeyPatch, device: str) -> Any:
    """The backend, made by its constructor for an engine on ``device``; what it proves about weights is simulated."""
    from refdelta.vllm import backend

    simulated = Simulated.of(engine := Engine(QWEN3), state_of(engine.rules(0), 1))
    proved = EngineState(simulated.targets[0], simulated.block_digests[0], simulated.ledger)
    monkeypatch.setattr("refdelta.vllm.backend.wrap_worker", lambda engine_class: None)
    monkeypatch.setattr(RankGroup, "world", RankGroup)
    monkeypatch.setattr(backend, "LoadedFiles", lambda *arguments: None)
    monkeypatch.setattr(backend, "prove", lambda *arguments: proved)
    config = departed(proven(), "device_config.device_type", device)
    config.additional_config = {}
    made = backend.DeltaSnapshotEngine(None, config, torch.device("cpu"), Qwen3ForCausalLM())
    made.serves(simulated.targets[0].model)
    return made


def update(engine: Any, tmp_path: Path) -> None:
    patch = TensorPatch("model.norm.weight", (40,), torch.tensor([3], dtype=torch.int32), torch.tensor([1.5]))
    total = sum(info.numel for info in Engine(QWEN3).rules(0).sources.values())
    engine.start_weight_update()
    engine.update_from({"target_weights_path": str(write_delta(Delta((patch,), total), tmp_path / "delta"))}, 0)
    engine.finish_weight_update()


@pytest.mark.parametrize(("device", "unproven"), [("cuda", ["device=cuda"]), ("cpu", [])])
def test_a_device_that_was_never_seen_is_named(
    device: str, unproven: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log at start, in status, audit and last update, and in what a client reads of them."""
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    logger = logging.getLogger("vllm.refdelta")
    logger.addHandler(handler)
    try:
        engine = started(monkeypatch, device)
    finally:
        logger.removeHandler(handler)
    assert [line.partition(": no live test")[0] for line in lines] == [f"refdelta: unproven: {of}" for of in unproven]
    update(engine, tmp_path)
    status, audit = engine.status(), engine.audit()
    assert status["unproven"] == status["last_update"]["unproven"] == audit["unproven"] == unproven
    read = read_status([status], paused=False, weight_version="")
    assert read.last_update is not None
    assert read.unproven == read.last_update.unproven == read_audit([audit]).unproven == tuple(unproven)
