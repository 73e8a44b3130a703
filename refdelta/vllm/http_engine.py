"""`refdelta.vllm.calls.http`, under the name by which it is known outside."""

from __future__ import annotations

from refdelta.vllm.calls.http import HttpEngine, Timeouts

__all__ = ["HttpEngine", "Timeouts"]
