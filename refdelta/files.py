"""Files and directories as the codec needs them: opened without waiting, read exactly, written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from refdelta.spec import DeltaError, Reason

__all__ = ["Folder", "new_directory", "read_exactly", "sync_directory", "write_file"]


class Folder:
    """A directory held open, so that both files come from the same one even if a link to it is moved meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Folder:
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            raise DeltaError(Reason.NOT_A_DELTA, f"no directory {self.path}") from None
        except OSError as error:
            raise DeltaError(Reason.UNREADABLE, f"{self.path}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def open(self, name: str) -> FileIO:
        """The regular file ``name``; does not wait at a FIFO."""
        path = self.path / name
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            raise DeltaError(Reason.NOT_A_DELTA, f"no file {path}") from None
        except OSError as error:
            raise DeltaError(Reason.UNREADABLE, f"{path}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise DeltaError(Reason.UNREADABLE, f"{path} is not a regular file")
        return FileIO(fd, "rb")


def read_exactly(file: FileIO, size: int) -> Tensor:
    """[size] uint8: the next bytes of an unbuffered file."""
    data = torch.empty(size, dtype=torch.uint8)
    view, at = data.numpy().data, 0
    while at < size:
        try:
            got = file.readinto(view[at:])
        except OSError as error:
            raise DeltaError(Reason.UNREADABLE, f"read failed: {error.strerror}") from None
        if not got:
            raise DeltaError(Reason.UNREADABLE, f"the file ends {size - at} bytes early")
        at += got
    return data


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
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
def new_directory(target: Path) -> Iterator[Path]:
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
        sync_directory(temporary)
        temporary.rename(target)
        sync_directory(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            # Renaming onto what another writer has put there meanwhile.
            lost = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(target)
            reason = Reason.TARGET_EXISTS if lost else Reason.WRITE_FAILED
            raise DeltaError(reason, f"{target}: {error.strerror}") from error
        raise


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
