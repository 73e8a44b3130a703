"""The allow-list: the proven engine passes, and each single departure from it is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from refdelta.spec import DeltaError, Reason
from refdelta.vllm.assumptions.adapters import SETTINGS
from refdelta.vllm.assumptions.allowlist import check_engine
from refdelta.vllm.assumptions.compiled import INDUCTOR_OPTIONS


class Qwen3ForCausalLM(nn.Module):
    """Only the class name counts."""


class FusedMoE(nn.Module):
    """Stands for any expert layer."""


def proven() -> SimpleNamespace:
    """A config like the one that the conformance suite runs."""
    return SimpleNamespace(
        model_config=SimpleNamespace(quantization=None, enforce_eager=True, enable_sleep_mode=False, use_mla=False),
        compilation_config=SimpleNamespace(mode=SimpleNamespace(name="NONE")),
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
    """No finding for what the suite runs, at one rank or several, and nothing unproven."""
    assert check_engine(proven(), Qwen3ForCausalLM()) == ()


@pytest.mark.parametrize(
    ("path", "value", "unproven"),
    [
        ("device_config.device_type", "cuda", "device=cuda"),
        ("load_config.load_format", "hf", "load_format=hf"),
        ("load_config.load_format", SimpleNamespace(value="safetensors"), "load_format=safetensors"),
    ],
)
def test_what_was_never_seen_live_passes_by_name(path: str, value: object, unproven: str) -> None:
    """Let in, and named; beside a departure that is refused, only that one is named."""
    assert check_engine(departed(proven(), path, value), Qwen3ForCausalLM()) == (unproven,)
    both = departed(departed(proven(), path, value), "model_config.quantization", "fp8")
    assert refusal(both, Qwen3ForCausalLM()).startswith("quantization=fp8: ")


def test_several_unseen_fields_are_all_named() -> None:
    config = departed(departed(proven(), "device_config.device_type", "cuda"), "load_config.load_format", "hf")
    assert check_engine(config, Qwen3ForCausalLM()) == ("device=cuda", "load_format=hf")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.quantization", "fp8"),
        ("compilation_config.mode", SimpleNamespace(name="VLLM_COMPILE")),
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
        ("speculative_config", object()),
        ("kv_transfer_config", object()),
    ],
)
def test_each_departure_is_refused_by_name(path: str, value: object) -> None:
    """`unsupported_engine: field=value`, one field at a time."""
    field = path.rpartition(".")[2]
    config = departed(proven(), path, value)
    assert f"{field.replace('device_type', 'device')}=" in refusal(config, Qwen3ForCausalLM())


def compiled() -> SimpleNamespace:
    """As vLLM makes it for a CPU where ``enforce_eager`` is off."""
    config = proven()
    config.model_config.enforce_eager = False
    config.compilation_config = SimpleNamespace(
        mode=SimpleNamespace(name="DYNAMO_TRACE_ONCE"),
        backend="inductor",
        custom_ops=["none"],
        inductor_passes={},
        splitting_ops=[],
        compile_sizes=None,
        inductor_compile_config=dict(INDUCTOR_OPTIONS),
        dynamic_shapes_config=SimpleNamespace(type=SimpleNamespace(value="backed"), evaluate_guards=False),
    )
    return config


def departed(config: SimpleNamespace, path: str, value: object) -> SimpleNamespace:
    """``config`` with one field, ``a.b.c``, set."""
    *parents, field = path.split(".")
    holder: Any = config
    for parent in parents:
        holder = getattr(holder, parent)
    setattr(holder, field, value)
    return config


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("mode", SimpleNamespace(name="VLLM_COMPILE"), "compilation_config.mode=VLLM_COMPILE"),
        ("mode", SimpleNamespace(name="NONE"), "compilation_config.mode=NONE"),
        ("backend", "my.backend", "compilation_config.backend=my.backend"),
        ("inductor_passes", {"post_grad_custom_post_pass": "my.pass"}, "compilation_config.inductor_passes="),
        ("splitting_ops", ["vllm.attention"], "compilation_config.splitting_ops="),
        ("custom_ops", ["all"], "compilation_config.custom_ops="),
        ("compile_sizes", [8], "compilation_config.compile_sizes="),
        ("inductor_compile_config", {**INDUCTOR_OPTIONS, "freezing": True}, "inductor_compile_config.freezing=True"),
        ("inductor_compile_config", {**INDUCTOR_OPTIONS, "max_autotune": False}, "config.max_autotune=False"),
        ("inductor_compile_config", {**INDUCTOR_OPTIONS, "dce": 1}, "inductor_compile_config.dce=1"),
        ("inductor_compile_config", {}, "inductor_compile_config.epilogue_fusion=None"),
        ("dynamic_shapes_config.type", "unbacked", "dynamic_shapes_config.type=unbacked"),
        ("dynamic_shapes_config.evaluate_guards", True, "dynamic_shapes_config.evaluate_guards=True"),
    ],
)
def test_each_compile_setting_that_was_not_proven_is_refused(path: str, value: object, named: str) -> None:
    """vLLM's own settings for a CPU pass; each departure from them is named."""
    check_engine(compiled(), Qwen3ForCausalLM())
    found = refusal(departed(compiled(), f"compilation_config.{path}", value), Qwen3ForCausalLM())
    assert named in found


