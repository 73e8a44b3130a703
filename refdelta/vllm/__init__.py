"""Everything that imports vLLM."""

from typing import Final

__all__ = ["BACKENDS"]

BACKENDS: Final = ("delta_snapshot", "refdelta")
"""The names under which `refdelta.vllm.plugin` registers the backend with vLLM."""
