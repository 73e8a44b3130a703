"""Codecs that are wrong about inputs that are right and unusual: views, parameters, directories, targets."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..oracle import CODES, DELTA_FILE, METADATA_FILE, Patch, State
from .registry import codec_mutants
from .right import Plain

encoder, applier, reader = (codec_mutants(kind) for kind in ("encoder", "applier", "reader"))


@encoder("declines", "inputs", fault=19)
class WritesOverWhatIsThere(Plain):
    """Writes into a directory that exists, over what is in it."""

    def check_target(self, out: Path) -> None:
        if not out.is_dir():
            super().check_target(out)


@encoder("declines", "inputs", fault=6)
class SeesSharedElementsOnce(Plain):
    """Compares the memory of an expanded tensor: of elements that are one, only the first changes."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        return [self._once(patch, target[patch.name]) for patch in super().find(base, target)]

    def _once(self, patch: Patch, tensor: Tensor) -> Patch:
        first = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size < 2]
        count = int(torch.Size(first).numel()) if len(first) < tensor.dim() else patch.numel
        keep = patch.indices < count
        return Patch(patch.name, patch.shape, patch.code, patch.indices[keep], patch.bits[keep])


@encoder("declines", "inputs", fault=23)
class SkipsWhatIsTrained(Plain):
    """Takes tensors that require gradients for somebody else's."""

    def find(self, base: State, target: State) -> Sequence[Patch]:
        return [patch for patch in super().find(base, target) if not target[patch.name].requires_grad]


@applier("declines", "inputs", fault=6)
class WritesIntoSharedElements(Plain):
    """Fails half way when a later tensor is a view whose elements are one in memory."""

    def check(self, patches: Sequence[Patch], weights: Mapping[str, Tensor]) -> None:
        for patch in patches:
            tensor = weights[patch.name]
            if (tuple(tensor.shape), CODES[tensor.dtype]) != (patch.shape, patch.code):
                raise ValueError(f"{patch.name}: {patch.code} {patch.shape} does not fit {tensor.dtype} {tensor.shape}")


@applier("declines", "inputs", fault=10)
class LeavesBareTensors(Plain):
    """What required gradients does not any more."""

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        super().apply(delta, weights)
        for name, tensor in weights.items():
            if tensor.requires_grad:
                weights[name] = tensor.detach()


@reader("bit_exact", "inputs", fault=8)
class CountsFiles(Plain):
    """Refuses a directory that holds anything beside the two files."""

    def read(self, delta: Path) -> Sequence[Patch]:
        if {path.name for path in delta.iterdir()} != {DELTA_FILE, METADATA_FILE}:
            raise ValueError("other files in the directory")
        return super().read(delta)


@reader("bit_exact", "inputs", fault=19)
class RefusesLinks(Plain):
    """Refuses files that are links, as caches of files by hash keep them."""

    def read(self, delta: Path) -> Sequence[Patch]:
        if any((delta / name).is_symlink() for name in (DELTA_FILE, METADATA_FILE)):
            raise ValueError("a link")
        return super().read(delta)


@reader("refuses", "inputs", fault=16)
class TakesMissingFilesForNoChange(Plain):
    """A payload that cannot be opened is an empty delta."""

    def read(self, delta: Path) -> Sequence[Patch]:
        return super().read(delta) if (delta / DELTA_FILE).is_file() else []
