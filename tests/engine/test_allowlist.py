"""The allow-list: the proven engine passes, and each single departure from it is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from refdelta.spec import DeltaError, Reason
from refdelta.vllm.allowlist import check_engine


class Qwen3ForCausalLM(nn.Module):
    """Only the class name counts."""


class FusedMoE(nn.Module):
    """Stands for any expert layer."""


def proven() -> SimpleNamespace:
    """A config like the one that the conformance suite runs."""
    return SimpleNamespace(
        model_config=SimpleNamespace(quantization=None, enforce_eager=True, enable_sleep_mode=False, use_mla=False),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            nnodes=1,
            enable_expert_parallel=False,
            enable_eplb=False,
            enable_elastic_ep=False,
            enable_dbo=False,
            enable_fault_tolerance=False,
            distributed_executor_backend="mp",
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto"),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        diffusion_config=None,
    )


def refusal(config: Any, model: nn.Module) -> str:
    with pytest.raises(DeltaError) as caught:
        check_engine(config, model)
    assert caught.value.reason is Reason.UNSUPPORTED_ENGINE
    return caught.value.detail


def test_the_proven_engine_passes() -> None:
    """No finding for what the suite runs, at one rank or several."""
    check_engine(proven(), Qwen3ForCausalLM())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.quantization", "fp8"),
        ("model_config.enforce_eager", False),
        ("model_config.enable_sleep_mode", True),
        ("model_config.use_mla", True),
        ("parallel_config.data_parallel_size", 2),
        ("parallel_config.pipeline_parallel_size", 2),
        ("parallel_config.decode_context_parallel_size", 2),
        ("parallel_config.prefill_context_parallel_size", 2),
        ("parallel_config.nnodes", 2),
        ("parallel_config.enable_expert_parallel", True),
        ("parallel_config.enable_eplb", True),
        ("parallel_config.enable_elastic_ep", True),
        ("parallel_config.distributed_executor_backend", "ray"),
        ("device_config.device_type", "tpu"),
        ("load_config.load_format", "dummy"),
        ("offload_config.uva.cpu_offload_gb", 4),
        ("offload_config.prefetch.offload_group_size", 8),
        ("lora_config", object()),
        ("speculative_config", object()),
        ("kv_transfer_config", object()),
    ],
)
def test_each_departure_is_refused_by_name(path: str, value: object) -> None:
    """`unsupported_engine: field=value`, one field at a time."""
    config: Any = proven()
    *parents, field = path.split(".")
    holder = config
    for parent in parents:
        holder = getattr(holder, parent)
    setattr(holder, field, value)
    assert f"{field.replace('device_type', 'device')}=" in refusal(config, Qwen3ForCausalLM())


def test_unknown_architectures_and_experts_are_refused() -> None:
    """A model family that was not proven, and expert layers inside one that was."""
    assert "architecture=Linear" in refusal(proven(), nn.Linear(2, 3))
    model = Qwen3ForCausalLM()
    model.add_module("experts", FusedMoE())
    assert "moe_layers=1" in refusal(proven(), model)


class CPUUnquantizedExperts:
    """A kernel that was proven, where it packs for vectors."""

    isa = "vec"


class FlashInferExperts:
    """A kernel that was not."""


class RoutedExperts(nn.Module):
    """An expert layer with its kernel."""

    def __init__(self, experts: object) -> None:
        super().__init__()
        self.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))


def with_experts(*kernels: object) -> nn.Module:
    model = Qwen3ForCausalLM()
    for number, experts in enumerate(kernels):
        model.add_module(f"experts{number}", RoutedExperts(experts))
    return model


def test_experts_are_judged_by_their_kernel() -> None:
    """A proven kernel passes; another one is named, and so is a proven class that packs otherwise or not at all."""
    check_engine(proven(), with_experts(CPUUnquantizedExperts(), CPUUnquantizedExperts()))
    found = refusal(proven(), with_experts(CPUUnquantizedExperts(), FlashInferExperts()))
    assert found.startswith("moe_kernel=FlashInferExperts: ")
    other = CPUUnquantizedExperts()
    other.isa = "neon"
    assert "moe_kernel=CPUUnquantizedExperts(neon)" in refusal(proven(), with_experts(other))
    zen = CPUUnquantizedExperts()
    setattr(zen, "_use_zentorch", True)  # noqa: B010  # vLLM sets it while loading
    assert "moe_kernel=zentorch" in refusal(proven(), with_experts(zen))
    model = with_experts(CPUUnquantizedExperts())
    model.add_module("strange", FusedMoE())
    assert "moe_layers=1" in refusal(proven(), model)
