"""The suite's checkpoints and changes show what they are there to show; no engine is started."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conformance import oracle
from conformance.inputs import checkpoints
from conformance.inputs.checkpoints import State
from conformance.live import changes

STATE: State = {
    "model.embed_tokens.weight": checkpoints.random_tensor("e", (203, 80)),
    "model.layers.0.self_attn.q_proj.weight": checkpoints.random_tensor("q", (128, 80)),
    "model.layers.0.layer_scalar": checkpoints.random_tensor("s", (1,)),
    "model.tower.limit": checkpoints.random_tensor("l", ()),
    "lm_head.weight": checkpoints.random_tensor("e", (203, 80)),
}
ALIASES = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("model", checkpoints.MODELS)
def test_tensors_differ_everywhere(model: str, tmp_path: Path) -> None:
    """No tensor is constant, no two of one shape are equal (but for tied ones), no served matrix is square."""
    checkpoint = checkpoints.make(model, tmp_path / "one")
    state = checkpoints.load(checkpoint.directory)
    tied = checkpoints.aliases(state, tied=checkpoint.tied)
    assert (tied is not None) == (model == "qwen3-tied-both")
    for name, tensor in state.items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.isfinite().all()
        assert tensor.numel() == 1 or tensor.unique().numel() > 1, f"{name} is constant"
        distinct = len(set(tensor.shape)) == tensor.ndim
        assert changes.family(name) == "towers" or tensor.ndim < 2 or distinct, f"{name} is square"
    served = [name for name in state if changes.family(name) != "towers"]
    pairs = [{a, b} for a, b in itertools.combinations(served, 2) if not oracle.difference(state[a], state[b])]
    assert pairs == ([set(tied)] if tied else [])


def test_same_bytes_every_time(tmp_path: Path) -> None:
    one, two = (checkpoints.make("gemma4-text", tmp_path / name).directory for name in ("one", "two"))
    assert checkpoints.content_digest(one) == checkpoints.content_digest(two)


def test_gemma4_holds_what_the_loader_drops(tmp_path: Path) -> None:
    """KV-shared layers have k, v and k_norm in the files; sliding and global layers differ in head_dim."""
    state = checkpoints.load(checkpoints.make("gemma4-text", tmp_path / "one").directory)
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    assert shapes["model.layers.4.self_attn.k_norm.weight"] == (32,)
    assert shapes["model.layers.5.self_attn.v_proj.weight"] == (128, 72)
    assert shapes["model.layers.2.self_attn.q_norm.weight"] == (64,)


def test_with_state_keeps_shards_and_index(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    shards = {
        "model-1.safetensors": {"b": torch.ones(3, 2), "d": torch.zeros(2)},
        "model-2.safetensors": {"a": torch.ones(1)},
    }
    for file, tensors in shards.items():
        save_file(tensors, base / file)
    homes = {name: file for file, tensors in shards.items() for name in tensors}
    (base / checkpoints.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    (base / "config.json").write_text("{}")
    state = {"a": torch.full((1,), -0.0), "b": torch.ones(3, 2), "d": torch.zeros(2), "new": torch.ones(2, 3)}

    out = checkpoints.with_state(base, state, tmp_path / "out")

    assert not oracle.difference(state, checkpoints.load(out))
    assert set(oracle.load_state(out / "model-1.safetensors")) == {"b", "d"}
    index = json.loads((out / checkpoints.INDEX_FILE).read_text())
    assert index["weight_map"] == homes | {"new": "model-2.safetensors"}


def differing(before: State, after: State, name: str) -> list[int]:
    return list(np.flatnonzero(oracle.bits(before[name]) != oracle.bits(after[name])))


@pytest.mark.parametrize("aliases", [None, ALIASES])
def test_every_tensor_changes_a_little_of_each(aliases: changes.Aliases) -> None:
    after = changes.every_tensor(STATE, "seed", aliases)
    for name, tensor in STATE.items():
        assert 1 <= len(differing(STATE, after, name)) <= max(1, round(0.1 * tensor.numel()))
        assert after[name].isfinite().all()
    assert (not oracle.difference(after[ALIASES[0]], after[ALIASES[1]])) == (aliases is not None)


@pytest.mark.parametrize("which", [0, -1])
def test_one_element_is_the_first_or_last(which: int) -> None:
    after = changes.one_element(STATE, which)
    assert all(differing(STATE, after, name) == [which % t.numel()] for name, t in STATE.items())


def test_boundaries_lie_on_both_sides_of_each_cut() -> None:
    """Rows 63|64 and columns 39|40 of a 128x80 matrix at two ranks; 127|128 of 203 rows padded to 256."""
    rows, columns = np.divmod(changes.boundary_positions((128, 80), 2), 80)
    assert {0, 63, 64, 127} <= set(rows)
    assert {0, 39, 40, 79} <= set(columns)
    padded, _ = np.divmod(changes.boundary_positions((203, 80), 2), 80)
    assert {0, 100, 101, 127, 128, 202} <= set(padded)
    assert list(changes.boundary_positions((1,), 2)) == [0]


def test_special_values_hold_every_kind_and_move_each_to_its_neighbour() -> None:
    patterns = changes.special_patterns("BF16")
    assert {0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0xFF81, 0x7FC0, 0xFFFF} <= set(patterns)
    one, two = (changes.special_values(STATE, turn) for turn in (0, 1))
    name = "model.layers.0.self_attn.q_proj.weight"
    at = differing(one, two, name)
    before, after = (oracle.bits(state[name])[at] for state in (one, two))
    assert set(before) == set(patterns)
    following = dict(zip(patterns, [*patterns[1:], patterns[0]], strict=True))
    assert [following[int(b)] for b in before] == list(after)


def test_aliases_get_no_nan() -> None:
    after = changes.special_values(STATE, 0, ALIASES)
    assert not after[ALIASES[0]].isnan().any()
    assert after[ALIASES[0]].isinf().any()
    assert after["model.layers.0.self_attn.q_proj.weight"].isnan().any()


def test_families_name_every_tensor_once() -> None:
    families = changes.families(STATE, ALIASES)
    assert families == {
        "embed_tokens": ["model.embed_tokens.weight", "lm_head.weight"],
        "self_attn.q_proj": ["model.layers.0.self_attn.q_proj.weight"],
        "layer_scalar": ["model.layers.0.layer_scalar"],
        "tower.limit": ["model.tower.limit"],
    }
    assert changes.family("model.vision_tower.encoder.layers.0.x") == "towers"
    groups = changes.family_groups(families, 3)
    assert [len(group) for group in groups] == [3, 1]
    assert sorted(itertools.chain(*groups)) == sorted(families)
