"""Digests of blocks on simulated ranks: they add up to the checkpoint's digest, roll with updates, and are audited."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.oracle import digests
from refdelta import DeltaEncoder
from refdelta.digest import state_digest
from refdelta.spec import Delta, DeltaError, Reason
from refdelta.vllm.update import block_digests as shares_module
from refdelta.vllm.update.ledger import Account, Ledger
from refdelta.vllm.update.options import Options
from tests.engine.simulated import Simulated, State, held, state_of
from tests.layout.models import SMALL


@pytest.fixture(params=[1 << 18, 300], ids=["one block", "small blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements of a block."""
    size: int = request.param
    monkeypatch.setattr(shares_module, "BLOCK", size)
    return size


def start(name: str) -> tuple[Simulated, State]:
    layout = SMALL[name].rules(0)
    state = state_of(layout, 1)
    return Simulated.of(SMALL[name], state), state


def changed(state: State, aliases: dict[str, str], share: float = 0.1) -> State:
    """Some elements of every tensor, tied names alike."""
    generator, after = torch.Generator().manual_seed(9), {name: t.clone() for name, t in state.items()}
    for tensor in after.values():
        at = torch.randperm(tensor.numel(), generator=generator)[: max(1, int(share * tensor.numel()))]
        tensor.view(torch.int32).view(-1)[at] ^= 1
    return after | {a: after[n].clone() for a, n in aliases.items() if a in state}


@pytest.mark.parametrize("name", SMALL)
def test_ranks_add_up_to_the_state_digest(name: str, block: int) -> None:
    """Replicas once, padding never, what no rank holds from the files."""
    simulated, state = start(name)
    assert simulated.ledger.digest == state_digest(state)


def test_the_sum_is_that_of_the_suites_own_definition() -> None:
    """Pure Python, from the text of SPEC.md."""
    simulated, state = start("gemma4-moe")
    assert simulated.ledger.digest == digests.state_digest(state)


@pytest.mark.parametrize("name", SMALL)
def test_updates_roll_every_rank_to_what_its_memory_says(name: str, block: int) -> None:
    """Rolled block digests equal measured ones; weights equal laying out the new state; digests the encoder's."""
    simulated, state = start(name)
    aliases = dict(simulated.targets[0].layout.aliases)
    encoder = DeltaEncoder(state, run_id="r")
    for _ in range(2):
        state = changed(state, aliases)
        delta = encoder.encode(state)
        simulated.update(delta)
        encoder.commit(delta)
        assert simulated.ledger.digest == encoder.digest
        assert simulated.ledger.verified
        for rank, (block_digests, measured) in enumerate(
            zip(simulated.block_digests, simulated.measured(), strict=True)
        ):
            assert block_digests.values.tolist() == measured
            wanted = held(SMALL[name], state, rank)
            assert all(
                torch.equal(wanted[p].view(torch.int32), t.view(torch.int32)) for p, t in simulated.live[rank].items()
            )


@pytest.mark.parametrize("name", ["qwen3 replicated", "gemma4-moe"])
def test_undo_restores_every_bit(name: str) -> None:
    """Old values were gathered while writing."""
    simulated, state = start(name)
    before = [{p: t.clone() for p, t in live.items()} for live in simulated.live]
    updates = simulated.update(DeltaEncoder(state).encode(changed(state, dict(simulated.targets[0].layout.aliases))))
    assert any(not torch.equal(t, simulated.live[0][p]) for p, t in before[0].items())
    for update in updates:
        update.undo()
    for was, live in zip(before, simulated.live, strict=True):
        assert all(torch.equal(t.view(torch.int32), live[p].view(torch.int32)) for p, t in was.items())


def test_an_audit_names_the_tensor(block: int) -> None:
    """One flipped bit of one replica."""
    simulated, _ = start("qwen3 replicated")
    block_digests, live = simulated.block_digests[3], simulated.live[3]
    assert block_digests.differing(live, block_digests.auditable) == {}
    live["model.layers.1.self_attn.q_norm.weight"].view(torch.int32)[5] ^= 1
    assert list(block_digests.differing(live, block_digests.auditable)) == ["model.layers.1.self_attn.q_norm.weight"]


