"""Hundreds of updates on one live engine with requests in flight: equal digests after every one, no growth."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.inputs import checkpoints
from conformance.inputs.checkpoints import State
from conformance.oracle import digests
from tests.live.rig import Engine, running

UPDATES, WARM = 300, 100
FEW = 50
"""Updates of the quick profile; too few to tell a leak from noise, so memory is looked at in the long run alone."""
DENSITY = 0.01
GROWTH_MB = 24
"""Resident memory of a worker may rise by this over the last 200 updates; a leaked delta each would be more."""
TOKENS = 40


def stepped(state: State, step: int) -> State:
    """About `DENSITY` of every tensor, one element at least, with its low bits changed."""
    draw, after = np.random.default_rng(step), checkpoints.clone(state)
    for tensor in after.values():
        count = max(1, round(DENSITY * tensor.numel()))
        at = torch.from_numpy(draw.choice(tensor.numel(), count, replace=False))
        bits = tensor.view(torch.int16).view(-1)
        bits[at] ^= torch.from_numpy(draw.integers(1, 8, count).astype(np.int16))
    return after


def memory(engine: Engine) -> list[float]:
    """Resident megabytes of every worker."""
    return [answer["rss_mb"] for answer in engine.host.call("rpc", method="test_memory")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("updates", [FEW, pytest.param(UPDATES, marks=pytest.mark.nightly)])
def test_many_updates(updates: int, tmp_path: Path) -> None:
    """The trainer's digest after every step on every rank, a fresh engine's bits at the end, requests answered."""
    checkpoint = checkpoints.make("qwen3-untied", tmp_path / "base")
    with running(checkpoint, 2, tmp_path, max_model_len=256) as engine:
        finished, sizes = 0, dict[int, list[float]]()
        tokens = TOKENS if updates == UPDATES else TOKENS // 4  # some requests are to end while weights change
        for step in range(updates):
            finished += engine.host.call("keep_busy", prompts=[[5, 9, 14, 2], [77, 31, 8]], tokens=tokens)
            target = stepped(engine.state, step)
            delta = engine.encoder.encode(target)
            path = engine.write(delta)
            assert engine.sync(path) is None
            engine.encoder.commit(delta)
            engine.state = target
            engine.is_current()
            shutil.rmtree(path)
            if step + 1 in (WARM, UPDATES):
                sizes[step + 1] = memory(engine)
        assert engine.encoder.version == updates
        assert engine.status()["digest"] == digests.state_digest(engine.state)
        engine.holds(engine.state)
        assert finished > 2, "no request ended while weights changed"
        if updates < UPDATES:
            return
        growth = [after - before for before, after in zip(sizes[WARM], sizes[UPDATES], strict=True)]
        print(f"{UPDATES} updates: resident MB at {WARM} and {UPDATES}: {sizes}; {finished} requests ended")
        assert max(growth) < GROWTH_MB, sizes
