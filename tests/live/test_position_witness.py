"""Three maps of every small model from three sources: the rules, the trace, and what a fresh engine did with a code.

A fresh engine, without refdelta's plugin, loads checkpoints whose elements say where they come from
(`conformance.live.position_code`). What stands in its parameters is compared with the traced map and with the rules, on
every element of every parameter and rank, expert weights through the permutation that was recovered for them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.inputs import checkpoints
from conformance.inputs.checkpoints import Checkpoint, State
from conformance.live.judge import read_dumps
from conformance.live.position_code import Code, Numbers, Reading, read
from conformance.live.runner import START_TIMEOUT, Host, start_arguments
from conformance.mutants.loader_run import numbers_of
from refdelta.layout.reasons import OTHER_RANKS
from refdelta.layout_map import Box, LayoutMap, Region, TensorInfo, layout_from_config

pytestmark = pytest.mark.timeout(600)

EXPERT_PARALLEL = [("qwen3-moe", 2, True), ("gemma4-moe", 2, True)]
CASES = [*((model, tp, False) for model in checkpoints.MODELS for tp in (1, 2)), *EXPERT_PARALLEL]
QUICK = {
    *("qwen3-untied-tp2", "qwen3-moe-tp2", "qwen3-tied-both-tp1", "gemma4-text-tp2", "gemma4-multimodal-tp1"),
    "gemma4-moe-ep2",
}
"""Every family, each way to cut, one rank and two; the other cases are the nightly run's."""


def _case(model: str, tp: int, parallel: bool) -> Any:
    name = f"{model}-{'ep' if parallel else 'tp'}{tp}"
    return pytest.param(model, tp, parallel, id=name, marks=[] if name in QUICK else [pytest.mark.nightly])


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


def rearranged(held: Mapping[str, Numbers], traced: Traced, reading: Reading) -> dict[str, Numbers]:
    """What they hold after the engine moved elements of some."""
    moved = dict(held)
    for param, places in traced.places.items():
        moved[param] = np.zeros(int(np.prod(reading.shapes[param])), np.int64)
        moved[param][places] = held[param]
    return moved


@dataclass(frozen=True, slots=True)
class Witness:
    """One small model at one size: what was asked, read and traced, by rank."""

    checkpoint: Checkpoint
    state: State
    code: Code
    readings: list[Reading]
    traced: list[Traced]

    @classmethod
    def ask(cls, model: str, tp: int, expert_parallel: bool, zygote: Host, scratch: Path) -> Witness:
        """Load every digit of the code into a fresh engine of its own."""
        checkpoint = checkpoints.make(model, scratch / "base")
        state = checkpoints.load(checkpoint.directory)
        code = Code.of(state, checkpoints.aliases(state, tied=checkpoint.tied))
        outs = [scratch / f"dump{digit}" for digit in range(code.digits)]
        jobs = []
        for out, directory in zip(outs, code.checkpoints(checkpoint.directory, scratch), strict=True):
            out.mkdir()
            coded = replace(checkpoint, directory=directory)
            start = start_arguments(coded, tp, enable_expert_parallel=expert_parallel)
            jobs.append({"start": start, "prompts": [], "out": str(out)})
        at_once = max(1, (os.cpu_count() or 1) // tp)
        limits = {"at_once": at_once, "limit_s": START_TIMEOUT}
        zygote.call("forked_truths", timeout=START_TIMEOUT * len(jobs), jobs=jobs, **limits)
        traced = [Traced.read(path) for path in sorted(outs[0].glob("rank*.traced"))]
        return cls(checkpoint, state, code, read([read_dumps(out) for out in outs]), traced)

    def rules(self, rank: int, expert_parallel: bool) -> LayoutMap:
        """The map of one rank by the rules."""
        tensors = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self.state.items()}
        size = len(self.readings)
        ep_size, ep_rank = (size, rank) if expert_parallel else (1, 0)
        return layout_from_config(
            self.checkpoint.config, tp_size=size, tp_rank=rank, ep_size=ep_size, ep_rank=ep_rank, tensors=tensors
        )

    def difference(self, layout: LayoutMap, rank: int) -> list[str]:
        """Where the engine's rank holds something else than a map says."""
        held = numbers_of(layout, self.code)
        return self.readings[rank].difference(rearranged(held, self.traced[rank], self.readings[rank]), self.code)


Ask = Callable[[str, int, bool], Witness]


