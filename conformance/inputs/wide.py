"""Checkpoints that are large where live faults hide: in numbers of two digits, in blocks, in files, in dtypes.

``qwen3-wide`` has twelve layers and twelve experts, one key-value head (so that two ranks share it), four files, and an
embedding of which each of two ranks holds more than 2^19 elements. ``qwen3-float32`` has F32 weights, two files, and an
embedding of more than 2^24 elements, where positions are no longer what float32 holds.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ..oracle import from_bits
from .checkpoints import EMBEDDING, HEAD, INDEX_FILE, Checkpoint, State, load, random_tensor
from .sizes import generator

LAYERS = EXPERTS = 12


def _wide() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=11_003,
        hidden_size=96,
        intermediate_size=112,
        moe_intermediate_size=80,
        num_hidden_layers=LAYERS,
        mlp_only_layers=[1, 11],
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        dtype=torch.bfloat16,
    )
    return Qwen3MoeForCausalLM(config)


def _float32() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=211_003,
        hidden_size=80,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config)


_BUILDERS: Mapping[str, tuple[Callable[[], Any], torch.dtype, int]] = {
    "qwen3-wide": (_wide, torch.bfloat16, 4),
    "qwen3-float32": (_float32, torch.float32, 2),
}
"""Name -> model, dtype, files."""


def make(name: str, directory: Path) -> Checkpoint:
    """Write the checkpoint to ``directory``, the same bytes every time."""
    build, dtype, files = _BUILDERS[name]
    with tempfile.TemporaryDirectory() as scratch:
        build().to(dtype).save_pretrained(scratch)
        shapes = {tensor: t.shape for tensor, t in load(Path(scratch)).items()}
        directory.mkdir(parents=True)
        shutil.copy(Path(scratch) / "config.json", directory / "config.json")
    _save({tensor: _random(tensor, shape, dtype) for tensor, shape in shapes.items()}, directory, files)
    return Checkpoint(name, directory)


def _random(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """As the suite's other checkpoints; in F32 the lower half of the bits is drawn, too, so that rounding shows."""
    rounded = random_tensor(name, shape)
    if dtype != torch.float32:
        return rounded
    low = generator(int.from_bytes(name.encode()[-4:], "big")).integers(1, 2**16, rounded.numel(), dtype=np.uint32)
    bits = (rounded.view(torch.int16).numpy().reshape(-1).astype(np.uint16).astype(np.uint32) << 16) | low
    return from_bits(bits, "F32", shape)


def _save(state: State, directory: Path, files: int) -> None:
    """Tensors by turns, so that neighbours lie in different files."""
    shards = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
    homes = {name: shards[number % files] for number, name in enumerate(sorted(state))}
    for shard in shards:
        own = {name: state[name].contiguous() for name in sorted(state) if homes[name] == shard}
        save_file(own, directory / shard, metadata={"format": "pt"})
    size = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": homes}
    (directory / INDEX_FILE).write_text(json.dumps(index))


def numbers(state: Mapping[str, object], part: str) -> set[int]:
    """The numbers of the layers or experts of a checkpoint: ``part`` is ``layers`` or ``experts``."""
    return {int(found) for name in state for found in re.findall(rf"\b{part}\.(\d+)\.", name)}


def vocabulary(state: Mapping[str, object]) -> list[str]:
    """The largest tensors: embedding and head."""
    return [name for name in state if name.endswith((EMBEDDING, HEAD))]
