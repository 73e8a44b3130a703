"""Three maps of every small model that share nothing: the rules, the trace, and what a fresh engine did with a code.

A fresh engine, without refdelta's plugin, loads checkpoints whose elements say where they come from
(`conformance.position_code`). What stands in its parameters is compared with the traced map and with the rules, on
every element of every parameter and rank, expert weights through the permutation that was recovered for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from conformance import checkpoints
from conformance.checkpoints import Checkpoint
from conformance.live.judge import read_dumps
from conformance.live.runner import START_TIMEOUT, Host
from conformance.position_code import Code, Numbers, Reading, read
from refdelta.layout_map import Box, LayoutMap, TensorInfo, layout_from_config

pytestmark = pytest.mark.timeout(600)

MODELS = [pytest.param(model, tp, id=f"{model}-tp{tp}") for model in checkpoints.MODELS for tp in (1, 2)]


@dataclass(frozen=True, slots=True)
class Traced:
    """What one rank traced and recovered."""

    layout: LayoutMap
    failed: Mapping[str, str]
    places: Mapping[str, NDArray[np.int64]]
    """Parameter -> where each loaded element stands."""
    verdicts: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Traced:
        raw = json.loads(path.read_text())
        places = {param: _summed(tables) for param, tables in raw["tables"].items()}
        return cls(LayoutMap.from_json(raw["layout"]), raw["failed"], places, raw["verdicts"])


def _summed(tables: list[list[int]]) -> NDArray[np.int64]:
    total = np.zeros(1, np.int64)
    for table in tables:
        total = (total[:, None] + np.array(table, np.int64)).reshape(-1)
    return total


def numbers_of(layout: LayoutMap, code: Code) -> dict[str, Numbers]:
    """What the parameters hold according to a map, right after loading; an element written twice fails."""
    held = {name: np.zeros(info.numel, np.int64) for name, info in layout.params.items()}
    for region in layout.regions:
        target = _view(held[region.param], region.param_box)
        assert not target.any(), f"{region.source} writes into {region.param} where another tensor did"
        target[...] = _view(code.numbers(region.source), region.source_box)
    return held


def _view(flat: Numbers, box: Box) -> Numbers:
    strides = [8 * stride for stride in box.strides]
    return np.lib.stride_tricks.as_strided(flat[box.offset :], box.shape, strides)


def rearranged(held: Mapping[str, Numbers], traced: Traced, reading: Reading) -> dict[str, Numbers]:
    """What they hold after the engine moved elements of some."""
    moved = dict(held)
    for param, places in traced.places.items():
        moved[param] = np.zeros(int(np.prod(reading.shapes[param])), np.int64)
        moved[param][places] = held[param]
    return moved


def run(zygote: Host, checkpoint: Checkpoint, code: Code, tp: int, scratch: Path) -> tuple[list[Reading], list[Traced]]:
    """Load every digit into a fresh engine of its own."""
    outs = [scratch / f"dump{digit}" for digit in range(code.digits)]
    jobs = []
    for out, directory in zip(outs, code.checkpoints(checkpoint.directory, scratch), strict=True):
        out.mkdir()
        start = {"checkpoint": str(directory), "tp": tp, "hf_overrides": dict(checkpoint.hf_overrides)}
        jobs.append({"start": start, "prompts": [], "out": str(out)})
    zygote.call("forked_truths", timeout=START_TIMEOUT * len(jobs), jobs=jobs, at_once=1, limit_s=START_TIMEOUT)
    return read([read_dumps(out) for out in outs]), [Traced.read(p) for p in sorted(outs[0].glob("rank*.traced"))]


def by_the_rules(checkpoint: Checkpoint, state: Mapping[str, torch.Tensor], tp: int, rank: int) -> LayoutMap:
    tensors = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    return layout_from_config(checkpoint.config, tp_size=tp, tp_rank=rank, tensors=tensors)


@pytest.mark.parametrize(("model", "tp"), MODELS)
def test_three_maps_agree(model: str, tp: int, zygote: Host, tmp_path: Path) -> None:
    """Every element of every parameter, buffer and rank; and every checkpoint element stands on some rank."""
    checkpoint = checkpoints.make(model, tmp_path / "base")
    state = checkpoints.load(checkpoint.directory)
    code = Code.of(state, checkpoints.aliases(state, tied=checkpoint.tied))
    readings, traced = run(zygote, checkpoint, code, tp, tmp_path)
    assert len(readings) == len(traced) == tp
    for reading, trace in zip(readings, traced, strict=True):
        assert not trace.failed
        held = numbers_of(trace.layout, code)
        assert reading.difference(rearranged(held, trace, reading), code) == []
        rules = numbers_of(by_the_rules(checkpoint, state, tp, reading.rank), code)
        assert reading.difference(rearranged(rules, trace, reading), code) == []
        _verdicts_hold(reading, trace, held)
    everywhere = np.unique(np.concatenate([found for reading in readings for found in reading.numbers.values()]))
    kept = [code.numbers(name) for name in state if name not in traced[0].layout.dropped]
    assert np.array_equal(everywhere[everywhere > 0], np.unique(np.concatenate(kept)))


def _verdicts_hold(reading: Reading, trace: Traced, held: Mapping[str, Numbers]) -> None:
    """What each verdict claims is what was read."""
    assert not reading.unread
    claimed: dict[str, set[str]] = {}
    for name, verdict in trace.verdicts.items():
        claimed.setdefault(verdict, set()).add(name)
    in_place = {name for name, found in reading.numbers.items() if np.array_equal(found, held[name])}
    expected: dict[str, Any] = {
        "plain": in_place,
        "permuted": set(reading.numbers) - in_place,
        "derived": set(reading.untouched),
        "dropped": set(trace.layout.dropped),
    }
    assert {verdict: claimed.get(verdict, set()) for verdict in expected} == expected
    assert claimed.get("aliased", set()) <= set(reading.aliases)
    assert "packed" not in claimed
