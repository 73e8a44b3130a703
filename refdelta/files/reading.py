"""Reading delta directories. Everything is checked before a `Delta` exists."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from refdelta.codec.arguments import check_path
from refdelta.codec.composition import compose as compose
from refdelta.codec.composition import join as join
from refdelta.files.container import Entry, Header, read_header, shown, strict_json
from refdelta.files.opening import Folder, read_exactly, size_of
from refdelta.spec import (
    DELTA_FILE,
    DTYPES,
    EXTENSIONS,
    FORMAT,
    FORMAT_KEYS,
    FORMAT_VERSION,
    MAX_ELEMENTS,
    MAX_HEADER_BYTES,
    METADATA_FILE,
    NON_FLOATING_VALUES,
    Delta,
    DeltaError,
    Lineage,
    Reason,
    TensorPatch,
    check_extra,
    check_name,
    check_shape,
    density_pct,
    is_density_pct,
)
from refdelta.values import is_int

__all__ = ["read_delta"]

_PACKED_KEYS: Final = frozenset({"delta.indices_flat", "delta.values_flat", "delta.layer_lengths"})


def read_delta(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Delta:
    """The delta in directory ``path``, its tensors on ``device``; layers keep the order of the file.

    Everything that the format promises is checked, and the header before any tensor is made. Raises `DeltaError`.
    """
    check_path("path", path)
    while True:
        with Folder(Path(path)) as folder:
            try:
                return _read(folder, device)
            except DeltaError:
                if folder.is_current():
                    raise


def _read(folder: Folder, device: str | torch.device) -> Delta:
    metadata = _read_metadata(folder)
    with folder.open(DELTA_FILE) as file:
        header = read_header(file)
        layers = _check_layers(metadata, header)
        _check_counts(metadata, layers)
        tensors = _read_tensors(file, header, metadata.lineage)
    patches = []
    for number, layer in enumerate(layers):
        indices, values = tensors[f"{number}.indices"], tensors[f"{number}.values"]
        patch = TensorPatch(layer.name, layer.shape, indices, values)
        patch.check_indices()
        patches.append(patch.to(device))
    return Delta(tuple(patches), metadata.total_elements, metadata.lineage, metadata.extra)


@dataclass(frozen=True, slots=True)
class _Metadata:
    """metadata.json with its types checked."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    changed_elements: int
    total_elements: int
    density_pct: float
    requires: frozenset[str]
    lineage: Lineage | None
    extra: Mapping[str, object]


def _read_metadata(folder: Folder) -> _Metadata:
    with folder.open(METADATA_FILE) as file:
        size = size_of(file)
        if size > MAX_HEADER_BYTES:
            raise DeltaError(Reason.BAD_METADATA, f"{METADATA_FILE} has {size} bytes, more than {MAX_HEADER_BYTES}")
        raw = strict_json(bytes(read_exactly(file, size).numpy()), Reason.BAD_METADATA, METADATA_FILE)
    if not isinstance(raw, dict):
        raise DeltaError(Reason.BAD_METADATA, f"{METADATA_FILE}: expected an object, found {shown(raw)}")
    if raw.get("format") != FORMAT:
        raise DeltaError(Reason.UNSUPPORTED_FORMAT, f"format: expected {FORMAT}, found {shown(raw.get('format'))}")
    _check_version(raw.get("format_version"), folder)
    names = _check_names(_typed(raw, "layer_names", list, "a list"))
    shapes = _typed(raw, "layer_shapes", list, "a list")
    if len(names) != len(shapes):
        raise DeltaError(Reason.BAD_METADATA, f"{len(names)} layer_names, {len(shapes)} layer_shapes")
    return _Metadata(
        names=names,
        shapes=tuple(check_shape(shape, name) for name, shape in zip(names, shapes, strict=True)),
        changed_elements=_typed(raw, "changed_elements", int, "an integer"),
        total_elements=_typed(raw, "total_elements", int, "an integer"),
        density_pct=_typed(raw, "density_pct", (int, float), "a number"),
        requires=_check_requires(raw.get("requires")),
        lineage=None if raw.get("lineage") is None else Lineage.from_json(raw["lineage"]),
        extra=check_extra({key: value for key, value in raw.items() if key not in FORMAT_KEYS}),
    )


def _check_version(version: object, folder: Folder) -> None:
    if is_int(version) and version == FORMAT_VERSION:
        return
    try:
        with folder.open(DELTA_FILE) as file:
            _check_not_legacy(read_header(file).entries)
    except DeltaError as error:
        if error.reason is Reason.LEGACY_LAYOUT:
            raise
    raise DeltaError(Reason.UNSUPPORTED_VERSION, f"format_version: expected {FORMAT_VERSION}, found {shown(version)}")


def _check_not_legacy(keys: Mapping[str, object]) -> None:
    """Refuse payloads packed over all layers, and those keyed by tensor name."""
    if packed := sorted(_PACKED_KEYS & keys.keys()):
        raise DeltaError(Reason.LEGACY_LAYOUT, f"packed payload of an earlier version: {', '.join(packed)}")
    pairs = [key for key in keys if key.endswith((".indices", ".values"))]
    if pairs and len(pairs) == len(keys) and not any(key.split(".", 1)[0].isdecimal() for key in pairs):
        raise DeltaError(Reason.LEGACY_LAYOUT, f"payload of an earlier version, keyed by tensor name: {pairs[0]}")


