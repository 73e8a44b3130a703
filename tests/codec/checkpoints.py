"""Checkpoints for tests: states cut into shards, written byte by byte, without the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from tests.codec.support import DTYPES, State, bytes_of, change, container, random_tensor

INDEX = "model.safetensors.index.json"


def safetensors(state: State, metadata: Mapping[str, str] | None = None, padding: int = 0) -> bytes:
    """One file: tensors in the order of ``state``, so many blanks behind the header."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, t in state.items():
        code = next(code for code, dtype in DTYPES.items() if dtype == t.dtype)
        raw = bytes_of(t).tobytes()
        shape = [*t.shape[:-1], 2 * t.shape[-1]] if code == "F4" else list(t.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return container(json.dumps(header).encode() + b" " * padding, data)


def write(folder: Path, *shards: State, index: bool = True, others: Mapping[str, str] | None = None) -> Path:
    """A directory of shards ``model-1.safetensors`` and so on, with an index if asked for and other files."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number}.safetensors"
        (folder / name).write_bytes(safetensors(shard, {"format": "pt", "shard": str(number)}, padding=number))
        weight_map |= dict.fromkeys(shard, name)
    if index:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    for name, text in (others or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def every_dtype(seed: int = 1) -> dict[str, Tensor]:
    """A tensor of each dtype, not square, in an order that is no name order; a scalar, and two empty ones."""
    rng = np.random.default_rng(seed)
    state = {f"m.{code}": random_tensor(rng, code, (5, 7)) for code in reversed(DTYPES)}
    return {
        "odd": random_tensor(rng, "U8", (3,)),  # what follows is unaligned
        **state,
        "scalar": random_tensor(rng, "F32", ()),
        "none": random_tensor(rng, "BF16", (0, 3)),
        "no rows": random_tensor(rng, "F16", (4, 0)),
    }


def changed(state: State, names: Sequence[str] | None = None, seed: int = 2) -> dict[str, Tensor]:
    """``state`` with about a third of the elements of each named tensor changed; first and last always."""
    rng = np.random.default_rng(seed)
    found = dict(state)
    for name, t in state.items():
        if t.numel() and (names is None or name in names):
            at = np.flatnonzero(rng.random(t.numel()) < 0.33)
            found[name] = change(rng, t, np.union1d(at, [0, t.numel() - 1]))
    return found


def split(state: State, *names: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """``state`` in two: the named tensors, and the others."""
    return {n: t for n, t in state.items() if n in names}, {n: t for n, t in state.items() if n not in names}
