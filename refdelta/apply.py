"""Reading and applying deltas. Everything is validated before the first byte of a state changes."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from refdelta import bits
from refdelta.checkpoint import Checkpoint
from refdelta.checkpoint_apply import patch_checkpoint
from refdelta.composition import compose as compose
from refdelta.composition import join as join
from refdelta.container import Entry, Header, read_header, shown, strict_json
from refdelta.digest import parse as parse_digest
from refdelta.digest import roll_digest
from refdelta.files import Folder, read_exactly, size_of
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
    UNVERSIONED,
    Delta,
    DeltaError,
    Lineage,
    Reason,
    TensorPatch,
    check_delta,
    check_extra,
    check_name,
    check_path,
    check_plain,
    check_shape,
    density_pct,
    is_density_pct,
    is_int,
)
from refdelta.state import Weights, first_names, holds_memory, named_tensors

_PACKED_KEYS: Final = frozenset({"delta.indices_flat", "delta.values_flat", "delta.layer_lengths"})


# Reading


def read_delta(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Delta:
    """The delta in directory ``path``, its tensors on ``device``; layers keep the order of the file.

    Everything that the format promises is checked, the header before any tensor is made; raises `DeltaError`.
    """
    check_path("path", path)
    while True:
        with Folder(Path(path)) as folder:
            try:
                return _read(folder, device)
            except DeltaError:
                if folder.is_current():
                    raise
        # Another delta was put in this one's place while it was read.


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
        raise DeltaError(Reason.BAD_METADATA, f"requires: expected a list of texts, found {shown(value)}")
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


# Applying


def apply_delta(delta: Delta, weights: Weights, *, digest: str | None = None) -> Delta:
    """Write ``delta`` into ``weights`` in place and return the inverse delta. O(changed), any strides, CPU or CUDA.

    Everything is checked before the first write: names, shapes, dtypes, positions, memory shared between tensors. When
    a write fails, what was written is undone and `DeltaError` (write_failed) raised. Names that a module ties to one
    tensor may be changed under any of them; elsewhere every name of shared memory must state the change. One part of
    several is refused: `join` them first.

    ``digest``: what `state_digest` of ``weights`` is, as the caller has kept it. Then the delta's base digest must be
    that one (base_mismatch), and its digest the one that the change leads to (digest_mismatch); the inverse's lineage
    holds the state after as ``base_digest`` and the state before as ``digest``.
    """
    check_delta(delta)
    if digest is not None:
        parse_digest(digest)
    tensors = named_tensors(weights)
    check_fits(delta, tensors)
    _check_aliases(delta, tensors if isinstance(weights, Mapping) else _untied(tensors, delta))
    old = tuple(_old_values(patch, tensors[patch.name]) for patch in delta.patches)
    lineage = _inverse_lineage(delta.lineage)
    if digest is not None:
        if not isinstance(weights, Mapping):
            _check_first_names(delta, tensors)
        lineage = _digested(lineage, digest, _digest_after(delta, old, digest))
    inverse = Delta(old, delta.total_elements, lineage)
    _write(delta, tensors, inverse)
    return inverse


def apply_to_checkpoint(
    delta_path: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Write the checkpoint ``checkpoint_dir`` with the delta ``delta_path`` applied to ``out_dir``.

    A checkpoint is a directory of safetensors shards, with or without an index, or one file. Streamed: the delta and a
    piece of one tensor are in memory. Names, order, dtypes and header metadata stay, other files are copied; see
    `refdelta.checkpoint_apply.patch_checkpoint` for what is not, and for what is refused.
    """
    for name, path in (("delta_path", delta_path), ("checkpoint_dir", checkpoint_dir), ("out_dir", out_dir)):
        check_path(name, path)
    with Checkpoint(checkpoint_dir) as source:
        patch_checkpoint(read_delta(delta_path), source, Path(out_dir), overwrite=overwrite)


def _digest_after(delta: Delta, old: Sequence[TensorPatch], digest: str) -> str:
    """The digest that ``delta`` leads to from ``digest``, when both are what its lineage says."""
    lineage = delta.lineage
    if lineage is not None and lineage.base_digest not in (None, digest):
        raise DeltaError(Reason.BASE_MISMATCH, f"the delta is based on {lineage.base_name}; the state is {digest}")
    after = digest
    for patch, before in zip(delta.patches, old, strict=True):
        after = roll_digest(after, patch, before.values)
    if lineage is not None and lineage.digest not in (None, after):
        detail = f"expected {lineage.digest} after the delta; from {digest} it leads to {after}"
        raise DeltaError(Reason.DIGEST_MISMATCH, detail)
    return after


def _digested(lineage: Lineage | None, before: str, after: str) -> Lineage:
    """The inverse's lineage with what is known about digests, which is also there where no version is."""
    known = lineage or Lineage(UNVERSIONED, 0)
    return replace(known, base_digest=after, digest=before)


def _check_first_names(delta: Delta, tensors: Mapping[str, Tensor]) -> None:
    """A digest counts a tied tensor under its first name; a change under another one would not roll it."""
    counted = first_names(tensors)
    for patch in delta.patches:
        if patch.name not in counted:
            detail = "tied to a tensor of an earlier name, under which alone its digest counts"
            raise DeltaError(Reason.ALIAS_CONFLICT, detail, patch.name)


