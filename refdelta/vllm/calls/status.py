"""Read the status of an engine's workers, and compare the ranks with each other. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from refdelta.spec import DeltaError, Reason
from refdelta.vllm.calls.engine_calls import unexpected
from refdelta.vllm.update.ledger import left_out

__all__ = ["Audit", "LastUpdate", "Status", "read_audit", "read_status"]

_TEXTS: Final = ("run_id", "digest", "fence")
_STATE: Final = ("run_id", "version", "digest", "verified", "unmapped", "fence", "refused")
_AGREED: Final = ("refdelta", "vllm", "unproven", *_STATE, "session", "staged")
"""Fields in which all ranks must agree."""


@dataclass(frozen=True, slots=True)
class LastUpdate:
    """The last update that was committed, over all ranks."""

    sources: tuple[str, ...]
    """The paths of its deltas, as the client gave them."""
    changed: int
    """Elements that it changes, of checkpoint tensors."""
    written: int
    """Elements written, summed over ranks."""
    dropped: Mapping[str, str]
    """Checkpoint tensor -> why the engine does not hold its changes."""
    seconds: Mapping[str, float]
    """Phase (read, stage, prepare, write, audit) -> seconds of the slowest rank."""
    unproven: tuple[str, ...] = ()
    """See `Status`."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of an engine. All ranks agree on it."""

    refdelta: str
    vllm: str
    unproven: tuple[str, ...]
    """Properties of the engine on which refdelta never ran a live test, such as ``device=cuda``."""
    run_id: str | None
    version: int | None
    digest: str | None
    """State digest of the whole engine, in checkpoint coordinates."""
    verified: bool
    """False where an update came without a digest that could be checked."""
    unmapped: Mapping[str, str]
    """Checkpoint tensors that the engine leaves out although no rule says why, each with a sentence. `digest` counts
    them as they were in the files at the start. `verified` says nothing about them."""
    fence: str | None
    """Why the engine takes nothing but an anchor. None: it is not fenced."""
    refused: Mapping[str, str]
    """Checkpoint tensor -> why no update may change it."""
    session: int | None
    """The open update session."""
    staged: int
    """Deltas staged in it."""
    ranks: int
    last_error: DeltaError | None
    last_update: LastUpdate | None
    paused: bool
    weight_version: str
    """The version label that the last finish gave to vLLM."""

    @property
    def name(self) -> str:
        """For messages."""
        version = "an unversioned state" if self.version is None else f"version {self.version} of run {self.run_id}"
        return f"{version}, {self.digest or 'of unknown digest'}{left_out(self.unmapped)}"


@dataclass(frozen=True, slots=True)
class Audit:
    """A whole audit: every weight against the digests that the engine keeps."""

    elements: int
    """Elements looked at, summed over ranks."""
    mismatched: Mapping[int, Mapping[str, str]]
    """Rank -> checkpoint tensor -> what differs; only ranks where something does."""
    unmapped: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint tensors that the engine leaves out without a stated reason. The audit could not look at them."""
    unproven: tuple[str, ...] = ()
    """See `Status`."""

    @property
    def holds(self) -> bool:
        """Whether all weights that the engine holds agree with their digests."""
        return not self.mismatched


def read_status(answers: Sequence[Any], *, paused: bool, weight_version: str) -> Status:
    """One status out of every rank's.

    Raises `DeltaError`: ``bad_answer`` for what is no status (a reply to another call), ``rank_disagreement`` where the
    ranks do not say the same.
    """
    found = [_checked(answer, rank) for rank, answer in enumerate(answers)]
    if not found:
        raise unexpected("refdelta_status", "no rank answered")
    first = found[0]
    for rank, other in enumerate(found):
        if differs := [key for key in _AGREED if other[key] != first[key]]:
            says = ", ".join(f"{key} {first[key]} and {other[key]}" for key in differs)
            raise DeltaError(Reason.RANK_DISAGREEMENT, f"ranks 0 and {rank} say: {says}")
    return Status(
        **{key: first[key] for key in _AGREED if key != "unproven"},
        unproven=tuple(first["unproven"]),
        ranks=len(found),
        last_error=_error(first["last_error"]),
        last_update=_last([answer["last_update"] for answer in found]),
        paused=paused,
        weight_version=weight_version,
    )


def read_audit(answers: Sequence[Any]) -> Audit:
    """One audit out of every rank's. Raises `DeltaError` (``bad_answer``)."""
    for rank, answer in enumerate(answers):
        kinds = {"mismatched": dict, "unmapped": dict, "unproven": list}
        whole = _is_rank(answer, rank) and all(isinstance(answer.get(key), kind) for key, kind in kinds.items())
        if not whole or "elements" not in answer:
            raise unexpected("refdelta_audit", f"rank {rank} answered {answer}")
    bad = {answer["rank"]: answer["mismatched"] for answer in answers if answer["mismatched"]}
    unmapped = {name: why for answer in answers for name, why in answer["unmapped"].items()}
    unproven = tuple(sorted({field for answer in answers for field in answer["unproven"]}))
    return Audit(sum(answer["elements"] for answer in answers), bad, unmapped, unproven)


def _is_rank(answer: Any, rank: int) -> bool:
    return isinstance(answer, dict) and answer.get("rank") == rank


def _checked(answer: Any, rank: int) -> dict[str, Any]:
    keys = (*_AGREED, "last_error", "last_update")
    if not _is_rank(answer, rank) or any(key not in answer for key in keys):
        raise unexpected("refdelta_status", f"rank {rank} answered {answer}")
    text = dict.fromkeys(_TEXTS, str | None)
    kinds = {"version": int | None, "verified": bool, "unmapped": dict, "refused": dict, "unproven": list, **text}
    if not all(isinstance(answer[key], kind) for key, kind in kinds.items()):
        raise unexpected("refdelta_status", f"rank {rank} answered {answer}")
    found: dict[str, Any] = answer
    return found


def _error(found: Any) -> DeltaError | None:
    if found is None:
        return None
    return DeltaError(Reason(found["reason"]), found["detail"], found["tensor"])


def _last(updates: Sequence[Any]) -> LastUpdate | None:
    if None in updates:
        return None
    if len({tuple(update["sources"]) for update in updates}) > 1:
        raise DeltaError(Reason.RANK_DISAGREEMENT, "the ranks committed different updates last")
    phases = {phase for update in updates for phase in update["seconds"]}
    return LastUpdate(
        sources=tuple(updates[0]["sources"]),
        changed=updates[0]["changed"],
        written=sum(update["written"] for update in updates),
        dropped=updates[0]["dropped"],
        unproven=tuple(updates[0]["unproven"]),
        seconds={phase: max(update["seconds"].get(phase, 0.0) for update in updates) for phase in sorted(phases)},
    )
