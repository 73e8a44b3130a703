"""What one rank's engine holds from one update to the next: proven layout, block digests, ledger, fence, audit cursors.

The state changes in two ways only: `EngineState.commit`, after every rank has written and checked an update, and the
methods that fence the engine. Looking at it (`differing`, `check_written`) reads the live weights and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from torch import nn

from refdelta.spec import DeltaError, Reason
from refdelta.vllm.update.anchor import AnchorUpdate
from refdelta.vllm.update.block_digests import BlockDigests
from refdelta.vllm.update.ledger import Ledger
from refdelta.vllm.update.proven_layout import ProvenLayout
from refdelta.vllm.update.updating import Update

__all__ = ["EngineState", "LastUpdate"]

_RESTART: Final = "nothing is known of what reads it: restart the engine"


@dataclass(frozen=True, slots=True)
class LastUpdate:
    """What the last update did on this rank; part of the engine's status."""

    sources: list[str]
    """The paths that were staged, as the client named them: so a client knows whether the update was its own."""
    changed: int
    written: int
    dropped: dict[str, str]
    audited: int
    seconds: dict[str, float]
    unproven: list[str]
    """See `DeltaSnapshotEngine.status`."""


@dataclass
class EngineState:
    """What this rank holds. Every rank holds the same ledger and the same fence."""

    proven: ProvenLayout
    block_digests: BlockDigests
    ledger: Ledger
    fence: str | None = None
    """Why the engine takes nothing but an anchor, or None."""
    unaudited: str | None = None
    """What may have touched the weights since all of them were last audited, or None."""
    last_update: LastUpdate | None = None
    audit_cursors: tuple[int, int] = (0, 0)
    """Where the next audit goes on; see `BlockDigests.blocks_to_audit`."""
    served: nn.Module | None = None
    """The model that the worker runs now; None before the worker's first call."""

    # --- looking ---

    def moved(self) -> dict[str, str]:
        """Runtime parameter -> why what this rank serves under its name is not the memory that was proved."""
        attestation = self.proven.attestation
        if self.served is not None and self.served is not self.proven.model:
            return dict.fromkeys(attestation.proved, f"the worker serves another model object; {_RESTART}")
        return {name: f"{why}; {_RESTART}" for name, why in attestation.moved().items()}

    def check_memory(self) -> None:
        """Raise ``unattested`` where the model holds other memory than was proved."""
        for name, why in self.moved().items():
            raise DeltaError(Reason.UNATTESTED, why, name)

    def differing(self) -> dict[str, str]:
        """Tensor -> how the weights in memory differ from the digests, over every block that can be read."""
        moved = self.moved()
        found = self.block_digests.differing(self.proven.attestation.live(), self.readable_blocks(moved))
        return {name: f"{where} changed without an update" for name, where in found.items()} | moved

    def readable_blocks(self, moved: Mapping[str, str]) -> list[int]:
        """The blocks that an audit reads, by number: those with a digest, in parameters that are where they were."""
        digests = self.block_digests
        return [number for number in digests.auditable if digests.blocks[number].param not in moved]

    def check_written(self, update: Update, budget: int) -> int:
        """Compare what an update touched, and some of the rest, with the digests as they should be after it.

        Args:
            update: has been written, and is not committed yet.
            budget: about how many elements to read, where the update does not want every touched block read.

        Returns how many elements were compared. Raises `DeltaError` (``digest_mismatch``).
        """
        after = update.block_digests()
        numbers, self.audit_cursors = after.blocks_to_audit(
            update.touched(), budget, self.audit_cursors, whole=update.audit_whole
        )
        for name, where in after.differing(self.proven.attestation.live(), numbers).items():
            raise DeltaError(Reason.DIGEST_MISMATCH, f"{where} is not what the engine's digest says", name)
        return after.elements(numbers)

    # --- changing ---

    def commit(self, update: Update, ledger: Ledger, done: LastUpdate) -> None:
        """Take over what an update has written. An anchor replaced everything, so it lifts the fence."""
        self.ledger, self.block_digests, self.last_update = ledger, update.block_digests(), done
        if isinstance(update, AnchorUpdate):
            self.fence = self.unaudited = None

    def fence_off(self, step: str, found_by_rank: Sequence[Mapping[str, str]]) -> None:
        """Fence the engine where any rank has found something. The first fence stays; later ones add nothing.

        Args:
            step: what the ranks were doing.
            found_by_rank: of each rank, tensor or parameter -> what is wrong with it.
        """
        for rank, found in enumerate(found_by_rank):
            for name, why in found.items():
                self.fence = self.fence or f"{step}: rank {rank}: {name}: {why}"

    # --- telling ---

    def to_plain(self) -> dict[str, Any]:
        """The state's part of the engine's status."""
        ledger = self.ledger
        return {
            "run_id": ledger.run_id,
            "version": ledger.version,
            "digest": ledger.digest,
            "verified": ledger.verified,
            "unmapped": dict(ledger.unmapped),
            "fence": self.fence,
            "refused": dict(self.proven.refused),
            "last_update": self.last_update and asdict(self.last_update),
        }
