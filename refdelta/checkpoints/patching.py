"""Write a checkpoint with a delta applied, run by run. Memory never holds more than one run of a tensor.

Headers are copied as they stand, so that names, order, dtypes, metadata and padding of every shard stay; so are the
other files of the directory.
"""

from __future__ import annotations

import bisect
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from refdelta.checkpoints.reading import INDEX_FILE, RUN_BYTES, Checkpoint, Shard
from refdelta.codec import bits
from refdelta.codec.digests import ZERO, add, header_digest, roll_digest, run_digest
from refdelta.codec.state import TensorInfo
from refdelta.files.atomic import check_target, new_directory, new_file, write_file
from refdelta.files.opening import open_file
from refdelta.spec import Delta, DeltaError, Reason, TensorPatch

__all__ = [
    "Advance",
    "StateDigests",
    "check_fits_checkpoint",
    "check_output",
    "part_in_run",
    "patch_checkpoint",
    "write_run",
]

Advance = Callable[[int], object]
"""Called with the number of bytes after each run of work."""

_OTHER_WEIGHTS: Final = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*",
    "consolidated*",
    "tf_model*",
    "flax_model*",
    "*.gguf",
)
"""Files with weights that the delta does not change, or with the names of such files."""


def patch_checkpoint(
    delta: Delta, source: Checkpoint, out: Path, *, overwrite: bool = False, advance: Advance = lambda _: None
) -> list[str]:
    """Write ``source`` with ``delta`` applied to ``out``, a file where ``source`` is one, else a directory.

    Returns the paths below ``source`` that were left out: other weights (a second format, shards that the index does
    not name), which would not fit the new ones; hidden directories; links to directories, and what is not a file.
    Atomic. Raises `DeltaError`: before anything is written where names, shapes or dtypes do not fit; base_mismatch or
    digest_mismatch, with nothing left behind, where the lineage has digests and the states do not; target_exists where
    there is anything at ``out``, with ``overwrite`` anything but a checkpoint of this kind; write_failed.
    """
    check_output(source, out, overwrite=overwrite)
    check_fits_checkpoint(delta, source.infos())
    writing = _Writing(delta, advance)
    if source.is_file:
        with new_file(out, _is_checkpoint_file if overwrite else None) as place:
            write_file(place, writing.bytes_of(source.shards[0]))
            writing.check_digests()
        return []
    with new_directory(out, _is_checkpoint_directory if overwrite else None) as place:
        for shard in source.shards:
            path = place / shard.name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, writing.bytes_of(shard))
        writing.check_digests()
        return _copy_others(source, place)


def check_output(source: Checkpoint, out: Path, *, overwrite: bool = False) -> None:
    """Raise `DeltaError` where `patch_checkpoint` would refuse ``out``, whatever the delta is.

    ``out`` may be ``source`` itself: its shards are held open, and it is exchanged for the whole new checkpoint in one
    step. What would be left out of the copy has no other place then, so it is refused (bad_option).
    """
    if source.is_file:
        check_target(out, _is_checkpoint_file if overwrite else None)
        return
    _check_apart(source.path, out)
    check_target(out, _is_checkpoint_directory if overwrite else None)
    if source.path.resolve() == out.resolve():
        shards = {shard.name for shard in source.shards}
        lost = [name for name, copied in _others(source.path) if not copied and name not in shards]
        if lost:
            raise DeltaError(Reason.BAD_OPTION, f"{out} is the checkpoint itself, and would lose {', '.join(lost)}")


def check_fits_checkpoint(delta: Delta, infos: Mapping[str, TensorInfo]) -> None:
    """Raise `DeltaError` that lists every patch without a tensor of its name, shape and dtype."""
    if delta.lineage is not None and delta.lineage.is_partial:
        raise DeltaError(Reason.INCOMPLETE, f"part {list(delta.lineage.part or ())} of several; join them first")
    faults: list[tuple[Reason, str]] = []
    for patch in delta.patches:
        patch.check_indices()
        info = infos.get(patch.name)
        if info is None:
            faults.append((Reason.UNKNOWN_TENSOR, f"{patch.name} is not in the checkpoint"))
            continue
        if info.shape != patch.shape:
            shapes = f"{list(info.shape)} in the checkpoint, {list(patch.shape)} in the delta"
            faults.append((Reason.SHAPE_MISMATCH, f"{patch.name} has shape {shapes}"))
        if info.dtype != patch.dtype:
            dtypes = f"{info.dtype} in the checkpoint, {patch.dtype} in the delta"
            faults.append((Reason.DTYPE_MISMATCH, f"{patch.name} is {dtypes}"))
    if faults:
        raise DeltaError(faults[0][0], "; ".join(text for _, text in faults))


def part_in_run(patch: TensorPatch, start: int, length: int) -> TensorPatch:
    """The part of ``patch`` at the positions in [start, start + length)."""
    positions = patch.indices.numpy()
    first = bisect.bisect_left(positions, start)
    stop = bisect.bisect_left(positions, start + length, lo=first)
    return TensorPatch(patch.name, patch.shape, patch.indices[first:stop], patch.values[first:stop])


