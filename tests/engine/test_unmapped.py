"""A checkpoint tensor that the engine leaves out, and no rule says why: it is named, and what changes it is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from refdelta import DeltaEncoder, compose
from refdelta.digest import state_digest
from refdelta.layout.reasons import OTHER_RANKS, TOWER
from refdelta.layout_map import LayoutMap, TensorInfo
from refdelta.spec import Delta, DeltaError, Reason, TensorPatch
from refdelta.vllm.proof.unmapped import NOWHERE, accounts, find
from refdelta.vllm.update.anchor import AnchorUpdate, Stated
from tests.engine.simulated import Simulated, State, state_of
from tests.layout.models import SMALL, Engine

BIAS = "model.layers.1.self_attn.o_proj.bias"
BIASES = {f"model.layers.{i}.self_attn.o_proj.bias": NOWHERE for i in range(2)}
Q = "model.layers.0.self_attn.q_proj.weight"


@dataclass(frozen=True, slots=True)
class Skipping(Engine):
    """As vLLM's Qwen3: it has no bias of o_proj, and its loader skips that name."""

    def rules(self, rank: int, **options: Any) -> LayoutMap:
        """One rank's map, as a trace gives it."""
        raw = json.loads(Engine.rules(self, rank, **options).to_json())
        raw["regions"] = [region for region in raw["regions"] if not region[0].endswith("o_proj.bias")]
        raw["params"] = {name: info for name, info in raw["params"].items() if not name.endswith("o_proj.bias")}
        return LayoutMap.from_json(json.dumps(raw))


@pytest.fixture
def engine(tmp_path: Path) -> tuple[Simulated, State]:
    """Two ranks, and what their files hold."""
    made = Skipping(SMALL["qwen3 tied, bias"].config, 2)
    state = state_of(made.rules(0), 1)
    save_file(state, tmp_path / "model.safetensors")
    return Simulated.of(made, state, tmp_path), state


def changed(state: State, *names: str) -> State:
    """Every element of some tensors changed."""
    return {name: tensor + 1 if name in names else tensor for name, tensor in state.items()}


def refusal(simulated: Simulated, delta: Delta) -> DeltaError:
    """Of every rank alike, before any of them writes."""
    before = simulated.measured()
    errors = []
    for target in simulated.targets:
        with pytest.raises(DeltaError) as caught:
            target.validate(delta)
        errors.append(caught.value)
    assert len(set(map(str, errors))) == 1
    assert simulated.measured() == before
    return errors[0]


def test_it_is_known_at_the_start_and_named_with_the_digest(engine: tuple[Simulated, State]) -> None:
    simulated, state = engine
    assert simulated.ledger.unmapped == BIASES
    assert simulated.ledger.digest == state_digest(state)
    first, *_ = BIASES
    assert simulated.ledger.name.endswith(f"(of which the engine does not hold {first} and 1 more tensors)")
    assert not set(simulated.ledger.dropped) & set(BIASES)


def test_a_delta_that_changes_it_is_refused_and_others_go_on(engine: tuple[Simulated, State]) -> None:
    simulated, state = engine
    encoder = DeltaEncoder(state, run_id="run")
    error = refusal(simulated, encoder.encode(changed(state, BIAS, Q)))
    assert (error.reason, error.tensor) == (Reason.UNMAPPED, BIAS)
    delta = encoder.encode(changed(state, Q))
    simulated.update(delta)
    assert simulated.ledger.digest == state_digest(changed(state, Q))
    assert simulated.ledger.verified


def test_a_patch_that_leaves_every_bit_is_taken(engine: tuple[Simulated, State]) -> None:
    """As a composed delta may hold one."""
    simulated, state = engine
    encoder = DeltaEncoder(state, run_id="run")
    there = encoder.encode(changed(state, BIAS))
    encoder.commit(there)
    delta = compose([there, encoder.encode(changed(state, Q))])
    assert BIAS in {patch.name for patch in delta.patches}
    made = simulated.update(delta)
    assert made[0].dropped == {BIAS: NOWHERE}
    assert simulated.ledger.digest == state_digest(changed(state, Q))


