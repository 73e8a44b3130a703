"""`refdelta.vllm.tracing.recorder`, under the name by which it is known outside."""

from __future__ import annotations

from refdelta.vllm.tracing.recorder import (
    runtime_aliases,
    runtime_tensors,
    trace_config,
    trace_config_ranks,
    trace_model,
)

__all__ = ["runtime_aliases", "runtime_tensors", "trace_config", "trace_config_ranks", "trace_model"]
