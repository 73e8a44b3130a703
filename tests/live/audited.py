"""A worker extension for audits: the suite's probe, refdelta's audit, and ways to spoil a live engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from conformance.live.probe import Probe
from refdelta.vllm.auditing.extension import AuditExtension


class Audited(Probe, AuditExtension):
    """Named in ``worker_extension_cls``."""

    rank: int
    model_runner: Any

    def native_update(self, delta: str) -> None:
        """Apply a delta with vLLM's own loader of sparse patches."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        metadata = json.loads((Path(delta) / "metadata.json").read_text())
        payload = load_file(Path(delta) / "delta.safetensors")
        patches = [
            CheckpointWeightPatch(
                name, tuple(shape), payload[f"{i}.values"].dtype, payload[f"{i}.values"], payload[f"{i}.indices"]
            )
            for i, (name, shape) in enumerate(zip(metadata["layer_names"], metadata["layer_shapes"], strict=True))
        ]
        load_checkpoint_weight_patches(self.model_runner.get_model(), patches)

    def flip(self, rank: int, param: str, position: int) -> None:
        """Flip the lowest bit of one element, on one rank."""
        if self.rank == rank:
            with torch.inference_mode():
                _words(self._parameter(param)).view(-1)[position] ^= 1

    def swap_experts(self, param: str, a: int, b: int) -> None:
        """Exchange two experts of a stacked parameter, on every rank."""
        with torch.inference_mode():
            words = _words(self._parameter(param))
            words[[a, b]] = words[[b, a]]

    def _parameter(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.model_runner.get_model().get_parameter(name).detach()
        return found


def _words(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.view(torch.int16)
