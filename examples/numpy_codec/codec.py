"""A codec of sparse_delta v2 in numpy and the standard library: no refdelta, no torch.

    refdelta conformance --engine codec:CODEC        from this directory

It reads and writes every dtype but F4, canonically, and declines what it does not declare in `capabilities`. The suite
hands it torch tensors, whose memory it looks at through numpy, as unsigned integers: bits, never numbers.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[Any]

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""torch's name -> the code in a safetensors file."""
WIDTH = {
    code: {"BOOL": 1, "C64": 8, "BF16": 2}.get(code) or max(8, int(code[1:].partition("_")[0])) // 8
    for code in CODES.values()
}
OTHER = "non_floating_values"
"""The extension that values of integers, bools and complex numbers need."""


class Refused(ValueError):
    """The delta, or the states, are not what they should be; nothing was changed."""


def need(holds: object, text: str) -> None:
    """Refuse unless it holds."""
    if not holds:
        raise Refused(text)


class Memory(NamedTuple):
    """A tensor's memory."""

    code: str
    shape: tuple[int, ...]
    bits: Bits
    """Its elements as unsigned integers, flat and row-major; writing them writes the tensor."""


class Patch(NamedTuple):
    """The change of one tensor."""

    name: str
    code: str
    shape: tuple[int, ...]
    positions: NDArray[np.int64]
    bits: Bits


