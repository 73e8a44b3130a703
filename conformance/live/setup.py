"""How the engines of a row are started beyond their checkpoint, the one under test and the fresh ones alike."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..inputs.checkpoints import State, random_tensor
from . import compiler

ADAPTER_RANK = 8


@dataclass(frozen=True, slots=True)
class Setup:
    """Nothing but the defaults of `engine.Engine`, unless said otherwise."""

    name: str = ""
    """Beside the model in the row's name."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for vLLM's ``LLM``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""
    adapter: Path | None = None
    """A LoRA adapter: answers are asked without it, then with it."""
    private_cache: bool = False
    """Whether the engine under test and the fresh ones get compile caches of their own, empty at first."""

    def variables(self, home: Path) -> dict[str, str]:
        """The environment of engines whose files are under ``home``."""
        return {**self.environment, **(_private_caches(home) if self.private_cache else {})}


def _private_caches(home: Path) -> dict[str, str]:
    """Caches of graphs and kernels under ``home``; shared are what vLLM notes of its own model classes, which it asks
    of a child that imports everything, and the C++ compiler's work (`compiler`)."""
    root, notes = home / "vllm-cache", "modelinfos"
    shared = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm")) / notes
    shared.mkdir(parents=True, exist_ok=True)
    root.mkdir(parents=True, exist_ok=True)
    if not (root / notes).exists():
        (root / notes).symlink_to(shared)
    private = {"VLLM_CACHE_ROOT": str(root), "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor-cache")}
    return private | compiler.install(_compilers_home().name, os.environ)


@functools.cache
def _compilers_home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="conformance-compiler-")


PLAIN = Setup()

COMPILED = Setup(
    "compiled", {"enforce_eager": False}, {"TORCHDYNAMO_DISABLE": "0", "VLLM_USE_AOT_COMPILE": "1"}, private_cache=True
)
"""vLLM's own compilation for CPUs: inductor, ahead of time."""


def beside_adapter(base: State, directory: Path) -> Setup:
    """Engines with LoRA on, and an adapter for every linear layer of ``base``."""
    write_adapter(base, directory)
    arguments = {"enable_lora": True, "max_lora_rank": ADAPTER_RANK}
    return Setup("lora", arguments, adapter=directory)


def write_adapter(base: State, directory: Path) -> None:
    """An adapter as peft saves it, for every projection: no matrix of it is square or constant."""
    directory.mkdir(parents=True)
    projections = {name.removesuffix(".weight"): t.shape for name, t in base.items() if name.endswith("_proj.weight")}
    tensors: dict[str, torch.Tensor] = {}
    for module, (rows, columns) in projections.items():
        for half, shape in {"lora_A": (ADAPTER_RANK, columns), "lora_B": (rows, ADAPTER_RANK)}.items():
            name = f"base_model.model.{module}.{half}.weight"
            tensors[name] = random_tensor(name, shape)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in projections}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
