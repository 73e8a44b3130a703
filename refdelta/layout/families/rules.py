"""The layout that the rules of a model's family give, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping

from refdelta.codec.state import TensorInfo
from refdelta.layout.families import Ranks, layout
from refdelta.layout.map import LayoutMap

__all__ = ["layout_from_config"]


def layout_from_config(
    hf_config: object,
    *,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    pp_size: int = 1,
    pp_rank: int = 0,
    architecture: str | None = None,
    tensors: Mapping[str, TensorInfo] | None = None,
) -> LayoutMap:
    """The layout of one rank by the rules of the model's family, from its config alone: no engine, no weights.

    Args:
        hf_config: a transformers config, or the mapping of a config.json.
        tp_size, tp_rank: tensor parallelism.
        ep_size, ep_rank: expert parallelism; 1: experts are cut like everything else. A multiple of ``tp_size``.
        pp_size, pp_rank: pipeline parallelism.
        architecture: the engine's model class, where it matters: a multimodal Gemma 4 config is laid out as the text
            model (towers dropped) unless this is ``Gemma4ForConditionalGeneration``.
        tensors: name -> shape and dtype of what the checkpoint files hold. By default what hub files hold according to
            the config: one tensor per expert and projection for Qwen3-MoE, 3-D experts for Gemma 4.

    Raises `DeltaError`: ``unsupported_engine`` for a model without rules, sizes that cannot be cut, ranks that do not
    exist; ``shape_mismatch`` where ``tensors`` contradicts the config.
    """
    ranks = Ranks(tp_size, tp_rank, ep_size, ep_rank, pp_size, pp_rank)
    return layout(hf_config, ranks, architecture=architecture, tensors=tensors)
