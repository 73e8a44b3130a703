"""The calls that an update makes on a vLLM engine, and their form for an `LLM` object in this process.

The same calls over HTTP are `refdelta.vllm.calls.http.HttpEngine`. Nothing here imports vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeVar

from refdelta.spec import DeltaError, Reason
from refdelta.vllm import BACKENDS

__all__ = ["Engine", "LocalEngine", "PauseMode", "said", "stated", "unexpected", "without_backend"]


_EXECUTOR_SAYS = "', please check the stack trace above for the root cause"
"""What vLLM's executor puts behind a worker's error, in one line with it (``v1/executor/multiproc_executor.py``)."""

PauseMode = Literal["keep", "abort"]
T = TypeVar("T")


class Engine(Protocol):
    """One vLLM engine. Every call raises `DeltaError`: the backend's reason, or ``bad_answer``."""

    def backend(self) -> str | None:
        """The name of its weight-transfer backend; None where it does not say. Raises where it has none."""

    def pause(self, mode: PauseMode) -> None:
        """Stop scheduling. ``keep`` freezes running requests, ``abort`` ends them; the prefix cache stays."""

    def resume(self) -> None:
        """Schedule again."""

    def is_paused(self) -> bool:
        """Whether scheduling is stopped."""

    def start(self) -> None:
        """Open an update session; one that is open is dropped."""

    def update(self, info: Mapping[str, object]) -> None:
        """Stage a delta or an anchor."""

    def finish(self, weight_version: str | None) -> None:
        """Write what is staged, and name the version to vLLM."""

    def reset_prefix_cache(self, *, running: bool) -> bool:
        """Empty the prefix cache; with ``running`` also the cache of running requests, which are computed again.
        Returns whether it is empty."""

    def rpc(self, method: str) -> list[Any]:
        """Call a method of every worker; the answers in rank order."""

    def weight_version(self) -> str:
        """The version label that vLLM was given last."""


def stated(text: str) -> DeltaError | None:
    """The backend's error, taken out of vLLM's message of a failure. None where there is none. That the engine has none
    of our methods counts as an error of the backend."""
    if re.search(r"\brefdelta_\w+\W+is not implemented", text):
        return without_backend(None)
    found = DeltaError.parse(text)
    if found is None:
        return None
    return DeltaError(found.reason, found.detail.partition(_EXECUTOR_SAYS)[0], found.tensor)


def without_backend(found: str | None) -> DeltaError:
    """The error for an engine on another weight-transfer backend, ``found``, or on none."""
    has = "has no weight-transfer backend" if found is None else f"has the weight-transfer backend {found}"
    detail = f"the engine {has}: start vLLM with a --weight-transfer-config whose backend is {BACKENDS[0]}"
    return DeltaError(Reason.UNSUPPORTED_ENGINE, detail)


def said(body: str) -> str:
    """The message of a server's error: the one in its JSON, or else the whole body."""
    try:
        found = json.loads(body)
    except ValueError:
        return body
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return found if isinstance(found, str) else body


def unexpected(call: str, found: object) -> DeltaError:
    """The error for an answer that does not fit ``call``, in one line of plain characters."""
    text = " ".join(str(found).split()).replace('"', "'")
    return DeltaError(Reason.BAD_ANSWER, f"{call}: {text[:400]}")


class LocalEngine:
    """A `vllm.LLM` of this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def backend(self) -> str | None:
        """See `Engine`."""
        transfer = self._llm.llm_engine.vllm_config.weight_transfer_config
        if transfer is None:
            raise without_backend(None)
        return str(transfer.backend)

    def pause(self, mode: PauseMode) -> None:
        """See `Engine`."""
        _call("pause", lambda: self._llm.sleep(level=0, mode=mode))

    def resume(self) -> None:
        """See `Engine`. An engine that sleeps at another level does not wake up by this."""
        if not _call("resume", lambda: self._llm.wake_up(tags=["scheduling"])):
            raise unexpected("resume", "the engine is still asleep")

    def is_paused(self) -> bool:
        """See `Engine`; an engine that sleeps is paused."""
        return bool(_call("is_paused", self._llm.llm_engine.is_sleeping))

    def start(self) -> None:
        """See `Engine`."""
        _call("start_weight_update", self._llm.start_weight_update)

    def update(self, info: Mapping[str, object]) -> None:
        """See `Engine`."""
        _call("update_weights", lambda: self._llm.update_weights({"update_info": dict(info)}))

    def finish(self, weight_version: str | None) -> None:
        """See `Engine`."""
        _call("finish_weight_update", lambda: self._llm.finish_weight_update(weight_version))

    def reset_prefix_cache(self, *, running: bool) -> bool:
        """See `Engine`."""
        return bool(_call("reset_prefix_cache", lambda: self._llm.reset_prefix_cache(reset_running_requests=running)))

    def rpc(self, method: str) -> list[Any]:
        """See `Engine`."""
        return list(_call(method, lambda: self._llm.collective_rpc(method)))

    def weight_version(self) -> str:
        """See `Engine`."""
        return str(_call("get_weight_version", self._llm.get_weight_version))


def _call(name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        raise stated(str(error)) or unexpected(name, f"{type(error).__name__}: {error}") from error
