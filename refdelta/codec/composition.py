"""Several deltas in one: `compose` deltas that follow each other, `join` the parts of one update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from refdelta.codec import bits
from refdelta.codec.arguments import check_delta
from refdelta.spec import Delta, DeltaError, Lineage, Reason, TensorPatch, check_argument, index_dtype

__all__ = ["compose", "join"]

_OF_THE_WRITING: Final = frozenset({"created_at", "timestamp"})
"""Metadata about one act of writing. A delta made of others gets its own."""

_WINDOW: Final = 1 << 20
"""Positions of each delta that are merged at once. It keeps the memory for merging small beside the deltas."""


def compose(deltas: Iterable[Delta]) -> Delta:
    """One delta that does what ``deltas`` do when applied in this order. O(changed), layers in name order.

    Where several deltas change a position, the last one wins. A position stays in the result even if its last value is
    the one that it began with. The lineage spans the
    range: base of the first, version and digest of the last. Raises `DeltaError` when they do not follow each other:
    count_mismatch (totals), shape_mismatch, dtype_mismatch, base_mismatch (another run, a gap, a base that is not the
    state before, or a lineage beside none), incomplete (one part of several), bad_option (no deltas at all).

    >>> import torch
    >>> from refdelta import diff
    >>> states = [{"w": torch.tensor([[0, value, 0]])} for value in (1, 2, 3)]
    >>> both = compose([diff(states[0], states[1]), diff(states[1], states[2])])
    >>> both.patches[0].indices.tolist(), both.patches[0].values.tolist()
    ([1], [3])
    """
    chain = _listed(deltas)
    for delta in chain:
        if delta.lineage is not None and delta.lineage.is_partial:
            raise DeltaError(Reason.INCOMPLETE, f"part {list(delta.lineage.part or ())} of several; join them first")
    for before, after in pairwise(chain):
        _check_follows(before, after)
    return Delta(_merged(chain, _later_wins), chain[0].total_elements, _span(chain), _common_extra(chain))


def join(parts: Iterable[Delta]) -> Delta:
    """The update that comes in ``parts``, in any order. O(changed), layers in name order.

    Raises `DeltaError` (incomplete) unless ``parts`` are all parts of one update and no position is in two of them;
    count_mismatch, shape_mismatch, dtype_mismatch and bad_option as in `compose`.
    """
    whole = _listed(parts)
    lineage = _common_lineage(whole)
    for before, after in pairwise(whole):
        _check_same_total(before, after)
    return Delta(_merged(whole, _disjoint), whole[0].total_elements, lineage, _common_extra(whole))


def _listed(given: Iterable[Delta]) -> list[Delta]:
    """The deltas that were given, at least one."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        check_argument("deltas", given, (), "several Deltas")
    deltas = list(given)
    for delta in deltas:
        check_delta(delta, "deltas")
    if not deltas:
        raise DeltaError(Reason.BAD_OPTION, "no deltas: nothing says how many elements the state has")
    return deltas


def _check_same_total(a: Delta, b: Delta) -> None:
    if a.total_elements != b.total_elements:
        detail = f"total_elements: {a.total_elements} and {b.total_elements} are not those of one state"
        raise DeltaError(Reason.COUNT_MISMATCH, detail)


# Patches


def _merged(deltas: Sequence[Delta], pick: Callable[[str, Tensor], Tensor]) -> tuple[TensorPatch, ...]:
    """Per tensor the positions of all deltas, once each; ``pick`` says which of equal ones stay."""
    by_name: dict[str, list[TensorPatch]] = {}
    for patch in (patch for delta in deltas for patch in delta.patches):
        same = by_name.setdefault(patch.name, [])
        _check_same_tensor(same[0] if same else patch, patch)
        patch.check_indices()
        same.append(patch)
    merged = (_merge(name, by_name[name], pick) for name in sorted(by_name))
    return tuple(patch for patch in merged if patch.changed)


def _check_same_tensor(a: TensorPatch, b: TensorPatch) -> None:
    if a.shape != b.shape:
        raise DeltaError(Reason.SHAPE_MISMATCH, f"{list(a.shape)} in one delta, {list(b.shape)} in a later one", a.name)
    if a.dtype != b.dtype:
        raise DeltaError(Reason.DTYPE_MISMATCH, f"{a.dtype} in one delta, {b.dtype} in a later one", a.name)


def _merge(name: str, patches: Sequence[TensorPatch], pick: Callable[[str, Tensor], Tensor]) -> TensorPatch:
    first = patches[0]
    dtype, device = index_dtype(first.numel), first.values.device
    pieces = [_merge_window(name, window, pick, dtype, device) for window in _windows(patches)]
    indices, values = (torch.cat(part) for part in zip(*pieces, strict=True))
    return TensorPatch(name, first.shape, indices, values.view(first.dtype))


