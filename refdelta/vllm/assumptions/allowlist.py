"""Which engines the backend was seen live on. Others are refused at start-up: ``unsupported_engine: field=value``.

Moving an entry from refused to seen needs a live proof in the suite. `UNSEEN` is let in without one: such an engine
names these fields as ``unproven`` in every answer and log line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn

from refdelta.spec import DeltaError, Reason
from refdelta.vllm.assumptions.adapters import adapter_fields
from refdelta.vllm.assumptions.compiled import compile_fields
from refdelta.vllm.assumptions.experts import PROVEN_KERNELS, expert_layers, kernel

__all__ = ["check_engine"]

ARCHITECTURES = frozenset({"Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma4ForCausalLM"})
DEVICES = frozenset({"cpu"})
EXECUTORS = frozenset({"uni", "mp", "None"})
LOAD_FORMATS = frozenset({"auto"})
UNSEEN: Final[Mapping[str, frozenset[str]]] = {
    "device": frozenset({"cuda"}),
    "load_format": frozenset({"safetensors", "hf"}),
}
"""Field -> values that are let in, though no live test ever ran with them."""


def check_engine(vllm_config: Any, model: nn.Module) -> tuple[str, ...]:
    """What is let in unproven, as ``field=value``; empty for an engine like those of the live tests.

    Raises `DeltaError` (``unsupported_engine``) naming every other field of this engine that was not proven.
    """
    fields = [(name, value) for name, value, proven in _fields(vllm_config, model) if not proven]
    found = [f"{name}={value}" for name, value in fields if not _let_in(name, value)]
    if found:
        raise DeltaError(
            Reason.UNSUPPORTED_ENGINE, ", ".join(found) + ": sparse deltas in place were not proven on such an engine"
        )
    return tuple(f"{name}={value}" for name, value in fields)


def _let_in(name: str, value: object) -> bool:
    return name in UNSEEN and value in UNSEEN[name]


def _fields(config: Any, model: nn.Module) -> Iterator[tuple[str, object, bool]]:
    """(field, value, whether it was proven)."""
    yield "architecture", type(model).__name__, type(model).__name__ in ARCHITECTURES
    yield from _model_fields(config.model_config)
    yield from _parallel_fields(config.parallel_config)
    device = str(config.device_config.device_type)
    yield "device", device, device in DEVICES
    load_format = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    yield "load_format", load_format, load_format in LOAD_FORMATS
    offload = config.offload_config
    yield "cpu_offload_gb", offload.uva.cpu_offload_gb, not offload.uva.cpu_offload_gb
    yield "offload_group_size", offload.prefetch.offload_group_size, not offload.prefetch.offload_group_size
    yield from compile_fields(config)
    yield from adapter_fields(config, model)
    for name in ("speculative_config", "kv_transfer_config", "ec_transfer_config", "diffusion_config"):
        yield name, "set", getattr(config, name, None) is None
    yield from _expert_fields(model)


def _expert_fields(model: nn.Module) -> Iterator[tuple[str, object, bool]]:
    """Kernels of expert layers. What each of them made of its weights is proved later, layer by layer."""
    layers = expert_layers(model)
    others = [name for name, module in model.named_modules() if "MoE" in type(module).__name__]
    unknown = [name for name in others if not any(_within(name, layer) or _within(layer, name) for layer in layers)]
    yield "moe_layers", len(unknown), not unknown
    for found in sorted({kernel(layer) for layer in layers.values()}):
        yield "moe_kernel", found, found in PROVEN_KERNELS


def _within(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def _model_fields(model_config: Any) -> Iterator[tuple[str, object, bool]]:
    yield "quantization", model_config.quantization, model_config.quantization is None
    yield "enable_sleep_mode", model_config.enable_sleep_mode, not model_config.enable_sleep_mode
    yield "use_mla", model_config.use_mla, not model_config.use_mla


def _parallel_fields(parallel: Any) -> Iterator[tuple[str, object, bool]]:
    for name in (
        "data_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "nnodes",
    ):
        value = getattr(parallel, name)
        yield name, value, value == 1
    for name in ("enable_expert_parallel", "enable_eplb", "enable_elastic_ep", "enable_dbo", "enable_fault_tolerance"):
        value = getattr(parallel, name)
        yield name, value, not value
    executor = str(parallel.distributed_executor_backend)
    yield "distributed_executor_backend", executor, executor in EXECUTORS
