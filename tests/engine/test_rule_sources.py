"""What the rules say the files hold, against transformers' own models on the meta device: names, shapes, defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from refdelta.layout.families import table_of
from refdelta.layout_map import layout_from_config
from tests.layout.models import GEMMA4, GEMMA4_MOE, QWEN3, QWEN3_MOE, TOWERS, wrapped

transformers = pytest.importorskip("transformers", reason="transformers comes with the engine")

FUSED = ["model.layers.0.mlp.experts.gate_up_proj"]
CASES = {
    "qwen3": (QWEN3, None),
    "qwen3 tied, bias": ({**QWEN3, "tie_word_embeddings": True, "attention_bias": True}, None),
    "qwen3-moe": (QWEN3_MOE, FUSED),
    "qwen3-moe, every second layer": ({**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": []}, FUSED),
    "gemma4": (GEMMA4, None),
    "gemma4 untied, bias": ({**GEMMA4, "tie_word_embeddings": False, "attention_bias": True}, None),
    "gemma4, no layer types": ({name: value for name, value in GEMMA4.items() if name != "layer_types"}, None),
    "gemma4-moe": (GEMMA4_MOE, None),
    "gemma4 wrapped": (wrapped(GEMMA4), None),
    "gemma4 with towers": (wrapped(GEMMA4, **TOWERS), None),
    "gemma4 with default towers": (wrapped(GEMMA4, vision_config={}, audio_config={}), None),
}
CORE = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""What no config leaves out; the rest are defaults."""


def held(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what transformers saves: parameters and persistent buffers, a tied head once."""
    loaded = transformers.AutoConfig.for_model(**config)
    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = kind(loaded)
    tied = config.get("tie_word_embeddings", loaded.tie_word_embeddings)
    state = model.state_dict()
    return {name: tuple(x.shape) for name, x in state.items() if not (tied and name == "lm_head.weight")}


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes(name: str) -> None:
    """Every tensor of the model, and no other."""
    config, form = CASES[name]
    config = {**config, "num_kv_shared_layers": 0} if "layer_types" not in config else config
    rules = {source: info.shape for source, info in table_of(config, tensors=form).tensors().items()}
    assert rules == held(config)


@pytest.mark.parametrize(
    ("family", "architecture", "form"),
    [
        ("qwen3", "Qwen3ForCausalLM", None),
        ("qwen3_moe", "Qwen3MoeForCausalLM", FUSED),
        ("gemma4_text", "Gemma4ForCausalLM", None),
    ],
)
def test_defaults(family: str, architecture: str, form: list[str] | None) -> None:
    """What a config leaves out is what transformers takes for it."""
    config = {"model_type": family, "architectures": [architecture], **CORE}
    rules = {source: info.shape for source, info in table_of(config, tensors=form).tensors().items()}
    assert rules == held(config)


@pytest.mark.parametrize("name", CASES)
def test_config_objects_and_saved_configs(name: str) -> None:
    """The config object, and what transformers 5 writes of it, give the map that the published config gives."""
    config, _ = CASES[name]
    config = {**config, "num_kv_shared_layers": 0} if "layer_types" not in config else config
    loaded = transformers.AutoConfig.for_model(**config)
    published = layout_from_config(config)
    assert layout_from_config(loaded) == published
    saved = json.loads(loaded.to_json_string())
    if name.startswith("gemma4"):
        assert "global_head_dim" not in saved.get("text_config", saved), "transformers writes per_layer_config instead"
    assert layout_from_config(saved) == published
