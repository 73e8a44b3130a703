"""vLLM's entry point (``vllm.general_plugins``), called in the front end, the engine core and every worker."""

from __future__ import annotations

__all__ = ["register"]

ENGINE = ("refdelta.vllm.backend", "DeltaSnapshotEngine")


def register() -> None:
    """Register the backend as ``delta_snapshot`` and ``refdelta``, and keep CPU weights unpacked for its engines.

    Where another plugin has taken ``delta_snapshot`` first, only ``refdelta`` is registered, with a warning.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.logger import init_logger

    from refdelta.vllm import BACKENDS
    from refdelta.vllm.assumptions.linears import keep_cpu_weights_unpacked

    for name in BACKENDS:
        try:
            WeightTransferEngineFactory.register_engine(name, *ENGINE)
        except ValueError:
            if _is_ours(name):
                continue  # vLLM may load plugins twice in one process
            init_logger("vllm.refdelta").warning(
                "refdelta: the backend name %r is already taken by another plugin; use backend=%r", name, BACKENDS[-1]
            )
    keep_cpu_weights_unpacked()


def _is_ours(name: str) -> bool:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    found = WeightTransferEngineFactory._registry[name]()
    return (found.__module__, found.__name__) == ENGINE
