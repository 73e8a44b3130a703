"""States, hand-made files and corruptions. Nothing here uses the codec under test: bits are handled with numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

# Written out and not taken from refdelta: what safetensors 0.8 can hold.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
FLOATING = tuple(code for code in DTYPES if code.startswith(("F", "BF")))

Bytes = npt.NDArray[np.uint8]
State = Mapping[str, Tensor]


def tensor_of(raw: Bytes, code: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of ``shape`` from its bytes in row-major order."""
    if not len(raw):
        return torch.empty(shape, dtype=DTYPES[code])
    return torch.from_numpy(raw.copy()).view(DTYPES[code]).reshape(shape)


def bytes_of(t: Tensor) -> Bytes:
    """[numel, itemsize]: the bytes of every element, in row-major order of the logical shape."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize]
    flat = np.ascontiguousarray(t.detach().view(bits).numpy())
    return flat.reshape(-1).view(np.uint8).reshape(t.numel(), t.dtype.itemsize)


def random_tensor(rng: np.random.Generator, code: str, shape: tuple[int, ...]) -> Tensor:
    """Any bits at all; a bool holds 0 or 1."""
    size = math.prod(shape) * DTYPES[code].itemsize
    return tensor_of(rng.integers(0, 2 if code == "BOOL" else 256, size, dtype=np.uint8), code, shape)


def change(rng: np.random.Generator, t: Tensor, positions: npt.NDArray[np.int64]) -> Tensor:
    """A contiguous copy in which exactly ``positions`` have other bits."""
    raw = bytes_of(t).copy()
    if t.dtype == torch.bool:
        raw[positions] ^= 1
    else:
        raw[positions, 0] ^= rng.integers(1, 256, len(positions), dtype=np.uint8)
    code = next(code for code, dtype in DTYPES.items() if dtype == t.dtype)
    return tensor_of(raw.reshape(-1), code, tuple(t.shape))


def bf16(*patterns: int) -> Tensor:
    """[n] bfloat16 of bit patterns."""
    return torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def patterns(t: Tensor) -> list[int]:
    """Bit patterns, as unsigned integers."""
    return [int.from_bytes(row.tobytes(), "little") for row in bytes_of(t)]


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert found[name].dtype == want.dtype, name
        assert found[name].shape == want.shape, name
        assert np.array_equal(bytes_of(found[name]), bytes_of(want)), f"{name}: {found[name]} is not {want}"


def strided_like(t: Tensor, layout: str) -> Tensor:
    """A tensor of ``t``'s shape and bits in another memory layout."""
    if layout == "transposed" and t.dim() > 1:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced" and t.dim() > 0:
        wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1] + 1), dtype=torch.uint8)
        holder = wide.repeat_interleave(t.element_size(), -1).view(t.dtype)[..., 1::2]
        holder.view(_bits(t)).copy_(t.view(_bits(t)))
        return holder
    if layout == "offset":
        holder = torch.zeros((t.numel() + 3) * t.element_size(), dtype=torch.uint8).view(t.dtype)[3:].view(t.shape)
        holder.view(_bits(t)).copy_(t.view(_bits(t)))
        return holder
    return t.clone()


LAYOUTS = ("plain", "transposed", "sliced", "offset")


def _bits(t: Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize]


# Files by hand


def write_v2(folder: Path, layers: list[tuple[str, list[int], Tensor, Tensor]], total: int, **over: object) -> Path:
    """A delta as OpenRL writes it, from the format's description: the safetensors library and json, nothing else.

    ``layers`` are (name, shape, indices, values); ``over`` replaces metadata fields, and removes those that are None.
    """
    folder.mkdir(parents=True)
    tensors, names = {}, [name for name, *_ in layers]
    for i, (_, _, indices, values) in enumerate(layers):
        tensors[f"{i}.indices"], tensors[f"{i}.values"] = indices, values
    save_file(tensors, folder / "delta.safetensors", metadata={"layer_names": json.dumps(names)})
    changed = sum(indices.numel() for _, _, indices, _ in layers)
    metadata: dict[str, object] = {
        "base_model": "org/model",
        "created_at": "2026-01-02T03:04:05+00:00",
        "format": "sparse_delta",
        "format_version": 2,
        "kind": "sampler",
        "model_id": "run-7",
        "changed_elements": changed,
        "total_elements": total,
        "layer_names": names,
        "layer_shapes": [shape for _, shape, *_ in layers],
        "density_pct": round(100.0 * changed / total, 3) if total else 0.0,
        "timestamp": 1767322645.5,
        **over,
    }
    write_metadata(folder, {key: value for key, value in metadata.items() if value is not None})
    return folder


def write_metadata(folder: Path, metadata: object) -> None:
    (folder / "metadata.json").write_text(json.dumps(metadata))


def edit_metadata(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Load metadata.json, ``edit`` it in place, store it."""
    metadata = json.loads((folder / "metadata.json").read_text())
    edit(metadata)
    write_metadata(folder, metadata)


def container(header: object, data: bytes = b"") -> bytes:
    """A safetensors file; ``header`` is its JSON text or a value to dump."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def split_container(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Load the header of delta.safetensors, ``edit`` it in place, store it before the same data."""
    file = folder / "delta.safetensors"
    header, data = split_container(file.read_bytes())
    edit(header)
    file.write_bytes(container(header, data))
