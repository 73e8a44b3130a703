"""A write that fails moves nothing that the backend knows: run, version and digests; on one rank without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refdelta import Delta, DeltaEncoder, write_delta
from refdelta.codec import bits
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.update import updating as update
from refdelta.vllm.update.block_digests import BlockDigests
from refdelta.vllm.update.engine_state import EngineState
from tests.engine.simulated import Simulated, State, backend_of, state_of
from tests.layout.models import QWEN3, Engine

pytest.importorskip("vllm", reason="the backend imports vLLM")


class Rig:
    """The backend on a rank that holds version 1 of a run, and what leads to version 2."""

    def __init__(self, scratch: Path) -> None:
        engine = Engine(QWEN3)
        state = state_of(engine.rules(0), 1)
        self.simulated = Simulated.of(engine, state)
        self.backend = backend_of(self.simulated)
        self.scratch = scratch
        self.encoder = DeltaEncoder(state, run_id="run")
        first = self.encoder.encode(flipped(state, 1))
        self.update(self.written(first))
        self.encoder.commit(first)
        self.second = self.encoder.encode(flipped(state, 2))
        assert self.known() == ("run", 1, self.encoder.digest)

    def written(self, delta: Delta) -> dict[str, str]:
        """An ``update_info``."""
        return {"target_weights_path": str(write_delta(delta, self.scratch / f"{len(list(self.scratch.iterdir()))}"))}

    def update(self, info: dict[str, str]) -> None:
        """One whole session."""
        self.backend.start_weight_update()
        self.backend.update_from(info, 0)
        self.backend.finish_weight_update()

    def known(self) -> tuple[Any, Any, Any]:
        """Run, version and digest, as the status says them."""
        status = self.backend.status()
        return status["run_id"], status["version"], status["digest"]

    def held(self) -> list[Tensor]:
        """Copies of the weights."""
        return [tensor.clone() for tensor in self.simulated.live[0].values()]


def flipped(state: State, bit: int) -> State:
    """One bit of the first, the middle and the last element of every tensor."""
    after = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in after.values():
        words = tensor.view(torch.int32).view(-1)
        words[[0, len(words) // 2, len(words) - 1]] ^= bit
    return after


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def fails(*_: object, **__: object) -> None:
    raise RuntimeError("injected")


FAULTS: dict[str, tuple[Any, str, int]] = {
    "first write": (update, "_put", 1),
    "fifth write": (update, "_put", 5),
    "audit": (EngineState, "check_written", 1),
    "look": (BlockDigests, "differing", 1),
    "settle": (update.DeltaUpdate, "settle", 1),
    "prepare": (update.DeltaUpdate, "prepare", 1),
}
"""Of what which function fails at which call."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_versioned_delta_that_is_not_written_leaves_its_version_untaken(
    rig: Rig, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next attempt would be the version that the engine holds, and be skipped in silence."""
    known, held, path = rig.known(), rig.held(), rig.written(rig.second)
    digests = rig.backend.state.block_digests
    with monkeypatch.context() as patch:
        owner, name, call = FAULTS[fault]
        right, calls = getattr(owner, name), iter(range(1, 1000))
        patch.setattr(owner, name, lambda *a, **k: fails() if next(calls) == call else right(*a, **k))
        with pytest.raises(DeltaError, match="injected") as caught:
            rig.update(path)
    assert caught.value.reason is Reason.RANK_FAILED
    assert rig.known() == known
    assert rig.backend.state.block_digests is digests
    assert all(map(bits.equal, rig.held(), held))
    assert rig.backend.audit()["mismatched"] == {}
    rig.update(path)
    assert rig.known() == ("run", 2, rig.second.lineage and rig.second.lineage.digest)
    assert rig.backend.status()["last_update"]["written"] == rig.second.changed_elements
    assert not any(map(bits.equal, rig.held(), held))