def write_run(part: TensorPatch, start: int, run: Tensor) -> Tensor:
    """Write ``part`` into ``run``, the 1-D piece of its tensor that begins at ``start``; returns the old values."""
    if not part.changed:
        return part.values
    at = part.indices - start
    old = bits.gather(run, at)
    bits.scatter_(run, at, part.values)
    return old


class StateDigests:
    """The digests of a state before and after a delta, added up run by run."""

    def __init__(self) -> None:
        self.before = self.after = ZERO

    def add_tensor(self, name: str, info: TensorInfo) -> None:
        """Call once for each tensor."""
        self._add(header_digest(name, info.dtype, info.shape))

    def add_run(self, name: str, info: TensorInfo, start: int, run: Tensor) -> None:
        """Call with every element once, before it changes."""
        self._add(run_digest(name, info.dtype, info.shape, start, run))

    def change(self, part: TensorPatch, old: Tensor) -> None:
        """Call with what is written over it."""
        self.after = roll_digest(self.after, part, old)

    def _add(self, share: str) -> None:
        self.before, self.after = add(self.before, share), add(self.after, share)


class _Writing:
    """The bytes of shards with a delta applied, and the digests of both states where the lineage states them."""

    def __init__(self, delta: Delta, advance: Advance) -> None:
        self._patches = {patch.name: patch for patch in delta.patches}
        self._lineage = delta.lineage
        stated = delta.lineage is not None and (delta.lineage.base_digest or delta.lineage.digest)
        self._digests = StateDigests() if stated else None
        self._advance = advance

    def bytes_of(self, shard: Shard) -> Iterator[bytes | memoryview]:
        """Header and data of a shard."""
        yield shard.header.raw
        for name in shard.header.entries:
            if self._digests:
                self._digests.add_tensor(name, shard.info(name))
            for start, run in shard.runs(name):
                self._change(shard, name, start, run)
                data = run.view(torch.uint8).numpy().data
                yield data
                self._advance(len(data))

    def _change(self, shard: Shard, name: str, start: int, run: Tensor) -> None:
        if self._digests:
            self._digests.add_run(name, shard.info(name), start, run)
        if name in self._patches:
            part = part_in_run(self._patches[name], start, len(run))
            old = write_run(part, start, run)
            if self._digests:
                self._digests.change(part, old)

    def check_digests(self) -> None:
        """Raise `DeltaError` unless both states have the digests that the lineage states."""
        found, lineage = self._digests, self._lineage
        if found is None or lineage is None:
            return
        if lineage.base_digest not in (None, found.before):
            detail = f"the delta is based on {lineage.base_name}; the checkpoint is {found.before}"
            raise DeltaError(Reason.BASE_MISMATCH, detail)
        if lineage.digest not in (None, found.after):
            detail = f"expected {lineage.digest} after the delta; from {found.before} it leads to {found.after}"
            raise DeltaError(Reason.DIGEST_MISMATCH, detail)


def _check_apart(source: Path, out: Path) -> None:
    """Refuse an output inside the source, which would be copied into itself, and one around it."""
    inner, outer = source.resolve(), out.resolve()
    if inner != outer and (inner.is_relative_to(outer) or outer.is_relative_to(inner)):
        raise DeltaError(Reason.BAD_OPTION, f"{out} lies inside {source}, or around it")


def _is_checkpoint_file(path: Path) -> bool:
    return not path.is_symlink() and path.is_file() and _is_checkpoint(path)


def _is_checkpoint_directory(path: Path) -> bool:
    return not path.is_symlink() and path.is_dir() and (not os.listdir(path) or _is_checkpoint(path))


def _is_checkpoint(path: Path) -> bool:
    try:
        with Checkpoint(path):
            return True
    except DeltaError:
        return False


def _copy_others(source: Checkpoint, place: Path) -> list[str]:
    """Copy the files that are no shards; returns the paths left out."""
    shards, left_out = {shard.name for shard in source.shards}, []
    for name, copied in _others(source.path):
        if name in shards:
            continue
        if copied:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            with open_file(source.path / name, Reason.UNREADABLE) as file:
                write_file(place / name, iter(lambda: file.read(RUN_BYTES), b""))  # used up at once
        else:
            left_out.append(name)
    return left_out


def _others(top: Path) -> Iterator[tuple[str, bool]]:
    """Everything in a directory but its directories, by its path below it, and whether it belongs to a copy with other
    weights."""
    for folder, folders, files in os.walk(top):
        for name in sorted(folders):
            path = Path(folder, name)
            if name.startswith(".") or path.is_symlink():
                folders.remove(name)
                yield path.relative_to(top).as_posix(), False
        for name in sorted(files):
            path = Path(folder, name)
            yield path.relative_to(top).as_posix(), path == top / INDEX_FILE or _is_copied(path)


def _is_copied(path: Path) -> bool:
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError:
        regular = False
    return regular and not any(fnmatch(path.name, pattern) for pattern in _OTHER_WEIGHTS)
