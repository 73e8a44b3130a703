"""Writing delta directories: canonical bytes, whole or not at all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from torch import Tensor

from refdelta.codec import bits
from refdelta.codec.arguments import check_delta, check_path
from refdelta.files.atomic import check_target, new_directory, write_file, write_hashed
from refdelta.spec import (
    DELTA_FILE,
    DTYPE_CODES,
    FORMAT,
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    METADATA_FILE,
    NON_FLOATING_VALUES,
    Delta,
    DeltaError,
    Reason,
    TensorPatch,
    index_dtype,
)

__all__ = ["canonical_payload", "check_output", "write_delta"]


def write_delta(delta: Delta, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write ``delta`` as the directory ``path`` and return it. A reader sees the whole delta or none.

    ``delta.safetensors`` has the canonical bytes: they follow from the patches alone. A lineage gets the payload's
    SHA-256. ``created_at`` and ``timestamp`` come from ``delta.extra``, or else are the present time. Raises
    `DeltaError`: target_exists when there is anything at ``path`` (with ``overwrite``: anything but a directory with at
    most a delta's two files), write_failed when the file system refuses, or what is wrong with the delta.
    """
    check_delta(delta)
    check_path("path", path)
    target = Path(path)
    patches = [_canonical(patch) for patch in sorted(delta.patches, key=lambda patch: patch.name)]
    header = _header_bytes(patches)
    _metadata_bytes(delta, patches, None)  # refuses what JSON cannot hold before anything is written
    with new_directory(target, _is_delta_directory if overwrite else None) as folder:
        sha256 = write_hashed(folder / DELTA_FILE, _payload(header, patches))
        write_file(folder / METADATA_FILE, [_metadata_bytes(delta, patches, sha256)])
    return target


def check_output(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise now the `DeltaError` (target_exists, write_failed) that `write_delta` would raise about ``path`` later."""
    check_target(Path(path), _is_delta_directory if overwrite else None)


def canonical_payload(delta: Delta) -> Iterator[bytes | memoryview]:
    """The bytes that `write_delta` gives ``delta.safetensors``, in pieces."""
    patches = [_canonical(patch) for patch in sorted(delta.patches, key=lambda patch: patch.name)]
    return _payload(_header_bytes(patches), patches)


def _is_delta_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and {*os.listdir(path)} <= {DELTA_FILE, METADATA_FILE}


def _canonical(patch: TensorPatch) -> TensorPatch:
    patch.check_indices()
    indices = patch.indices.to(device="cpu", dtype=index_dtype(patch.numel))
    return TensorPatch(patch.name, patch.shape, indices, patch.values.detach().cpu())


def _tensors(patches: list[TensorPatch]) -> Iterator[tuple[str, Tensor]]:
    for number, patch in enumerate(patches):
        yield f"{number}.indices", patch.indices
        yield f"{number}.values", patch.values


def _header_bytes(patches: list[TensorPatch]) -> bytes:
    """Length, JSON and padding: ``__metadata__`` first, then the tensors in the order of their bytes."""
    header: dict[str, object] = {"__metadata__": {"layer_names": _compact([patch.name for patch in patches])}}
    at = 0
    for key, t in _tensors(patches):
        end = at + t.numel() * t.element_size()
        # Safetensors counts the halves of an F4 pair.
        length = t.numel() * (2 if DTYPE_CODES[t.dtype] == "F4" else 1)
        header[key] = {"dtype": DTYPE_CODES[t.dtype], "shape": [length], "data_offsets": [at, end]}
        at = end
    text = _compact(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise DeltaError(Reason.BAD_HEADER, f"header of {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _metadata_bytes(delta: Delta, patches: list[TensorPatch], payload_sha256: str | None) -> bytes:
    metadata: dict[str, object] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "changed_elements": delta.changed_elements,
        "total_elements": delta.total_elements,
        "density_pct": delta.density_pct,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "timestamp": time.time(),
        **delta.extra,
        "layer_names": [patch.name for patch in patches],
        "layer_shapes": [list(patch.shape) for patch in patches],
    }
    if not all(patch.dtype.is_floating_point for patch in patches):
        metadata["requires"] = [NON_FLOATING_VALUES]
    if delta.lineage is not None:
        metadata["lineage"] = replace(delta.lineage, payload_sha256=payload_sha256).to_json()
    try:
        return (json.dumps(metadata, ensure_ascii=False, allow_nan=False, indent=2) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DeltaError(Reason.BAD_METADATA, f"extra or lineage cannot be written as JSON: {error}") from None


def _payload(header: bytes, patches: list[TensorPatch]) -> Iterator[bytes | memoryview]:
    yield header
    for _, t in _tensors(patches):
        yield bits.bit_view(t).contiguous().numpy().data
