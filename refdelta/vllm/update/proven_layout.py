"""Where a rank's checkpoint tensors stand in its live parameters, and which of them may be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from refdelta.checkpoints.reading import Checkpoint
from refdelta.layout.map import LayoutMap, Region, destinations
from refdelta.spec import Delta, DeltaError, Reason, TensorPatch
from refdelta.vllm.proof.attest import Attestation
from refdelta.vllm.proof.position_maps import PositionMap
from refdelta.vllm.proof.post_load import PostLoadVerdict
from refdelta.vllm.proof.unmapped import Unmapped

__all__ = ["Piece", "ProvenLayout"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What of a patch lies in one region of this rank."""

    region: int
    """Number of the region, as `BlockDigests` counts them."""
    positions: Tensor
    """[n] I64: positions in the checkpoint tensor."""
    param: str
    indices: Tensor
    """[n] I64: positions in the live parameter, as the engine holds it."""
    values: Tensor
    """[n]: what they hold afterwards."""


@dataclass(frozen=True)
class ProvenLayout:
    """What this rank may write to: its layout, the proof of it, and what other ranks' proofs exclude."""

    layout: LayoutMap
    attestation: Attestation
    refused: Mapping[str, str]
    """Checkpoint tensor -> why no delta may touch it, on any rank."""
    position_maps: Mapping[str, PositionMap] = field(default_factory=dict)
    """Parameter -> where the elements went that were loaded into it, of those that the engine rearranged."""
    post_load_verdicts: Mapping[str, PostLoadVerdict] = field(default_factory=dict)
    """Runtime name, or dropped checkpoint tensor -> what became of it after loading."""
    opened: Callable[[Path], Checkpoint] = Checkpoint
    """Opens an anchor."""
    unmapped: Unmapped = field(default_factory=Unmapped)
    """What the engine leaves out without a reason."""

    @property
    def model(self) -> nn.Module:
        """The live model, for the modes that write through its loader."""
        return self.attestation.model

    def not_held(self, names: Iterable[str]) -> dict[str, str]:
        """Checkpoint tensor -> why this rank does not hold it, for those of ``names`` that it does not."""
        reasons = {**self.layout.dropped, **self.unmapped.reasons}
        return {name: reasons[name] for name in names if name in reasons}

    def validate(self, delta: Delta, *, whole: bool = True) -> None:
        """Raise `DeltaError` unless every patch has a proven place; of a whole delta tied names must agree too."""
        if whole:
            self.layout.check_aliases(delta.patches)
        for patch in delta.patches:
            if patch.name in self.unmapped.reasons:
                self.layout.check_info(patch)
                self.unmapped.check_patch(patch)
            else:
                self.layout.check_patch(patch)
            refusal = self.refused.get(self.layout.aliases.get(patch.name, patch.name))
            if refusal is not None:
                raise DeltaError(Reason.UNATTESTED, refusal, patch.name)

    def check_storage(self) -> None:
        """Raise ``unattested`` where the model holds other memory now than was proved."""
        for name, why in self.attestation.moved().items():
            raise DeltaError(Reason.UNATTESTED, why, name)

    def route(self, patch: TensorPatch, numbers: Sequence[int], regions: Sequence[Region]) -> list[Piece]:
        """Where a patch's elements stand in the live parameters, in O(changed).

        Args:
            numbers: for each of ``regions`` its number, as `BlockDigests` counts regions.
            regions: those of the patch's tensor on this rank.
        """
        pieces, positions = list[Piece](), patch.indices.to(torch.int64)
        for which, chosen, at in destinations(patch.indices, regions):
            param = regions[which].param
            moved = self.position_maps.get(param)
            stands = moved(at) if moved else at
            pieces.append(Piece(numbers[which], positions[chosen], param, stands, patch.values[chosen]))
        return pieces
