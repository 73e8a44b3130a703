"""One update session on one rank: staged and validated first, then written, checked, and undone if any rank failed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from refdelta import bits
from refdelta.apply import read_delta
from refdelta.layout_map import LayoutMap, RoutedPatch
from refdelta.spec import DELTA_FILE, METADATA_FILE, Delta, DeltaError, Reason, TensorPatch
from refdelta.vllm.attest import Attestation
from refdelta.vllm.position_map import PositionMap
from refdelta.vllm.postload import Standing

__all__ = ["Session", "Target"]


@dataclass(frozen=True)
class Target:
    """What this rank may write to: its layout, the proof of it, and what other ranks' proofs exclude."""

    layout: LayoutMap
    attestation: Attestation
    refused: Mapping[str, str]
    """Checkpoint tensor -> why no delta may touch it, on any rank."""
    places: Mapping[str, PositionMap] = field(default_factory=dict)
    """Parameter -> where the elements went that were loaded into it, of those that the engine rearranged."""
    standings: Mapping[str, Standing] = field(default_factory=dict)
    """Runtime name, or dropped checkpoint tensor -> what became of it after loading."""

    def route(self, patch: TensorPatch) -> list[RoutedPatch]:
        """Where a patch's elements stand in the live parameters, in O(changed); raises as `LayoutMap.route`."""
        return [
            RoutedPatch(piece.param, place(piece.indices), piece.values)
            if (place := self.places.get(piece.param))
            else piece
            for piece in self.layout.route(patch)
        ]


@dataclass
class Session:
    """An open update: staged patches, then old values once written."""

    number: int
    target: Target
    staged: list[RoutedPatch] = field(default_factory=list)
    payloads: list[str] = field(default_factory=list)
    """SHA-256 over payload and metadata of each staged delta: what the ranks agree on."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Checkpoint tensors whose changes this engine rightly does not hold, with the reason."""
    _old: list[RoutedPatch] = field(default_factory=list)

    def stage(self, path: Path) -> str:
        """Read, validate and route one delta; returns its payload hash. Nothing is written.

        Raises `DeltaError`; what was staged before stays staged.
        """
        payload = _hash(path)
        delta = read_delta(path)
        self._validate(delta)
        layout = self.target.layout
        self.staged += [piece for patch in delta.patches for piece in self._route(patch)]
        self.payloads.append(payload)
        self.dropped |= {p.name: layout.dropped[p.name] for p in delta.patches if p.name in layout.dropped}
        return payload

    def write(self) -> None:
        """Write every staged value in place, keep the old ones, and read back what was written.

        Raises `DeltaError` (``write_failed``, ``unattested``); `undo` then restores what was written so far.
        """
        if moved := self.target.attestation.moved():
            raise DeltaError(Reason.UNATTESTED, "the engine replaced this parameter's storage", moved[0])
        for piece in self.staged:
            tensor = self._tensor(piece.param)
            self._old.append(RoutedPatch(piece.param, piece.indices, bits.gather(tensor, piece.indices)))
            _put(tensor, piece)

    def undo(self) -> None:
        """Write the old values back, last written first. Raises `DeltaError` (``write_failed``) if it cannot."""
        while self._old:
            piece = self._old[-1]
            _put(self._tensor(piece.param), piece)
            self._old.pop()

    def _validate(self, delta: Delta) -> None:
        layout = self.target.layout
        layout.check_aliases(delta.patches)
        for patch in delta.patches:
            refusal = self.target.refused.get(layout.aliases.get(patch.name, patch.name))
            if refusal is not None:
                raise DeltaError(Reason.UNATTESTED, refusal, patch.name)

    def _route(self, patch: TensorPatch) -> list[RoutedPatch]:
        return [self._placed(piece) for piece in self.target.route(patch)]

    def _placed(self, piece: RoutedPatch) -> RoutedPatch:
        device = self._tensor(piece.param).device
        return RoutedPatch(piece.param, piece.indices.to(device), piece.values.to(device))

    def _tensor(self, param: str) -> Tensor:
        return self.target.attestation.proved[param]


def _put(tensor: Tensor, piece: RoutedPatch) -> None:
    bits.scatter_(tensor, piece.indices, piece.values)
    if not bits.equal(bits.gather(tensor, piece.indices), piece.values):
        raise DeltaError(Reason.WRITE_FAILED, f"{piece.param}: what was written does not read back")


def _hash(path: Path) -> str:
    """SHA-256 over the digests of payload and metadata: one text that every rank must have read alike."""
    whole = hashlib.sha256()
    try:
        for name in (DELTA_FILE, METADATA_FILE):
            with (path / name).open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    except FileNotFoundError as error:
        raise DeltaError(Reason.NOT_A_DELTA, f"{path} has no {name}") from error
    except OSError as error:
        raise DeltaError(Reason.UNREADABLE, f"{path / name}: {error.strerror}") from error
    return whole.hexdigest()
