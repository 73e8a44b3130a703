"""Small model configs, drawn by Hypothesis and by hand, with a size at which they can be served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from refdelta.layout_map import LayoutMap, layout_from_config

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Engine:
    """A config and how many ranks serve it."""

    config: Config
    tp_size: int = 1
    dealt: bool = False
    """Expert parallelism: whole experts are dealt out to the tensor-parallel ranks."""

    def rules(self, rank: int, **options: Any) -> LayoutMap:
        """One rank's map by the rules."""
        ep_size, ep_rank = (self.tp_size, rank) if self.dealt else (1, 0)
        return layout_from_config(
            self.config, tp_size=self.tp_size, tp_rank=rank, ep_size=ep_size, ep_rank=ep_rank, **options
        )


QWEN3: Config = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "float32",
    "vocab_size": 130,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
QWEN3_MOE: Config = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "tie_word_embeddings": True,
}
GEMMA4: Config = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "dtype": "float32",
    "vocab_size": 203,
    "vocab_size_per_layer_input": 130,
    "hidden_size": 40,
    "hidden_size_per_layer_input": 12,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 24,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": True,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GEMMA4_MOE: Config = {
    **GEMMA4,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": False,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
}
TOWERS: Config = {
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "position_embedding_size": 40,
        "patch_size": 4,
        "use_clipped_linears": True,
        "standardize": True,
    },
    "audio_config": {
        "model_type": "gemma4_audio",
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 40,
    },
}


def wrapped(text: Config, **entries: Any) -> dict[str, Any]:
    """A multimodal Gemma 4 config around a text config."""
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": dict(text),
        **entries,
    }


SMALL = {
    "qwen3": Engine(QWEN3, 2),
    "qwen3 replicated": Engine({**QWEN3, "vocab_size": 515}, 4),
    "qwen3 tied, bias": Engine({**QWEN3, "attention_bias": True, "tie_word_embeddings": True}, 2),
    "qwen3-moe": Engine(QWEN3_MOE, 2),
    "qwen3-moe dealt": Engine(QWEN3_MOE, 2, dealt=True),
    "gemma4": Engine(GEMMA4, 2),
    "gemma4 replicated": Engine(GEMMA4, 4),
    "gemma4 bias": Engine({**GEMMA4, "attention_bias": True}, 2),
    "gemma4 wrapped": Engine(wrapped(GEMMA4, **TOWERS), 2),
    "gemma4-moe": Engine(GEMMA4_MOE, 4),
    "gemma4-moe dealt": Engine(GEMMA4_MOE, 4, dealt=True),
}
"""Engines that between them have every kind of cut."""


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """Any model of any family, at a size that vLLM serves on a CPU."""
    tp = draw(st.sampled_from([1, 2, 2, 4]))
    kv = draw(st.sampled_from([1, 2, 4]))
    heads = draw(st.sampled_from([h for h in (1, 2, 4, 6, 8, 12) if h % kv == 0 and h % tp == 0]))
    family = draw(st.sampled_from([_qwen3, _qwen3_moe, _gemma4, _gemma4]))
    config = {
        "dtype": "float32",
        "vocab_size": draw(st.sampled_from([7, 64, 130, 203])),
        "hidden_size": draw(st.sampled_from([24, 40, 72])),
        "intermediate_size": tp * draw(st.sampled_from([3, 5, 14])),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([8, 16])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    config |= family(draw, tp)
    dealt = "moe_intermediate_size" in config and draw(st.booleans())
    if config["model_type"] == "gemma4_text" and draw(st.booleans()):
        config = wrapped(config)
    return Engine(config, tp, dealt)


def _qwen3(draw: st.DrawFn, tp: int) -> dict[str, Any]:
    layers = draw(st.integers(1, 3))
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers}


def _qwen3_moe(draw: st.DrawFn, tp: int) -> dict[str, Any]:
    layers = draw(st.integers(1, 4))
    step = draw(st.sampled_from([1, 1, 2])) if layers > 1 else 1
    with_experts = [i for i in range(layers) if (i + 1) % step == 0]
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": layers,
        "decoder_sparse_step": step,
        "mlp_only_layers": draw(st.sampled_from([[], with_experts[1:2]])),
        **_experts(draw, tp),
        "num_experts_per_tok": 2,
    }


def _gemma4(draw: st.DrawFn, tp: int) -> dict[str, Any]:
    layers = draw(st.integers(1, 5))
    kinds = draw(st.lists(st.sampled_from(["sliding_attention", "full_attention"]), min_size=layers, max_size=layers))
    kinds[-1] = "full_attention"
    possible = [n for n in range(layers) if set(kinds[layers - n :]) <= set(kinds[: layers - n])]
    config: dict[str, Any] = {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_kv_shared_layers": draw(st.sampled_from(possible)),
        "vocab_size_per_layer_input": draw(st.sampled_from([64, 100])),
        "hidden_size_per_layer_input": draw(st.sampled_from([0, 4 * tp])),
        "global_head_dim": draw(st.sampled_from([8, 24])),
        "attention_k_eq_v": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "use_double_wide_mlp": draw(st.booleans()),
        "sliding_window": 8,
        "max_position_embeddings": 64,
    }
    if draw(st.booleans()):
        config["num_global_key_value_heads"] = draw(st.sampled_from([1, 2]))
    if draw(st.booleans()):
        config |= {"enable_moe_block": True, "top_k_experts": 2, **_experts(draw, tp)}
    return config


def _experts(draw: st.DrawFn, tp: int) -> dict[str, Any]:
    # The CPU's expert kernels take no other hidden sizes than multiples of 32.
    return {
        "hidden_size": draw(st.sampled_from([32, 96])),
        "num_experts": draw(st.sampled_from([4, 5, 8])),
        "moe_intermediate_size": tp * draw(st.sampled_from([3, 8])),
    }
