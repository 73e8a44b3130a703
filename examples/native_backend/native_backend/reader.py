"""Reads a sparse_delta v2 directory with safetensors and json, and refuses what is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

Known = Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]
"""Checkpoint tensor -> shape and dtype; None for a dtype that deltas do not hold."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


class Patch(NamedTuple):
    """New values for some elements of a checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    indices: torch.Tensor
    values: torch.Tensor


class Refused(ValueError):
    """The delta is malformed, or is not for this checkpoint."""


def known_tensors(checkpoint: Path) -> Known:
    """What a checkpoint's safetensors files hold."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                entry = tensors.get_slice(name)
                found[name] = tuple(entry.get_shape()), DTYPES.get(entry.get_dtype())
    return found


def read(delta: Path, known: Known) -> list[Patch]:
    """The patches of a delta, every one checked against the checkpoint. Raises `Refused`."""
    try:
        metadata = json.loads((delta / "metadata.json").read_text(encoding="utf-8"))
        names, shapes = metadata["layer_names"], [tuple(shape) for shape in metadata["layer_shapes"]]
        with safe_open(delta / "delta.safetensors", "pt") as tensors:
            payload = {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
    except Exception as error:
        raise Refused(f"{delta} is no delta: {error}") from error
    _require((metadata.get("format"), metadata.get("format_version")) == ("sparse_delta", 2), "not sparse_delta 2")
    _require("requires" not in metadata, f"requires {metadata.get('requires')}")
    _require(len(names) == len(shapes) == len(set(names)), "layer_names and layer_shapes do not fit")
    keys = {f"{number}.{part}" for number in range(len(names)) for part in ("indices", "values")}
    _require(payload.keys() == keys, f"expected the tensors {sorted(keys)}, found {sorted(payload)}")
    patches = [
        Patch(name, shape, payload[f"{i}.indices"], payload[f"{i}.values"])
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    for patch in patches:
        _check(patch, known)
    _require(metadata["changed_elements"] == sum(len(patch.indices) for patch in patches), "changed_elements is wrong")
    return patches


def _check(patch: Patch, known: Known) -> None:
    name, shape, indices, values = patch
    _require(name in known, f"{name}: the checkpoint has no such tensor")
    _require(known[name] == (shape, values.dtype), f"{name}: {shape} {values.dtype}, expected {known[name]}")
    _require(indices.dtype in (torch.int32, torch.int64) and indices.ndim == values.ndim == 1, f"{name}: bad tensors")
    _require(len(indices) == len(values), f"{name}: {len(indices)} indices, {len(values)} values")
    at = indices.to(torch.int64)
    _require(bool((at[1:] > at[:-1]).all()), f"{name}: indices do not increase")
    _require(not len(at) or (at[0] >= 0 and at[-1] < math.prod(shape)), f"{name}: indices out of range")
    _require(not bool(values.isnan().any()), f"{name}: NaN means unchanged to vLLM's patch loader")


def _require(holds: object, text: str) -> None:
    if not holds:
        raise Refused(text)


def untied(patches: list[Patch], known: Known, tied: bool) -> Iterator[Patch]:
    """Each patch once: of a tied model the head's goes with the embedding's, which it must equal."""
    by_name = {patch.name: patch for patch in patches}
    head = "lm_head.weight"
    if not tied or head not in known:
        yield from patches
        return
    embedding = next(name for name in known if name.endswith("embed_tokens.weight"))
    one, two = by_name.get(embedding), by_name.get(head)
    _require((one is None) == (two is None), f"{head} and {embedding} are one tensor; only one of them changes")
    if one and two:
        same = torch.equal(one.indices, two.indices) and torch.equal(one.values, two.values)
        _require(same, f"{head} and {embedding} are one tensor; their changes differ")
    yield from (patch for patch in patches if patch.name != head)
