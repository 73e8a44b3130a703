"""The layout rules: one table for each model family, written from the architecture alone.

A new family is a module with a table and a line in `_TABLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from refdelta.codec.state import TensorInfo
from refdelta.layout.families.common import Ranks, Table, refuse
from refdelta.layout.families.config import Config, as_mapping
from refdelta.layout.families.gemma4 import gemma4
from refdelta.layout.families.placing import lay_out
from refdelta.layout.families.qwen3 import qwen3, qwen3_moe
from refdelta.layout.map import LayoutMap

__all__ = ["Ranks", "Table", "lay_out", "layout", "table_of"]

_TABLES: Mapping[str, Callable[[Config, bool, str | None], Table]] = {
    "qwen3": lambda config, fused, architecture: qwen3(config),
    "qwen3_moe": lambda config, fused, architecture: qwen3_moe(config, fused),
    "gemma4": gemma4,
    "gemma4_text": gemma4,
}
_FUSED = {"qwen3": False, "qwen3_moe": False, "gemma4": True, "gemma4_text": True}
"""Whether the files of a family hold one tensor for all experts of a layer."""


def table_of(hf_config: object, *, architecture: str | None = None, tensors: Iterable[str] | None = None) -> Table:
    """The table of a config. ``tensors``: names in the checkpoint files, which say how they hold experts."""
    config = as_mapping(hf_config)
    family = str(config.get("model_type"))
    if family not in _TABLES:
        raise refuse(f"no rules for model_type={family!r}; known: {', '.join(_TABLES)}")
    if config.get("quantization_config") is not None:
        raise refuse("no rules for quantised checkpoints (quantization_config)")
    return _TABLES[family](config, _fused(family, tensors), architecture)


def _fused(family: str, tensors: Iterable[str] | None) -> bool:
    for name in tensors or ():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            return True
        if name.endswith((".gate_proj.weight", ".down_proj.weight")) and ".experts." in name:
            return False
    return _FUSED[family]


def layout(
    hf_config: object,
    ranks: Ranks,
    *,
    architecture: str | None = None,
    tensors: Mapping[str, TensorInfo] | None = None,
) -> LayoutMap:
    """The map of one rank by the rules; see `refdelta.layout_map.layout_from_config`."""
    return lay_out(table_of(hf_config, architecture=architecture, tensors=tensors), ranks, tensors)
