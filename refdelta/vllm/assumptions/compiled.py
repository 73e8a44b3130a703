"""Which of vLLM's compile settings were proven to read live weights, and what is refused beside them.

A compiled graph gets its weights as inputs at every call, unless the compiler folds them into itself: inductor's
``freezing`` (which ``max_autotune`` turns on in vLLM's CPU runner) does, and a pass of somebody's may do anything.
Seen live on a tiny Qwen3: with ``TORCHINDUCTOR_FREEZING=1`` a delta succeeds, reading its writes back, and the answers
are neither the old checkpoint's nor the new one's. Read from vLLM 0.32.0 (``platforms/cpu.py``,
``compilation/wrapper.py``, ``v1/worker/cpu_model_runner.py``) and torch 2.13 (``_inductor/config.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["compile_fields"]

INDUCTOR_OPTIONS = {
    "enable_auto_functionalized_v2": False,
    "dce": True,
    "size_asserts": False,
    "nan_asserts": False,
    "epilogue_fusion": True,
    "cpp.dynamic_threads": True,
}
"""What vLLM sets for CPUs by itself, and what the live proof ran with."""

INDUCTOR_SWITCHES = (
    "freezing",
    "max_autotune",
    "max_autotune_gemm",
    "cpp_wrapper",
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
"""Process-wide switches of inductor (environment variables set some of them) that must be off."""


def compile_fields(config: Any) -> Iterator[tuple[str, object, bool]]:
    """(field, value, whether it was proven) of a `VllmConfig`'s compilation: none, or vLLM's own for CPUs."""
    compilation, eager = config.compilation_config, bool(config.model_config.enforce_eager)
    mode = str(getattr(compilation.mode, "name", compilation.mode))
    if eager:
        yield "compilation_config.mode", mode, mode == "NONE"
        return
    device = str(config.device_config.device_type)
    yield "enforce_eager", f"False on {device}", device == "cpu"
    yield "compilation_config.mode", mode, mode == "DYNAMO_TRACE_ONCE"
    yield "compilation_config.backend", compilation.backend, compilation.backend == "inductor"
    for name in ("inductor_passes", "splitting_ops", "compile_sizes"):
        value = getattr(compilation, name)
        yield f"compilation_config.{name}", value, not value
    options = dict(compilation.inductor_compile_config)
    for name in sorted(options.keys() | INDUCTOR_OPTIONS.keys()):
        value = options.get(name)
        yield f"inductor_compile_config.{name}", value, name in INDUCTOR_OPTIONS and value is INDUCTOR_OPTIONS[name]
    yield "compilation_config.custom_ops", compilation.custom_ops, compilation.custom_ops == ["none"]
    shapes = compilation.dynamic_shapes_config
    kind = str(getattr(shapes.type, "value", shapes.type))
    yield "dynamic_shapes_config.type", kind, kind == "backed"
    yield "dynamic_shapes_config.evaluate_guards", shapes.evaluate_guards, shapes.evaluate_guards is False
    yield from _process_wide()


def _process_wide() -> Iterator[tuple[str, object, bool]]:
    from torch._inductor import config as inductor
    from vllm import envs

    # Also off where VLLM_DISABLE_COMPILE_CACHE is set.
    yield "VLLM_USE_AOT_COMPILE", envs.VLLM_USE_AOT_COMPILE, envs.VLLM_USE_AOT_COMPILE is True
    for name in INDUCTOR_SWITCHES:
        value = getattr(inductor, name, None)
        yield f"torch._inductor.config.{name}", value, not value
