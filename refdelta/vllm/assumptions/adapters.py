"""LoRA adapters beside the weights that deltas change: what was proven, read from vLLM 0.32.0 (``config/lora.py``).

vLLM wraps layers before the backend is made: their weights are then ``<layer>.base_layer.weight``, which its loader,
and so the trace, knows. An adapter's own tensors are no parameters of the model; a delta cannot reach them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["adapter_fields"]

ARCHITECTURES = frozenset({"Qwen3ForCausalLM"})
"""Model classes on which deltas beside an adapter were run live. Experts are wrapped in another way, and wait."""

SETTINGS = {
    "fully_sharded_loras": False,
    "target_modules": None,
    "lora_dtype": "bfloat16",
    "default_mm_loras": None,
    "enable_tower_connector_lora": False,
    "specialize_active_lora": False,
    "enable_mixed_moe_lora_format": False,
    "enable_moe_shared_loras": False,
}
"""Settings that change what is wrapped or how, as in the live proof. Ranks and numbers of adapters are free."""


def adapter_fields(config: Any, model: nn.Module) -> Iterator[tuple[str, object, bool]]:
    """(field, value, whether it was proven) of a `VllmConfig`'s LoRA settings; nothing where there are none."""
    lora = config.lora_config
    if lora is None:
        return
    architecture, device = type(model).__name__, str(config.device_config.device_type)
    yield "lora_config", f"on {architecture}", architecture in ARCHITECTURES
    yield "lora_config", f"on {device}", device == "cpu"
    yield "lora_config", "with enforce_eager=False", bool(config.model_config.enforce_eager)
    for name, proven in SETTINGS.items():
        value = getattr(lora, name, "absent")
        yield f"lora_config.{name}", value, str(value).removeprefix("torch.") == str(proven)
