"""What the live changes reach: of every region of every rank the first element, the last, and both sides of each cut.

A region is a box of a checkpoint tensor that one parameter of one rank holds, by refdelta's layout rules. The suite
chooses its positions without those: a fault at the edge of any region must meet a changed element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance import oracle
from conformance.inputs import checkpoints
from conformance.inputs.checkpoints import Checkpoint
from conformance.live import changes
from refdelta.layout.map import Region
from refdelta.layout_map import LayoutMap, layout_from_config

RANKS = {1: (0,), 2: (0, 1)}


def layouts(checkpoint: Checkpoint, tp: int) -> Iterator[LayoutMap]:
    """The layout of every rank."""
    config = checkpoint.config | dict(checkpoint.hf_overrides)
    for rank in RANKS[tp]:
        yield layout_from_config(config, tp_size=tp, tp_rank=rank)


def edges(region: Region) -> dict[str, int]:
    """What must be met: positions in the checkpoint tensor of the region's corners."""
    box = region.source_box
    corners = {"first": box.offset, "last": box.last}
    for axis, (size, stride) in enumerate(zip(box.shape, box.strides, strict=True)):
        if size > 1:
            corners[f"far end of axis {axis}"] = box.offset + (size - 1) * stride
            corners[f"near end of axis {axis}"] = box.last - (size - 1) * stride
    return corners


def reached(directory: Path, tp: int) -> dict[str, NDArray[np.int64]]:
    """Positions by tensor that the checks `first_element`, `last_element` and `shard_boundaries` change."""
    state = checkpoints.load(directory)
    targets = [changes.one_element(state, 0), changes.one_element(state, -1)]
    targets.append(changes.shard_boundaries(state, max(2, tp)))
    return {
        name: np.unique(
            np.concatenate([np.flatnonzero(oracle.bits(t[name]) != oracle.bits(state[name])) for t in targets])
        )
        for name in state
    }


@pytest.mark.parametrize("tp", list(RANKS))
@pytest.mark.parametrize("model", checkpoints.MODELS)
def test_every_edge_of_every_region_of_every_rank_is_changed(model: str, tp: int, tmp_path: Path) -> None:
    checkpoint = checkpoints.make(model, tmp_path / "base")
    changed, missed, met = reached(checkpoint.directory, tp), list[str](), Counter[str]()
    for rank, layout in enumerate(layouts(checkpoint, tp)):
        for region in layout.regions:
            for edge, position in edges(region).items():
                met[edge.partition(" of ")[0]] += 1
                if position not in changed[region.source]:
                    missed.append(f"rank {rank} {region.source} -> {region.param}: {edge}, position {position}")
    assert not missed, f"{len(missed)} of {met.total()}:\n" + "\n".join(missed[:12])
    assert min(met["first"], met["last"], met["far end"], met["near end"]) > 10, met
