"""A loader that drops one tensor for everybody, fresh engines included, and says that it loaded it.

Imported by every process of such an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

DROPPED = "model.layers.1.self_attn.k_norm.weight"


def _drop() -> None:
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    load_weights = Qwen3ForCausalLM.load_weights

    def without(self: Any, weights: Iterable[tuple[str, Any]]) -> Any:
        return load_weights(self, ((name, tensor) for name, tensor in weights if name != DROPPED)) | {DROPPED}

    Qwen3ForCausalLM.load_weights = without


_drop()
