"""A weight-transfer backend as anybody would write it, imported by every process of an engine under test.

It writes in ``update_weights`` and raises where it fails, on the rank that failed. ``REFDELTA_TEST_FAULT`` names a JSON
file, a list of ``[rank, point, kind]`` as in `tests.protocol.model.Native`.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from conformance.live.probe import Probe
from tests.live.variables import FAULT

NAME = "raising"
PARTS = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
"""Two whole parameters of every rank, of non-zero values; a version is a number that is added to both."""
VERSIONS = {"old": 0.0, "a": 1.0, "stale": 2.0}


@dataclass
class Info(WeightTransferInitInfo, WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is untyped here
    """Which version to write."""

    target_weights_path: str = ""


class Raising(WeightTransferEngine[Info, Info]):  # type: ignore[misc]  # as above
    """Writes one part after the other."""

    init_info_cls = Info
    update_info_cls = Info

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parameters = dict(model.named_parameters())
        self.live = [parameters[name] for name in PARTS]
        self.base = [part.detach().clone() for part in self.live]
        self.rank = vllm_config.parallel_config.rank

    def init_transfer_engine(self, init_info: Info) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """May fail."""
        self._may_fail("start")

    def receive_weights(self, update_info: Info) -> None:
        """Read, then write; may fail anywhere."""
        self._may_fail("read")
        self.write(self._kind("read") or update_info.target_weights_path)

    def finish_weight_update(self) -> None:
        """May fail."""
        self._may_fail("finish")

    def shutdown(self) -> None:
        """Nothing is held."""

    def write(self, version: str) -> None:
        """Write both parts, unless a fault strikes."""
        kind = self._kind("write")
        for number, (part, base) in enumerate(zip(self.live, self.base, strict=True)):
            if kind == ("fails before", "fails in the middle")[number]:
                raise RuntimeError(f"injected: write {kind}")
            with torch.inference_mode():
                part.copy_(base + VERSIONS[version])
        if kind:
            raise RuntimeError(f"injected: write {kind}")

    def held(self) -> str:
        """The version that both parts are of, or mixed."""
        pairs = list(zip(self.live, self.base, strict=True))
        whole = [v for v, add in VERSIONS.items() if all(torch.equal(part, base + add) for part, base in pairs)]
        return whole[0] if whole else "mixed"

    def _kind(self, point: str) -> str | None:
        faults = json.loads(Path(os.environ[FAULT]).read_text() or "[]")
        kind = next((kind for rank, where, kind in faults if (rank, where) == (self.rank, point)), None)
        if kind:
            Path(f"{os.environ[FAULT]}.{self.rank}").touch()  # it has been read, and may be replaced
        return kind

    def _may_fail(self, point: str) -> None:
        if self._kind(point) == "fails":
            raise RuntimeError(f"injected: {point} fails")


def _held(self: Any, directory: str, nonce: str) -> None:
    """Leave what this rank holds in a file: replies cannot be trusted here."""
    Path(directory, f"{nonce}.{self.rank}").write_text(self.weight_transfer_engine.held())


def _mended(self: Any) -> None:
    """As after the start: base weights, no session."""
    self.weight_transfer_engine.write("old")
    self._weight_update_active = False


_call = MultiprocExecutor.collective_rpc


def _call_or_drain(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """``test_drain`` takes what was left in the replies' queues, and says how much: nobody can, from outside.

    Each queue is read up to the answer to an echo of its own, so that no reply is still on its way.
    """
    if method != "test_drain":
        return _call(self, method, *args, **kwargs)
    nonce, left = uuid.uuid4().hex, 0
    self.rpc_broadcast_mq.enqueue(("probe_echo", (nonce,), {}, None))
    for rank, queue in enumerate(self.response_mqs):
        while queue.dequeue(timeout=60)[1] != (rank, nonce):
            left += 1
    return [left]


_ADDED: list[tuple[type, str, Callable[..., Any]]] = [
    (Probe, "test_held", _held),
    (Probe, "test_mended", _mended),
    (MultiprocExecutor, "collective_rpc", _call_or_drain),
]
for _owner, _name, _method in _ADDED:
    setattr(_owner, _name, _method)

if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, "tests.live.raising", "Raising")
