"""Checkpoint tensors that an engine rightly does not hold, each with its reason.

A tensor that reaches no parameter is a fault unless a rule here accounts for it: the public failures of weight sync
began with names that were skipped in silence. One rule per reason, stated from the architecture, not from the loader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from refdelta.layout.families.gemma4 import SHARED_KV_NAME, TOWER_NAME
from refdelta.layout.reasons import OTHER_RANKS, ROTARY, SHARED_KV, TOWER

__all__ = ["declared_drops"]

_ROTARY = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")

_EXPERT = re.compile(r"\.experts\.(\d+)\.")

_Rule = Callable[[str], str | None]


def declared_drops(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Checkpoint tensor -> why the engine does not hold it, for those of ``names`` that a rule accounts for."""
    rules = [_rotary, *_family_rules(model), *_expert_rules(model), *_stage_rules(model)]
    reasons = {name: next((reason for rule in rules if (reason := rule(name))), None) for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _family_rules(model: nn.Module) -> list[_Rule]:
    if type(model).__name__ == "Gemma4ForCausalLM":
        config: Any = model.config
        first_shared = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", 0) or 0)
        return [_tower, lambda name: _shared_kv(name, first_shared)]
    return []


def _rotary(name: str) -> str | None:
    return ROTARY if _ROTARY.search(name) else None


def _tower(name: str) -> str | None:
    return TOWER if TOWER_NAME.match(name) else None


def _shared_kv(name: str, first_shared: int) -> str | None:
    found = SHARED_KV_NAME.search(name)
    if found and int(found[1]) >= first_shared:
        return SHARED_KV
    return None


def _expert_rules(model: nn.Module) -> list[_Rule]:
    """With expert parallelism, the experts of other ranks; an id that no rank has stays unaccounted for."""
    managers = (getattr(module, "expert_map_manager", None) for module in model.modules())
    manager = next((found for found in managers if found is not None and found.use_ep), None)
    if manager is None:
        return []
    elsewhere = {i for i in range(manager.global_num_experts) if manager.map_global_to_local(i) < 0}
    return [lambda name: OTHER_RANKS if (found := _EXPERT.search(name)) and int(found[1]) in elsewhere else None]


def _stage_rules(model: nn.Module) -> list[_Rule]:
    """With pipeline parallelism, the modules that other stages hold."""
    missing = [
        _plain(name) + "." for name, module in model.named_modules() if type(module).__name__ == "PPMissingLayer"
    ]
    return [lambda name: OTHER_RANKS if missing and _plain(name).startswith(tuple(missing)) else None]


def _plain(name: str) -> str:
    """Files and engines nest a multimodal model's language model differently."""
    return name.replace("language_model.", "")
