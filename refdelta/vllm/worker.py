"""Wrap vLLM's Worker, which has its own idea of update sessions, so that the backend decides about them.

Read from vLLM 0.32.0 (``v1/worker/gpu_worker.py``). A Worker that differs is refused here, with a sentence that names
the version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from refdelta.spec import DeltaError, Reason
from refdelta.vllm.assumptions.versions import installed_version

if TYPE_CHECKING:
    from refdelta.vllm.backend import DeltaSnapshotEngine

__all__ = ["wrap_worker"]

_WORKER_METHODS = {
    "init_weight_transfer_engine": ["self", "init_info"],
    "shutdown_weight_transfer_engine": ["self"],
    "start_weight_update": ["self"],
    "start_draft_weight_update": ["self"],
    "update_weights": ["self", "update_info"],
    "finish_weight_update": ["self"],
    "reload_weights": ["self", "args", "kwargs"],
    "sleep": ["self", "level"],
    "wake_up": ["self", "tags"],
    "discard": ["self", "tags"],
}

_SLEEP_METHODS = frozenset({"sleep", "wake_up", "discard"})


def wrap_worker(engine_class: type[DeltaSnapshotEngine]) -> None:
    """Let the backend, not the Worker, decide when an update session is open, on every rank alike.

    vLLM's Worker keeps ``_weight_update_active`` by itself: a failed update clears it on the ranks that raised only, a
    failed finish leaves it set, and its own refusals raise on every rank at once, which leaves the RPC channel of
    several ranks out of step. For workers whose engine is of ``engine_class`` each call goes through an agreement of
    all ranks.
    """
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, "refdelta_wrapped"):
        return
    _check_worker(Worker)
    for name, replacement in _replacements().items():
        setattr(Worker, name, _for_this_backend(getattr(Worker, name), replacement, engine_class))
    _wrap_sleep(Worker, engine_class)
    for name, method in _ADDED.items():
        setattr(Worker, name, method)
    Worker.refdelta_wrapped = True


def _wrap_sleep(worker: type, engine_class: type[DeltaSnapshotEngine]) -> None:
    """Whatever sleeps, wakes or discards leaves the weights uncertain: all of them are audited before the next update.

    A platform's worker overrides these methods (``CPUWorker`` with ones that do nothing), so each class is wrapped that
    has one of its own.
    """
    for cls in _with_subclasses(worker):
        for name in _SLEEP_METHODS & cls.__dict__.keys():
            setattr(cls, name, _for_this_backend(cls.__dict__[name], _uncertain(name), engine_class))


def _with_subclasses(cls: type) -> list[type]:
    below: list[type] = cls.__subclasses__()
    return [cls, *(found for one in below for found in _with_subclasses(one))]


def _uncertain(name: str) -> _Replacement:
    def replacement(worker: Any, engine: DeltaSnapshotEngine, original: _Original, *args: Any, **kwargs: Any) -> Any:
        engine.base_uncertain(f"the worker ran {name}")
        return original(worker, *args, **kwargs)

    return replacement


def _check_worker(worker: type) -> None:
    for name, expected in _WORKER_METHODS.items():
        method = getattr(worker, name, None)
        found = list(inspect.signature(method).parameters) if method is not None else None
        if found != expected:
            raise DeltaError(
                Reason.UNSUPPORTED_ENGINE,
                f"vLLM {installed_version()}: Worker.{name} takes {found}, expected {expected}; "
                "the backend does not know this version's update session",
            )


_Original = Callable[..., Any]
_Replacement = Callable[..., Any]


def _for_this_backend(
    original: _Original, replacement: _Replacement, engine_class: type[DeltaSnapshotEngine]
) -> _Original:
    """The Worker's method, going to ``replacement`` where this backend is in use."""

    def method(worker: Any, *args: Any, **kwargs: Any) -> Any:
        engine = worker.weight_transfer_engine
        if not isinstance(engine, engine_class):
            return original(worker, *args, **kwargs)
        engine.serves(worker.get_model())
        try:
            return replacement(worker, engine, original, *args, **kwargs)
        finally:
            worker._weight_update_active = engine.is_open

    method.__name__ = original.__name__
    method.__doc__ = original.__doc__
    return method


def _replacements() -> dict[str, _Replacement]:
    return {
        "init_weight_transfer_engine": _init,
        "shutdown_weight_transfer_engine": _shutdown,
        "start_weight_update": _start,
        "start_draft_weight_update": _start_draft,
        "update_weights": _update,
        "finish_weight_update": _finish,
        "reload_weights": _reload,
    }


def _added(call: Callable[[DeltaSnapshotEngine], Any]) -> _Original:
    """A method of the Worker for ``collective_rpc``, for workers that use this backend."""

    def method(worker: Any) -> Any:
        engine = worker.weight_transfer_engine
        engine.serves(worker.get_model())
        try:
            return call(engine)
        finally:
            worker._weight_update_active = engine.is_open

    return method


_ADDED: dict[str, _Original] = {
    "refdelta_status": _added(lambda engine: engine.status()),
    "refdelta_audit": _added(lambda engine: engine.audit()),
    "refdelta_abort": _added(lambda engine: engine.abort_weight_update()),
}
"""Answers are plain values, one of each rank."""


def _init(worker: Any, engine: DeltaSnapshotEngine, original: _Original, init_info: dict[str, Any]) -> None:
    engine.init_from(init_info)


def _shutdown(worker: Any, engine: DeltaSnapshotEngine, original: _Original) -> None:
    engine.shutdown()


def _start(worker: Any, engine: DeltaSnapshotEngine, original: _Original) -> None:
    worker._weight_update_is_draft = False
    engine.start_weight_update()


def _start_draft(worker: Any, engine: DeltaSnapshotEngine, original: _Original) -> None:
    engine.refuse("draft models are not updated by this backend")


def _update(worker: Any, engine: DeltaSnapshotEngine, original: _Original, update_info: Any) -> None:
    parallel = worker.vllm_config.parallel_config
    engine.update_from(update_info, parallel.data_parallel_index * parallel.world_size + worker.rank)


def _finish(worker: Any, engine: DeltaSnapshotEngine, original: _Original) -> None:
    engine.finish_weight_update()


def _reload(worker: Any, engine: DeltaSnapshotEngine, original: _Original, *args: Any, **kwargs: Any) -> None:
    engine.reload(lambda: original(worker, *args, **kwargs))
