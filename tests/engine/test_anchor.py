"""A whole checkpoint on simulated ranks: it leaves what a fresh load leaves, padding included, and can be undone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from refdelta.digest import state_digest
from refdelta.vllm.update.anchor import AnchorUpdate, Stated
from tests.engine.simulated import Simulated, held, state_of
from tests.layout.models import SMALL


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(wanted[name].view(torch.int32), t.view(torch.int32)) for name, t in found.items())


def updates(simulated: Simulated, path: Path, turns: int) -> list[AnchorUpdate]:
    """Every rank's side, read and settled."""
    made = [
        AnchorUpdate.read(path, target, block_digests, Stated("run", 3), (rank, turns))
        for rank, (target, block_digests) in enumerate(zip(simulated.targets, simulated.block_digests, strict=True))
    ]
    told = [update.prepare() for update in made]
    ledgers = {update.settle(told, simulated.ledger).name for update in made}
    assert len(ledgers) == 1
    return made


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_an_anchor_leaves_a_fresh_load(name: str, tmp_path: Path) -> None:
    """Garbage in the padding, as a broken writer leaves it, is gone; undone, every bit is back, the garbage too."""
    engine = SMALL[name]
    old, new = (state_of(engine.rules(0), seed) for seed in (1, 2))
    save_file(new, tmp_path / "model.safetensors")
    simulated = Simulated.of(engine, old)
    dirty = 0
    for target, live in zip(simulated.targets, simulated.live, strict=True):
        for param, boxes in target.layout.padding.items():
            for box in boxes:
                box.view(live[param]).fill_(float("nan"))
                dirty += box.numel
    assert dirty, "no rank has padding, so nothing is shown"
    before = [{param: tensor.clone() for param, tensor in live.items()} for live in simulated.live]

    made = updates(simulated, tmp_path, len(simulated.live))
    assert state_digest(new) in made[0].settle([update.prepare() for update in made], simulated.ledger).name
    for update in made:
        update.write()
    assert all(same(live, held(engine, new, rank)) for rank, live in enumerate(simulated.live))
    for update in made:
        update.undo()
    assert all(same(live, kept) for live, kept in zip(simulated.live, before, strict=True))
