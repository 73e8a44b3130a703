"""Read checkpoints: one safetensors file, or a directory of them with or without an index.

Nothing is mapped into memory. A tensor is read when it is asked for, whole or in runs, into memory of its own. So a
process holds only what it works on, and later changes of the files do not change what it holds.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from torch import Tensor

from refdelta.codec.state import TensorInfo
from refdelta.files.container import Entry, Header, read_header, shown, strict_json
from refdelta.files.opening import Folder, new_bytes, open_file, read_exactly, read_into, refusal, size_of
from refdelta.spec import (
    DELTA_FILE,
    DTYPES,
    MAX_HEADER_BYTES,
    METADATA_FILE,
    DeltaError,
    Reason,
    check_name,
    check_shape,
)

__all__ = ["INDEX_FILE", "RUN_BYTES", "Checkpoint", "Shard"]

INDEX_FILE: Final = "model.safetensors.index.json"

RUN_BYTES: Final = 1 << 21
"""Bytes of the runs in which tensors are streamed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a checkpoint, held open."""

    name: str
    """Path of the file, relative to the checkpoint's directory."""
    file: FileIO
    header: Header

    def read(self, start: int, end: int) -> Tensor:
        """[end - start] uint8: bytes of the file's data."""
        data = new_bytes(end - start)
        at = len(self.header.raw) + start

        def read(view: memoryview) -> int:
            return os.preadv(self.file.fileno(), [view], at + end - start - len(view))

        read_into(data.numpy().data, read)
        return data

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a tensor."""
        return _info(self.header.entries[key])

    def runs(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """The elements of a tensor in row-major order: (first position, 1-D tensor of at most `RUN_BYTES`)."""
        entry, dtype = self.header.entries[key], DTYPES[self.header.entries[key].dtype]
        for start in range(entry.start, entry.end, RUN_BYTES):
            data = self.read(start, min(entry.end, start + RUN_BYTES))
            yield (start - entry.start) // dtype.itemsize, data.view(dtype)


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, read when asked for.

    path: a safetensors file, or a directory.
    files: names of the directory's files that are the checkpoint, whatever else lies there. By default, with an index
    (``model.safetensors.index.json``) the directory's shards are the index's and hold exactly the tensors that it says;
    without one, every ``*.safetensors`` file counts that is not hidden.

    Order: files by name, tensors as their bytes lie. Use as a context manager; tensors stay valid after it closes.
    Raises `DeltaError`: not_a_checkpoint, bad_metadata or keys_mismatch (the index), duplicate_name, and what
    `read_header` raises.
    """

    def __init__(self, path: str | os.PathLike[str], files: Sequence[str] | None = None) -> None:
        self.path = Path(path)
        self._files = files
        self.is_file = not _is_directory(self.path)
        self._stack = ExitStack()
        try:
            self.shards = self._open()
            self._shard_of = _by_name(self.shards)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)

    def __getitem__(self, name: str) -> Tensor:
        shard, info = self._shard_of[name], self.info(name)
        entry = shard.header.entries[name]
        return shard.read(entry.start, entry.end).view(info.dtype).reshape(info.shape)

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor."""
        return self._shard_of[name].info(name)

    def infos(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor, in order."""
        return {name: self.info(name) for name in self}

    def runs(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A tensor in pieces: (first position, 1-D tensor), in row-major order."""
        return self._shard_of[name].runs(name)

    @property
    def total_elements(self) -> int:
        """Elements of all tensors."""
        return sum(info.numel for info in self.infos().values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.numel * info.dtype.itemsize for info in self.infos().values())

    def _open(self) -> tuple[Shard, ...]:
        if self.is_file:
            return (self._open_file(),)
        while True:
            with Folder(self.path, Reason.NOT_A_CHECKPOINT) as folder:
                try:
                    return self._open_all(folder)
                except DeltaError:
                    if folder.is_current():
                        raise
            # Another checkpoint was put in this one's place while it was opened.

    def _open_file(self) -> Shard:
        file = self._stack.enter_context(open_file(self.path, Reason.NOT_A_CHECKPOINT))
        if self.path.name in (DELTA_FILE, METADATA_FILE):
            detail = f"{self.path} is a file of a delta, which is the directory {self.path.parent}"
            raise DeltaError(Reason.NOT_A_CHECKPOINT, detail)
        try:
            return _shard(self.path, self.path.name, file)
        except DeltaError as error:
            if error.reason is not Reason.BAD_HEADER:
                raise
            detail = f"{error.detail}; this is a file, and a delta or a checkpoint of several files is a directory"
            raise DeltaError(Reason.BAD_HEADER, detail) from None

    def _open_all(self, folder: Folder) -> tuple[Shard, ...]:
        names = self._files
        if names is None:
            files = folder.names()
            if INDEX_FILE in files:
                return self._open_indexed(folder)
            names = sorted(name for name in files if name.endswith(".safetensors") and not name.startswith("."))
        if not names or DELTA_FILE in names:
            found = f"no safetensors files in {self.path}" if not names else f"{self.path} is a delta"
            raise DeltaError(Reason.NOT_A_CHECKPOINT, found)
        return tuple(self._open_shard(folder, name) for name in names)

    def _open_shard(self, folder: Folder, name: str) -> Shard:
        return _shard(self.path / name, name, self._stack.enter_context(folder.open(name)))

    def _open_indexed(self, folder: Folder) -> tuple[Shard, ...]:
        wanted = _read_index(folder)
        shards = tuple(self._open_shard(folder, name) for name in sorted(set(wanted.values())))
        held = {(name, shard.name) for shard in shards for name in shard.header.entries}
        if faults := sorted(held ^ wanted.items()):
            name, file = faults[0]
            what = f"{file} does not hold it" if (name, file) in wanted.items() else f"{file} holds it"
            detail = f"{what}, unlike what {self.path / INDEX_FILE} says; {len(faults)} such differences"
            raise DeltaError(Reason.KEYS_MISMATCH, detail, name)
        return shards


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise refusal(error, Reason.NOT_A_CHECKPOINT, "file or directory", path) from None


def _read_index(folder: Folder) -> dict[str, str]:
    """Tensor name -> file, from a checked index."""
    where = str(folder.path / INDEX_FILE)

    def refuse(detail: str) -> DeltaError:
        return DeltaError(Reason.BAD_METADATA, f"{where}: {detail}")

    with folder.open(INDEX_FILE) as file:
        size = size_of(file)
        if size > MAX_HEADER_BYTES:
            raise refuse(f"{size} bytes, more than {MAX_HEADER_BYTES}")
        raw = strict_json(bytes(read_exactly(file, size).numpy()), Reason.BAD_METADATA, where)
    entries = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise refuse("no weight_map of tensor names and files")
    for name, path in entries.items():
        check_name(name)
        if not isinstance(path, str) or not _stays_inside(path):
            raise DeltaError(Reason.BAD_METADATA, f"{where}: not the name of a file beside it: {shown(path)}", name)
    return entries


def _stays_inside(path: str) -> bool:
    """Whether a path of an index names something in the index's directory, by one spelling; links are not looked at."""
    parts = path.split("/")
    return "\0" not in path and path.isprintable() and not any(part in ("", ".", "..") for part in parts)


def _shard(path: Path, name: str, file: FileIO) -> Shard:
    try:
        shard = Shard(name, file, read_header(file))
        for key, entry in shard.header.entries.items():
            check_name(key)
            # An empty tensor may have sizes whose product no library can hold.
            check_shape([size or 1 for size in entry.shape], key)
    except DeltaError as error:
        raise DeltaError(error.reason, f"{path}: {error.detail}", error.tensor) from None
    return shard


def _by_name(shards: tuple[Shard, ...]) -> dict[str, Shard]:
    found: dict[str, Shard] = {}
    for shard in shards:
        for name in shard.header.entries:
            if name in found:
                raise DeltaError(Reason.DUPLICATE_NAME, f"in {found[name].name} and {shard.name}", name)
            found[name] = shard
    return found


def _info(entry: Entry) -> TensorInfo:
    shape, dtype = entry.shape, DTYPES[entry.dtype]
    if entry.dtype == "F4":  # files count the halves of a pair
        shape = (*shape[:-1], shape[-1] // 2)
    assert math.prod(shape) * dtype.itemsize == entry.end - entry.start
    return TensorInfo(shape, dtype)
