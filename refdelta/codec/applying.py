"""Applying deltas. Everything is validated before the first byte of a state changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from refdelta.codec import bits
from refdelta.codec.arguments import check_delta
from refdelta.codec.composition import compose as compose
from refdelta.codec.composition import join as join
from refdelta.codec.digests import parse as parse_digest
from refdelta.codec.digests import roll_digest
from refdelta.codec.state import Weights, first_names, holds_memory, named_tensors
from refdelta.spec import UNVERSIONED, Delta, DeltaError, Lineage, Reason, TensorPatch, check_plain

__all__ = ["apply_delta", "check_fits"]


def apply_delta(delta: Delta, weights: Weights, *, digest: str | None = None) -> Delta:
    """Write ``delta`` into ``weights`` in place and return the inverse delta. O(changed), any strides, CPU or CUDA.

    Everything is checked before the first write: names, shapes, dtypes, positions, memory shared between tensors. When
    a write fails, what was written is undone and `DeltaError` (write_failed) raised. Where a module ties several
    names to one tensor, the delta may use any one of them. Elsewhere, if names share memory, the delta must state the
    change under each. One part of a delta in several parts is refused: `join` the parts first.

    ``digest``: the `state_digest` of ``weights``, if the caller has kept it. The delta's base digest must then equal it
    (base_mismatch), and the delta's digest must equal the digest of the result (digest_mismatch). The lineage of the
    inverse goes the other way: ``base_digest`` is that of the result, ``digest`` that of the state before.

    >>> import torch
    >>> from refdelta import diff
    >>> old, new = torch.zeros(2, 3), torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 7.0]])
    >>> held = {"w": old.clone()}
    >>> inverse = apply_delta(diff({"w": old}, {"w": new}), held)
    >>> bool(held["w"].equal(new))
    True
    >>> _ = apply_delta(inverse, held)  # back again
    >>> bool(held["w"].equal(old))
    True
    """
    check_delta(delta)
    if digest is not None:
        parse_digest(digest)
    tensors = named_tensors(weights)
    check_fits(delta, tensors)
    _check_aliases(delta, tensors if isinstance(weights, Mapping) else _untied(tensors, delta))
    old = tuple(_old_values(patch, tensors[patch.name]) for patch in delta.patches)
    lineage = _inverse_lineage(delta.lineage)
    if digest is not None:
        if not isinstance(weights, Mapping):
            _check_first_names(delta, tensors)
        lineage = _digested(lineage, digest, _digest_after(delta, old, digest))
    inverse = Delta(old, delta.total_elements, lineage)
    _write(delta, tensors, inverse)
    return inverse


def _digest_after(delta: Delta, old: Sequence[TensorPatch], digest: str) -> str:
    """The digest that ``delta`` leads to from ``digest``, when both are what its lineage says."""
    lineage = delta.lineage
    if lineage is not None and lineage.base_digest not in (None, digest):
        raise DeltaError(Reason.BASE_MISMATCH, f"the delta is based on {lineage.base_name}; the state is {digest}")
    after = digest
    for patch, before in zip(delta.patches, old, strict=True):
        after = roll_digest(after, patch, before.values)
    if lineage is not None and lineage.digest not in (None, after):
        detail = f"expected {lineage.digest} after the delta; from {digest} it leads to {after}"
        raise DeltaError(Reason.DIGEST_MISMATCH, detail)
    return after


def _digested(lineage: Lineage | None, before: str, after: str) -> Lineage:
    """The inverse's lineage with what is known about digests, which is also there where no version is."""
    known = lineage or Lineage(UNVERSIONED, 0)
    return replace(known, base_digest=after, digest=before)


def _check_first_names(delta: Delta, tensors: Mapping[str, Tensor]) -> None:
    """A digest counts a tied tensor under its first name; a change under another one would not roll it."""
    counted = first_names(tensors)
    for patch in delta.patches:
        if patch.name not in counted:
            detail = "tied to a tensor of an earlier name, under which alone its digest counts"
            raise DeltaError(Reason.ALIAS_CONFLICT, detail, patch.name)


