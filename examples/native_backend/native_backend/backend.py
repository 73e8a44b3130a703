"""The backend: a delta is read and checked while it is staged, and written when the update is finished."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from native_backend.reader import Patch, Refused, known_tensors, read, untied


@dataclass
class NativeInitInfo(WeightTransferInitInfo):
    """Nothing to connect."""


@dataclass
class NativeUpdateInfo(WeightTransferUpdateInfo):
    """Where the delta is, on a file system that every rank reads."""

    delta: str


class NativeEngine(WeightTransferEngine[NativeInitInfo, NativeUpdateInfo]):
    """One rank's side."""

    init_info_cls = NativeInitInfo
    update_info_cls = NativeUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        text = vllm_config.model_config.hf_config.get_text_config()
        if any(getattr(text, field, None) for field in ("num_experts", "num_local_experts")):
            raise Refused("mixture-of-experts models are not offered: vLLM rearranges experts after loading")
        self.tied = _is_tied(model)
        self.known = known_tensors(Path(vllm_config.model_config.model))
        self.staged: list[list[Patch]] = []

    def init_transfer_engine(self, init_info: NativeInitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Forget what was staged."""
        self.staged = []

    def receive_weights(self, update_info: NativeUpdateInfo) -> None:
        """Read and check; nothing is written."""
        self.staged.append(list(untied(read(Path(update_info.delta), self.known), self.known, self.tied)))

    def finish_weight_update(self) -> None:
        """Write everything. What fails half-way is not undone."""
        staged, self.staged = self.staged, []
        for patches in staged:
            changed = [patch for patch in patches if len(patch.indices)]
            load_checkpoint_weight_patches(
                self.model,
                [CheckpointWeightPatch(p.name, p.shape, p.values.dtype, p.values, p.indices) for p in changed],
            )

    def shutdown(self) -> None:
        """Nothing is held."""


def _is_tied(model: torch.nn.Module) -> bool:
    """Whether head and embedding share memory; vLLM decides it by the checkpoint's bytes, not by the config alone."""
    places = {name: weight.data_ptr() for name, weight in model.named_parameters(remove_duplicate=False)}
    heads = {place for name, place in places.items() if name.endswith("lm_head.weight")}
    return bool(heads & {place for name, place in places.items() if name.endswith("embed_tokens.weight")})
