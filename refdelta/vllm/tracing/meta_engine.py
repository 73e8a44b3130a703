"""vLLM's model of any rank of any size, built from a config alone: no weights, no other ranks, no devices.

Parameters live on the meta device and the process group is torch's fake one, so a single process stands for one rank
of many. Every assumption about vLLM that this needs is here. Read from vLLM 0.32.0: ``distributed/parallel_state.py``,
``model_executor/model_loader/utils.py``, ``model_executor/layers/fused_moe/expert_map_manager.py``.

Building leaves vLLM's and torch's distributed state of the process changed: `refdelta.vllm.tracing.child` calls it, in
a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from refdelta.spec import DeltaError, Reason

__all__ = ["ENVIRONMENT", "MetaRank", "Sizes", "engine_config", "patch_vllm"]

ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""What the process that builds models has in its environment before it imports vLLM."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How an engine is spread: its tensor- and pipeline-parallel sizes, and whether experts are dealt out whole."""

    tp_size: int = 1
    pp_size: int = 1
    expert_parallel: bool = False


def patch_vllm() -> None:
    """Replace what would talk to other ranks, once per process."""
    import torch.distributed as dist
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.model_executor.layers.fused_moe import expert_map_manager
    from vllm.platforms import current_platform

    new_group, expert_map = dist.new_group, expert_map_manager.determine_expert_map

    def fake_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake")

    def expert_map_on_cpu(*args: Any, **kwargs: Any) -> Any:
        # Loading asks the map which experts are local, and meta tensors have no values.
        with torch.device("cpu"):
            return expert_map(*args, **kwargs)

    dist.new_group = fake_group
    parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * dist.get_world_size(group)
    shm_broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *args, **kwargs: None)
    expert_map_manager.determine_expert_map = expert_map_on_cpu
    base = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    type(current_platform).get_device_communicator_cls = classmethod(lambda cls: base)


def engine_config(config_dir: Path, sizes: Sizes, dtype: torch.dtype) -> Any:
    """vLLM's own configuration for a directory that holds a config.json; raises `DeltaError` where vLLM refuses it."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        return EngineArgs(
            model=str(config_dir),
            dtype=str(dtype).removeprefix("torch."),
            tensor_parallel_size=sizes.tp_size,
            pipeline_parallel_size=sizes.pp_size,
            enable_expert_parallel=sizes.expert_parallel,
            distributed_executor_backend="mp",
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            # Small, so that nothing but parameters takes memory or time.
            max_model_len=16,
            max_num_batched_tokens=16,
            max_num_seqs=1,
        ).create_engine_config()
    except Exception as error:
        raise _refused("the config", error) from error


class MetaRank:
    """The model of one rank of the engine, as a context: vLLM's distributed state is torn down at the end."""

    def __init__(self, config: Any, sizes: Sizes, rank: int) -> None:
        self._config, self._sizes, self._rank = config, sizes, rank

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        """Raises `DeltaError` (``unsupported_engine``) where vLLM cannot build this rank."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state

        with set_current_vllm_config(self._config):
            try:
                yield self._build()
            finally:
                parallel_state.destroy_model_parallel()
                parallel_state.destroy_distributed_environment()

    def _build(self) -> nn.Module:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from vllm.distributed import parallel_state
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        world = self._sizes.tp_size * self._sizes.pp_size
        # The static forward context maps layer names to layers; a second rank's layers would be duplicates.
        self._config.compilation_config.static_forward_context.clear()
        self._config.compilation_config.static_all_moe_layers.clear()
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=self._rank, world_size=world)
            # local_rank only chooses a device, and there is none.
            parallel_state.init_distributed_environment(world, self._rank, "env://", 0, "fake")
            parallel_state.initialize_model_parallel(self._sizes.tp_size, self._sizes.pp_size, backend="fake")
            with set_default_torch_dtype(self._config.model_config.dtype), torch.device("meta"):
                model: nn.Module = initialize_model(self._config)
        except Exception as error:
            raise _refused(f"rank {self._rank} of {world}", error) from error
        return model


def _refused(what: str, error: Exception) -> DeltaError:
    from refdelta.vllm.assumptions.versions import installed_version

    detail = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return DeltaError(Reason.UNSUPPORTED_ENGINE, f"layout: vLLM {installed_version()} refuses {what}: {detail}")
