"""Layout maps from vLLM's own loader, under the name by which they are known outside."""

from __future__ import annotations

from refdelta.vllm.tracing.recorder import runtime_aliases, runtime_tensors, trace_model
from refdelta.vllm.tracing.tracer import trace_config, trace_config_ranks

__all__ = ["runtime_aliases", "runtime_tensors", "trace_config", "trace_config_ranks", "trace_model"]