def test_the_rota_comes_to_every_block(block: int) -> None:
    """Within as many updates as the budget needs; touched blocks first, all of them where asked."""
    simulated, _ = start("qwen3")
    block_digests, cursors, seen = simulated.block_digests[0], (0, 0), set[int]()
    whole, budget = block_digests.elements(block_digests.auditable), 500
    touched = [0, 1]
    for _ in range(2 * (whole // budget + len(block_digests.blocks))):
        numbers, cursors = block_digests.blocks_to_audit(touched, budget, cursors, whole=False)
        assert numbers == sorted(set(numbers))
        seen |= set(numbers)
    assert seen == set(block_digests.auditable)
    assert block_digests.blocks_to_audit(touched, 0, (3, 4), whole=True) == (touched, (3, 4))
    assert block_digests.blocks_to_audit(touched, 0, (3, 4), whole=False) == ([], (3, 4))
    assert block_digests.blocks_to_audit([0], 10**9, (0, 0), whole=False)[0] == block_digests.auditable


def test_what_overlaps_is_not_counted() -> None:
    """Boxes that neither are equal nor disjoint cannot be counted once."""
    layout = SMALL["qwen3"].rules(0)
    boxes = shares_module.boxes_by_source(layout)
    name = "model.norm.weight"
    shifted = {**boxes, name: [[1, [39], [1]]]}
    assert name in shares_module.ownership(layout, [boxes, boxes], 0).counted
    assert name not in shares_module.ownership(layout, [boxes, shifted], 0).counted
    assert name not in shares_module.ownership(layout, [boxes, boxes], 0, excluded=[name]).counted


# --- the ledger -------------------------------------------------------------------------------------------------------

ONE, TWO = "rd1:0000000000000001", "rd1:0000000000000002"


def ledger(**fields: object) -> Ledger:
    return replace(Ledger({"a": 1}, {}), **fields)  # type: ignore[arg-type]  # fields of a Ledger


@pytest.mark.parametrize(
    ("held", "lineage", "required", "refused"),
    [
        ({}, None, False, False),
        ({}, None, True, True),
        ({}, {"base_digest": ONE}, False, False),
        ({}, {"base_digest": TWO}, False, True),
        ({}, {"base_version": 5}, False, False),
        ({}, {"base_digest": ONE}, True, True),
        ({}, {"base_digest": ONE, "digest": TWO}, True, False),
        ({"run_id": "r", "version": 4}, {"base_version": 4}, False, False),
        ({"run_id": "r", "version": 4}, {"base_version": 3}, False, True),
        ({"run_id": "r", "version": 4}, {"base_version": 4, "base_digest": TWO}, False, True),
        ({"run_id": "r", "version": 4}, {"base_version": 3, "base_digest": ONE}, False, True),
        ({"run_id": "other", "version": 4}, {"base_version": 4}, False, True),
        ({"run_id": "other", "version": 9}, {"base_version": 4, "base_digest": ONE}, False, False),
        ({"run_id": "other", "version": 4}, {"base_version": 4, "base_digest": TWO}, False, True),
        ({"layers": {"a": None}}, {"base_digest": ONE}, False, False),
        ({"layers": {"a": None}}, {"base_digest": ONE, "digest": TWO}, True, True),
        ({"layers": {"a": None}, "run_id": "other", "version": 1}, {"base_digest": ONE}, False, True),
    ],
)
def test_bases(held: dict[str, object], lineage: dict[str, object] | None, required: bool, refused: bool) -> None:
    """Which deltas start from what the engine holds."""
    from refdelta.spec import Lineage

    found = None if lineage is None else Lineage("r", 5, **lineage)  # type: ignore[arg-type]
    options = Options(lineage="required" if required else "accept")
    if not refused:
        ledger(**held).check_base(found, options)
        return
    with pytest.raises(DeltaError) as caught:
        ledger(**held).check_base(found, options)
    assert caught.value.reason is Reason.BASE_MISMATCH
    assert (ledger(**held).digest or "of unknown digest") in caught.value.detail


def test_elements_that_no_rank_counts_are_refused() -> None:
    """A router that loses elements cannot go unseen."""
    simulated, state = start("qwen3")
    delta = DeltaEncoder(state).encode(changed(state, {}))
    accounts = [Account(**update.prepare()) for update in simulated.update(delta)]  # type: ignore[arg-type]
    name = "model.layers.0.self_attn.k_proj.weight"
    short = [replace(a, elements={**a.elements, name: a.elements[name] - 1}) for a in accounts[:1]] + accounts[1:]
    with pytest.raises(DeltaError) as caught:
        simulated.ledger.after(delta, short, repeated=False)
    assert (caught.value.reason, caught.value.tensor) == (Reason.UNMAPPED, name)


def test_an_empty_delta_is_a_version_and_without_lineage_nothing() -> None:
    """What is known stays known."""
    from refdelta.spec import Lineage

    here = ledger(run_id="r", version=4, verified=False)
    assert here.after(Delta((), 1), [], repeated=False) == here
    after = here.after(Delta((), 1, Lineage("r", 5, 4, ONE, ONE)), [], repeated=False)
    assert (after.version, after.verified) == (5, True)
    with pytest.raises(DeltaError, match="digest_mismatch"):
        here.after(Delta((), 1, Lineage("r", 5, 4, ONE, TWO)), [], repeated=False)