def check_fits(delta: Delta, tensors: Mapping[str, Tensor]) -> None:
    """Raise `DeltaError` unless every patch names a tensor that it can be written to, and no other part is missing."""
    if delta.lineage is not None and delta.lineage.is_partial:
        raise DeltaError(Reason.INCOMPLETE, f"part {list(delta.lineage.part or ())} of several; join them first")
    for patch in delta.patches:
        t = tensors.get(patch.name)
        if t is None:
            raise DeltaError(Reason.UNKNOWN_TENSOR, f"not among the {len(tensors)} tensors", patch.name)
        if tuple(check_plain(t, patch.name).shape) != patch.shape:
            detail = f"expected {list(t.shape)}, the delta has {list(patch.shape)}"
            raise DeltaError(Reason.SHAPE_MISMATCH, detail, patch.name)
        if t.dtype != patch.dtype:
            raise DeltaError(Reason.DTYPE_MISMATCH, f"expected {t.dtype}, the delta has {patch.dtype}", patch.name)
        try:
            bits.check_writable(t)
        except DeltaError as error:
            raise DeltaError(error.reason, error.detail, patch.name) from None
        patch.check_indices()


def _untied(tensors: Mapping[str, Tensor], delta: Delta) -> dict[str, Tensor]:
    """``tensors`` without further names of the same view, unless those are patched too."""
    patched = {patch.name: tensors[patch.name] for patch in delta.patches}
    return first_names({**patched, **tensors}) | patched


def _check_aliases(delta: Delta, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a change that one tensor states and another one, which holds the same memory, does not.

    Tensors of different dtypes or alignment are taken to share all memory between the first and the last element.
    """
    patches = {patch.name: patch for patch in delta.patches if patch.changed}
    for a, b in _overlapping_spans(tensors):
        for name, other in ((a, b), (b, a)):
            if name in patches and _changes_unstated(patches[name], tensors[name], tensors[other], patches.get(other)):
                detail = f"shares memory with {other}, for which the delta states another change or none"
                raise DeltaError(Reason.ALIAS_CONFLICT, detail, name)


def _overlapping_spans(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names whose first-to-last bytes intersect; what has no memory of its own has no address either."""
    spans = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + bits.extent(t) * t.element_size(), name)
        for name, t in tensors.items()
        if holds_memory(t)
    )
    for i, (device, _, end, name) in enumerate(spans):
        for other_device, start, _, other in itertools.islice(spans, i + 1, None):
            if (other_device, start) >= (device, end):
                break
            yield name, other


def _changes_unstated(patch: TensorPatch, t: Tensor, other: Tensor, stated: TensorPatch | None) -> bool:
    """Whether ``patch`` of ``t`` writes an element of ``other`` that ``stated`` does not give the same bits."""
    distance, odd = divmod(t.data_ptr() - other.data_ptr(), t.element_size())
    if t.dtype != other.dtype or odd or bits.overlaps_itself(other):
        return True
    positions, inside = bits.positions_at(other, bits.offsets_in_storage(t, patch.indices) + distance)
    positions, values = positions[inside], bits.bit_view(patch.values).to(t.device)[inside]
    if stated is None or not len(positions):
        return len(positions) > 0
    have = stated.indices.to(device=t.device, dtype=torch.int64)
    at = torch.searchsorted(have, positions).clamp_(max=len(have) - 1)
    same = (have[at] == positions) & (bits.bit_view(stated.values).to(t.device)[at] == values)
    return not bool(same.all())


def _old_values(patch: TensorPatch, t: Tensor) -> TensorPatch:
    old = bits.gather(t, patch.indices).to(patch.values.device)
    return TensorPatch(patch.name, patch.shape, patch.indices, old)


def _inverse_lineage(lineage: Lineage | None) -> Lineage | None:
    if lineage is None or lineage.base_version is None:
        return None
    return Lineage(
        run_id=lineage.run_id,
        version=lineage.base_version,
        base_version=lineage.version,
        base_digest=lineage.digest,
        digest=lineage.base_digest,
    )


def _write(delta: Delta, tensors: Mapping[str, Tensor], inverse: Delta) -> None:
    """Write every patch, or none: on failure the values of ``inverse`` are written back."""
    for number, patch in enumerate(delta.patches):
        try:
            bits.scatter_(tensors[patch.name], patch.indices, patch.values)
        except BaseException as error:
            _undo(inverse.patches[: number + 1], tensors, error)
            if not isinstance(error, Exception):
                raise
            raise DeltaError(Reason.WRITE_FAILED, f"undone: {error}", patch.name) from error


def _undo(patches: Sequence[TensorPatch], tensors: Mapping[str, Tensor], cause: BaseException) -> None:
    for patch in patches:
        try:
            bits.scatter_(tensors[patch.name], patch.indices, patch.values)
        except Exception:
            detail = f"the state is a mixture: writing failed ({cause}), and so did undoing it"
            raise DeltaError(Reason.WRITE_FAILED, detail, patch.name) from cause
