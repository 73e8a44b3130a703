"""The hook that lets the next write of refdelta's backend fail: `row.Backend.fail_at` names it, the probe calls it.

Somebody else's backend names a function of its own in its plugin: ``FAIL_AT = "module:function"``. It is called in
every worker with the worker's rank and the rank on which the next update's write is to fail, once every rank has agreed
to write and this rank has written something. None takes that back.
"""

from __future__ import annotations

from typing import Any

_ARMED: list[tuple[Any, Any]] = []
"""Class and its own `write`, of those that are replaced now."""


def fail_next_write(own_rank: int, failing_rank: int | None) -> None:
    """Let the next write of refdelta's backend fail on ``failing_rank``, with everything written by then."""
    from refdelta.spec import DeltaError, Reason
    from refdelta.vllm.update.anchor import AnchorUpdate
    from refdelta.vllm.update.updating import DeltaUpdate

    _disarm()
    if own_rank != failing_rank:
        return
    kinds: tuple[Any, ...] = (DeltaUpdate, AnchorUpdate)
    for kind in kinds:
        _ARMED.append((kind, kind.write))

        def failing(self: Any, write: Any = kind.write) -> None:
            _disarm()
            write(self)
            raise DeltaError(Reason.WRITE_FAILED, "the suite lets this write fail")

        kind.write = failing


def _disarm() -> None:
    while _ARMED:
        kind, write = _ARMED.pop()
        kind.write = write
