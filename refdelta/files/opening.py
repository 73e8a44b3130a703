"""Open files and directories without waiting, read exact sizes, and turn errors of the file system into reasons."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from refdelta.spec import DeltaError, Reason

__all__ = [
    "OPEN_DIRECTORY",
    "Folder",
    "exists",
    "new_bytes",
    "open_file",
    "read_exactly",
    "read_into",
    "refusal",
    "size_of",
]

OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NOTHING_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_LONG: Final = 1000
"""Characters of a path from which on a message does not repeat it."""


def refusal(error: OSError | ValueError, missing: Reason, kind: str, where: object) -> DeltaError:
    """The refusal for an error of the file system. This is the one place where an errno becomes a reason.

    The reason is ``missing`` where there is no ``kind`` (file or directory) at ``where``, or where there can be none,
    because the name is too long or illegal (for which Python raises ValueError). Otherwise it is unreadable, with the
    system's own message.
    """
    place = str(where)
    if len(place) > _LONG:
        place = f"{place[:60]}... ({len(place)} characters)"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return DeltaError(missing, f"no {kind} {place}")
    says = (isinstance(error, OSError) and error.strerror) or str(error)
    if isinstance(error, OSError) and error.errno not in _NOTHING_THERE:
        return DeltaError(Reason.UNREADABLE, f"{place}: {says}")
    return DeltaError(missing, f"no {kind} {place}: {says}")


def exists(path: Path) -> bool:
    """Whether anything exists at ``path``. Raises `DeltaError` (unreadable) if the system cannot tell."""
    try:
        os.stat(path)
    except (OSError, ValueError) as error:
        if (found := refusal(error, Reason.NOT_A_DELTA, "file", path)).reason is Reason.UNREADABLE:
            raise found from None
        return False
    return True


class Folder:
    """A directory held open, so that all files come from the same one even if a link to it is moved meanwhile.

    missing: the reason to give where the directory, or a file in it, is not there.
    """

    def __init__(self, path: Path, missing: Reason = Reason.NOT_A_DELTA) -> None:
        self.path = path
        self.missing = missing

    def __enter__(self) -> Folder:
        try:
            self.fd = os.open(self.path, OPEN_DIRECTORY)
        except (OSError, ValueError) as error:
            if isinstance(error, NotADirectoryError) and exists(self.path):
                raise DeltaError(self.missing, f"{self.path} is a file; a directory is expected") from None
            raise refusal(error, self.missing, "directory", self.path) from None
        try:
            self._opened = os.fstat(self.fd)
        except OSError as error:
            self.__exit__()
            raise refusal(error, self.missing, "directory", self.path) from None
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what was read was read
            os.close(self.fd)

    def names(self) -> list[str]:
        """What the directory holds."""
        try:
            return os.listdir(self.fd)
        except OSError as error:
            raise refusal(error, self.missing, "directory", self.path) from None

    def open(self, name: str) -> FileIO:
        """The regular file ``name``, a path relative to the directory; does not wait at a FIFO."""
        return open_file(self.path / name, self.missing, name, self.fd)

    def is_current(self) -> bool:
        """Whether the path still leads to the directory that is held open. True as well where that cannot be found
        out."""
        try:
            return os.path.samestat(os.stat(self.path), self._opened)
        except OSError as error:
            return error.errno not in _NOTHING_THERE


def open_file(path: Path, missing: Reason, name: str | None = None, dir_fd: int | None = None) -> FileIO:
    """The regular file at ``path`` (or ``name`` in the open directory ``dir_fd``), without waiting at a FIFO."""
    # The name comes first and apart: vLLM masks paths in errors that it answers.
    shown = f"{path.name} in {path.parent}"
    try:
        fd = os.open(path if name is None else name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except (OSError, ValueError) as error:
        raise refusal(error, missing, "file", shown) from None
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return _File(fd, "rb")
        found = DeltaError(Reason.UNREADABLE, f"{shown} is not a regular file")
    except OSError as error:
        found = refusal(error, missing, "file", shown)
    with suppress(OSError):
        os.close(fd)
    raise found


class _File(FileIO):
    """A file of which a close that fails (some file systems of FUSE) does not undo what was read."""

    def close(self) -> None:
        """Close it."""
        with suppress(OSError):
            super().close()


def size_of(file: FileIO) -> int:
    """Bytes of an open file."""
    try:
        return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise refusal(error, Reason.UNREADABLE, "file", "its size is not known") from None


def read_exactly(file: FileIO, size: int) -> Tensor:
    """[size] uint8: the next bytes of an unbuffered file."""
    data = new_bytes(size)
    read_into(data.numpy().data, file.readinto)
    return data


def new_bytes(size: int) -> Tensor:
    """[size] uint8, not initialised. `DeltaError` (unreadable) if there is not enough memory."""
    try:
        return torch.empty(size, dtype=torch.uint8)
    except RuntimeError:
        raise DeltaError(Reason.UNREADABLE, f"no memory for {size} bytes") from None


def read_into(view: memoryview, read: Callable[[memoryview], int | None]) -> None:
    """Fill ``view`` by as many calls of ``read`` as it takes; `DeltaError` (unreadable) where the file ends early."""
    at = 0
    while at < len(view):
        try:
            got = read(view[at:])
        except OSError as error:
            raise refusal(error, Reason.UNREADABLE, "file", "read failed") from None
        if not got:
            raise DeltaError(Reason.UNREADABLE, f"the file ends {len(view) - at} bytes early")
        at += got
