"""The ranks of an engine in one process, without vLLM: parameters laid out densely in numpy, maps by the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refdelta.checkpoints.reading import Checkpoint
from refdelta.codec import digests as digest
from refdelta.layout_map import LayoutMap
from refdelta.spec import Delta
from refdelta.vllm.proof.attest import Attestation
from refdelta.vllm.proof.memory import Memory
from refdelta.vllm.proof.unmapped import Unmapped, accounts, find
from refdelta.vllm.update.block_digests import BlockDigests, boxes_by_source, header_sum, ownership
from refdelta.vllm.update.engine_state import EngineState
from refdelta.vllm.update.ledger import Ledger
from refdelta.vllm.update.options import Options
from refdelta.vllm.update.proven_layout import ProvenLayout
from refdelta.vllm.update.ranks import RankGroup
from refdelta.vllm.update.updating import DeltaUpdate
from tests.engine.modules import module_of
from tests.layout.dense import Rank, lay_out
from tests.layout.models import Engine

State = dict[str, Tensor]


def state_of(layout: LayoutMap, seed: int) -> State:
    """Random finite bits for every checkpoint tensor; tied names alike."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(info.shape, generator=generator) for name, info in layout.sources.items()}
    return state | {a: state[n].clone() for a, n in layout.aliases.items() if a in layout.sources}


@dataclass
class Simulated:
    """All ranks, each with what it holds."""

    engine: Engine
    live: list[dict[str, Tensor]]
    targets: list[ProvenLayout]
    block_digests: list[BlockDigests]
    ledger: Ledger

    @classmethod
    def of(cls, engine: Engine, state: State, files: Path | None = None) -> Simulated:
        """As at the start of an engine on ``state``, which ``files`` hold."""
        layouts = [engine.rules(rank) for rank in range(engine.tp_size)]
        live = [held(engine, state, rank) for rank in range(engine.tp_size)]
        boxes = [boxes_by_source(layout) for layout in layouts]
        block_digests = []
        for rank, layout in enumerate(layouts):
            empty = BlockDigests.of(layout, {}, ownership(layout, boxes, rank))
            block_digests.append(empty.with_values(empty.measured(live[rank])))
        told = [accounts(layout.check().unmapped, layout.dropped) for layout in layouts]
        reasons = find(layouts[0].sources, told)
        opened = partial(Checkpoint, files) if files else None
        unmapped = Unmapped(reasons, {name: _number(name, state[name]) for name in reasons}, opened)
        targets = [
            ProvenLayout(
                layout,
                Attestation(module_of(held), {n: Memory.of(t) for n, t in held.items()}, {}),
                {},
                unmapped=unmapped,
            )
            for layout, held in zip(layouts, live, strict=True)
        ]
        return cls(engine, live, targets, block_digests, _ledger(block_digests, state, unmapped))

    def update(self, delta: Delta, *, repeated: bool = False) -> list[DeltaUpdate]:
        """Write ``delta`` on all ranks, as a session does."""
        made = [
            DeltaUpdate.of(delta, target, block_digests, repeated=repeated)
            for target, block_digests in zip(self.targets, self.block_digests, strict=True)
        ]
        told = [update.prepare() for update in made]
        ledgers = [update.settle(told, self.ledger) for update in made]
        assert all(ledger == ledgers[0] for ledger in ledgers)
        for update in made:
            update.write()
        self.ledger, self.block_digests = ledgers[0], [update.block_digests() for update in made]
        return made

    def measured(self) -> list[list[int]]:
        """Every rank's digests of its blocks as they are in memory."""
        return [
            block_digests.measured(live).tolist()
            for block_digests, live in zip(self.block_digests, self.live, strict=True)
        ]


def backend_of(simulated: Simulated, rank: int = 0) -> Any:
    """The backend on one of the ranks, alone, as it is after the start of an engine. It imports vLLM."""
    from refdelta.vllm.backend import DeltaSnapshotEngine, DeltaUpdateInfo

    made: Any = object.__new__(DeltaSnapshotEngine)
    state = EngineState(simulated.targets[rank], simulated.block_digests[rank], simulated.ledger)
    unset = {"session": None, "_error": None, "_unopened": False}
    vars(made).update(state=state, **unset, options=Options(), ranks=RankGroup(), _sessions=0, unproven=())
    made.serves(simulated.targets[rank].model)
    made.parse_update_info = lambda info: DeltaUpdateInfo(**info)
    return made


def held(engine: Engine, state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The parameters of one rank, laid out without refdelta."""
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    dense = lay_out(engine.config, arrays, Rank(engine.tp_size, rank, engine.dealt))
    found = {name: torch.from_numpy(np.ascontiguousarray(array).copy()) for name, array in dense.items()}
    return {name: found[name] for name in engine.rules(rank).params}


def _number(name: str, tensor: Tensor) -> int:
    return digest.parse(digest.tensor_digest(name, tensor))


def _ledger(block_digests: list[BlockDigests], state: State, unmapped: Unmapped) -> Ledger:
    counted = block_digests[0].ownership.counted
    layers = {n: header_sum(n, block_digests[0].layout.sources[n]) for n in counted}
    for mine in block_digests:
        for name, share in mine.owned_sums(mine.values).items():
            layers[name] += share
    rest = {name: _number(name, tensor) for name, tensor in state.items() if name not in counted}
    dropped = {name: block_digests[0].layout.dropped[name] for name in rest if name not in unmapped.reasons}
    return Ledger({n: v % digest._WORD for n, v in layers.items()} | rest, dropped, unmapped=unmapped.reasons)
