"""Qwen3, dense and mixture of experts: one decoder, whose MLP is dense or a set of experts, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from refdelta.layout.families.common import COLUMNS, ROWS, VOCABULARY, WHOLE, Ends, Row, Table, heads, kv_heads, refuse
from refdelta.layout.families.config import Config, dtype_of, read
from refdelta.layout.families.experts import experts

__all__ = ["qwen3", "qwen3_moe"]

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Dense:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def head_size(self) -> int:
        """Rows of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, slots=True)
class _Experts:
    num_experts: int = field(default=128, metadata={"or": "num_local_experts"})
    moe_intermediate_size: int = 768
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_intermediate_size: int = field(default=0, metadata={"zero": True})

    def in_layer(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def qwen3(config: Config) -> Table:
    """The table of a dense Qwen3."""
    c = read(_Dense, {"head_dim": 128, **config})
    ends = [
        Row(_EMBEDDING, _EMBEDDING, (c.vocab_size, c.hidden_size), VOCABULARY,
            ends=Ends.BOTH if c.tie_word_embeddings else Ends.FIRST),
        Row("model.norm.weight", "model.norm.weight", (c.hidden_size,), WHOLE, ends=Ends.LAST),
    ]  # fmt: skip
    if not c.tie_word_embeddings:
        ends.append(Row(_HEAD, _HEAD, (c.vocab_size, c.hidden_size), VOCABULARY, ends=Ends.LAST))
    layers = [row for i in range(c.num_hidden_layers) for row in (*_attention(c, i), *_mlp(c, i))]
    return _table(config, c, [*ends, *layers], Ends.LAST)


def qwen3_moe(config: Config, fused: bool) -> Table:
    """The table of a Qwen3 mixture of experts. ``fused``: the files hold all experts of a layer in one tensor, as
    transformers 5 keeps them in memory, instead of one tensor per expert and projection."""
    c = read(_Dense, config)
    e = read(_Experts, config)
    if e.shared_expert_intermediate_size:
        raise refuse("Qwen3-MoE has no shared expert; shared_expert_intermediate_size says otherwise")
    ends = [
        Row(_EMBEDDING, _EMBEDDING, (c.vocab_size, c.hidden_size), VOCABULARY),
        Row("model.norm.weight", "model.norm.weight", (c.hidden_size,), WHOLE),
    ]
    if not c.tie_word_embeddings:
        ends.append(Row(_HEAD, _HEAD, (c.vocab_size, c.hidden_size), VOCABULARY))
    layers = [
        row
        for i in range(c.num_hidden_layers)
        for row in (*_attention(c, i), *(_experts(c, e, i, fused) if e.in_layer(i) else _mlp(c, i)))
    ]
    return _table(config, c, [*ends, *layers], Ends.EVERY)


def _table(config: Config, c: _Dense, rows: list[Row], head: Ends) -> Table:
    tied = (_HEAD, _EMBEDDING) if c.tie_word_embeddings else None
    return Table(rows, c.num_hidden_layers, dtype_of(config), tied, head)


def _attention(c: _Dense, i: int) -> Iterator[Row]:
    at, h, d = f"model.layers.{i}.", c.hidden_size, c.head_size
    q, kv = c.num_attention_heads, c.num_key_value_heads
    qkv, o = at + "self_attn.qkv_proj.", at + "self_attn.o_proj."
    norms = {"self_attn.q_norm": d, "self_attn.k_norm": d, "input_layernorm": h, "post_attention_layernorm": h}

    #         runtime parameter  checkpoint tensor                    shape        cut
    yield Row(qkv + "weight", at + "self_attn.q_proj.weight", (q * d, h), heads(q), layer=i)
    yield Row(qkv + "weight", at + "self_attn.k_proj.weight", (kv * d, h), kv_heads(kv), layer=i)
    yield Row(qkv + "weight", at + "self_attn.v_proj.weight", (kv * d, h), kv_heads(kv), layer=i)
    yield Row(o + "weight", at + "self_attn.o_proj.weight", (h, q * d), COLUMNS, layer=i)
    for name, size in norms.items():
        yield Row(at + name + ".weight", at + name + ".weight", (size,), WHOLE, layer=i)
    if c.attention_bias:
        yield Row(qkv + "bias", at + "self_attn.q_proj.bias", (q * d,), heads(q), layer=i)
        yield Row(qkv + "bias", at + "self_attn.k_proj.bias", (kv * d,), kv_heads(kv), layer=i)
        yield Row(qkv + "bias", at + "self_attn.v_proj.bias", (kv * d,), kv_heads(kv), layer=i)
        yield Row(o + "bias", at + "self_attn.o_proj.bias", (h,), WHOLE, layer=i)


def _mlp(c: _Dense, i: int) -> Iterator[Row]:
    at, h, m = f"model.layers.{i}.mlp.", c.hidden_size, c.intermediate_size
    yield Row(at + "gate_up_proj.weight", at + "gate_proj.weight", (m, h), ROWS, layer=i)
    yield Row(at + "gate_up_proj.weight", at + "up_proj.weight", (m, h), ROWS, layer=i)
    yield Row(at + "down_proj.weight", at + "down_proj.weight", (h, m), COLUMNS, layer=i)


def _experts(c: _Dense, e: _Experts, i: int, fused: bool) -> Iterator[Row]:
    at, n = f"model.layers.{i}.mlp.", e.num_experts
    yield Row(at + "gate.weight", at + "gate.weight", (n, c.hidden_size), WHOLE, layer=i)
    yield from experts(at + "experts.", n, c.hidden_size, e.moe_intermediate_size, fused=fused, layer=i)
