"""Faults inside the backend, imported by every process of an engine under test.

``REFDELTA_TEST_FAULT`` names a JSON file, read at every step: ``{"point": "write", "ranks": [1], "call": 3}`` makes the
third write of rank 1 raise; with ``"undo": true`` every later one too, so that the old values cannot be restored, and
with ``"exit": true`` the process ends instead. Points are the keys of `_POINTS`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed

from conformance.live.probe import Probe
from refdelta.vllm import backend
from refdelta.vllm.update import anchor, block_digests, engine_state, proven_layout, session
from refdelta.vllm.update import updating as update
from tests.live.variables import FAULT

FAULTS = Path(os.environ[FAULT])
"""Only an engine under test has one: imported elsewhere, this module would break the backend for every later test."""

_calls: dict[str, int] = {}


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def _fail_if_due(point: str) -> None:
    text = FAULTS.read_text()
    fault: dict[str, Any] = json.loads(text) if text else {}
    if fault.get("point") != point or _rank() not in fault["ranks"]:
        return
    calls = _calls[text] = _calls.get(text, 0) + 1
    if calls == fault["call"] or (fault.get("undo") and calls > fault["call"]):
        if fault.get("exit"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"injected at {point}")


def _before(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(*args: Any, **kwargs: Any) -> Any:
        _fail_if_due(point)
        return function(*args, **kwargs)

    return faulty


def _after(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        _fail_if_due(point)
        return found

    return faulty


_POINTS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "start": (backend.DeltaSnapshotEngine, "_open", _before),
    "read": (session, "read_delta", _before),
    "stage": (proven_layout.ProvenLayout, "validate", _before),
    "prepare": (update.DeltaUpdate, "prepare", _before),
    "settle": (update.DeltaUpdate, "settle", _before),
    "before_write": (update.DeltaUpdate, "write", _before),
    "write": (update, "_put", _before),
    "after_write": (update.DeltaUpdate, "write", _after),
    "anchor": (anchor.AnchorUpdate, "_put", _before),
    "look": (block_digests.BlockDigests, "differing", _before),
    "audit": (engine_state.EngineState, "check_written", _before),
}

for _point, (_owner, _name, _when) in _POINTS.items():
    setattr(_owner, _name, _when(_point, getattr(_owner, _name)))


def _flip(self: Probe, rank: int, param: str, position: int) -> None:
    """Change the lowest bit of one element behind the engine's back."""
    if self.rank == rank:
        import torch

        tensor = dict(self.model_runner.get_model().named_parameters())[param]
        with torch.inference_mode():
            tensor.view(torch.int16).view(-1)[position] ^= 1


setattr(Probe, "test_flip", _flip)  # noqa: B010  # a method of every worker


def _memory(self: Probe) -> dict[str, float]:
    """Resident megabytes of this worker, after what is unreachable was collected."""
    import gc

    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6}


setattr(Probe, "test_memory", _memory)  # noqa: B010
