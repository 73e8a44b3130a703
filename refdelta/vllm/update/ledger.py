"""What an engine knows of the state that it holds: run, version, and the digest of every checkpoint tensor.

Every rank keeps the same ledger. It changes only after all ranks have written and checked an update. Of a tensor that
no rank holds (dropped, switched off) the digest is what the checkpoint's files gave at the start, and what deltas state
of it since; where one states nothing, the engine no longer knows the digest of the whole, and says so. Of a tensor that
is left out without a reason it stays what the files gave: no update may change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from refdelta.codec import digests as digest
from refdelta.spec import Delta, DeltaError, Lineage, Reason
from refdelta.vllm.update.options import Options

__all__ = ["Account", "Ledger", "left_out"]


def left_out(unmapped: Mapping[str, str]) -> str:
    """For messages, behind a digest: what of it the engine does not hold, if anything."""
    if not unmapped:
        return ""
    first, more = min(unmapped), len(unmapped) - 1
    return f" (of which the engine does not hold {first}{f' and {more} more tensors' if more else ''})"


@dataclass(frozen=True, slots=True)
class Account:
    """One rank's share of an update: per checkpoint tensor what it counts of it."""

    elements: Mapping[str, int] = field(default_factory=dict)
    """Changed elements that this rank counts."""
    sums: Mapping[str, int] = field(default_factory=dict)
    """What their change adds to the tensor's digest, modulo 2^64."""

    def to_json(self) -> dict[str, object]:
        """For the other ranks."""
        return {"elements": dict(self.elements), "sums": dict(self.sums)}


@dataclass(frozen=True)
class Ledger:
    """The state that the engine holds."""

    layers: Mapping[str, int | None]
    """Checkpoint tensor -> its `tensor_digest` as a number; None where it is not known any more."""
    dropped: Mapping[str, str]
    """Checkpoint tensor -> why no rank holds it."""
    run_id: str | None = None
    version: int | None = None
    verified: bool = True
    """Whether the last update's result was compared with a digest that its sender stated, or the weights with files."""
    unmapped: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint tensor -> that the engine leaves it out, and no rule says why. It counts in the digest with the bits
    of the files of the start, and the engine vouches for none of them."""

    @property
    def digest(self) -> str | None:
        """The state digest of all checkpoint tensors, or None where it is not known."""
        known = [layer for layer in self.layers.values() if layer is not None]
        return digest.text(sum(known)) if len(known) == len(self.layers) else None

    @property
    def name(self) -> str:
        """For messages: run and version, or the digest of an engine that has none."""
        version = "an unversioned state" if self.version is None else f"version {self.version} of run {self.run_id}"
        return f"{version}, {self.digest or 'of unknown digest'}{left_out(self.unmapped)}"

    def holds(self, lineage: Lineage | None) -> bool:
        """Whether the engine already holds the version that a delta of this lineage leads to.

        Raises ``base_mismatch`` where the engine holds that version with another digest.
        """
        if lineage is None or (lineage.run_id, lineage.version) != (self.run_id, self.version):
            return False
        if None not in (lineage.digest, self.digest) and lineage.digest != self.digest:
            detail = f"the engine holds {self.name}; the delta states {lineage.digest} for that version"
            raise DeltaError(Reason.BASE_MISMATCH, detail)
        return True

    def check_base(self, lineage: Lineage | None, options: Options) -> None:
        """Raise ``base_mismatch`` unless a delta of this lineage starts from the state that the engine holds."""
        if lineage is None:
            if options.lineage == "required":
                raise DeltaError(Reason.BASE_MISMATCH, f"no lineage; the engine holds {self.name} and requires one")
            return
        if options.lineage == "required" and None in (lineage.base_digest, lineage.digest):
            raise DeltaError(Reason.BASE_MISMATCH, f"no digests; the engine holds {self.name} and requires them")
        same_run = self.version is None or lineage.run_id == self.run_id
        faults = (
            same_run and None not in (self.version, lineage.base_version) and lineage.base_version != self.version,
            None not in (self.digest, lineage.base_digest) and lineage.base_digest != self.digest,
            not same_run and None in (self.digest, lineage.base_digest),
            options.lineage == "required" and self.digest is None,
        )
        if any(faults):
            detail = f"the delta is based on {lineage.base_name}; the engine holds {self.name}"
            raise DeltaError(Reason.BASE_MISMATCH, detail)

    def after(self, delta: Delta, accounts: Sequence[Account], *, repeated: bool) -> Ledger:
        """The ledger after ``delta``, of which each rank gives its account.

        Raises `DeltaError`: ``unmapped`` where elements would be lost without a reason; ``digest_mismatch`` where the
        result is not the one that the delta states, or where a repeated one would change the state.
        """
        stated = (delta.lineage.layer_digests if delta.lineage else None) or {}
        layers = dict(self.layers)
        for patch in delta.patches:
            if patch.name not in layers:
                continue  # a tied name that the files do not hold; its partner was patched alike
            written = sum(account.elements.get(patch.name, 0) for account in accounts)
            if patch.name in self.dropped:
                layers[patch.name] = digest.parse(stated[patch.name]) if patch.name in stated else None
                continue
            if written != patch.changed and patch.name not in self.unmapped:
                detail = f"{patch.changed} elements change, and the ranks together hold {written} of them"
                raise DeltaError(Reason.UNMAPPED, detail, patch.name)
            layers[patch.name] = self._rolled(patch.name, accounts, stated.get(patch.name))
        return self._checked(replace(self, layers=layers), delta, repeated)

    def _rolled(self, name: str, accounts: Sequence[Account], stated: str | None) -> int | None:
        before = self.layers[name]
        if before is None:
            return None
        after = (before + sum(account.sums.get(name, 0) for account in accounts)) % (1 << 64)
        if stated is not None and digest.parse(stated) != after:
            detail = f"expected {stated} after the delta; from {digest.text(before)} it leads to {digest.text(after)}"
            raise DeltaError(Reason.DIGEST_MISMATCH, detail, name)
        return after

    def _checked(self, after: Ledger, delta: Delta, repeated: bool) -> Ledger:
        lineage, found = delta.lineage, after.digest
        expected = self.digest if repeated else lineage.digest if lineage else None
        if None not in (expected, found) and expected != found:
            detail = f"expected {expected} after the delta; from {self.digest} it leads to {found}"
            raise DeltaError(Reason.DIGEST_MISMATCH, detail)
        if lineage is not None:
            checked = lineage.digest is not None and found is not None
            return replace(after, run_id=lineage.run_id, version=lineage.version, verified=checked)
        if not delta.changed_elements:
            return self
        return replace(after, run_id=None, version=None, verified=False)