def test_only_the_files_of_the_start_tell_that_a_patch_leaves_it(
    engine: tuple[Simulated, State], tmp_path: Path
) -> None:
    """Files that were replaced by what the patch holds do not, and none at all do not."""
    simulated, state = engine
    there, files = DeltaEncoder(state).encode(changed(state, BIAS)), tmp_path / "model.safetensors"
    save_file(changed(state, BIAS), files)
    assert refusal(simulated, there).reason is Reason.UNMAPPED
    files.unlink()
    assert refusal(simulated, there).reason is Reason.UNMAPPED


def test_another_shape_is_told_as_such(engine: tuple[Simulated, State]) -> None:
    simulated, _ = engine
    patch = TensorPatch(BIAS, (3,), torch.tensor([0], dtype=torch.int32), torch.tensor([1.0]))
    assert refusal(simulated, Delta((patch,), 3)).reason is Reason.SHAPE_MISMATCH


@pytest.mark.parametrize("names", [(BIAS,), (BIAS, Q)], ids=["alone", "with another"])
def test_an_anchor_that_changes_it_is_refused(
    engine: tuple[Simulated, State], names: tuple[str, ...], tmp_path: Path
) -> None:
    """By the rank whose turn it is, when it reads; the ranks then agree that nothing is written."""
    simulated, state = engine
    save_file(changed(state, *names), tmp_path / "anchor.safetensors")
    refused = []
    for rank, (target, block_digests) in enumerate(zip(simulated.targets, simulated.block_digests, strict=True)):
        try:
            AnchorUpdate.read(tmp_path / "anchor.safetensors", target, block_digests, Stated(), (rank, 2))
        except DeltaError as error:
            refused.append((error.reason, error.tensor))
    assert refused == [(Reason.UNMAPPED, BIAS)]


def test_an_anchor_that_leaves_it_is_taken(engine: tuple[Simulated, State], tmp_path: Path) -> None:
    simulated, state = engine
    target_state = changed(state, Q)
    save_file(target_state, tmp_path / "anchor.safetensors")
    made = [
        AnchorUpdate.read(tmp_path / "anchor.safetensors", target, block_digests, Stated("run", 1), (rank, 2))
        for rank, (target, block_digests) in enumerate(zip(simulated.targets, simulated.block_digests, strict=True))
    ]
    after = made[0].settle([update.prepare() for update in made], simulated.ledger)
    assert (after.digest, after.unmapped) == (state_digest(target_state), BIASES)
    assert all(update.dropped == BIASES for update in made)


INFOS = {"w": TensorInfo((3, 5), torch.bfloat16), "empty": TensorInfo((0, 5), torch.bfloat16)}


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([{}, {}], False),
        ([{}, {"w": OTHER_RANKS}], False),
        ([{"w": TOWER}, {"w": TOWER}], False),
        ([{"w": TOWER}, {"w": OTHER_RANKS}], False),
        ([{"w": NOWHERE}, {"w": NOWHERE}], True),
        ([{}, {"w": NOWHERE}], True),
        ([{"w": NOWHERE}, {"w": OTHER_RANKS}], True),
        ([{"w": OTHER_RANKS}, {"w": OTHER_RANKS}], True),
        ([{"empty": OTHER_RANKS}, {"empty": OTHER_RANKS}], False),
    ],
)
def test_what_the_ranks_do_not_account_for(told: list[dict[str, str]], found: bool) -> None:
    """A stated reason on every rank that lacks it, and, where that names other ranks, one that does hold it."""
    assert set(find(INFOS, told)) == ({"w"} if found else set())


def test_a_rank_tells_its_reasons_and_what_has_none() -> None:
    assert accounts(["b"], {"a": TOWER}) == {"a": TOWER, "b": NOWHERE}


def test_a_delta_may_not_state_another_digest_of_it(engine: tuple[Simulated, State]) -> None:
    """The ledger keeps what the files gave."""
    simulated, state = engine
    encoder = DeltaEncoder(state, run_id="run")
    there = encoder.encode(changed(state, BIAS))
    encoder.commit(there)
    delta = compose([there, encoder.encode(changed(state, Q))])
    assert delta.lineage is not None
    layers = {**(delta.lineage.layer_digests or {}), BIAS: "rd1:0123456789abcdef"}
    lying = replace(delta, lineage=replace(delta.lineage, layer_digests=layers))
    with pytest.raises(DeltaError) as caught:
        simulated.update(lying)
    assert (caught.value.reason, caught.value.tensor) == (Reason.DIGEST_MISMATCH, BIAS)
