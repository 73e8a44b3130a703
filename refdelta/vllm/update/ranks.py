"""Agreement between the ranks of one engine: everybody learns how a step went everywhere, before anybody raises.

vLLM's RPC channel stops reading replies at the first rank that raised and leaves the later ranks' replies queued, so
that every later call would return a previous answer. Only the highest rank may raise (`RankGroup.run_on_all_ranks`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from refdelta.files.opening import refusal
from refdelta.spec import DeltaError, Reason

__all__ = ["AgreedValue", "RankGroup", "StepFailed", "StepReport"]

AgreedValue: TypeAlias = list[int | str] | None
"""What a step did, for all ranks to have done alike; a type that JSON carries, so that a report cannot fail."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did, and besides what this rank tells the others of itself; both of types that JSON carries."""

    agreed: AgreedValue
    told: Any


class StepFailed(DeltaError):
    """A step failed on some rank; the same error is known to every rank."""


@dataclass
class RankGroup:
    """The ranks of one engine. ``gather`` is a collective: every rank gets the strings of all, in rank order."""

    rank: int = 0
    size: int = 1
    gather: Callable[[str], list[str]] = field(default=lambda text: [text])

    @classmethod
    def world(cls) -> RankGroup:
        """The engine's own world, over its gloo group on the CPU."""
        from torch import distributed
        from vllm.distributed import get_world_group

        world = get_world_group()
        if world.world_size == 1:
            return cls()

        def gather(text: str) -> list[str]:
            gathered: list[Any] = [None] * world.world_size
            distributed.all_gather_object(gathered, text, group=world.cpu_group)
            return [str(item) for item in gathered]

        return cls(world.rank_in_group, world.world_size, gather)

    @property
    def is_reporting_rank(self) -> bool:
        """Whether this is the one rank that raises for all."""
        return self.rank == self.size - 1

    def run_on_all_ranks(self, step: str, action: Callable[[], AgreedValue | StepReport]) -> list[Any]:
        """Run ``action`` here and learn how it went on every rank. Returns the report of each rank, in rank order.

        ``action`` may return what all ranks must agree on, with or without something to tell.

        Raises `StepFailed` on every rank alike: the first failing rank's error, or ``rank_disagreement``. Callers let
        it reach vLLM on the reporting rank (`is_reporting_rank`) only.
        """
        report: dict[str, object] = {"step": step, "agreed": None, "told": None, "error": None}
        try:
            done = action()
            report["agreed"], report["told"] = (
                (done.agreed, done.told) if isinstance(done, StepReport) else (done, None)
            )
        except Exception as error:  # any failure here must become every rank's knowledge, whatever it is
            report["error"] = _described(error)
        reports = [json.loads(text) for text in self.gather(json.dumps(report))]
        for rank, other in enumerate(reports):
            if other["error"] is not None:
                raise _failed(other["error"], rank, self.size)
        found = {json.dumps([other["step"], other["agreed"]], sort_keys=True) for other in reports}
        if len(found) > 1:
            raise StepFailed(Reason.RANK_DISAGREEMENT, f"the ranks do not agree in {step}: {sorted(found)}")
        return [other["told"] for other in reports]


def _described(error: Exception) -> list[str | None]:
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        error = refusal(error, Reason.UNREADABLE, "file", error.filename or "the file system")
    if isinstance(error, DeltaError):
        return [error.reason.value, error.detail, error.tensor]
    return [Reason.RANK_FAILED.value, f"{type(error).__name__}: {error}", None]


def _failed(described: list[str | None], rank: int, size: int) -> StepFailed:
    reason, detail, tensor = described
    where = f"rank {rank}: " if size > 1 else ""
    return StepFailed(Reason(str(reason)), where + str(detail), tensor)
