"""Gemma 4: the text decoder (dense, and with a mixture of experts beside the MLP), and the multimodal model around it.

What is particular: sliding and full-attention layers differ in head size and may in kv heads; the last layers may
share an earlier layer's keys and values and then have none of their own; in some models a full-attention layer's k is
its v too; a second embedding feeds every layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from refdelta.layout.families.common import COLUMNS, ROWS, VOCABULARY, WHOLE, Row, Table, heads, kv_heads, refuse
from refdelta.layout.families.config import Config, as_mapping, dtype_of, read
from refdelta.layout.families.experts import experts
from refdelta.layout.families.gemma4_towers import tower_tensors
from refdelta.layout.reasons import SHARED_KV, TOWER

__all__ = ["MULTIMODAL", "gemma4"]

MULTIMODAL = "Gemma4ForConditionalGeneration"

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARED_KV_NAME = re.compile(r"\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
TOWER_NAME = re.compile(r"^(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\.")
_PER_LAYER = {"head_dim", "num_key_value_heads", "sliding_window"}


@dataclass(frozen=True, slots=True)
class _Text:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 256
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    layer_types: tuple[str, ...] = ()
    num_kv_shared_layers: int = field(default=0, metadata={"zero": True})
    attention_k_eq_v: bool = False
    attention_bias: bool = False
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = field(default=256, metadata={"zero": True})
    vocab_size_per_layer_input: int = 262144
    enable_moe_block: bool = False
    num_experts: int | None = None
    moe_intermediate_size: int | None = None
    tie_word_embeddings: bool = True

    @property
    def first_shared(self) -> int:
        """The first layer that reads an earlier layer's keys and values."""
        return self.num_hidden_layers - self.num_kv_shared_layers


@dataclass(frozen=True, slots=True)
class _Layer:
    """What differs from layer to layer."""

    full: bool
    head_dim: int
    kv_heads: int
    shares_kv: bool
    k_is_v: bool
    inner: int


def gemma4(config: Config, fused: bool, architecture: str | None) -> Table:
    """The table of a Gemma 4 config, of the text model or of the multimodal one.

    A multimodal config is served as the text model, without towers, unless ``architecture`` is `MULTIMODAL`.
    """
    if "text_config" not in config:
        return _text_table(config, dtype_of(config), fused)
    text = as_mapping(config["text_config"])
    tied = [c["tie_word_embeddings"] for c in (config, text) if c.get("tie_word_embeddings") is not None]
    if len(set(tied)) > 1:
        raise refuse("tie_word_embeddings differs between the config and its text_config")
    table = _text_table({**text, "tie_word_embeddings": (tied or [True])[0]}, dtype_of(config, text), fused)
    towers = tower_tensors(config, text)
    if architecture == MULTIMODAL:
        return _around(table, towers)
    return replace(
        table,
        rows=[replace(row, source=_in_wrapper(row.source)) for row in table.rows],
        tied=table.tied and (table.tied[0], _in_wrapper(table.tied[1])),
        unused={name: (shape, TOWER) for name, shape in towers.items()},
    )


def _around(table: Table, towers: Mapping[str, tuple[int, ...]]) -> Table:
    """The multimodal engine: the text model one level deeper, every tower whole on every rank."""
    rows = [replace(row, source=_in_wrapper(row.source), param="language_model." + row.param) for row in table.rows]
    rows += [Row(name.removeprefix("model."), name, shape) for name, shape in towers.items()]
    return replace(table, rows=rows, tied=table.tied and (table.tied[0], _in_wrapper(table.tied[1])))


def _in_wrapper(name: str) -> str:
    return re.sub(r"^model\.", "model.language_model.", name)


def _text_table(config: Config, dtype: Any, fused: bool) -> Table:
    if "hidden_size_per_layer_input" in config and config["hidden_size_per_layer_input"] is None:
        config = {**config, "hidden_size_per_layer_input": 0}
    c = read(_Text, config)
    layers = list(_layers(c, config))
    rows = [row for i, layer in enumerate(layers) for row in _decoder_layer(c, layer, i, fused)]
    return Table(
        rows=[*_ends(c), *rows],
        layers=c.num_hidden_layers,
        dtype=dtype,
        tied=(_HEAD, _EMBEDDING) if c.tie_word_embeddings else None,
        same_stage=list(_sharing(layers)),
        drops=lambda name: _dropped(name, c.first_shared),
    )


def _dropped(name: str, first_shared: int) -> str | None:
    if TOWER_NAME.match(name):
        return TOWER
    shared = SHARED_KV_NAME.search(name)
    return SHARED_KV if shared and int(shared[1]) >= first_shared else None


# --- the layers, one by one -------------------------------------------------------------------------------------------


def _layers(c: _Text, config: Config) -> Iterator[_Layer]:
    types = c.layer_types or tuple(
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(c.num_hidden_layers)
    )
    if len(types) != c.num_hidden_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise refuse(f"layer_types does not name sliding or full attention for each of {c.num_hidden_layers} layers")
    types = (*types[:-1], "full_attention")  # transformers forces the last one
    overrides = _overrides(c, config, types)
    for i, kind in enumerate(types):
        full, shared = kind == "full_attention", i >= c.first_shared
        wide = c.use_double_wide_mlp and shared and c.first_shared > 0
        yield _Layer(
            full=full,
            head_dim=overrides[i].get("head_dim", c.head_dim),
            kv_heads=overrides[i].get("num_key_value_heads", c.num_key_value_heads),
            shares_kv=shared,
            k_is_v=c.attention_k_eq_v and full,
            inner=c.intermediate_size * (2 if wide else 1),
        )