def test_compilation_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; where the process turns on inductor's freezing; where graphs are not compiled ahead of time."""
    gpu = departed(compiled(), "device_config.device_type", "cuda")
    assert refusal(gpu, Qwen3ForCausalLM()).startswith("enforce_eager=False on cuda:")
    with monkeypatch.context() as patch:
        patch.setattr("torch._inductor.config.freezing", True)
        assert refusal(compiled(), Qwen3ForCausalLM()).startswith("torch._inductor.config.freezing=True:")
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    assert refusal(compiled(), Qwen3ForCausalLM()).startswith("VLLM_USE_AOT_COMPILE=False:")


def with_lora() -> SimpleNamespace:
    """As ``enable_lora=True`` makes it."""
    return departed(proven(), "lora_config", SimpleNamespace(**SETTINGS, max_loras=1, max_lora_rank=16))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("lora_config.fully_sharded_loras", True, "lora_config.fully_sharded_loras=True"),
        ("lora_config.target_modules", ["o_proj"], "lora_config.target_modules=['o_proj']"),
        ("lora_config.lora_dtype", torch.float16, "lora_config.lora_dtype=torch.float16"),
        ("lora_config.enable_moe_shared_loras", True, "lora_config.enable_moe_shared_loras=True"),
        ("device_config.device_type", "cuda", "lora_config=on cuda"),
    ],
)
def test_each_lora_setting_that_was_not_proven_is_refused(path: str, value: object, named: str) -> None:
    """The defaults pass."""
    check_engine(departed(with_lora(), "lora_config.lora_dtype", torch.bfloat16), Qwen3ForCausalLM())
    assert refusal(departed(with_lora(), path, value), Qwen3ForCausalLM()).startswith(named)


class Qwen3MoeForCausalLM(nn.Module):
    """Proven, but not beside an adapter."""


def test_lora_is_refused_where_it_was_not_run() -> None:
    """On another architecture, and in a compiled engine."""
    check_engine(proven(), Qwen3MoeForCausalLM())
    assert "lora_config=on Qwen3MoeForCausalLM" in refusal(with_lora(), Qwen3MoeForCausalLM())
    both = departed(compiled(), "lora_config", with_lora().lora_config)
    assert "lora_config=with enforce_eager=False" in refusal(both, Qwen3ForCausalLM())


def test_unknown_architectures_and_experts_are_refused() -> None:
    """A model family that was not proven, and expert layers inside one that was."""
    assert "architecture=Linear" in refusal(proven(), nn.Linear(2, 3))
    model = Qwen3ForCausalLM()
    model.add_module("experts", FusedMoE())
    assert "moe_layers=1" in refusal(proven(), model)


class CPUUnquantizedExperts:
    """A kernel that was proven, where it packs for vectors."""

    isa = "vec"


class X86CPUUnquantizedExperts:
    """The one that vLLM takes on a CPU with AMX."""

    isa = "amx"


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
    check_engine(proven(), with_experts(CPUUnquantizedExperts(), X86CPUUnquantizedExperts()))
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
