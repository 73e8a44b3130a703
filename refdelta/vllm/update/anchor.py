"""A whole checkpoint into a live engine, through the proven layout: first sync, resync, density above break-even.

vLLM's own reload is not used: on CPU it leaves experts wrong (measured on 0.28 to 0.32). Each rank reads
its boxes of every tensor into host memory, which then takes the old values, so that an anchor can be undone: it costs
the memory of one rank's weights on the host until the session ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from refdelta.checkpoints.reading import Checkpoint
from refdelta.codec import bits
from refdelta.codec import digests as digest
from refdelta.codec.encoding import check_comparable
from refdelta.files.opening import exists
from refdelta.layout.boxes import positions
from refdelta.layout.map import Region
from refdelta.spec import DELTA_FILE, METADATA_FILE, DeltaError, Reason
from refdelta.vllm.update.block_digests import BlockDigests, header_sum
from refdelta.vllm.update.ledger import Ledger
from refdelta.vllm.update.proven_layout import ProvenLayout

__all__ = ["AnchorUpdate", "Stated", "is_checkpoint"]


@dataclass(frozen=True, slots=True)
class Stated:
    """What an ``update_info`` says of the anchor that it names."""

    run_id: str | None = None
    version: int | None = None
    digest: str | None = None
    """The state digest that the checkpoint must have."""


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is to be read as a checkpoint: a file, or a directory without the files of a delta.

    Raises `DeltaError` (``unreadable``) where the file system does not say what is there.
    """
    return exists(path) and not exists(path / METADATA_FILE) and not exists(path / DELTA_FILE)


