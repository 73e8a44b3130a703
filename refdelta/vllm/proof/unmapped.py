"""Checkpoint tensors that the engine leaves out and that no stated reason explains.

vLLM's loaders skip some names in silence (Qwen3's ``o_proj.bias``). Such an engine starts, and can hold everything
else. Of these tensors it holds nothing: they are named wherever its digest is given, and what would change one is
refused. Their share of the digest is that of the files that the engine was started from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from refdelta.checkpoints.reading import Checkpoint
from refdelta.codec import bits
from refdelta.codec import digests as digest
from refdelta.codec.state import TensorInfo
from refdelta.layout.reasons import OTHER_RANKS
from refdelta.spec import DeltaError, Reason, TensorPatch

__all__ = ["NOWHERE", "Unmapped", "accounts", "find"]

NOWHERE: Final = "the engine's loader puts it nowhere, and no rule says why"
_NO_RANK: Final = "every rank takes another for its holder, and none holds it"


@dataclass(frozen=True, slots=True)
class Unmapped:
    """Those tensors of an engine, and what its files hold of them."""

    reasons: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint tensor -> why nothing is known of it; the same on every rank."""
    digests: Mapping[str, int] = field(default_factory=dict)
    """Checkpoint tensor -> its `tensor_digest` in the files of the start, as a number."""
    start: Callable[[], Checkpoint] | None = None
    """Opens the checkpoint of the start."""

    def check_patch(self, patch: TensorPatch) -> None:
        """Raise ``unmapped`` for a patch of one of them, unless every value is the one that the files had."""
        if patch.name in self.reasons and not self._leaves(patch):
            raise DeltaError(Reason.UNMAPPED, f"{self.reasons[patch.name]}; the delta changes it", patch.name)

    def check_files(self, checkpoint: Checkpoint, turn: tuple[int, int]) -> None:
        """Raise ``unmapped`` where a checkpoint holds other bits than the start's.

        ``turn``: rank and ranks, which share the work.
        """
        for name in sorted(self.reasons)[turn[0] :: turn[1]]:
            if _number(name, checkpoint) != self.digests[name]:
                detail = f"{self.reasons[name]}; the checkpoint's bits are not those that the engine was started from"
                raise DeltaError(Reason.UNMAPPED, detail, name)

    def _leaves(self, patch: TensorPatch) -> bool:
        """Whether a patch repeats what is there, as one of a composed delta may; the files tell, if they still can."""
        if not patch.changed:
            return True
        if self.start is None:
            return False
        try:
            with self.start() as checkpoint:
                if _number(patch.name, checkpoint) != self.digests[patch.name]:
                    return False
                old = checkpoint[patch.name].contiguous()
                return bits.equal(bits.gather(old, patch.indices.cpu()), patch.values.cpu())
        except (DeltaError, KeyError, OSError):
            return False


def find(sources: Mapping[str, TensorInfo], told: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Checkpoint tensor -> why nothing is known of it.

    ``told``: of every rank its `accounts`; a rank says nothing of what it holds.
    """
    found: dict[str, str] = {}
    for name, info in sources.items():
        says = {rank.get(name) for rank in told}
        if NOWHERE in says:
            found[name] = NOWHERE
        elif info.numel and says == {OTHER_RANKS}:
            found[name] = _NO_RANK
    return found


def accounts(unmapped: Sequence[str], dropped: Mapping[str, str]) -> dict[str, str]:
    """What one rank says of the tensors that it does not hold: its stated reason, or `NOWHERE`."""
    return {**dropped, **dict.fromkeys(unmapped, NOWHERE)}


def _number(name: str, checkpoint: Checkpoint) -> int:
    return digest.parse(digest.tensor_digest(name, checkpoint[name]))
