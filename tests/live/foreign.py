"""Somebody else's backend, as the suite meets one: another `update_info`, and no NaN values. refdelta's, underneath.

`register` refuses NaNs, with nothing written; `register_silent` leaves them out without a word, which no backend may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

CAPABILITIES = {"rollback", "reasons", "sharding", "tied", "experts", "buffers"}


def register() -> None:
    """Refuse a delta that holds a NaN."""
    _register(_refuse)


def register_silent() -> None:
    """Drop the NaNs of a delta."""
    _register(_drop)


def _register(change: Callable[[Any], Any]) -> None:
    from refdelta.vllm import plugin
    from refdelta.vllm.update import session as sessions

    session: Any = sessions
    from refdelta.vllm.backend import DeltaSnapshotEngine

    plugin.register()
    update_from, read = DeltaSnapshotEngine.update_from, session.read_delta

    def translated(self: Any, update_info: Any, rank: int) -> None:
        update_from(self, {"target_weights_path": update_info["snapshot"]["at"]}, rank)

    def read_changed(path: Any) -> Any:
        delta = read(path)
        return replace(delta, patches=tuple(change(patch) for patch in delta.patches))

    DeltaSnapshotEngine.update_from = translated  # type: ignore[method-assign]
    session.read_delta = read_changed


def _refuse(patch: Any) -> Any:
    from refdelta.spec import DeltaError, Reason

    if patch.values.isnan().any():
        raise DeltaError(Reason.BAD_VALUES, "a NaN", patch.name)
    return patch


def _drop(patch: Any) -> Any:
    kept = ~patch.values.isnan()
    return replace(patch, indices=patch.indices[kept], values=patch.values[kept])
