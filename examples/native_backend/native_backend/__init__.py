"""A vLLM plugin: the weight-transfer backend `native`, which hands sparse deltas to vLLM's own patch loader.

    refdelta conformance --engine vllm --backend native --plugin native_backend:register \\
        --update-info '{"delta": "{path}"}'

from this directory, or anywhere once it is installed. Nothing of refdelta is used.
"""

from __future__ import annotations

CAPABILITIES = {"sharding", "tied", "buffers"}
"""Not offered: `nan_values` (to vLLM's patch loader NaN means unchanged), `rollback` (it undoes nothing, and ranks that
raise leave vLLM's RPC channel out of step), `experts` (on CPU they are repacked after loading, and the loader would
write to the wrong place), `reasons`, `lineage`, `per_rank`, `http` (the module is named, not an entry point here)."""


def register() -> None:
    """vLLM's entry point, called in every process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "native" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("native", "native_backend.backend", "NativeEngine")