def _windows(patches: Sequence[TensorPatch]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Indices and values of all patches, cut at common positions; at most `_WINDOW` of each at once."""
    cuts = sorted({cut for patch in patches for cut in patch.indices[_WINDOW - 1 :: _WINDOW].tolist()})
    stops = [[0, *_counts_up_to(patch.indices, cuts), patch.changed] for patch in patches]
    for bounds in pairwise(zip(*stops, strict=True)):
        spans = zip(patches, *bounds, strict=True)
        yield [(patch.indices[start:stop], patch.values[start:stop]) for patch, start, stop in spans]


def _counts_up_to(indices: Tensor, cuts: Sequence[int]) -> list[int]:
    """How many of the sorted ``indices`` are at most each of ``cuts``."""
    # I32 indices of a large tensor are all below what I32 cannot hold.
    held = torch.tensor(cuts, dtype=torch.int64).clamp_(max=torch.iinfo(indices.dtype).max)
    counts: list[int] = torch.searchsorted(indices, held.to(indices), right=True).tolist()
    return counts


def _merge_window(
    name: str,
    window: Sequence[tuple[Tensor, Tensor]],
    pick: Callable[[str, Tensor], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Indices of ``dtype`` and the bits of their values."""
    indices = torch.cat([at.to(device=device, dtype=torch.int64) for at, _ in window])
    values = torch.cat([bits.bit_view(bits.resolved(new)).to(device) for _, new in window])
    # Stable: of equal positions the later delta's comes last.
    indices, order = torch.sort(indices, stable=True)
    keep = pick(name, indices)
    return indices[keep].to(dtype), values[order[keep]]


def _later_wins(_: str, indices: Tensor) -> Tensor:
    """[n] bool: the last of each run of equal positions."""
    last = torch.ones_like(indices, dtype=torch.bool)
    last[:-1] = indices[1:] != indices[:-1]
    return last


def _disjoint(name: str, indices: Tensor) -> Tensor:
    """[n] bool, all true; refuses equal positions."""
    last = _later_wins(name, indices)
    if not bool(last.all()):
        twice = int(indices[last.logical_not()][0])
        raise DeltaError(Reason.INCOMPLETE, f"position {twice} is in more than one part", name)
    return last


# Lineage


def _check_follows(before: Delta, after: Delta) -> None:
    _check_same_total(before, after)
    a, b = before.lineage, after.lineage
    if a is None and b is None:
        return
    if a is None or b is None:
        raise DeltaError(Reason.BASE_MISMATCH, "a delta with lineage and one without: whether they follow is unknown")
    if a.run_id != b.run_id:
        raise DeltaError(Reason.BASE_MISMATCH, f"run {b.run_id} does not continue run {a.run_id}")
    links = {"version": (a.version, b.base_version), "digest": (a.digest, b.base_digest)}
    known = {what: link for what, link in links.items() if None not in link}
    if not known:
        raise DeltaError(Reason.BASE_MISMATCH, f"version {b.version} of run {b.run_id} states no base")
    for what, (found, expected) in known.items():
        if found != expected:
            detail = f"version {b.version} of run {b.run_id} is based on {what} {expected}, the state before is {found}"
            raise DeltaError(Reason.BASE_MISMATCH, detail)


def _span(chain: Sequence[Delta]) -> Lineage | None:
    first, last = chain[0].lineage, chain[-1].lineage
    if first is None or last is None:
        return None
    return Lineage(
        run_id=last.run_id,
        version=last.version,
        base_version=first.base_version,
        base_digest=first.base_digest,
        digest=last.digest,
        layer_digests=_last_layer_digests(chain),
    )


def _last_layer_digests(chain: Sequence[Delta]) -> Mapping[str, str] | None:
    """Per layer the digest after the last delta that changes it; none where that one does not say."""
    found: dict[str, str] = {}
    stated = [delta.lineage.layer_digests if delta.lineage else None for delta in chain]
    for delta, said in zip(chain, stated, strict=True):
        for patch in delta.patches:
            found.pop(patch.name, None)
        found.update(said or {})
    return None if all(said is None for said in stated) else found


def _common_lineage(parts: Sequence[Delta]) -> Lineage:
    """The lineage of the whole update: that of every part, with all layer digests."""
    lineages = [part.lineage for part in parts if part.lineage is not None]
    numbers = sorted(lineage.part or (0, 1) for lineage in lineages)
    if numbers != [(i, len(parts)) for i in range(len(parts))]:
        raise DeltaError(Reason.INCOMPLETE, f"expected each of {len(parts)} parts once, found {numbers}")
    layer_digests: dict[str, str] = {}
    for lineage in lineages:
        for name, digest in (lineage.layer_digests or {}).items():
            if layer_digests.setdefault(name, digest) != digest:
                raise DeltaError(Reason.INCOMPLETE, "parts state different digests of this layer", name)
    whole = [replace(x, layer_digests=layer_digests or None, payload_sha256=None, part=None) for x in lineages]
    for other in whole:
        if other != whole[0]:
            raise DeltaError(Reason.INCOMPLETE, f"parts of different updates: {whole[0].to_json()}, {other.to_json()}")
    return whole[0]


def _common_extra(deltas: Sequence[Delta]) -> Mapping[str, object]:
    """The further metadata that all deltas state alike."""
    first, *others = (delta.extra for delta in deltas)
    return {
        key: value
        for key, value in first.items()
        if key not in _OF_THE_WRITING and all(key in extra and extra[key] == value for extra in others)
    }
