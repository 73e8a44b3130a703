"""The difference of two checkpoints, run by run. Memory holds the delta and one run of each side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refdelta.checkpoints.patching import Advance, StateDigests
from refdelta.checkpoints.reading import Checkpoint
from refdelta.codec import bits
from refdelta.codec.digests import ZERO, add
from refdelta.codec.encoding import check_comparable
from refdelta.spec import Delta, Lineage, TensorPatch, index_dtype

__all__ = ["diff_checkpoints", "diff_tensor"]


def diff_checkpoints(
    base: Checkpoint, target: Checkpoint, *, lineage: Lineage | None = None, advance: Advance = lambda _: None
) -> Delta:
    """The delta from ``base`` to ``target``, as `refdelta.codec.encoding.diff` gives it. Shards may be cut differently.

    ``lineage`` states the run and the versions. Its digests are computed here. Raises `DeltaError` that lists every
    name, shape and dtype in which the two differ.
    """
    check_comparable(base.infos(), target.infos())
    patches, before, layers = [], ZERO, {}
    for name in sorted(target):
        digests = StateDigests() if lineage else None
        patch = diff_tensor(base, target, name, digests, advance)
        if patch.changed:
            patches.append(patch)
        if digests:
            before = add(before, digests.before)
            layers[name] = digests.after
    if lineage:
        lineage = replace(
            lineage,
            base_digest=before,
            digest=add(ZERO, *layers.values()),
            layer_digests={patch.name: layers[patch.name] for patch in patches},
        )
    return Delta(tuple(patches), target.total_elements, lineage)


def diff_tensor(
    base: Checkpoint,
    target: Checkpoint,
    name: str,
    digests: StateDigests | None = None,
    advance: Advance = lambda _: None,
) -> TensorPatch:
    """The change of one tensor that both checkpoints hold in the same shape and dtype. It may be empty."""
    info = target.info(name)
    indices = _Growing(index_dtype(info.numel))
    values = _Growing(bits.bit_view(torch.empty(0, dtype=info.dtype)).dtype)
    if digests:
        digests.add_tensor(name, info)
    for (start, old), (_, new) in zip(base.runs(name), target.runs(name), strict=True):
        at = bits.differing(new, old)
        run = TensorPatch(name, info.shape, (at + start).to(indices.dtype), bits.gather(new, at))
        indices.append(run.indices)
        values.append(bits.bit_view(run.values))
        if digests:
            digests.add_run(name, info, start, old)
            digests.change(run, bits.gather(old, at))
        advance(len(new) * new.element_size())
    return TensorPatch(name, info.shape, indices.tensor(), values.tensor().view(info.dtype))


class _Growing:
    """A 1-D tensor of ``dtype`` that grows where it is, so that there are never two copies of it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._array: np.ndarray[Any, Any] = torch.empty(0, dtype=dtype).numpy().copy()

    def append(self, more: Tensor) -> None:
        length = len(self._array)
        self._array.resize(length + len(more), refcheck=False)
        self._array[length:] = more.numpy()

    def tensor(self) -> Tensor:
        return torch.from_numpy(self._array)