@pytest.fixture(scope="module")
def ask(zygote: Host, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """The witness of a model at a size; asked once."""

    @cache
    def asked(model: str, tp: int, expert_parallel: bool) -> Witness:
        return Witness.ask(model, tp, expert_parallel, zygote, tmp_path_factory.mktemp(model))

    return asked


@pytest.mark.parametrize(("model", "tp", "expert_parallel"), [_case(*case) for case in CASES])
def test_three_maps_agree(model: str, tp: int, expert_parallel: bool, ask: Ask) -> None:
    """Every element of every parameter, buffer and rank; and every checkpoint element stands on some rank."""
    witness = ask(model, tp, expert_parallel)
    assert len(witness.readings) == len(witness.traced) == tp
    for rank, (reading, trace) in enumerate(zip(witness.readings, witness.traced, strict=True)):
        assert not trace.failed
        assert witness.difference(trace.layout, rank) == []
        assert witness.difference(witness.rules(rank, expert_parallel), rank) == []
        _verdicts_hold(reading, trace, numbers_of(trace.layout, witness.code))
    everywhere = np.unique(
        np.concatenate([found for reading in witness.readings for found in reading.numbers.values()])
    )
    dropped = {name for name, why in witness.traced[0].layout.dropped.items() if why != OTHER_RANKS}
    kept = [witness.code.numbers(name) for name in witness.state if name not in dropped]
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


# --- maps that are wrong, held against the same engines -------------------------------------------------------------


def _renamed(region: Region, names: Mapping[str, str]) -> Region:
    for old, new in names.items():
        if old in region.source:
            return replace(region, source=region.source.replace(old, new))
    return region


def _next_expert(region: Region) -> Region:
    found = re.search(r"experts\.(\d+)\.", region.source)
    return _renamed(region, {found[0]: f"experts.{(int(found[1]) + 1) % 6}."}) if found else region


def _rows(region: Region) -> Region:
    """A row slice where the engine takes a column slice, of as many elements."""
    if not region.source.endswith("o_proj.weight"):
        return region
    rows, columns = 48, 128
    box = Box(rows * columns, (rows, columns), (columns, 1))
    return replace(region, source_box=box, param_box=replace(box, offset=0))


def _one_row_on(region: Region) -> Region:
    if not region.source.endswith("embed_tokens.weight"):
        return region
    rows, columns = region.source_box.shape
    box = replace(region.param_box, offset=columns, shape=(rows - 1, columns))
    return replace(region, param_box=box, source_box=replace(region.source_box, shape=box.shape))


def _wrong(witness: Witness) -> Iterator[tuple[str, str, LayoutMap]]:
    """(fault, parameter that must be named, map of rank 1)."""
    right = witness.rules(1, False)

    def each(change: Callable[[Region], Region]) -> LayoutMap:
        return replace(right, regions=tuple(change(region) for region in right.regions))

    k_and_v = {"k_proj": "v_proj", "v_proj": "k_proj"}
    gate_and_up = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    yield "k and v swapped", "qkv_proj", each(lambda r: _renamed(r, k_and_v))
    yield "gate and up swapped", "gate_up_proj", each(lambda r: _renamed(r, gate_and_up))
    yield "gate and up of experts swapped", "w13_weight", each(lambda r: _renamed(r, gate_and_up))
    yield "q_norm and k_norm swapped", "q_norm", each(lambda r: _renamed(r, {"q_norm": "k_norm", "k_norm": "q_norm"}))
    yield "the next expert", "w2_weight", each(_next_expert)
    yield "rows for columns", "o_proj", each(_rows)
    yield "one row on in the vocabulary", "embed_tokens", each(_one_row_on)
    yield "the first rank's part", "o_proj", witness.rules(0, False)
    kept = tuple(region for region in right.regions if "post_attention_layernorm" not in region.source)
    yield "a tensor left out", "post_attention_layernorm", replace(right, regions=kept)
    known = {name: info for name, info in right.params.items() if "lm_head" not in name}
    kept = tuple(region for region in right.regions if region.param in known)
    yield "a parameter left out", "lm_head", replace(right, params=known, regions=kept)


def test_wrong_maps_are_seen(ask: Ask) -> None:
    """Each fault is named with its parameter, by the witness alone."""
    witness = ask("qwen3-moe", 2, False)
    for fault, param, layout in _wrong(witness):
        findings = witness.difference(layout, 1)
        assert any(param in finding for finding in findings), f"{fault}: {findings}"


def test_a_wrong_permutation_is_seen(ask: Ask) -> None:
    """Experts as loaded, not as packed: what an in-place write that knows the loader alone would do."""
    witness = ask("qwen3-moe", 2, False)
    trace, reading = witness.traced[1], witness.readings[1]
    unpacked = {param: np.sort(places) for param, places in trace.places.items()}
    held = numbers_of(trace.layout, witness.code)
    findings = reading.difference(rearranged(held, replace(trace, places=unpacked), reading), witness.code)
    assert sorted(finding.partition("[")[0] for finding in findings) == sorted(trace.places)
