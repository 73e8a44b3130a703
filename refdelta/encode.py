"""Making deltas: the difference of two states, and its files."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from refdelta import bits
from refdelta.apply import apply_delta
from refdelta.digest import ZERO, add, layer_digests, roll_digest
from refdelta.files import check_target, new_directory, write_file, write_hashed
from refdelta.peft import check_no_adapters
from refdelta.regions import TensorInfo
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
    Lineage,
    Reason,
    TensorPatch,
    check_delta,
    check_path,
    index_dtype,
)
from refdelta.state import Weights, total_elements, tracked

# Comparing


def diff(base: Weights, target: Weights) -> Delta:
    """The delta from ``base`` to ``target``: exactly the positions whose bits differ, layers in name order.

    States have equal names, shapes and dtypes, else `DeltaError` says everything that differs. Of names that a module
    ties to one tensor only the first counts. Patches lie on ``target``'s devices; ``base`` may be on others.
    """
    return _diff(tracked(base), tracked(target), device=None)


class DeltaEncoder:
    """Encodes against a baseline that it keeps in host memory (pinned where there is CUDA).

    The baseline is what the receiver holds. `encode` does not move it; `commit` does, once the receiver has
    acknowledged the delta, so that a delta that was lost or refused is contained in the next one.

    With a ``run_id`` every delta gets a lineage: the version after `version`, its base, and digests. They are computed
    from all elements once, here, and rolled with each commit. Without a commit the next delta has the same version.
    """

    def __init__(self, weights: Weights, *, run_id: str | None = None, version: int = 0) -> None:
        """``version`` is that of ``weights`` in the run; a resumed trainer starts where the receiver stands.

        ``weights`` are the whole state, as from now on: names, shapes and dtypes that differ later are refused. So is
        here what is no whole tensor (unsupported_tensor: a shard, a placeholder, a wrapper; gather it on every rank,
        for example by ``full_tensor()``) and what no checkpoint has (unknown_tensor: adapters that are not merged, a
        mapping under PEFT's names; see `refdelta.peft`). Where a trainer marks its placeholders, it marks parameters:
        give the module, or its ``named_parameters()``, since ``state_dict()`` makes bare tensors of them. Tensors of
        shape [0] are warned of for that reason.
        """
        self._position = None if run_id is None else Lineage(run_id, version)
        if isinstance(weights, Mapping):  # names that are no strings are refused by `tracked`, with the rest
            check_no_adapters(name for name in weights if isinstance(name, str))
        counted = tracked(weights)
        _warn_of_placeholders(counted)
        self._baseline = {name: _host_copy(t) for name, t in counted.items()}
        self._layers: dict[str, str] = {}
        if self._position is not None:
            self._layers = layer_digests(self._baseline)
            self._position = replace(self._position, digest=add(*self._layers.values()))

    @property
    def run_id(self) -> str | None:
        """The run, if there is one."""
        return None if self._position is None else self._position.run_id

    @property
    def version(self) -> int | None:
        """Version of the baseline."""
        return None if self._position is None else self._position.version

    @property
    def digest(self) -> str | None:
        """State digest of the baseline."""
        return None if self._position is None else self._position.digest

    def encode(self, weights: Weights) -> Delta:
        """The delta from the baseline to ``weights``, on the CPU; errors as in `diff`."""
        delta = _diff(self._baseline, tracked(weights), device="cpu")
        return delta if self._position is None else replace(delta, lineage=self._next(self._position, delta))

    def commit(self, delta: Delta) -> None:
        """Move the baseline by ``delta``; `DeltaError` and an unmoved baseline if it does not fit."""
        check_delta(delta)
        total = total_elements(self._baseline)
        if delta.total_elements != total:
            detail = f"total_elements: the baseline has {total}, the delta says {delta.total_elements}"
            raise DeltaError(Reason.COUNT_MISMATCH, detail)
        if self._position is None:
            apply_delta(delta, self._baseline)
            return
        version = _version_after(self._position, delta.lineage)
        inverse = apply_delta(delta, self._baseline, digest=self._position.digest)
        for patch, old in zip(delta.patches, inverse.patches, strict=True):
            self._layers[patch.name] = roll_digest(self._layers[patch.name], patch, old.values)
        assert inverse.lineage is not None  # it holds the digest
        self._position = replace(self._position, version=version, digest=inverse.lineage.base_digest)

    def _next(self, position: Lineage, delta: Delta) -> Lineage:
        digest, layers = position.digest or ZERO, {}
        for patch in delta.patches:
            old = bits.gather(self._baseline[patch.name], patch.indices)
            digest = roll_digest(digest, patch, old)
            layers[patch.name] = roll_digest(self._layers[patch.name], patch, old)
        return Lineage(
            run_id=position.run_id,
            version=position.version + 1,
            base_version=position.version,
            base_digest=position.digest,
            digest=digest,
            layer_digests=layers,
        )


def _warn_of_placeholders(counted: Mapping[str, Tensor]) -> None:
    """A state dict of a partitioned module has placeholders without a mark, from which no delta would ever come."""
    empty = [name for name, t in counted.items() if t.shape == (0,)]
    if empty:
        text = (
            f"{len(empty)} of {len(counted)} tensors, the first of them {empty[0]}, have no elements. A partitioned "
            "trainer leaves such placeholders: give the module or its named_parameters(), gathered."
        )
        warnings.warn(text, stacklevel=3)


def _version_after(position: Lineage, lineage: Lineage | None) -> int:
    """The version of a delta that starts at ``position``."""
    if lineage is None:
        raise DeltaError(Reason.BASE_MISMATCH, f"the delta has no lineage, the baseline is in run {position.run_id}")
    stated, here = (lineage.run_id, lineage.base_version), (position.run_id, position.version)
    if stated != here:
        detail = f"the delta is based on {lineage.base_name}; the baseline is version {here[1]} of run {here[0]}"
        raise DeltaError(Reason.BASE_MISMATCH, detail)
    return lineage.version


def _host_copy(t: Tensor) -> Tensor:
    source = bits.resolved(t)
    copy = torch.empty(t.shape, dtype=bits.bit_view(source).dtype, pin_memory=torch.cuda.is_available())
    return copy.copy_(bits.bit_view(source)).view(t.dtype)


def _diff(base: Mapping[str, Tensor], target: Mapping[str, Tensor], device: str | None) -> Delta:
    check_comparable(base, target)
    patches = []
    for name in sorted(target):
        new = target[name].detach()
        at = bits.differing(new, base[name])
        if len(at):
            patch = TensorPatch(name, tuple(new.shape), at.to(index_dtype(new.numel())), bits.gather(new, at))
            patches.append(patch if device is None else patch.to(device))
    return Delta(tuple(patches), total_elements(target))


def check_comparable(base: Mapping[str, Tensor | TensorInfo], target: Mapping[str, Tensor | TensorInfo]) -> None:
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


def write_delta(delta: Delta, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write ``delta`` as the directory ``path`` and return it. A reader sees the whole delta or none.

    ``delta.safetensors`` has the canonical bytes: they follow from the patches alone. A lineage gets the payload's
    SHA-256. ``created_at`` and ``timestamp`` are those of ``delta.extra``, else now. Raises `DeltaError`: target_exists
    when there is anything at ``path`` (with ``overwrite``: anything but a directory with at most a delta's two files),
    write_failed when the file system refuses, or what is wrong with the delta.
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
    """Raise `DeltaError` (target_exists, write_failed) where `write_delta` would, before there is a delta."""
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
