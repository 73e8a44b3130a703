"""One update session on one rank: what was staged in it, and what all of it together will write."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from refdelta.codec import bits
from refdelta.codec.composition import compose, join
from refdelta.files.reading import read_delta
from refdelta.spec import Delta, DeltaError, Reason
from refdelta.vllm.update.anchor import AnchorUpdate, Stated
from refdelta.vllm.update.block_digests import BlockDigests
from refdelta.vllm.update.ledger import Ledger
from refdelta.vllm.update.modes import update_of
from refdelta.vllm.update.options import Options
from refdelta.vllm.update.proven_layout import ProvenLayout
from refdelta.vllm.update.updating import Update

__all__ = ["Session"]


@dataclass
class Session:
    """An open update: deltas staged one after the other, or an anchor alone."""

    number: int
    proven: ProvenLayout
    ledger: Ledger
    block_digests: BlockDigests
    options: Options
    """As overridden by the updates of this session."""
    fence: str | None = None
    """Why the engine takes nothing but an anchor."""
    sources: list[str] = field(default_factory=list)
    """What was to be staged, as the client named it."""
    deltas: list[Delta] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)
    """Of each staged delta or anchor: what the ranks agree on."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds that it took on this rank."""
    update: Update | None = None
    """What will be written; made when everything is staged."""
    audited: int = 0
    """Elements held against their digests after the write."""

    @property
    def staged(self) -> int:
        """Deltas and anchors staged so far."""
        return len(self.fingerprints)

    def stage(self, path: Path) -> str:
        """Read and validate one delta, or one part of one; returns its fingerprint. Nothing is written.

        Raises `DeltaError`; what was staged before stays staged.
        """
        if self.fence is not None:
            raise DeltaError(Reason.FENCED, f"{self.fence}; only an anchor is taken")
        if self.fingerprints and not self.deltas:
            raise DeltaError(Reason.BAD_OPTION, "an anchor is staged in this session; finish it first")
        with self.timed("read"):
            delta = read_delta(path)
            fingerprint = _fingerprint(delta)
        with self.timed("stage"):
            if not self.deltas and not self.ledger.holds(delta.lineage):
                self.ledger.check_base(delta.lineage, self.options)
            self.proven.validate(delta, whole=False)
            self.deltas.append(delta)
            self.fingerprints.append(fingerprint)
            self.update = None
            if len(self.deltas) == 1 and not _is_partial(delta):
                self.update = self._whole()
        return fingerprint

    def stage_anchor(self, path: Path, stated: Stated, turn: tuple[int, int]) -> str:
        """Read and validate a whole checkpoint; see `AnchorUpdate.read`. Nothing is written."""
        if self.fingerprints:
            raise DeltaError(Reason.BAD_OPTION, "an anchor comes alone; something is staged in this session already")
        with self.timed("read"):
            self.update = AnchorUpdate.read(path, self.proven, self.block_digests, stated, turn)
        self.fingerprints.append(self.update.fingerprint)
        return self.update.fingerprint

    def prepared(self) -> Update | None:
        """What will be written; None where nothing was staged. Raises `DeltaError` (``incomplete``, ...)."""
        if self.update is None and self.deltas:
            with self.timed("stage"):
                self.update = self._whole()
        return self.update

    def _whole(self) -> Update:
        delta = _combined(self.deltas)
        repeated = self.ledger.holds(delta.lineage)
        if not repeated:
            self.ledger.check_base(delta.lineage, self.options)
        if repeated and self.options.repeat == "skip":
            delta = Delta((), delta.total_elements, delta.lineage)
        return update_of(self.options.mode, delta, self.proven, self.block_digests, repeated=repeated)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add what a block takes to `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


def _combined(deltas: Sequence[Delta]) -> Delta:
    """The deltas of a session as one: parts joined, what follows each other composed."""
    whole: list[Delta] = []
    parts: list[Delta] = []
    for delta in deltas:
        if not _is_partial(delta):
            whole.append(delta)
            continue
        assert delta.lineage is not None
        assert delta.lineage.part is not None
        parts.append(delta)
        if len(parts) == delta.lineage.part[1]:
            whole.append(join(parts))
            parts = []
    if parts:
        join(parts)  # raises: it lacks some
    return whole[0] if len(whole) == 1 else compose(whole)


def _is_partial(delta: Delta) -> bool:
    return delta.lineage is not None and delta.lineage.is_partial


def _fingerprint(delta: Delta) -> str:
    """SHA-256 over everything in a delta that decides about the weights. All ranks must have the same one."""
    whole = hashlib.sha256(repr((delta.total_elements, delta.lineage and delta.lineage.to_json())).encode())
    for patch in delta.patches:
        whole.update(repr((patch.name, patch.shape, patch.indices.dtype, patch.dtype, patch.changed)).encode())
        for tensor in (patch.indices, patch.values):
            whole.update(bits.bit_view(tensor.contiguous()).view(torch.uint8).cpu().numpy().data)
    return whole.hexdigest()
