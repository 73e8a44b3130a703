"""What an audit found: one rank's findings as plain values, and all ranks' together. No vLLM, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from refdelta.codec.state import TensorInfo
from refdelta.layout.boxes import Box, box_from_json, box_to_json, uncovered_elements
from refdelta.spec import DTYPE_CODES, DTYPES, DeltaError, Reason

__all__ = ["METHOD", "AuditReport", "Difference", "Outcome", "RankAudit", "TensorAudit"]

METHOD = "refdelta_compare"
"""The method that `refdelta.vllm.audit.AuditExtension` adds to every worker."""


class Outcome(StrEnum):
    """What the comparison of one checkpoint tensor gave, on one rank or on all together."""

    EQUAL = "equal"
    """Every element that is held equals the expected one, bit for bit."""
    DIFFERS = "differs"
    NOT_COMPARABLE = "not_comparable"
    """The engine holds nothing that could be compared, or computes from a copy out of reach."""
    ELSEWHERE = "elsewhere"
    """Of one rank: other ranks hold all of it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element, in checkpoint order, that is not what it should be."""

    position: tuple[int, ...]
    """Its index in the checkpoint tensor."""
    param: str
    """The runtime parameter that holds it."""
    expected: str
    """Bits in hexadecimal, as of one number."""
    found: str


@dataclass(frozen=True, slots=True)
class TensorAudit:
    """One checkpoint tensor on one rank."""

    info: TensorInfo
    outcome: Outcome
    elements: int = 0
    """Elements of the engine that were compared with it."""
    differing: int = 0
    first: Difference | None = None
    reason: str | None = None
    """Why it cannot be compared."""
    boxes: tuple[Box, ...] = ()
    """What this rank holds of the tensor; empty where that is all of it or nothing."""

    def to_plain(self) -> dict[str, Any]:
        """For `collective_rpc` and JSON."""
        first = self.first
        return {
            "shape": list(self.info.shape),
            "dtype": DTYPE_CODES[self.info.dtype],
            "outcome": self.outcome.value,
            "elements": self.elements,
            "differing": self.differing,
            "first": first and [list(first.position), first.param, first.expected, first.found],
            "reason": self.reason,
            "boxes": [box_to_json(box) for box in self.boxes],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TensorAudit:
        """What `to_plain` made."""
        first = plain["first"]
        return cls(
            TensorInfo(tuple(plain["shape"]), DTYPES[plain["dtype"]]),
            Outcome(plain["outcome"]),
            int(plain["elements"]),
            int(plain["differing"]),
            first and Difference(tuple(first[0]), *map(str, first[1:])),
            plain["reason"],
            tuple(map(box_from_json, plain["boxes"])),
        )


@dataclass(frozen=True, slots=True)
class RankAudit:
    """What one rank found."""

    rank: int
    tensors: Mapping[str, TensorAudit]
    uncovered: Mapping[str, int] = field(default_factory=dict)
    """Runtime parameter -> how many of its elements no checkpoint tensor and no padding covers."""
    padding: Mapping[str, int] = field(default_factory=dict)
    """Runtime parameter -> how many of its padding elements are not zero, where any."""

    def to_plain(self) -> dict[str, Any]:
        """For `collective_rpc` and JSON."""
        return {
            "rank": self.rank,
            "tensors": {name: audit.to_plain() for name, audit in self.tensors.items()},
            "uncovered": dict(self.uncovered),
            "padding": dict(self.padding),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RankAudit:
        """What `to_plain` made. Raises the rank's `DeltaError` where it refused, ``rank_failed`` for anything else."""
        if isinstance(text := plain.get("error"), str):
            error = DeltaError.parse(text) or DeltaError(Reason.RANK_FAILED, text)
            raise DeltaError(error.reason, f"rank {plain.get('rank')}: {error.detail}", error.tensor)
        try:
            tensors = {str(name): TensorAudit.from_plain(audit) for name, audit in plain["tensors"].items()}
            return cls(int(plain["rank"]), tensors, dict(plain["uncovered"]), dict(plain["padding"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DeltaError(Reason.RANK_FAILED, f"not an audit of a rank: {error!r}") from error


@dataclass(frozen=True)
class AuditReport:
    """All ranks' findings, and what they say together."""

    ranks: tuple[RankAudit, ...]

    @classmethod
    def from_plain(cls, answers: Sequence[Any]) -> AuditReport:
        """From what every rank answered; raises `DeltaError` where one refused, or answered something else."""
        strange = [answer for answer in answers if not isinstance(answer, Mapping)]
        if strange or not answers:
            found = f"{strange[0]!r}"[:200] if strange else "no answers"
            raise DeltaError(Reason.RANK_FAILED, f"expected one audit a rank, found {found}")
        return cls(tuple(RankAudit.from_plain(answer) for answer in answers))

    @property
    def outcomes(self) -> dict[str, tuple[Outcome, str]]:
        """Checkpoint tensor -> the outcome over all ranks, and what it rests on in words."""
        names = {name: None for rank in self.ranks for name in rank.tensors}
        return {name: _together([(r.rank, r.tensors[name]) for r in self.ranks if name in r.tensors]) for name in names}

    def named(self, outcome: Outcome) -> dict[str, str]:
        """The tensors with this outcome over all ranks, each with what it rests on."""
        return {name: why for name, (found, why) in self.outcomes.items() if found is outcome}

    @property
    def parameters(self) -> Iterator[tuple[int, str, Outcome, str]]:
        """(rank, runtime parameter, outcome, why) of parameters to which no checkpoint tensor leads."""
        for rank in self.ranks:
            for name, count in rank.padding.items():
                yield rank.rank, name, Outcome.DIFFERS, f"{count} padding elements are not zero"
            for name, count in rank.uncovered.items():
                yield rank.rank, name, Outcome.NOT_COMPARABLE, f"{count} elements are covered by no checkpoint tensor"

    @property
    def outcome(self) -> Outcome:
        """The worst of all: ``differs``, then ``not_comparable``, then ``equal``."""
        found = {outcome for outcome, _ in self.outcomes.values()} | {item[2] for item in self.parameters}
        return next((o for o in (Outcome.DIFFERS, Outcome.NOT_COMPARABLE) if o in found), Outcome.EQUAL)


def _together(audits: Sequence[tuple[int, TensorAudit]]) -> tuple[Outcome, str]:
    """One tensor over all ranks: a difference anywhere counts, and equal is only what is equal to the last element."""
    of: dict[Outcome, list[tuple[int, TensorAudit]]] = {outcome: [] for outcome in Outcome}
    for rank, audit in audits:
        of[audit.outcome].append((rank, audit))
    if of[Outcome.DIFFERS]:
        rank, audit = of[Outcome.DIFFERS][0]
        others = len(of[Outcome.DIFFERS]) - 1
        return Outcome.DIFFERS, f"rank {rank}, {_first(audit)}" + (f"; on {others} more ranks" if others else "")
    if of[Outcome.NOT_COMPARABLE]:
        rank, audit = of[Outcome.NOT_COMPARABLE][0]
        return Outcome.NOT_COMPARABLE, f"rank {rank}: {audit.reason}"
    held = [audit for _, audit in of[Outcome.EQUAL]]
    if missing := _missing(held) if held else audits[0][1].info.numel:
        return Outcome.NOT_COMPARABLE, f"{missing} of its {audits[0][1].info.numel} elements are on no rank"
    return Outcome.EQUAL, f"{sum(audit.elements for audit in held)} elements on {len(held)} ranks"


def _first(audit: TensorAudit) -> str:
    first = audit.first
    assert first is not None
    found = f"first at {list(first.position)}: expected {first.expected}, found {first.found}"
    return f"{first.param}: {audit.differing} of {audit.elements} elements differ, {found}"


def _missing(held: Sequence[TensorAudit]) -> int:
    """Elements of a tensor that no rank holds."""
    if any(not audit.boxes for audit in held):
        return 0
    boxes = {box for audit in held for box in audit.boxes}
    return uncovered_elements(held[0].info, sorted(boxes, key=lambda box: box.offset))
