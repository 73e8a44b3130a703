"""What an update does on one rank: look, agree, write, undo. `DeltaUpdate` writes a delta in place, in O(changed)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from refdelta.codec import bits
from refdelta.codec import digests as digest
from refdelta.layout.map import Region
from refdelta.spec import Delta, DeltaError, Reason, TensorPatch
from refdelta.vllm.update.block_digests import BlockDigests
from refdelta.vllm.update.ledger import Account, Ledger
from refdelta.vllm.update.proven_layout import Piece, ProvenLayout

__all__ = ["DeltaUpdate", "Update"]

_WORD = 1 << 64


class Update(Protocol):
    """Something staged that can be written on this rank, and undone. Nothing is written before `write`."""

    @property
    def changed(self) -> int:
        """Elements that the update changes, over all ranks."""

    @property
    def written(self) -> int:
        """Elements that this rank has written."""

    @property
    def dropped(self) -> Mapping[str, str]:
        """Checkpoint tensors of the update that this rank does not hold, with the reason."""

    audit_whole: ClassVar[bool]
    """Whether every touched block is held against its digest, not a share of them."""

    def prepare(self) -> dict[str, object]:
        """Look at the values that will be replaced; returns what the other ranks must know of it."""

    def settle(self, told: Sequence[Mapping[str, object]], ledger: Ledger) -> Ledger:
        """The ledger after the update, from the reports of all ranks. Raises `DeltaError` where they contradict the
        delta."""

    def write(self) -> None:
        """Write everything, keep the old values, read back what was written."""

    def undo(self) -> None:
        """Write the old values back. Raises where that fails."""

    def block_digests(self) -> BlockDigests:
        """This rank's digests after the update."""

    def touched(self) -> list[int]:
        """Blocks in which something was written."""


@dataclass
class DeltaUpdate:
    """A whole delta, routed to this rank."""

    audit_whole: ClassVar[bool] = False
    delta: Delta
    proven: ProvenLayout
    before: BlockDigests
    repeated: bool
    pieces: list[Piece]
    changed: int = 0
    written: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    _old: list[tuple[Piece, Tensor]] = field(default_factory=list)
    _rolled: Tensor | None = None
    _touched: Tensor | None = None

    @classmethod
    def of(cls, delta: Delta, proven: ProvenLayout, block_digests: BlockDigests, *, repeated: bool) -> Self:
        """Validate against the engine and route. Raises `DeltaError`."""
        proven.validate(delta)
        pieces = [piece for patch in delta.patches for piece in _route(proven, block_digests, patch)]
        made = cls(delta, proven, block_digests, repeated, pieces, changed=delta.changed_elements)
        made.dropped = proven.not_held(patch.name for patch in delta.patches)
        return made

    def prepare(self) -> dict[str, object]:
        """Roll this rank's digests: gather the old values, and count what the rank counts."""
        self.proven.check_storage()
        rolled, touched = self.before.values.clone(), torch.zeros(len(self.before.blocks), dtype=torch.bool)
        elements, sums = dict[str, int](), dict[str, int]()
        for piece in self.pieces:
            region = self.before.region(piece.region)
            diff = self._terms(region, piece, piece.values) - self._terms(region, piece, self._held(piece))
            blocks = self.before.block_of(piece.region, piece.positions).cpu()
            rolled.index_add_(0, blocks, diff.cpu())
            touched[blocks] = True
            if self.before.ownership.owned[piece.region]:
                elements[region.source] = elements.get(region.source, 0) + len(diff)
                sums[region.source] = (sums.get(region.source, 0) + int(diff.sum())) % _WORD
        self._rolled, self._touched = rolled, touched
        return Account(elements, sums).to_json()

    def settle(self, told: Sequence[Mapping[str, object]], ledger: Ledger) -> Ledger:
        """See `Ledger.after`."""
        accounts = [Account(**other) for other in told]  # type: ignore[arg-type]  # as `Account.to_json` wrote it
        return ledger.after(self.delta, accounts, repeated=self.repeated)

    def write(self) -> None:
        """Write every value in place, keep the old ones, and read back what was written."""
        self.proven.check_storage()
        for piece in self.pieces:
            if self._is_written(piece):
                self._old.append((piece, self._held(piece)))
                _put(self._tensor(piece.param), piece)
                self.written += len(piece.indices)

    def undo(self) -> None:
        """Write the old values back, last written first. Raises `DeltaError` (``write_failed``) if it cannot."""
        while self._old:
            piece, old = self._old[-1]
            _put(self._tensor(piece.param), Piece(piece.region, piece.positions, piece.param, piece.indices, old))
            self._old.pop()

    def block_digests(self) -> BlockDigests:
        """The rolled digests."""
        return self.before if self._rolled is None else self.before.with_values(self._rolled)

    def touched(self) -> list[int]:
        """Blocks in which an element was written."""
        return [] if self._touched is None else [int(number) for number in self._touched.nonzero().flatten()]

    def _terms(self, region: Region, piece: Piece, values: Tensor) -> Tensor:
        info = self.proven.layout.sources[region.source]
        return digest.terms_at(region.source, info.dtype, info.shape, piece.positions, values)

    def _is_written(self, piece: Piece) -> bool:
        """Of a tied tensor that the files hold under two names, the one of the layout is written."""
        return piece.region < len(self.proven.layout.regions)

    def _held(self, piece: Piece) -> Tensor:
        return bits.gather(self._tensor(piece.param), piece.indices)

    def _tensor(self, param: str) -> Tensor:
        return self.proven.attestation.tensor(param)


def _route(proven: ProvenLayout, block_digests: BlockDigests, patch: TensorPatch) -> list[Piece]:
    numbers = block_digests.numbers.get(patch.name, ())
    found = proven.route(patch, numbers, [block_digests.region(number) for number in numbers])
    return [_placed(proven.attestation.proved[piece.param].device, piece) for piece in found]


def _placed(device: torch.device, piece: Piece) -> Piece:
    moved = (tensor.to(device) for tensor in (piece.positions, piece.indices, piece.values))
    positions, indices, values = moved
    return Piece(piece.region, positions, piece.param, indices, values)


def _put(tensor: Tensor, piece: Piece) -> None:
    bits.scatter_(tensor, piece.indices, piece.values)
    if not bits.equal(bits.gather(tensor, piece.indices), piece.values):
        raise DeltaError(Reason.WRITE_FAILED, f"{piece.param}: what was written does not read back")
