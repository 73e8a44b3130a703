"""Deltas that say which version they lead to, as a trainer's do; digests are the suite's own."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from .. import oracle
from ..inputs.checkpoints import State
from ..oracle import digests
from . import changes
from .row import Row

ELSEWHERE = "rd1:0123456789abcdef"
"""A digest of no state here."""


class Trainer:
    """Says of each delta what a trainer would say whose run begins at the row's current state."""

    def __init__(self, live: Row) -> None:
        self.live = live
        self.run, self.version = f"run-{uuid.uuid4().hex[:8]}", 0

    def next(self, seed: str) -> State:
        """A state after the current one."""
        return changes.every_tensor(self.live.current, f"version {seed}", self.live.aliases)

    def draft(self, target: State, patches: Sequence[oracle.Patch] | None = None, **fields: object) -> oracle.Draft:
        """The next version's delta, all that there is to say said of it, but for ``fields``."""
        lineage = {
            "run_id": self.run,
            "version": self.version + 1,
            "base_version": self.version,
            "base_digest": digests.state_digest(self.live.current),
            "digest": digests.state_digest(target),
        } | fields
        made = self.live.draft(self.live.patches(target) if patches is None else patches)
        made.metadata["lineage"] = {key: value for key, value in lineage.items() if value is not None}
        return made

    def publishes(self, seed: str) -> None:
        """The next version is taken."""
        target = self.next(seed)
        self.live.accepts(target, self.live.write(self.draft(target)))
        self.version += 1
