"""Files and directories that are written whole or not at all.

Everything is first written into a staging directory: a hidden sibling ``.NAME.<hex>.tmp`` of the target. It is synced
there and then moved into place in one step. A writer that is killed leaves its staging directory behind. That is
neither a delta nor a checkpoint, because its contents lie one level deeper. It may be removed at any time, and the next
writer of the same target removes it once it is older than `LEFTOVER_AGE_S`.

Not every file system has every operation; docs/SPEC.md (section 2) says what is promised without it. Where two
directories cannot be exchanged, the former target is moved to ``old`` in the staging directory. Where it cannot be
moved either, it is emptied. A staging directory that holds ``old`` is never removed: ``old`` is what was at the target,
or ``new`` beside it is the only whole copy.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from refdelta.files.opening import OPEN_DIRECTORY
from refdelta.files.posix import fcntl
from refdelta.spec import DeltaError, Reason

__all__ = ["LEFTOVER_AGE_S", "Replaceable", "check_target", "new_directory", "new_file", "write_file", "write_hashed"]

LEFTOVER_AGE_S: Final = 3600
"""Seconds after which a staging directory that no process holds locked counts as abandoned."""
_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
_WITHOUT_FLAGS: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
"""What `renameat2` answers where the file system, the kernel or a container's filter (EPERM) has no such flag."""
_APPEARED: Final = (errno.EEXIST, errno.ENOTEMPTY)
"""What a rename answers when its target has come into being meanwhile."""
_WITHOUT_SYNC: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""What `fsync` answers where a file system cannot do it, for directories above all (CIFS, some of FUSE)."""
_WITHOUT_LINKS: Final = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EMLINK)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write and sync a new file."""
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        _sync(file.fileno())


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
    """As `write_file`; returns the file's SHA-256, 64 hexadecimal digits."""
    sha256 = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            sha256.update(chunk)
            yield chunk

    write_file(path, hashed())
    return sha256.hexdigest()


Replaceable = Callable[[Path], bool]
"""Says whether whatever is at a path may be replaced."""


