"""Changes to parts of fused, replicated and odd tensors, alone: each leaves what a fresh engine has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conformance.inputs import checkpoints
from conformance.inputs.checkpoints import Checkpoint, State
from tests.live.rig import Engine, running
from tests.live.test_versions import halves


def grouped_with_biases(directory: Path, without: str = "o_proj.bias") -> Checkpoint:
    """A Qwen3 with biases on q, k and v and one kv head for four heads: both ranks hold all of k and v.

    vLLM's Qwen3 has no bias on o, which is left out of the files (what ends in ``without``).
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=203,
        hidden_size=80,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        attention_bias=True,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    (weights,) = directory.glob("*.safetensors")
    names = [name for name in load_file(weights) if not without or not name.endswith(without)]
    shapes = {name: load_file(weights)[name].shape for name in names}
    state = {name: checkpoints.random_tensor(name, shape) for name, shape in shapes.items()}
    weights.unlink()
    checkpoints.save(state, directory)
    return Checkpoint("qwen3-biased", directory)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Two ranks, replicated kv heads, biases."""
    tmp = tmp_path_factory.mktemp("fused")
    with running(grouped_with_biases(tmp / "base"), 2, tmp) as made:
        yield made


def only(state: State, changed: State, *names: str) -> State:
    """``state`` with the tensors of ``changed`` whose names contain one of ``names``."""
    found = {name: changed[name] if any(part in name for part in names) else t for name, t in state.items()}
    assert any(found[name] is not state[name] for name in state), f"no tensor is named {names}"
    return found


@pytest.mark.parametrize(
    "names", [("q_proj.weight",), ("k_proj.weight",), ("v_proj.weight",), ("gate_proj",), ("up_proj",)], ids=str
)
def test_one_tensor_of_a_fused_parameter(qwen: Engine, names: tuple[str, ...]) -> None:
    """Its neighbours in the same parameter keep their bits, on every rank."""
    qwen.accepts(only(qwen.state, qwen.next(f"one of {names}"), *names))
    qwen.holds(qwen.state)


@pytest.mark.parametrize("names", [("q_proj.bias",), ("k_proj.bias",), ("v_proj.bias",), (".bias",)], ids=str)
def test_only_biases_with_grouped_kv_heads(qwen: Engine, names: tuple[str, ...]) -> None:
    """k and v biases stand on both ranks."""
    assert qwen.checkpoint.config["num_key_value_heads"] == 1
    qwen.accepts(only(qwen.state, qwen.next(f"biases {names}"), *names))
    qwen.holds(qwen.state)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_halves_of_fused_parameters_in_separate_parts(qwen: Engine, order: tuple[int, int]) -> None:
    """gate in one part and up in the other, both orders."""
    target = only(qwen.state, qwen.next(f"halves {order}"), "gate_proj", "up_proj")
    delta = qwen.encoder.encode(target)
    parts = halves(delta)
    names = [{patch.name.split(".")[-2] for patch in part.patches} for part in parts]
    assert names == [{"gate_proj"}, {"up_proj"}]
    paths = [qwen.write(part) for part in parts]
    assert qwen.several([paths[number] for number in order]) is None
    qwen.encoder.commit(delta)
    qwen.state = target
    qwen.is_current()
    qwen.holds(target)


def test_only_layer_scalar(tmp_path: Path) -> None:
    """Gemma 4's buffer of one element a layer, at two ranks."""
    with running(checkpoints.make("gemma4-text", tmp_path / "base"), 2, tmp_path) as gemma:
        target = only(gemma.state, gemma.next("scalars"), "layer_scalar")
        gemma.accepts(target)
        gemma.holds(target)
        written = gemma.host.call("rpc", method="refdelta_status")[0]["last_update"]["written"]
        assert written == gemma.checkpoint.config["num_hidden_layers"], json.dumps(written)