def _sharing(layers: list[_Layer]) -> Iterator[tuple[int, int]]:
    """(layer whose keys and values are read, layer that reads them): the last own one of the same kind."""
    own = {layer.full: i for i, layer in enumerate(layers) if not layer.shares_kv}
    for i, layer in enumerate(layers):
        if layer.shares_kv:
            if layer.full not in own:
                raise refuse(f"layer {i} shares keys and values, but no earlier layer of its type has any")
            yield own[layer.full], i


def _overrides(c: _Text, config: Config, types: tuple[str, ...]) -> list[Mapping[str, int]]:
    """What each layer has otherwise than the config says for all: as transformers 5 writes it, or as files say it."""
    if "per_layer_config" in config:
        given = {int(i): values for i, values in (config["per_layer_config"] or {}).items()}
        unknown = sorted({name for values in given.values() for name in values} - _PER_LAYER)
        if unknown:
            raise refuse(f"per_layer_config changes {unknown[0]}, which no rule knows")
        return [given.get(i, {}) for i in range(len(types))]
    full = {"head_dim": c.global_head_dim}
    if c.attention_k_eq_v and c.num_global_key_value_heads is not None:
        full["num_key_value_heads"] = c.num_global_key_value_heads
    return [full if kind == "full_attention" else {} for kind in types]


# --- the table --------------------------------------------------------------------------------------------------------


def _ends(c: _Text) -> Iterator[Row]:
    h, p = c.hidden_size, c.hidden_size_per_layer_input
    yield Row(_EMBEDDING, _EMBEDDING, (c.vocab_size, h), VOCABULARY)
    if p:
        all_layers, at = c.num_hidden_layers * p, "model."
        table, projection = at + "embed_tokens_per_layer.weight", at + "per_layer_model_projection.weight"
        yield Row(table, table, (c.vocab_size_per_layer_input, all_layers), VOCABULARY)
        yield Row(projection, projection, (all_layers, h), ROWS)
        yield _same(at + "per_layer_projection_norm.weight", (p,))
    yield _same("model.norm.weight", (h,))
    if not c.tie_word_embeddings:
        yield Row(_HEAD, _HEAD, (c.vocab_size, h), VOCABULARY)


def _decoder_layer(c: _Text, layer: _Layer, i: int, fused: bool) -> Iterator[Row]:
    at, h, m, p = f"model.layers.{i}.", c.hidden_size, layer.inner, c.hidden_size_per_layer_input
    yield from _attention(c, layer, i)
    yield Row(at + "mlp.gate_up_proj.weight", at + "mlp.gate_proj.weight", (m, h), ROWS, layer=i)
    yield Row(at + "mlp.gate_up_proj.weight", at + "mlp.up_proj.weight", (m, h), ROWS, layer=i)
    yield Row(at + "mlp.down_proj.weight", at + "mlp.down_proj.weight", (h, m), COLUMNS, layer=i)
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield _same(f"{at}{norm}_layernorm.weight", (h,), i)
    yield _same(at + "layer_scalar", (1,), i)
    if p:
        yield _same(at + "per_layer_input_gate.weight", (p, h), i)
        yield _same(at + "per_layer_projection.weight", (h, p), i)
        yield _same(at + "post_per_layer_input_norm.weight", (h,), i)
    if c.enable_moe_block:
        yield from _mixture(c, i, fused)


def _attention(c: _Text, layer: _Layer, i: int) -> Iterator[Row]:
    at, h, d = f"model.layers.{i}.self_attn.", c.hidden_size, layer.head_dim
    q, kv = c.num_attention_heads, layer.kv_heads
    third = "k_proj" if layer.k_is_v else "v_proj"
    parts = [("q_proj", q * d, heads(q)), ("k_proj", kv * d, kv_heads(kv)), (third, kv * d, kv_heads(kv))]
    fused = at + ("q_proj." if layer.shares_kv else "qkv_proj.")
    for name, rows, cut in parts[:1] if layer.shares_kv else parts:
        yield Row(fused + "weight", f"{at}{name}.weight", (rows, h), cut, layer=i)
        if c.attention_bias:
            yield Row(fused + "bias", f"{at}{name}.bias", (rows,), cut, layer=i)
    yield Row(at + "o_proj.weight", at + "o_proj.weight", (h, q * d), COLUMNS, layer=i)
    if c.attention_bias:
        yield _same(at + "o_proj.bias", (h,), i)
    yield _same(at + "q_norm.weight", (d,), i)
    if not layer.shares_kv:
        yield _same(at + "k_norm.weight", (d,), i)


def _mixture(c: _Text, i: int, fused: bool) -> Iterator[Row]:
    at, h, n, m = f"model.layers.{i}.", c.hidden_size, c.num_experts, c.moe_intermediate_size
    if n is None or m is None:
        raise refuse("enable_moe_block without num_experts and moe_intermediate_size")
    yield _same(at + "router.scale", (h,), i)
    yield _same(at + "router.per_expert_scale", (n,), i)
    yield _same(at + "router.proj.weight", (n, h), i)
    yield from experts(at + "experts.", n, h, m, fused=fused, layer=i)
    for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
        yield _same(f"{at}{norm}.weight", (h,), i)


def _same(name: str, shape: tuple[int, ...], layer: int | None = None) -> Row:
    """A tensor that every rank holds whole, under the files' name."""
    return Row(name, name, shape, WHOLE, layer=layer)
