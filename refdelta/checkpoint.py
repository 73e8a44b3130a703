"""Read the tensors of a checkpoint directory: safetensors shards, with or without an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from refdelta.layout_map import TensorInfo
from refdelta.spec import DeltaError, Reason

__all__ = ["INDEX_FILE", "Checkpoint"]

INDEX_FILE = "model.safetensors.index.json"


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint directory by name, memory-mapped, read when asked for.

    With an index (``model.safetensors.index.json``) the names and files are the index's; without one, every
    ``*.safetensors`` file counts and a name that stands in two of them is refused (``duplicate_name``). Order: files by
    name, tensors as the file lists them. Use as a context manager; tensors stay valid after it closes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stack = ExitStack()
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, safe_open] = {}
        try:
            self._file_of = dict(_named(self._files()))
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
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._open[self._file_of[name]].get_tensor(name)
        return tensor

    def infos(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor, in order."""
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self.items()}

    def _files(self) -> dict[Path, list[str]]:
        index = self.path / INDEX_FILE
        if index.is_file():
            return self._indexed(index)
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise DeltaError(Reason.UNREADABLE, f"no safetensors files in {self.path}")
        return {file: list(self._keys(file)) for file in files}

    def _indexed(self, index: Path) -> dict[Path, list[str]]:
        try:
            weight_map: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
            wanted = {name: self.path / file for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DeltaError(Reason.UNREADABLE, f"{index}: not a checkpoint index ({error!r})") from error
        held: dict[Path, list[str]] = {}
        for file in sorted(set(wanted.values())):
            held[file] = [name for name in self._keys(file) if wanted.get(name) == file]
        missing = sorted(set(wanted) - {name for names in held.values() for name in names})
        if missing:
            raise DeltaError(Reason.UNREADABLE, f"{index}: its file does not hold this tensor", missing[0])
        return held

    def _keys(self, file: Path) -> list[str]:
        try:
            handle = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise DeltaError(Reason.UNREADABLE, f"{file}: {error}") from error
        self._open[file] = handle
        return list(handle.keys())


def _named(files: Mapping[Path, list[str]]) -> Iterator[tuple[str, Path]]:
    seen: dict[str, Path] = {}
    for file, names in files.items():
        for name in names:
            if name in seen:
                raise DeltaError(Reason.DUPLICATE_NAME, f"in {seen[name].name} and {file.name}", name)
            seen[name] = file
            yield name, file