@dataclass
class AnchorUpdate:
    """A checkpoint, of which this rank's boxes are in host memory."""

    audit_whole: ClassVar[bool] = True
    proven: ProvenLayout
    before: BlockDigests
    stated: Stated
    fingerprint: str
    changed: int
    held: list[Tensor]
    """For each region of the layout: what it will hold, then, once written, what it held."""
    layers: dict[str, int]
    """Digests of tensors that no rank counts, each computed by one rank."""
    written: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    _done: list[int] = field(default_factory=list)
    _cleared: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    """Parameter, positions and old values of padding that was not zero."""
    _values: Tensor | None = None

    @classmethod
    def read(
        cls, path: Path, proven: ProvenLayout, block_digests: BlockDigests, stated: Stated, turn: tuple[int, int]
    ) -> AnchorUpdate:
        """Read this rank's boxes. ``turn``: rank and ranks, which share the work on tensors that none of them counts.

        Raises `DeltaError`: ``unknown_tensor``, ``shape_mismatch``, ``dtype_mismatch`` naming every tensor that is not
        as in the engine's own checkpoint; ``unattested``; ``alias_conflict`` where tied tensors differ; ``unmapped``
        where it changes a tensor that the engine leaves out without a reason.
        """
        with proven.opened(path) as source:
            check_comparable(proven.layout.sources, source.infos())
            for name, why in proven.refused.items():
                raise DeltaError(Reason.UNATTESTED, why, name)
            _check_tied(source, proven.layout.aliases)
            proven.unmapped.check_files(source, turn)
            rest = sorted(source.keys() - block_digests.ownership.counted)
            layers = {n: _number(n, source[n]) for i, n in enumerate(rest) if i % turn[1] == turn[0]}
            held = _boxes(source, proven)
            made = cls(proven, block_digests, stated, _fingerprint(source), source.total_elements, held, layers)
        made.dropped = proven.not_held(proven.layout.sources)
        return made

    def prepare(self) -> dict[str, object]:
        """The digests of what was read."""
        self.proven.check_storage()
        values = [self.before.measured_in(number, held) for number, held in self._by_region()]
        self._values = torch.cat(values) if values else self.before.values.clone()
        after = self.block_digests()
        return {
            "sums": after.owned_sums(self._values),
            "replicas": after.replicas(self._values),
            "layers": self.layers,
        }

    def settle(self, told: Sequence[Mapping[str, object]], ledger: Ledger) -> Ledger:
        """The ledger of the anchor's state. Raises where ranks read other files, or not the ones that were stated."""
        layers: dict[str, int] = {
            n: header_sum(n, self.proven.layout.sources[n]) for n in self.before.ownership.counted
        }
        replicas: dict[str, int] = {}
        for other in told:
            for name, share in _numbers(other["sums"]):
                layers[name] = (layers[name] + share) % (1 << 64)
            for box, share in _numbers(other["replicas"]):
                if replicas.setdefault(box, share) != share:
                    raise DeltaError(Reason.RANK_DISAGREEMENT, f"ranks read other bytes of {box}")
            layers.update(_numbers(other["layers"]))
        after = replace(ledger, layers=layers, run_id=self.stated.run_id, version=self.stated.version, verified=True)
        if self.stated.digest not in (None, after.digest):
            detail = f"expected {self.stated.digest}; the checkpoint's digest is {after.digest}"
            raise DeltaError(Reason.DIGEST_MISMATCH, detail)
        return after

    def write(self) -> None:
        """Swap every box with the engine's, and read it back; clear what padding somebody has written to."""
        self.proven.check_storage()
        for number, region in enumerate(self.proven.layout.regions):
            live, new = self.proven.attestation.tensor(region.param), self.held[number]
            self.held[number] = self.before.held({region.param: live}, region).to("cpu", copy=True)
            self._done.append(number)
            self._put(live, region, new)
            self.written += region.numel
        for name, live, at in self._padding():
            old = bits.gather(live, at)
            if bits.bit_view(old).any():
                self._cleared.append((name, at, old))
                bits.scatter_(live, at, torch.zeros_like(old))

    def undo(self) -> None:
        """Write the old values back, last written first."""
        while self._cleared:
            name, at, old = self._cleared[-1]
            bits.scatter_(self.proven.attestation.tensor(name), at, old)
            self._cleared.pop()
        while self._done:
            number = self._done[-1]
            region = self.proven.layout.regions[number]
            self._put(self.proven.attestation.tensor(region.param), region, self.held[number])
            self._done.pop()

    def block_digests(self) -> BlockDigests:
        """The digests of what was read."""
        return self.before if self._values is None else self.before.with_values(self._values)

    def touched(self) -> list[int]:
        """Every block."""
        return list(range(len(self.before.blocks)))

    def _padding(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Each proved parameter's padding: name, tensor, and flat positions in it. A fresh load leaves zeros there."""
        for name, live in self.proven.attestation.live().items():
            if place := self.proven.position_maps.get(name):
                yield name, live, place.unused(live.numel())
            else:
                yield from ((name, live, positions(box)) for box in self.proven.layout.padding.get(name, ()))

    def _by_region(self) -> Iterator[tuple[int, Tensor]]:
        """(number, values) of every counted region; tied names hold what their partner holds."""
        layout = self.proven.layout
        yield from enumerate(self.held)
        by_box = {(r.param, r.param_box): number for number, r in enumerate(layout.regions)}
        extra = chain.from_iterable(self.before.numbers.values())
        for number in sorted(n for n in extra if n >= len(layout.regions)):
            region = self.before.region(number)
            yield number, self.held[by_box[region.param, region.param_box]]

    def _put(self, live: Tensor, region: Region, new: Tensor) -> None:
        place = self.proven.position_maps.get(region.param)
        if place is None:
            with torch.inference_mode(live.is_inference()):
                bits.bit_view(region.param_box.view(live)).copy_(bits.bit_view(new))
        else:
            bits.scatter_(live, place(positions(region.param_box)), new.reshape(-1))
        if not bits.equal(self.before.held({region.param: live}, region).cpu(), new):
            raise DeltaError(Reason.WRITE_FAILED, f"{region.param}: what was written does not read back")


def _boxes(source: Checkpoint, proven: ProvenLayout) -> list[Tensor]:
    """For each region of the layout a copy of its box; every tensor is read once."""
    held: list[Tensor | None] = [None] * len(proven.layout.regions)
    numbers: dict[str, list[int]] = {}
    for number, region in enumerate(proven.layout.regions):
        numbers.setdefault(region.source, []).append(number)
    for name, wanted in numbers.items():
        tensor = source[name].contiguous()
        for number in wanted:
            held[number] = proven.layout.regions[number].source_box.view(tensor).contiguous().clone()
    return [box for box in held if box is not None]


def _check_tied(source: Checkpoint, aliases: Mapping[str, str]) -> None:
    for alias, name in aliases.items():
        if alias in source and not bits.equal(source[alias], source[name]):
            raise DeltaError(
                Reason.ALIAS_CONFLICT, f"the engine ties it to {name}; the checkpoint's bits differ", alias
            )


def _number(name: str, tensor: Tensor) -> int:
    return digest.parse(digest.tensor_digest(name, tensor))


def _numbers(value: object) -> list[tuple[str, int]]:
    assert isinstance(value, dict)
    return list(value.items())


def _fingerprint(source: Checkpoint) -> str:
    """SHA-256 over names, shapes and dtypes; what the tensors hold is agreed on by digests."""
    infos = sorted((name, info.shape, str(info.dtype)) for name, info in source.infos().items())
    return hashlib.sha256(repr(infos).encode()).hexdigest()
