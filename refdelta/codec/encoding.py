"""Making deltas: the difference of two states, and an encoder that follows one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from refdelta.codec import bits
from refdelta.codec.applying import apply_delta
from refdelta.codec.arguments import check_delta
from refdelta.codec.digests import ZERO, add, layer_digests, roll_digest
from refdelta.codec.peft import check_no_adapters
from refdelta.codec.state import TensorInfo, Weights, total_elements, tracked
from refdelta.spec import Delta, DeltaError, Lineage, Reason, TensorPatch, index_dtype

__all__ = ["DeltaEncoder", "check_comparable", "diff"]


def diff(base: Weights, target: Weights) -> Delta:
    """The delta from ``base`` to ``target``: exactly the positions whose bits differ, layers in name order.

    Both states must have equal names, shapes and dtypes; otherwise `DeltaError` lists everything that differs. Where a
    module ties several names to one tensor, only the first counts. Patches lie on ``target``'s devices; ``base`` may be
    on others.

    >>> import torch
    >>> base = {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}
    >>> target = {"w": torch.tensor([[0, 0, 1], [0, -0.0, 0]], dtype=torch.bfloat16)}
    >>> delta = diff(base, target)
    >>> delta.patches[0].indices.tolist()  # flat positions; -0.0 has other bits than 0.0
    [2, 4]
    >>> f"{delta.changed_elements} of {delta.total_elements}"
    '2 of 6'
    """
    return _diff(tracked(base), tracked(target), device=None)


class DeltaEncoder:
    """Makes deltas against a baseline, which it keeps in host memory (pinned where there is CUDA).

    The baseline is what the receiver holds. `encode` does not move it; `commit` does, once the receiver has
    acknowledged the delta, so that a delta that was lost or refused is contained in the next one.

    With a ``run_id`` every delta gets a lineage: the version after `version`, its base, and digests. They are computed
    from all elements once, in the constructor, and rolled with each commit. Without a commit the next delta has the
    same version.
    """

    def __init__(self, weights: Weights, *, run_id: str | None = None, version: int = 0) -> None:
        """``version`` is that of ``weights`` in the run; a resumed trainer starts where the receiver stands.

        ``weights`` are the whole state. Names, shapes and dtypes that differ from it later are refused. Two kinds of
        tensors are refused at once. unsupported_tensor: it is not whole (a shard, a placeholder, a wrapper); gather
        it on every rank, for example by ``full_tensor()``. unknown_tensor: no checkpoint has it (an adapter that is
        not merged, a mapping under PEFT's names; see `refdelta.codec.peft`). Trainers mark placeholders on
        parameters, and ``state_dict()`` loses the mark, so give the module or its ``named_parameters()``. A tensor
        of shape [0] gets a warning, because it may be such a placeholder.
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
        """Move the baseline by ``delta``. If it does not fit, `DeltaError` is raised and the baseline stays."""
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
    """Refuse states that differ in names, shapes or dtypes. The message lists all differences; the reason is the
    first's."""
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
