"""Versions and digests: what the encoder fills in, what apply refuses before it writes, what a commit moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance.inputs import strategies
from conformance.oracle import digests
from refdelta import (
    METADATA_FILE,
    Delta,
    DeltaEncoder,
    DeltaError,
    Lineage,
    Reason,
    TensorPatch,
    apply_delta,
    diff,
    read_delta,
    write_delta,
)
from refdelta.apply import compose
from refdelta.digest import ZERO, state_digest
from refdelta.spec import INVARIANTS, UNVERSIONED, copy_state
from tests.codec.support import assert_same, bf16, edit_metadata

State = dict[str, Tensor]


def state(*numbers: int) -> State:
    """Two tensors of which the second never changes."""
    return {"w": bf16(*numbers).view(1, -1), "norm": torch.ones(3)}


def refused(reason: Reason, attempt: Callable[[], object], *unchanged: State) -> DeltaError:
    """``attempt`` is refused and changes none of the states."""
    merged = {f"{n} {name}": t for n, weights in enumerate(unchanged) for name, t in weights.items()}
    error = INVARIANTS["refuses"].check(attempt, merged, reason)
    assert isinstance(error, DeltaError)
    return error


# What the encoder fills in


def test_versions_and_digests_of_a_run() -> None:
    a, b, c = state(1, 2, 3), state(1, 9, 3), state(4, 9, 5)
    encoder = DeltaEncoder(a, run_id="run", version=7)
    assert (encoder.run_id, encoder.version, encoder.digest) == ("run", 7, digests.state_digest(a))
    for number, (base, target) in enumerate([(a, b), (b, c)], start=8):
        delta = encoder.encode(target)
        layer = digests.text(digests.tensor_digest("w", target["w"]))
        assert delta.lineage == Lineage(
            "run", number, number - 1, digests.state_digest(base), digests.state_digest(target), {"w": layer}
        )
        encoder.commit(delta)
        assert (encoder.version, encoder.digest) == (number, digests.state_digest(target))


def test_without_a_run_there_is_no_lineage() -> None:
    encoder = DeltaEncoder(state(1, 2))
    delta = encoder.encode(state(1, 3))
    assert delta.lineage is None
    encoder.commit(delta)
    assert (encoder.run_id, encoder.version, encoder.digest) == (None, None, None)


def test_a_module_keeps_one_digest_for_tied_tensors() -> None:
    first, second = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    second.weight = first.weight
    module = nn.ModuleDict({"a": first, "b": second})
    encoder = DeltaEncoder(module, run_id="run")
    with torch.no_grad():
        first.weight[1, 2] += 1
    delta = encoder.encode(module)
    assert [patch.name for patch in delta.patches] == ["a.weight"]
    assert delta.lineage is not None
    assert delta.lineage.digest == state_digest(module) == digests.state_digest({"a.weight": first.weight})


@given(strategies.chains(tuple(strategies.ALL), 5), st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_run_followed_by_digest(chain: list[State], lost: list[bool]) -> None:
    """A receiver that keeps its digest takes every delta that reaches it; lost ones are contained in the next."""
    encoder = DeltaEncoder(chain[0], run_id="run")
    receiver, digest = copy_state(chain[0]), state_digest(chain[0])
    for target, is_lost in zip(chain[1:], lost, strict=True):
        delta = encoder.encode(target)
        if is_lost:
            continue
        inverse = apply_delta(delta, receiver, digest=digest)
        assert_same(receiver, dict(target))
        assert inverse.lineage is not None
        digest = inverse.lineage.base_digest or ""
        encoder.commit(delta)
        assert digest == encoder.digest == state_digest(receiver)
    assert encoder.version == lost.count(False)


# Fault kinds


def test_fault_15_delta_with_base_40_to_a_receiver_at_0() -> None:
    """A resumed trainer at 40, a receiver that restarted from the first checkpoint: refused, naming both."""
    first, at_40, at_41 = state(1, 2, 3), state(1, 9, 3), state(1, 9, 4)
    delta = DeltaEncoder(at_40, run_id="run", version=40).encode(at_41)
    receiver = copy_state(first)
    error = refused(Reason.BASE_MISMATCH, lambda: apply_delta(delta, receiver, digest=state_digest(first)), receiver)
    for text in ("version 40", state_digest(at_40), state_digest(first)):
        assert text in error.detail
    encoder = DeltaEncoder(first, run_id="run")
    error = refused(Reason.BASE_MISMATCH, lambda: encoder.commit(delta))
    assert "version 40 of run run" in error.detail
    assert "is version 0 of run" in error.detail
    assert (encoder.version, encoder.digest) == (0, state_digest(first))


def test_fault_16_a_refused_delta_keeps_the_version_and_an_empty_one_is_a_version() -> None:
    a = state(1, 2, 3)
    encoder = DeltaEncoder(a, run_id="run")
    empty = encoder.encode(a)
    assert (empty.patches, empty.lineage and empty.lineage.version) == ((), 1)
    encoder.commit(empty)
    assert (encoder.version, encoder.digest) == (1, state_digest(a))
    delta = encoder.encode(state(5, 2, 3))
    broken = replace(delta, patches=(replace(delta.patches[0], name="v"),))
    refused(Reason.UNKNOWN_TENSOR, lambda: encoder.commit(broken))
    assert (encoder.version, encoder.digest) == (1, state_digest(a))
    assert encoder.encode(a).patches == ()


def test_fault_17_the_baseline_moves_on_acknowledgement() -> None:
    """What was encoded and never applied is encoded again, under the same version."""
    a, b, c = state(1, 2, 3), state(9, 2, 3), state(9, 2, 8)
    encoder = DeltaEncoder(a, run_id="run")
    lost = encoder.encode(b)
    again = encoder.encode(c)
    assert lost.lineage is not None
    assert again.lineage is not None
    assert (lost.lineage.version, again.lineage.version) == (1, 1)
    assert again.patches[0].indices.tolist() == [0, 2]
    receiver = copy_state(a)
    apply_delta(again, receiver, digest=state_digest(a))
    assert_same(receiver, c)


def test_fault_19_files_of_an_earlier_run_in_the_same_place() -> None:
    """Versions start again at 1: the run tells them apart, whoever reads them."""
    a, b = state(1, 2, 3), state(9, 2, 3)
    earlier = DeltaEncoder(a, run_id="monday").encode(b)
    encoder = DeltaEncoder(a, run_id="tuesday")
    error = refused(Reason.BASE_MISMATCH, lambda: encoder.commit(earlier))
    assert "monday" in error.detail
    assert "tuesday" in error.detail
    encoder.commit(encoder.encode(b))
    refused(Reason.BASE_MISMATCH, lambda: compose([earlier, encoder.encode(a)]))


def test_fault_21_everything_since_the_last_commit_is_sent() -> None:
    """Two optimizer steps to one delta; the second step leaves alone what the first one changed."""
    a, two_steps = state(1, 2, 3), state(7, 2, 8)
    encoder = DeltaEncoder(a)
    weights = copy_state(a)
    for step in ([7, 2, 3], [7, 2, 8]):
        weights["w"].copy_(bf16(*step))
        delta = encoder.encode(weights)  # looked at after each step, sent after the second
    assert delta.patches[0].indices.tolist() == [0, 2]
    assert_same(weights, two_steps)


def test_missed_repeated_and_reordered_deltas_are_refused() -> None:
    states = [state(1, 2, 3), state(9, 2, 3), state(9, 8, 3), state(9, 8, 7)]
    encoder, deltas = DeltaEncoder(states[0], run_id="run"), []
    for target in states[1:]:
        deltas.append(encoder.encode(target))
        encoder.commit(deltas[-1])
    for start, delta in [(0, deltas[1]), (1, deltas[0]), (0, deltas[2]), (3, deltas[2])]:
        receiver = copy_state(states[start])
        digest = state_digest(receiver)
        refused(Reason.BASE_MISMATCH, partial(apply_delta, delta, receiver, digest=digest), receiver)


# Before the first write


def test_a_digest_that_does_not_fit_is_refused_before_the_first_write() -> None:
    a, b = state(1, 2, 3), state(1, 9, 3)
    delta = replace(diff(a, b), lineage=Lineage("run", 2, 1, state_digest(a), state_digest(b)))
    assert delta.lineage is not None
    other = state_digest(state(1, 2, 4))
    for lineage, reason in (
        (replace(delta.lineage, base_digest=other), Reason.BASE_MISMATCH),
        (replace(delta.lineage, base_digest="other:1"), Reason.BASE_MISMATCH),
        (replace(delta.lineage, digest=other), Reason.DIGEST_MISMATCH),
        (replace(delta.lineage, digest="other:1"), Reason.DIGEST_MISMATCH),
        (replace(delta.lineage, base_digest=None, digest=state_digest(a)), Reason.DIGEST_MISMATCH),
    ):
        receiver = copy_state(a)
        wrong = replace(delta, lineage=lineage)
        refused(reason, partial(apply_delta, wrong, receiver, digest=state_digest(a)), receiver)
    receiver = copy_state(a)
    refused(Reason.BASE_MISMATCH, lambda: apply_delta(delta, receiver, digest=other), receiver)
    apply_delta(delta, receiver, digest=state_digest(a))
    assert_same(receiver, b)


def test_values_damaged_on_the_way_do_not_lead_to_the_digest() -> None:
    a, b = state(1, 2, 3), state(1, 9, 3)
    delta = replace(diff(a, b), lineage=Lineage("run", 1, 0, state_digest(a), state_digest(b)))
    (patch,) = delta.patches
    damaged = replace(delta, patches=(replace(patch, values=bf16(0x8009)),))
    moved = replace(delta, patches=(replace(patch, indices=torch.tensor([2], dtype=torch.int32)),))
    for wrong in (damaged, moved, replace(delta, patches=())):
        receiver = copy_state(a)
        refused(Reason.DIGEST_MISMATCH, partial(apply_delta, wrong, receiver, digest=state_digest(a)), receiver)


def test_digests_that_are_no_digests() -> None:
    receiver = state(1, 2)
    for delta in (diff(receiver, state(1, 3)), Delta((), 5)):
        refused(Reason.BAD_OPTION, partial(apply_delta, delta, receiver, digest="rd1:12"), receiver)


def test_tensors_of_a_mapping_that_share_memory_roll_under_each_name() -> None:
    weight = bf16(1, 2, 3)
    shared = {"a": weight, "b": weight}
    after = {"a": bf16(1, 9, 3), "b": bf16(1, 9, 3)}
    delta = diff(copy_state(shared), after)
    inverse = apply_delta(delta, shared, digest=state_digest(shared))
    assert inverse.lineage is not None
    assert inverse.lineage.base_digest == state_digest(after) == state_digest(shared)


def test_a_tied_tensor_of_a_module_is_patched_under_its_first_name_where_digests_count() -> None:
    first, second = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    second.weight = first.weight
    module = nn.ModuleDict({"a": first, "b": second})
    at = torch.tensor([4], dtype=torch.int32)
    digest = state_digest(module)
    delta = Delta((TensorPatch("b.weight", (5, 3), at, torch.tensor([7.0])),), 15)
    refused(Reason.ALIAS_CONFLICT, lambda: apply_delta(delta, module, digest=digest), {"w": first.weight.data})
    good = Delta((TensorPatch("a.weight", (5, 3), at, torch.tensor([7.0])),), 15)
    inverse = apply_delta(good, module, digest=digest)
    assert inverse.lineage is not None
    assert inverse.lineage.base_digest == state_digest(module)
    apply_delta(delta, module)


# The inverse


@given(strategies.pairs(tuple(strategies.ALL)))
def test_the_inverse_states_both_digests_and_leads_back(pair: tuple[State, State]) -> None:
    base, target = pair
    receiver, before, after = copy_state(base), state_digest(base), state_digest(target)
    delta = replace(diff(base, target), lineage=Lineage("run", 8, 7, before, after))
    inverse = apply_delta(delta, receiver, digest=before)
    assert inverse.lineage == Lineage("run", 7, 8, after, before)
    again = apply_delta(inverse, receiver, digest=after)
    assert_same(receiver, dict(base))
    assert again.lineage == Lineage("run", 8, 7, before, after)


def test_the_inverse_of_a_delta_without_versions_still_states_digests() -> None:
    a, b = state(1, 2, 3), state(1, 9, 3)
    for lineage in (None, Lineage("run", 8)):
        receiver = copy_state(a)
        inverse = apply_delta(replace(diff(a, b), lineage=lineage), receiver, digest=state_digest(a))
        assert inverse.lineage == Lineage(UNVERSIONED, 0, None, state_digest(b), state_digest(a))
        apply_delta(inverse, receiver, digest=state_digest(b))
        assert_same(receiver, a)


def test_the_inverse_of_a_commit_takes_it_back() -> None:
    a, b = state(1, 2, 3), state(1, 9, 3)
    encoder, receiver = DeltaEncoder(a, run_id="run"), copy_state(a)
    delta = encoder.encode(b)
    inverse = apply_delta(delta, receiver, digest=state_digest(a))
    encoder.commit(delta)
    encoder.commit(inverse)
    assert (encoder.version, encoder.digest) == (0, state_digest(a))
    assert encoder.encode(a).patches == ()
    layers = encoder.encode(b).lineage
    assert layers is not None
    assert layers.layer_digests == {"w": digests.text(digests.tensor_digest("w", b["w"]))}


# Commits


def test_a_commit_takes_only_what_starts_at_the_baseline() -> None:
    a, b = state(1, 2, 3), state(1, 9, 3)
    encoder = DeltaEncoder(a, run_id="run", version=3)
    delta = encoder.encode(b)
    assert delta.lineage is not None
    for lineage, reason in (
        (None, Reason.BASE_MISMATCH),
        (replace(delta.lineage, run_id="another"), Reason.BASE_MISMATCH),
        (replace(delta.lineage, base_version=2), Reason.BASE_MISMATCH),
        (replace(delta.lineage, base_version=None), Reason.BASE_MISMATCH),
        (replace(delta.lineage, base_digest=state_digest(b)), Reason.BASE_MISMATCH),
        (replace(delta.lineage, digest=state_digest(a)), Reason.DIGEST_MISMATCH),
    ):
        refused(reason, partial(encoder.commit, replace(delta, lineage=lineage)))
        assert (encoder.version, encoder.digest) == (3, state_digest(a))
        assert encoder.encode(a).patches == ()
    encoder.commit(delta)
    refused(Reason.BASE_MISMATCH, lambda: encoder.commit(delta))
    assert encoder.version == 4


def test_an_encoder_whose_version_is_none() -> None:
    refused(Reason.BAD_METADATA, lambda: DeltaEncoder(state(1), run_id="run", version=-1))
    refused(Reason.BAD_METADATA, lambda: DeltaEncoder(state(1), run_id=""))


# On disk


def test_lineage_of_a_run_survives_the_file(tmp_path: Path) -> None:
    a, b = state(1, 2, 3), state(1, 9, 3)
    encoder, receiver = DeltaEncoder(a, run_id="run", version=41), copy_state(a)
    written = write_delta(encoder.encode(b), tmp_path / "42")
    delta = read_delta(written)
    apply_delta(delta, receiver, digest=state_digest(a))
    encoder.commit(delta)
    assert encoder.version == 42
    stored = json.loads((written / METADATA_FILE).read_text())["lineage"]
    assert (stored["version"], stored["base_version"]) == (42, 41)
    assert stored["digest"] == digests.state_digest(b)


def test_payload_sha256_is_checked_where_it_is_present(tmp_path: Path) -> None:
    folder = write_delta(DeltaEncoder(state(1, 2), run_id="run").encode(state(1, 3)), tmp_path / "d")
    edit_metadata(folder, lambda m: m["lineage"].update(payload_sha256="0" * 64))
    refused(Reason.PAYLOAD_MISMATCH, lambda: read_delta(folder))
    edit_metadata(folder, lambda m: m["lineage"].pop("payload_sha256"))
    read_delta(folder)


# Parts


def test_one_part_of_several_is_not_applied() -> None:
    a, b = state(1, 2, 3), state(1, 9, 3)
    delta = replace(diff(a, b), lineage=Lineage("run", 1, 0, part=(0, 2)))
    for digest in (None, state_digest(a)):
        receiver = copy_state(a)
        refused(Reason.INCOMPLETE, partial(apply_delta, delta, receiver, digest=digest), receiver)
    receiver = copy_state(a)
    apply_delta(replace(delta, lineage=Lineage("run", 1, 0, part=(0, 1))), receiver)
    assert_same(receiver, b)


def test_a_part_has_counts_of_its_own(tmp_path: Path) -> None:
    """S9.7-3: those of its own positions, not of the whole update."""
    delta = replace(diff(state(1, 2, 3), state(1, 9, 3)), lineage=Lineage("run", 1, 0, part=(0, 2)))
    folder = write_delta(delta, tmp_path / "part")
    assert read_delta(folder).changed_elements == 1
    edit_metadata(folder, lambda metadata: metadata.update(changed_elements=2))
    refused(Reason.COUNT_MISMATCH, partial(read_delta, folder))


def test_many_versions_cost_no_drift() -> None:
    """A digest rolled 200 times is the one computed anew."""
    rng = np.random.default_rng(7)
    weights = {"w": torch.from_numpy(rng.integers(-(2**15), 2**15, (11, 13), dtype=np.int16)).view(torch.bfloat16)}
    encoder = DeltaEncoder(weights, run_id="run")
    for _ in range(200):
        flat = weights["w"].view(torch.int16).view(-1)
        flat[torch.from_numpy(rng.integers(0, len(flat), 5))] ^= int(rng.integers(1, 2**15))
        encoder.commit(encoder.encode(weights))
    assert (encoder.version, encoder.digest) == (200, digests.state_digest(weights))


def test_a_lineage_without_a_base_says_so_in_words() -> None:
    """Nobody is to read of version None."""
    assert Lineage("r", 2).base_name == "no stated version of run r, no stated digest"
    assert Lineage("r", 2, 1, ZERO).base_name == f"version 1 of run r, {ZERO}"
    held = state(1, 2, 3)
    encoder = DeltaEncoder(held, run_id="r")
    unversioned = replace(encoder.encode(held), lineage=Lineage("r", 2, base_digest="rd1:" + "0" * 15 + "7"))
    for attempt in (
        partial(encoder.commit, unversioned),
        partial(apply_delta, unversioned, held, digest=state_digest(held)),
    ):
        assert "None" not in refused(Reason.BASE_MISMATCH, attempt, held).detail