def memory(name: str, tensor: Any) -> Memory:
    """The memory of a torch tensor on the CPU, without a copy."""
    code = CODES.get(str(tensor.dtype).removeprefix("torch."))
    need(code, f"{name}: dtype {tensor.dtype} is not supported")
    need(tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_conj(), f"{name}: not plain memory")
    assert code is not None
    size = tensor.numel() * WIDTH[code]
    raw = (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else bytearray()
    return Memory(code, tuple(tensor.shape), np.frombuffer(raw, f"<u{WIDTH[code]}"))


# -- writing -----------------------------------------------------------------------------------------------------------


def differences(base: Mapping[str, Memory], target: Mapping[str, Memory]) -> list[Patch]:
    """Exactly the positions whose bits differ, in the order of names."""
    need(base.keys() == target.keys(), "the states hold different tensors")
    found = []
    for name in sorted(base):
        old, new = base[name], target[name]
        need(old[:2] == new[:2], f"{name}: {old[:2]} against {new[:2]}")
        at = np.flatnonzero(old.bits != new.bits).astype(np.int64)
        if len(at):
            found.append(Patch(name, new.code, new.shape, at, new.bits[at]))
    return found


def payload(patches: list[Patch]) -> bytes:
    """`delta.safetensors`: header, then positions and values of each layer without gaps."""
    names = json.dumps([patch.name for patch in patches], ensure_ascii=False, separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": {"layer_names": names}}
    parts: list[bytes] = []
    offset = 0
    for number, patch in enumerate(patches):
        wide = math.prod(patch.shape) > 2**31
        positions = patch.positions.astype("<i8" if wide else "<i4").tobytes()
        for key, code, data in (
            ("indices", "I64" if wide else "I32", positions),
            ("values", patch.code, patch.bits.tobytes()),
        ):
            end = offset + len(data)
            spec = {"dtype": code, "shape": [len(patch.positions)], "data_offsets": [offset, end]}
            header[f"{number}.{key}"] = spec
            parts.append(data)
            offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def metadata_of(patches: list[Patch], total: int) -> dict[str, Any]:
    """`metadata.json`."""
    changed = sum(len(patch.positions) for patch in patches)
    found: dict[str, Any] = {
        "format": "sparse_delta",
        "format_version": 2,
        "layer_names": [patch.name for patch in patches],
        "layer_shapes": [list(patch.shape) for patch in patches],
        "changed_elements": changed,
        "total_elements": total,
        "density_pct": density(changed, total),
    }
    return found | (
        {"requires": [OTHER]} if any(patch.code[0] not in "FB" or patch.code == "BOOL" for patch in patches) else {}
    )


def density(changed: int, total: int) -> float:
    """Per cent, to three decimals."""
    return round(100 * changed / total, 3) if total else 0.0


# -- reading: strict, and whole before anything is written ------------------------------------------------------------


def strict_json(raw: bytes) -> Any:
    """JSON without doubled keys and without numbers that are not finite."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(pairs) == len(dict(pairs)), "a key is there twice")
        return dict(pairs)

    def finite(text: str) -> float:
        need(math.isfinite(float(text)), f"{text} is not finite")
        return float(text)

    try:
        return json.loads(raw.decode(), object_pairs_hook=once, parse_constant=finite, parse_float=finite)
    except RecursionError as error:
        raise Refused("too deep") from error


def count(value: object) -> bool:
    """A whole number, and no bool."""
    return type(value) is int and 0 <= value < 2**63


def texts(value: object) -> bool:
    """A list of texts that UTF-8 can hold."""
    return isinstance(value, list) and all(isinstance(text, str) and text.encode() is not None for text in value)


def read_metadata(raw: bytes) -> dict[str, Any]:
    """What `metadata.json` says, every key checked."""
    need(len(raw) <= 100_000_000, "metadata.json is too long")
    found: Any = strict_json(raw)
    need(isinstance(found, dict), "the metadata is no object")
    need(found.get("format") == "sparse_delta", "not a sparse_delta")
    version = found.get("format_version")
    need(type(version) is int and version == 2, "another version")
    names, shapes = found.get("layer_names"), found.get("layer_shapes")
    need(texts(names) and all(names) and len(set(names)) == len(names), "layer_names")
    need(isinstance(shapes, list) and len(shapes) == len(names), "layer_shapes")
    need(all(isinstance(shape, list) and all(map(count, shape)) for shape in shapes), "layer_shapes")
    requires = found.get("requires") or []
    need(texts(requires) and set(requires) <= {OTHER}, f"requires {requires}")
    for key in ("base_model", "model_id", "kind", "created_at"):
        need(isinstance(found.get(key), str | None), key)
    stamp = found.get("timestamp")
    need(isinstance(stamp, int | float | None) and not isinstance(stamp, bool), "timestamp")
    for key in ("changed_elements", "total_elements"):
        need(count(found.get(key)), key)
    need(isinstance(found.get("density_pct"), int | float), "density_pct")
    return dict(found)


def read_payload(raw: bytes) -> tuple[dict[str, tuple[str, list[int], bytes]], dict[str, str]]:
    """Key -> (dtype, shape, data), and the header's own metadata."""
    need(len(raw) >= 8, "no header")
    (length,) = struct.unpack("<Q", raw[:8])
    start = 8 + length
    need(length <= 100_000_000 and start <= len(raw) and raw[8:9] == b"{", "no header")
    header = strict_json(raw[8:start])
    metadata = header.pop("__metadata__", {})
    need(isinstance(metadata, dict) and texts([*metadata.values()]), "__metadata__")
    found, offset = {}, 0
    for key, spec in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        need(spec.keys() == {"dtype", "shape", "data_offsets"}, f"{key}: {sorted(spec)}")
        code, shape, (begin, end) = spec["dtype"], spec["shape"], spec["data_offsets"]
        need(code in WIDTH and all(map(count, shape)), f"{key}: {code} {shape}")
        need(begin == offset and end - begin == math.prod(shape) * WIDTH[code], f"{key}: offsets")
        found[key] = code, shape, raw[start + begin : start + end]
        offset = end
    need(start + offset == len(raw), "bytes after the last tensor")
    return found, metadata


def read(delta: Path) -> list[Patch]:
    """The patches of a delta; Refused where anything is wrong with it."""
    metadata = read_metadata((delta / "metadata.json").read_bytes())
    tensors, header = read_payload((delta / "delta.safetensors").read_bytes())
    names, shapes = metadata["layer_names"], metadata["layer_shapes"]
    need("layer_names" not in header or strict_json(header["layer_names"].encode()) == names, "other layer_names")
    keys = {f"{number}.{part}" for number in range(len(names)) for part in ("indices", "values")}
    need(tensors.keys() == keys, f"keys {sorted(tensors)}")
    patches = [
        read_patch(name, shape, tensors[f"{number}.indices"], tensors[f"{number}.values"])
        for number, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    changed, total = sum(len(patch.positions) for patch in patches), metadata["total_elements"]
    need(metadata["changed_elements"] == changed, "changed_elements")
    need(total >= sum(math.prod(patch.shape) for patch in patches), "total_elements")
    said = round(1000 * metadata["density_pct"])  # half way between two of them either will do
    need(metadata["density_pct"] == said / 1000, "density_pct: more than three decimals")
    need(2 * abs(said * max(total, 1) - 100_000 * changed) <= total, "density_pct")
    others = [patch.name for patch in patches if patch.code[0] not in "FB" or patch.code == "BOOL"]
    need(not others or OTHER in (metadata.get("requires") or []), f"{others} without {OTHER}")
    return patches


def read_patch(
    name: str, shape: list[int], positions: tuple[str, list[int], bytes], values: tuple[str, list[int], bytes]
) -> Patch:
    """One layer."""
    need(positions[0] in ("I32", "I64"), f"{name}: positions of {positions[0]}")
    need(len(positions[1]) == 1 and positions[1] == values[1], f"{name}: {positions[1]} positions, {values[1]} values")
    at = np.frombuffer(positions[2], "<i4" if positions[0] == "I32" else "<i8").astype(np.int64)
    need((np.diff(at) > 0).all(), f"{name}: positions out of order")
    need(not len(at) or (at[0] >= 0 and int(at[-1]) < math.prod(shape)), f"{name}: a position out of range")
    return Patch(name, values[0], tuple(shape), at, np.frombuffer(values[2], f"<u{WIDTH[values[0]]}"))


# -- the protocol of the suite ---------------------------------------------------------------------------------------


class Codec:
    """What the suite calls."""

    name = "numpy"
    version = "1.0"
    capabilities = frozenset(
        {"float64", "float8", "non_floating", "nan_values", "i64_positions", "canonical", "autograd", "keeps_existing"}
    )

    def encode(self, base: Mapping[str, Any], target: Mapping[str, Any], out: Path) -> None:
        """Write the delta from `base` to `target` into the directory `out`."""
        old, new = ({name: memory(name, tensor) for name, tensor in state.items()} for state in (base, target))
        patches = differences(old, new)
        total = sum(len(held.bits) for held in new.values())
        out.mkdir(parents=True)
        (out / "delta.safetensors").write_bytes(payload(patches))
        text = json.dumps(metadata_of(patches, total), ensure_ascii=False)
        (out / "metadata.json").write_text(text, encoding="utf-8")

    def apply(self, delta: Path, weights: MutableMapping[str, Any]) -> None:
        """Apply the delta to `weights` in place; raises before the first write."""
        patches = read(delta)
        held = {patch.name: memory(patch.name, weights[patch.name]) for patch in patches}
        for patch in patches:
            need(held[patch.name][:2] == (patch.code, patch.shape), f"{patch.name}: another dtype or shape")
        for patch in patches:
            held[patch.name].bits[patch.positions] = patch.bits


CODEC = Codec()