def check_fits(delta: Delta, tensors: Mapping[str, Tensor]) -> None:
    """Raise `DeltaError` unless every patch fits a tensor of the state, and the delta is whole, not one part of
    several."""
    if delta.lineage is not None and delta.lineage.is_partial:
        raise DeltaError(Reason.INCOMPLETE, f"part {list(delta.lineage.part or ())} of several; join them first")
    for patch in delta.patches:
        t = tensors.get(patch.name)
        if t is None:
            raise DeltaError(Reason.UNKNOWN_TENSOR, f"not among the {len(tensors)} tensors", patch.name)
        if tuple(check_plain(t, patch.name).shape) != patch.shape:
            detail = f"expected {list(t.shape)}, the delta has {list(patch.shape)}"
            raise DeltaError(Reason.SHAPE_MISMATCH, detail, patch.name)
        if t.dtype != patch.dtype:
            raise DeltaError(Reason.DTYPE_MISMATCH, f"expected {t.dtype}, the delta has {patch.dtype}", patch.name)
        try:
            bits.check_writable(t)
        except DeltaError as error:
            raise DeltaError(error.reason, error.detail, patch.name) from None
        patch.check_indices()


def _untied(tensors: Mapping[str, Tensor], delta: Delta) -> dict[str, Tensor]:
    """``tensors`` without further names of the same view, unless those are patched too."""
    patched = {patch.name: tensors[patch.name] for patch in delta.patches}
    return first_names({**patched, **tensors}) | patched


def _check_aliases(delta: Delta, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a change that one tensor states and another one, which holds the same memory, does not.

    Tensors of different dtypes or alignment are taken to share all memory between the first and the last element.
    """
    patches = {patch.name: patch for patch in delta.patches if patch.changed}
    for a, b in _overlapping_spans(tensors):
        for name, other in ((a, b), (b, a)):
            if name in patches and _changes_unstated(patches[name], tensors[name], tensors[other], patches.get(other)):
                detail = f"shares memory with {other}, for which the delta states another change or none"
                raise DeltaError(Reason.ALIAS_CONFLICT, detail, name)


def _overlapping_spans(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names whose first-to-last bytes intersect; what has no memory of its own has no address either."""
    spans = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + bits.extent(t) * t.element_size(), name)
        for name, t in tensors.items()
        if holds_memory(t)
    )
    for i, (device, _, end, name) in enumerate(spans):
        for other_device, start, _, other in itertools.islice(spans, i + 1, None):
            if (other_device, start) >= (device, end):
                break
            yield name, other


def _changes_unstated(patch: TensorPatch, t: Tensor, other: Tensor, stated: TensorPatch | None) -> bool:
    """Whether ``patch`` of ``t`` writes an element of ``other`` that ``stated`` does not give the same bits."""
    distance, odd = divmod(t.data_ptr() - other.data_ptr(), t.element_size())
    if t.dtype != other.dtype or odd or bits.overlaps_itself(other):
        return True
    positions, inside = bits.positions_at(other, bits.offsets_in_storage(t, patch.indices) + distance)
    positions, values = positions[inside], bits.bit_view(patch.values).to(t.device)[inside]
    if stated is None or not len(positions):
        return len(positions) > 0
    have = stated.indices.to(device=t.device, dtype=torch.int64)
    at = torch.searchsorted(have, positions).clamp_(max=len(have) - 1)
    same = (have[at] == positions) & (bits.bit_view(stated.values).to(t.device)[at] == values)
    return not bool(same.all())


def _old_values(patch: TensorPatch, t: Tensor) -> TensorPatch:
    old = bits.gather(t, patch.indices).to(patch.values.device)
    return TensorPatch(patch.name, patch.shape, patch.indices, old)


def _inverse_lineage(lineage: Lineage | None) -> Lineage | None:
    if lineage is None or lineage.base_version is None:
        return None
    return Lineage(
        run_id=lineage.run_id,
        version=lineage.base_version,
        base_version=lineage.version,
        base_digest=lineage.digest,
        digest=lineage.base_digest,
    )


def _write(delta: Delta, tensors: Mapping[str, Tensor], inverse: Delta) -> None:
    """Write every patch, or none: on failure the values of ``inverse`` are written back."""
    for number, patch in enumerate(delta.patches):
        try:
            bits.scatter_(tensors[patch.name], patch.indices, patch.values)
        except BaseException as error:
            _undo(inverse.patches[: number + 1], tensors, error)
            if not isinstance(error, Exception):
                raise
            raise DeltaError(Reason.WRITE_FAILED, f"undone: {error}", patch.name) from error


def _undo(patches: Sequence[TensorPatch], tensors: Mapping[str, Tensor], cause: BaseException) -> None:
    for patch in patches:
        try:
            bits.scatter_(tensors[patch.name], patch.indices, patch.values)
        except Exception:
            detail = f"the state is a mixture: writing failed ({cause}), and so did undoing it"
            raise DeltaError(Reason.WRITE_FAILED, detail, patch.name) from cause
