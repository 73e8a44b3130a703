"""What a rank's parameters hold, laid out densely in plain numpy from whole checkpoint tensors.

Written from the architectures a second time, in another way than the rules: arrays are split and concatenated here,
and nothing speaks of boxes, positions or regions. Imports nothing from refdelta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
State = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Rank:
    """A tensor-parallel rank; ``dealt``: whole experts are dealt out to the ranks instead of cut."""

    size: int = 1
    number: int = 0
    dealt: bool = False

    def rows(self, x: Array) -> Array:
        return np.split(x, self.size)[self.number]

    def columns(self, x: Array) -> Array:
        return np.split(x, self.size, axis=1)[self.number]

    def heads(self, x: Array, count: int) -> Array:
        """A share of the heads, or, with fewer heads than ranks, the one that this rank's queries attend to."""
        if count >= self.size:
            return self.rows(x)
        return np.split(x, count)[self.number // (self.size // count)]

    def vocabulary(self, x: Array) -> Array:
        padded = np.zeros((-(-len(x) // 64) * 64, x.shape[1]), x.dtype)
        padded[: len(x)] = x
        return self.rows(padded)

    def experts(self, gates: list[Array], ups: list[Array], downs: list[Array]) -> tuple[Array, Array]:
        """w13 and w2 of all experts' matrices."""
        numbers = list(range(len(gates)))
        mine = [list(part) for part in np.array_split(numbers, self.size)][self.number] if self.dealt else numbers
        cut = Rank() if self.dealt else self
        w13 = [np.concatenate([cut.rows(gates[e]), cut.rows(ups[e])]) for e in mine]
        return np.stack(w13), np.stack([cut.columns(downs[e]) for e in mine])


def lay_out(config: Mapping[str, Any], state: State, rank: Rank) -> dict[str, Array]:
    """Every parameter of one rank, by its runtime name."""
    text = config.get("text_config", config)
    if "text_config" in config:
        state = {
            name.replace("model.language_model.", "model."): array
            for name, array in state.items()
            if "_tower." not in name and "embed_vision" not in name and "embed_audio" not in name
        }
    return _gemma4(text, state, rank) if text["model_type"].startswith("gemma4") else _qwen3(text, state, rank)


def _qwen3(config: Mapping[str, Any], state: State, rank: Rank) -> dict[str, Array]:
    found = _ends(state, rank)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        names = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
        found |= {f"{at}{name}.weight": state[f"{at}{name}.weight"] for name in names}
        found |= _attention(state, rank, at, config["num_key_value_heads"], third="v_proj")
        if f"{at}mlp.gate.weight" in state:
            found[at + "mlp.gate.weight"] = state[at + "mlp.gate.weight"]
            found |= _experts(state, rank, at + "mlp.experts.", config["num_experts"])
        else:
            found |= _mlp(state, rank, at)
    return found


def _gemma4(config: Mapping[str, Any], state: State, rank: Rank) -> dict[str, Array]:
    found = _ends(state, rank)
    if config["hidden_size_per_layer_input"]:
        table, projection = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"
        found |= {table: rank.vocabulary(state[table]), projection: rank.rows(state[projection])}
        found["model.per_layer_projection_norm.weight"] = state["model.per_layer_projection_norm.weight"]
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    for i, kind in enumerate(config["layer_types"]):
        at, full = f"model.layers.{i}.", kind == "full_attention"
        equal = config["attention_k_eq_v"] and full
        heads = config["num_key_value_heads"]
        if equal and config.get("num_global_key_value_heads"):
            heads = config["num_global_key_value_heads"]
        if i < layers - shared:
            found |= _attention(state, rank, at, heads, third="k_proj" if equal else "v_proj")
        else:
            found |= {f"{at}self_attn.q_proj.weight": rank.rows(state[f"{at}self_attn.q_proj.weight"])}
            found |= _output(state, rank, at)
            if f"{at}self_attn.q_proj.bias" in state:
                found[f"{at}self_attn.q_proj.bias"] = rank.rows(state[f"{at}self_attn.q_proj.bias"])
        found |= _mlp(state, rank, at)
        if config.get("enable_moe_block"):
            found |= _experts(state, rank, at + "experts.", config["num_experts"])
        cut = (
            ".self_attn.q_proj.",
            ".self_attn.k_proj.",
            ".self_attn.v_proj.",
            ".self_attn.o_proj.",
            ".mlp.",
            ".experts.",
        )
        found |= {n: x for n, x in state.items() if n.startswith(at) and not any(part in n for part in cut)}
    return found


def _ends(state: State, rank: Rank) -> dict[str, Array]:
    found = {"model.norm.weight": state["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            found[name] = rank.vocabulary(state[name])
    return found


def _attention(state: State, rank: Rank, at: str, kv_heads: int, third: str) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for kind in ("weight", "bias"):
        if f"{at}self_attn.q_proj.{kind}" in state:
            q, k, v = (state[f"{at}self_attn.{name}.{kind}"] for name in ("q_proj", "k_proj", third))
            parts = [rank.rows(q), rank.heads(k, kv_heads), rank.heads(v, kv_heads)]
            found[f"{at}self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
    return found | _output(state, rank, at)


def _output(state: State, rank: Rank, at: str) -> dict[str, Array]:
    found = {at + "self_attn.o_proj.weight": rank.columns(state[at + "self_attn.o_proj.weight"])}
    if at + "self_attn.o_proj.bias" in state:
        found[at + "self_attn.o_proj.bias"] = state[at + "self_attn.o_proj.bias"]
    return found


def _mlp(state: State, rank: Rank, at: str) -> dict[str, Array]:
    gate, up, down = (state[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return {
        at + "mlp.gate_up_proj.weight": np.concatenate([rank.rows(gate), rank.rows(up)]),
        at + "mlp.down_proj.weight": rank.columns(down),
    }


def _experts(state: State, rank: Rank, at: str, count: int) -> dict[str, Array]:
    if at + "gate_up_proj" in state:
        pairs = [np.split(both, 2) for both in state[at + "gate_up_proj"]]
        gates, ups, downs = [gate for gate, _ in pairs], [up for _, up in pairs], list(state[at + "down_proj"])
    else:
        gates, ups, downs = (
            [state[f"{at}{e}.{name}_proj.weight"] for e in range(count)] for name in ("gate", "up", "down")
        )
    w13, w2 = rank.experts(gates, ups, downs)
    return {at + "routed_experts.w13_weight": w13, at + "routed_experts.w2_weight": w2}