def _check_names(names: Sequence[object]) -> tuple[str, ...]:
    seen: dict[str, None] = {}
    for name in map(check_name, names):
        if name in seen:
            raise DeltaError(Reason.DUPLICATE_NAME, "twice in layer_names", name)
        seen[name] = None
    return tuple(seen)


def _check_requires(value: object) -> frozenset[str]:
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise DeltaError(Reason.BAD_METADATA, f"requires: expected a list of strings, found {shown(value)}")
    if unknown := sorted(set(value) - EXTENSIONS):
        raise DeltaError(Reason.UNSUPPORTED_EXTENSION, f"requires: {', '.join(unknown)}")
    return frozenset(value)


def _typed(raw: Mapping[str, object], key: str, types: type | tuple[type, ...], expected: str) -> Any:
    value = raw.get(key)
    if not isinstance(value, types) or isinstance(value, bool):
        found = shown(value) if key in raw else "nothing"
        raise DeltaError(Reason.BAD_METADATA, f"{key}: expected {expected}, found {found}")
    return value


def _read_tensors(file: FileIO, header: Header, lineage: Lineage | None) -> dict[str, Tensor]:
    """Every tensor of the file, in memory of its own; their SHA-256 is that of the lineage, if it has one."""
    sha = hashlib.sha256(header.raw)
    expected = lineage.payload_sha256 if lineage else None
    tensors = {}
    for key, entry in header.entries.items():
        data = read_exactly(file, entry.end - entry.start)
        if expected is not None:
            sha.update(data.numpy().data)
        tensors[key] = data.view(DTYPES[entry.dtype])
    if expected not in (None, sha.hexdigest()):
        raise DeltaError(Reason.PAYLOAD_MISMATCH, f"SHA-256: expected {expected}, found {sha.hexdigest()}")
    return tensors


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer, as the metadata and the header declare it."""

    name: str
    shape: tuple[int, ...]
    changed: int


def _check_layers(metadata: _Metadata, header: Header) -> list[_Layer]:
    """The layers, when the payload holds exactly what the metadata declares."""
    _check_not_legacy(header.entries)
    expected = {f"{i}.{part}" for i in range(len(metadata.names)) for part in ("indices", "values")}
    if expected != header.entries.keys():
        missing, surplus = (
            sorted(a - b)[:4] for a, b in ((expected, set(header.entries)), (set(header.entries), expected))
        )
        raise DeltaError(Reason.KEYS_MISMATCH, f"missing in the payload: {missing}; not declared: {surplus}")
    declared = header.metadata.get("layer_names")
    if declared is not None and strict_json(
        declared.encode(errors="surrogatepass"), Reason.BAD_HEADER, "layer_names"
    ) != list(metadata.names):
        raise DeltaError(Reason.KEYS_MISMATCH, "layer_names of the payload are not those of the metadata")
    layers = []
    for number, (name, shape) in enumerate(zip(metadata.names, metadata.shapes, strict=True)):
        indices, values = header.entries[f"{number}.indices"], header.entries[f"{number}.values"]
        layers.append(_Layer(name, shape, _check_layer(name, indices, values, metadata.requires)))
    return layers


def _check_layer(name: str, indices: Entry, values: Entry, requires: frozenset[str]) -> int:
    if indices.dtype not in ("I32", "I64") or len(indices.shape) != 1:
        raise DeltaError(Reason.BAD_INDICES, f"expected 1-D I32 or I64, found {_form(indices)}", name)
    if len(values.shape) != 1:
        raise DeltaError(Reason.BAD_VALUES, f"expected 1-D, found {_form(values)}", name)
    if not DTYPES[values.dtype].is_floating_point and NON_FLOATING_VALUES not in requires:
        raise DeltaError(Reason.UNSUPPORTED_DTYPE, f"{values.dtype} values require {NON_FLOATING_VALUES}", name)
    length = values.shape[0] // 2 if values.dtype == "F4" else values.shape[0]
    if indices.shape[0] != length:
        raise DeltaError(Reason.LENGTH_MISMATCH, f"{indices.shape[0]} indices, {length} values", name)
    return length


def _form(entry: Entry) -> str:
    return f"{entry.dtype} {shown(list(entry.shape))}"


def _check_counts(metadata: _Metadata, layers: Sequence[_Layer]) -> None:
    changed, least = sum(layer.changed for layer in layers), sum(math.prod(layer.shape) for layer in layers)
    if metadata.changed_elements != changed:
        found = shown(metadata.changed_elements)
        raise DeltaError(Reason.COUNT_MISMATCH, f"changed_elements: payload holds {changed}, metadata says {found}")
    if not least <= metadata.total_elements <= MAX_ELEMENTS:
        found = shown(metadata.total_elements)
        raise DeltaError(Reason.COUNT_MISMATCH, f"total_elements: layers have {least}, metadata says {found}")
    if not is_density_pct(metadata.density_pct, changed, metadata.total_elements):
        exact, found = density_pct(changed, metadata.total_elements), shown(metadata.density_pct)
        raise DeltaError(Reason.COUNT_MISMATCH, f"density_pct: expected {exact}, metadata says {found}")
