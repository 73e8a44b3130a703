"""Making deltas: the difference of two states, and its files."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from refdelta import bits
from refdelta.apply import Weights, apply_delta, first_names, named_tensors
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
    check_name,
    index_dtype,
)

# Comparing


def diff(base: Weights, target: Weights) -> Delta:
    """The delta from ``base`` to ``target``: exactly the positions whose bits differ, layers in name order.

    States have equal names, shapes and dtypes, else `DeltaError` says everything that differs. Of names that a module
    ties to one tensor only the first counts. Patches lie on ``target``'s devices; ``base`` may be on others.
    """
    return _diff(_tracked(base), _tracked(target), device=None)


class DeltaEncoder:
    """Encodes against a baseline that it keeps in host memory (pinned where there is CUDA).

    The baseline is what the receiver holds. `encode` does not move it; `commit` does, once the receiver has
    acknowledged the delta, so that a delta that was lost or refused is contained in the next one.
    """

    def __init__(self, weights: Weights) -> None:
        self._baseline = {name: _host_copy(t) for name, t in _tracked(weights).items()}

    def encode(self, weights: Weights) -> Delta:
        """The delta from the baseline to ``weights``, on the CPU; errors as in `diff`."""
        return _diff(self._baseline, _tracked(weights), device="cpu")

    def commit(self, delta: Delta) -> None:
        """Move the baseline by ``delta``; `DeltaError` and an unmoved baseline if it does not fit."""
        total = _total(self._baseline)
        if delta.total_elements != total:
            detail = f"total_elements: the baseline has {total}, the delta says {delta.total_elements}"
            raise DeltaError(Reason.COUNT_MISMATCH, detail)
        apply_delta(delta, self._baseline)


def _tracked(weights: Weights) -> dict[str, Tensor]:
    tensors = named_tensors(weights)
    tracked = first_names(tensors) if isinstance(weights, nn.Module) else tensors
    for name, t in tracked.items():
        check_name(name)
        if t.dtype not in DTYPE_CODES or t.layout != torch.strided or t.is_meta:
            raise DeltaError(Reason.UNSUPPORTED_DTYPE, f"{t.dtype} in layout {t.layout} on {t.device.type}", name)
    return tracked


def _total(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() for t in tensors.values())


def _host_copy(t: Tensor) -> Tensor:
    source = t.detach().resolve_conj().resolve_neg()
    copy = torch.empty(t.shape, dtype=bits.bit_view(source).dtype, pin_memory=torch.cuda.is_available())
    return copy.copy_(bits.bit_view(source)).view(t.dtype)


def _diff(base: Mapping[str, Tensor], target: Mapping[str, Tensor], device: str | None) -> Delta:
    _check_comparable(base, target)
    patches = []
    for name in sorted(target):
        new = target[name].detach()
        at = bits.differing(new, base[name])
        if len(at):
            patch = TensorPatch(name, tuple(new.shape), at.to(index_dtype(new.numel())), bits.gather(new, at))
            patches.append(patch if device is None else patch.to(device))
    return Delta(tuple(patches), _total(target))


def _check_comparable(base: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Refuse states that differ in names, shapes or dtypes; the message lists all of it, the reason is the first."""
    both = sorted(base.keys() & target.keys())
    faults = {
        Reason.UNKNOWN_TENSOR: [f"{name} only in base" for name in sorted(base.keys() - target.keys())]
        + [f"{name} only in target" for name in sorted(target.keys() - base.keys())],
        Reason.SHAPE_MISMATCH: [
            f"{name} has shape {list(base[name].shape)} in base, {list(target[name].shape)} in target"
            for name in both
            if base[name].shape != target[name].shape
        ],
        Reason.DTYPE_MISMATCH: [
            f"{name} is {base[name].dtype} in base, {target[name].dtype} in target"
            for name in both
            if base[name].dtype != target[name].dtype
        ],
    }
    if found := [reason for reason, lines in faults.items() if lines]:
        raise DeltaError(found[0], "; ".join(line for lines in faults.values() for line in lines))


# Writing


def write_delta(delta: Delta, path: str | os.PathLike[str]) -> Path:
    """Write ``delta`` as the directory ``path`` and return it. A reader sees the whole delta or none.

    ``delta.safetensors`` has the canonical bytes: they follow from the patches alone. A lineage gets the payload's
    SHA-256. ``created_at`` and ``timestamp`` are those of ``delta.extra``, else now. Raises `DeltaError`: target_exists
    when there is anything at ``path``, write_failed when the file system refuses, or what is wrong with the delta.
    """
    target = Path(path)
    patches = [_canonical(patch) for patch in sorted(delta.patches, key=lambda patch: patch.name)]
    header = _header_bytes(patches)
    _metadata_bytes(delta, patches, None)  # refuses what JSON cannot hold before anything is written
    with _new_directory(target) as folder:
        sha256 = _write_file(folder / DELTA_FILE, _payload(header, patches))
        _write_file(folder / METADATA_FILE, [_metadata_bytes(delta, patches, sha256)])
    return target


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
        metadata["lineage"] = dataclasses.replace(delta.lineage, payload_sha256=payload_sha256).to_json()
    try:
        return (json.dumps(metadata, ensure_ascii=False, allow_nan=False, indent=2) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DeltaError(Reason.BAD_METADATA, f"extra or lineage cannot be written as JSON: {error}") from None


def _payload(header: bytes, patches: list[TensorPatch]) -> Iterator[bytes | memoryview]:
    yield header
    for _, t in _tensors(patches):
        yield bits.bit_view(t).contiguous().numpy().data


def _write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
    """Write and sync a new file; returns its SHA-256."""
    sha256 = hashlib.sha256()
    with path.open("xb") as file:
        for chunk in chunks:
            sha256.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


@contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    """A temporary sibling that becomes ``target`` at the end of the block, or is removed where the block fails."""
    if os.path.lexists(target):
        raise DeltaError(Reason.TARGET_EXISTS, str(target))
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.mkdir()
    except (OSError, ValueError) as error:
        raise DeltaError(Reason.WRITE_FAILED, f"{target}: {error}") from None
    try:
        yield temporary
        _sync_directory(temporary)
        temporary.rename(target)
        _sync_directory(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            # Renaming onto what another writer has put there meanwhile.
            lost = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(target)
            reason = Reason.TARGET_EXISTS if lost else Reason.WRITE_FAILED
            raise DeltaError(reason, f"{target}: {error.strerror}") from error
        raise


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
