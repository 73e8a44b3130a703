"""The vision and audio towers of a multimodal Gemma 4, by name and shape. No rank cuts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from refdelta.layout.families.config import Config, as_mapping, read

__all__ = ["tower_tensors"]

_Named = tuple[str, tuple[int, ...]]
_CLIPS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True)
class _Vision:
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    patch_size: int = 16
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False


@dataclass(frozen=True, slots=True)
class _Audio:
    hidden_size: int = 1024
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    subsampling_conv_channels: tuple[int, ...] = (128, 32)
    conv_kernel_size: int = 5
    use_clipped_linears: bool = True
    output_proj_dims: int = 1536


def tower_tensors(config: Config, text: Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the towers that the config has."""
    found: dict[str, tuple[int, ...]] = {}
    width = text["hidden_size"]
    if config.get("vision_config") is not None:
        v = read(_Vision, as_mapping(config["vision_config"]))
        found |= {f"model.vision_tower.{name}": shape for name, shape in _vision(v)}
        found["model.embed_vision.embedding_projection.weight"] = (width, v.hidden_size)
    if config.get("audio_config") is not None:
        a = read(_Audio, as_mapping(config["audio_config"]))
        found |= {f"model.audio_tower.{name}": shape for name, shape in _audio(a)}
        found["model.embed_audio.embedding_projection.weight"] = (width, a.output_proj_dims)
    return found


def _vision(v: _Vision) -> Iterator[_Named]:
    h, m, d = v.hidden_size, v.intermediate_size, v.head_dim
    q, kv = v.num_attention_heads * d, v.num_key_value_heads * d
    yield "patch_embedder.input_proj.weight", (h, 3 * v.patch_size**2)
    yield "patch_embedder.position_embedding_table", (2, v.position_embedding_size, h)
    for i in range(v.num_hidden_layers):
        at = f"encoder.layers.{i}."
        for name, shape in {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}.items():
            yield from _clippable(f"{at}self_attn.{name}_proj.", shape, v.use_clipped_linears)
        yield at + "self_attn.q_norm.weight", (d,)
        yield at + "self_attn.k_norm.weight", (d,)
        for name, shape in {"gate": (m, h), "up": (m, h), "down": (h, m)}.items():
            yield from _clippable(f"{at}mlp.{name}_proj.", shape, v.use_clipped_linears)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{at}{norm}_layernorm.weight", (h,)
    if v.standardize:
        yield "std_bias", (h,)
        yield "std_scale", (h,)


def _audio(a: _Audio) -> Iterator[_Named]:
    h, (first, second) = a.hidden_size, a.subsampling_conv_channels
    for i, (inputs, outputs) in enumerate(((1, first), (first, second))):
        yield f"subsample_conv_projection.layer{i}.conv.weight", (outputs, inputs, 3, 3)
        yield f"subsample_conv_projection.layer{i}.norm.weight", (outputs,)
    yield "subsample_conv_projection.input_proj_linear.weight", (h, first // 4 * second)
    for i in range(a.num_hidden_layers):
        yield from _audio_layer(a, f"layers.{i}.")
    yield "output_proj.weight", (a.output_proj_dims, h)
    yield "output_proj.bias", (a.output_proj_dims,)


def _audio_layer(a: _Audio, at: str) -> Iterator[_Named]:
    h, d = a.hidden_size, a.hidden_size // a.num_attention_heads
    inner, clipped = d * a.num_attention_heads, a.use_clipped_linears
    for name in ("feed_forward1.", "feed_forward2."):
        yield from _clippable(f"{at}{name}ffw_layer_1.", (4 * h, h), clipped)
        yield from _clippable(f"{at}{name}ffw_layer_2.", (h, 4 * h), clipped)
        yield f"{at}{name}pre_layer_norm.weight", (h,)
        yield f"{at}{name}post_layer_norm.weight", (h,)
    for name in ("q_proj.", "k_proj.", "v_proj."):
        yield from _clippable(f"{at}self_attn.{name}", (inner, h), clipped)
    yield from _clippable(f"{at}self_attn.post.", (h, h), clipped)
    yield f"{at}self_attn.relative_k_proj.weight", (inner, h)
    yield f"{at}self_attn.per_dim_scale", (d,)
    yield from _clippable(f"{at}lconv1d.linear_start.", (2 * h, h), clipped)
    yield from _clippable(f"{at}lconv1d.linear_end.", (h, h), clipped)
    yield f"{at}lconv1d.depthwise_conv1d.weight", (h, 1, a.conv_kernel_size)
    yield f"{at}lconv1d.pre_layer_norm.weight", (h,)
    yield f"{at}lconv1d.conv_norm.weight", (h,)
    for norm in ("norm_pre_attn", "norm_post_attn", "norm_out"):
        yield f"{at}{norm}.weight", (h,)


def _clippable(at: str, shape: tuple[int, ...], clipped: bool) -> Iterator[_Named]:
    """A linear layer whose inputs and outputs may be clamped to bounds that the files hold."""
    yield at + "linear.weight", shape
    if clipped:
        for bound in _CLIPS:
            yield at + bound, ()