def check_target(target: Path, replaceable: Replaceable | None = None) -> None:
    """Raise now what `new_directory` or `new_file` would raise about ``target`` later, after much work."""
    _check_target(target, replaceable)
    parent = target.parent
    if not parent.is_dir():
        raise DeltaError(Reason.WRITE_FAILED, f"{target}: there is no directory {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DeltaError(Reason.WRITE_FAILED, f"{target}: nothing can be written into {parent}")


@contextmanager
def new_directory(target: Path, replaceable: Replaceable | None = None) -> Iterator[Path]:
    """An empty directory that becomes ``target`` at the end of the block, or is removed where the block fails.

    Raises `DeltaError`: target_exists where something is there that is not ``replaceable``, write_failed where the file
    system refuses. A reader sees either the old directory or the whole new one. Where the file system cannot exchange
    two directories, there is a moment with neither.
    """
    with _new(target, replaceable) as place:
        place.mkdir()
        yield place
        for folder, _, _ in os.walk(place):
            _sync_directory(Path(folder))


@contextmanager
def new_file(target: Path, replaceable: Replaceable | None = None) -> Iterator[Path]:
    """As `new_directory`: a path for one file, which the block writes and syncs."""
    with _new(target, replaceable) as place:
        yield place


@contextmanager
def _new(target: Path, replaceable: Replaceable | None) -> Iterator[Path]:
    _check_target(target, replaceable)
    staging = _staging_directory_of(target)
    try:
        with _open_staging(target, staging):
            place = staging / "new"
            yield place
            _move(place, target, staging, replaceable)
            _sync_parent(target)
    except OSError as error:
        # Moving onto what another writer has put there meanwhile.
        lost = error.errno in (*_APPEARED, errno.ENOTDIR) and os.path.lexists(target)
        reason = Reason.TARGET_EXISTS if lost else Reason.WRITE_FAILED
        raise DeltaError(reason, f"{target}: {error.strerror}{_kept(staging)}") from error


def _check_target(target: Path, replaceable: Replaceable | None) -> None:
    if "\0" in os.fspath(target):
        raise DeltaError(Reason.WRITE_FAILED, f"{target}: the path has a NUL character")
    if _is_in_the_way(target, replaceable):
        kept = "; it holds other things, so it is not replaced" if replaceable else ""
        raise DeltaError(Reason.TARGET_EXISTS, f"{target}{kept}")


def _is_in_the_way(target: Path, replaceable: Replaceable | None) -> bool:
    """Whether there is anything that may not be replaced; what other writers move meanwhile is looked at again."""
    while (found := _identity(target)) is not None:
        with suppress(FileNotFoundError):
            if replaceable and replaceable(target):
                return False
        if _identity(target) == found:
            return True
    return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _move(source: Path, target: Path, staging: Path, replaceable: Replaceable | None) -> None:
    """``source`` becomes ``target``; what was there comes to lie in the staging directory, or goes."""
    done = False
    while not done:
        exists = replaceable is not None and os.path.lexists(target)
        _check_target(target, replaceable)
        try:
            done = _replace(source, target, staging, replaceable) if exists else _place(source, target)
        except OSError as error:
            appeared = error.errno in _APPEARED and not (staging / "old").exists()
            if not (appeared and replaceable):
                raise


def _place(source: Path, target: Path) -> bool:
    """Move ``source`` to where nothing was a moment ago; True.

    Without flags what has appeared since stays if it is a directory that is not empty, or a file where there are hard
    links.
    """
    try:
        _rename(source, target, _RENAME_NOREPLACE)
        return True
    except OSError as error:
        if error.errno not in _WITHOUT_FLAGS:
            raise
    if source.is_file():
        try:
            os.link(source, target)
            return True
        except OSError as error:
            if error.errno not in _WITHOUT_LINKS:
                raise
    source.rename(target)
    return True


def _replace(source: Path, target: Path, staging: Path, replaceable: Replaceable | None) -> bool:
    """Put ``source`` in the place of ``target``, in one step where that can be done.

    False where another writer has moved ``target`` meanwhile: all is to be tried again.
    """
    try:
        _rename(source, target, _RENAME_EXCHANGE)
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in (*_WITHOUT_FLAGS, errno.EXDEV):
            raise
    if target.is_dir():
        return _replace_in_two_steps(source, target, staging / "old", replaceable)
    source.rename(target)
    return True


def _replace_in_two_steps(source: Path, target: Path, old: Path, replaceable: Replaceable | None) -> bool:
    """As `_replace`; a reader sees the old, nothing, the new. Where the second step fails, the first one is undone."""
    try:
        target.rename(old)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.EXDEV or os.path.ismount(target):
            raise
        _replace_emptied(source, target, old, replaceable)
        return True
    try:
        source.rename(target)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _APPEARED:
            _check_target(target, replaceable)
            _retire(old)
            return False
        with suppress(OSError):
            old.rename(target)
        raise
    _retire(old)
    return True


def _replace_emptied(source: Path, target: Path, old: Path, replaceable: Replaceable | None) -> None:
    """`_replace` where ``target`` cannot be moved: it lies in a lower layer of an overlay (EXDEV).

    Weights go first: what is left of a delta or checkpoint is none from the first step on, as long as an index or the
    metadata names what is missing. From then on ``source`` is the only whole one, and ``old`` keeps it.
    """
    with os.scandir(target) as found:
        entries = sorted(found, key=_last_to_go)
    _check_target(target, replaceable)
    if sum(_is_weights(entry) for entry in entries) > 1 and not any(_is_index(entry) for entry in entries):
        detail = "lies in a lower layer of an overlay file system, and has no index: it would be seen in part"
        raise DeltaError(Reason.WRITE_FAILED, f"{target}: {detail}; remove it before, or write elsewhere")
    old.mkdir()
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    target.rmdir()
    source.rename(target)
    _retire(old)


def _last_to_go(entry: os.DirEntry[str]) -> tuple[int, str]:
    """Weights, directories (which may hold weights), other files, the index of the weights."""
    if _is_weights(entry):
        return 0, entry.name
    return (1 if entry.is_dir(follow_symlinks=False) else 3 if _is_index(entry) else 2), entry.name


def _is_weights(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".safetensors")


def _is_index(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".safetensors.index.json")


def _retire(old: Path) -> None:
    """Give up what was replaced: the staging directory may be removed again."""
    with suppress(OSError):
        old.rename(old.with_name(f"replaced-{secrets.token_hex(4)}"))


def _kept(staging: Path) -> str:
    """What a failure must say of a staging directory that stays."""
    old, new = staging / "old", staging / "new"
    if not old.exists():
        return ""
    moved = any(old.iterdir())
    return f"; what was there lies in {old}" if moved else f"; what was there is gone in part, the new lies in {new}"


def _rename(source: Path, target: Path, flag: int) -> None:
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, "no renameat2") from None
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _staging_directory_of(target: Path) -> Path:
    return target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}.tmp")


@contextmanager
def _open_staging(target: Path, staging: Path) -> Iterator[None]:
    """Make ``staging``, locked against `_remove_leftovers`; afterwards it is removed, unless it holds ``old``."""
    _remove_leftovers(target)
    staging.mkdir()
    fd = os.open(staging, OPEN_DIRECTORY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        if not (staging / "old").exists():
            shutil.rmtree(staging, ignore_errors=True)
        os.close(fd)


def _remove_leftovers(target: Path) -> None:
    """Remove what killed writers of ``target`` have left: old, locked by nobody, and not holding the former target."""
    for path in target.parent.glob(f"{glob.escape(_prefix(target))}*.tmp"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime < LEFTOVER_AGE_S or (path / "old").exists():
                continue
            fd = os.open(path, OPEN_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(fd)


def _prefix(target: Path) -> str:
    return f".{target.name[:40]}."


def _sync_parent(target: Path) -> None:
    """Make the move durable. A failure comes too late to undo it, and says so."""
    try:
        _sync_directory(target.parent)
    except OSError as error:
        detail = f"{target} is there and whole, but {target.parent} could not be synced: {error.strerror}"
        raise DeltaError(Reason.WRITE_FAILED, detail) from error


def _sync_directory(path: Path) -> None:
    try:
        fd = os.open(path, OPEN_DIRECTORY)
    except PermissionError:  # one may write into it and not read it, so it cannot be synced
        return
    try:
        _sync(fd)
    finally:
        os.close(fd)


def _sync(fd: int) -> None:
    """`fsync`, where the file system can do it."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _WITHOUT_SYNC:
            raise
