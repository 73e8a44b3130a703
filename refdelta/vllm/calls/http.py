"""A vLLM server in development mode (``VLLM_SERVER_DEV_MODE=1``) behind the calls of `refdelta.vllm.calls.engine_calls.Engine`.

Needs the extra ``refdelta[client]``. Routes as in vLLM 0.32 (``entrypoints/rl/online``, ``entrypoints/serve/dev``).
"""  # noqa: E501  # the name of a class

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import tenacity

from refdelta.spec import DeltaError
from refdelta.vllm.calls.engine_calls import PauseMode, said, stated, unexpected, without_backend

__all__ = ["HttpEngine", "Timeouts"]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds to wait for an answer."""

    connect: float = 5.0
    quick: float = 30.0
    """Calls that read state, start and resume."""
    pause: float = 120.0
    """A pause waits for the step that runs."""
    update: float = 600.0
    """Reading and validating a delta or a checkpoint."""
    finish: float = 600.0
    """Writing and verifying."""
    audit: float = 600.0


class HttpEngine:
    """One vLLM server. Errors: the backend's `DeltaError`, else ``bad_answer``, also where no answer comes.

    A call is repeated (``attempts`` in all) after a failure of the connection, if repeating it changes nothing: pause
    (keep), resume, start, abort, reset, status, audit. Staging, finishing and pausing with abort are repeated only
    where the connection was never made: after any other failure their outcome is unknown, and `Client.recover` tells.
    """

    def __init__(
        self,
        url: str,
        *,
        timeouts: Timeouts | None = None,
        attempts: int = 3,
        wait_s: float = 0.2,
        headers: Mapping[str, str] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        # vLLM's server closes a connection after an error that it answered, so none is used twice; and no proxy.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(
            base_url=url, headers=dict(headers or {}), transport=transport, limits=limits, trust_env=False
        )
        self._attempts, self._wait_s = attempts, wait_s

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the calls of `Engine` ---

    def backend(self) -> str | None:
        """See `Engine`; None too where the server has no ``/server_info``."""
        answer = self._ask("GET", "/server_info", self.timeouts.quick, query={"config_format": "json"}, absent_ok=True)
        config = answer.get("vllm_config")
        if not isinstance(config, dict) or "weight_transfer_config" not in config:
            return None
        transfer = config["weight_transfer_config"]
        if transfer is None:
            raise without_backend(None)
        return str(transfer["backend"]) if isinstance(transfer, dict) and "backend" in transfer else None

    def pause(self, mode: PauseMode) -> None:
        """See `Engine`. ``clear_cache`` is sent: vLLM clears by default, whatever the mode."""
        query = {"mode": mode, "clear_cache": "false"}
        answer = self._ask("POST", "/pause", self.timeouts.pause, query=query, repeat=mode == "keep")
        _expect("/pause", answer, "status", "paused")

    def resume(self) -> None:
        """See `Engine`."""
        _expect("/resume", self._ask("POST", "/resume", self.timeouts.quick), "status", "resumed")

    def is_paused(self) -> bool:
        """See `Engine`."""
        found = _field("/is_paused", self._ask("GET", "/is_paused", self.timeouts.quick), "is_paused")
        if not isinstance(found, bool):
            raise unexpected("/is_paused", found)
        return found

    def start(self) -> None:
        """See `Engine`."""
        _field("/start_weight_update", self._ask("POST", "/start_weight_update", self.timeouts.quick), "message")

    def update(self, info: Mapping[str, object]) -> None:
        """See `Engine`."""
        body = {"update_info": dict(info)}
        try:
            answer = self._ask("POST", "/update_weights", self.timeouts.update, body=body, repeat=False)
        except DeltaError as error:
            if _MASK not in error.detail:
                raise
            detail = f"{error.detail} (vLLM masks paths; the update was of {info.get('target_weights_path')})"
            raise DeltaError(error.reason, detail, error.tensor) from error
        _field("/update_weights", answer, "message")

    def finish(self, weight_version: str | None) -> None:
        """See `Engine`."""
        body = {"weight_version": weight_version}
        answer = self._ask("POST", "/finish_weight_update", self.timeouts.finish, body=body, repeat=False)
        _field("/finish_weight_update", answer, "message")

    def reset_prefix_cache(self, *, running: bool) -> bool:
        """See `Engine`. The server answers 200 with ``{"success": false}`` where it did not."""
        query = {"reset_running_requests": "true" if running else "false"}
        answer = self._ask("POST", "/reset_prefix_cache", self.timeouts.quick, query=query)
        return _field("/reset_prefix_cache", answer, "success") is True

    def rpc(self, method: str) -> list[Any]:
        """See `Engine`."""
        timeout = self.timeouts.audit if method == "refdelta_audit" else self.timeouts.quick
        found = self._ask("POST", "/collective_rpc", timeout, body={"method": method})
        results = _field(f"/collective_rpc {method}", found, "results")
        if not isinstance(results, list):
            raise unexpected(f"/collective_rpc {method}", results)
        return results

    def weight_version(self) -> str:
        """See `Engine`."""
        return str(_field("/weight_info", self._ask("GET", "/weight_info", self.timeouts.quick), "weight_version"))

    # --- requests ---

    def _ask(
        self,
        method: str,
        path: str,
        timeout: float,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        repeat: bool = True,
        absent_ok: bool = False,
    ) -> dict[str, Any]:
        limit = httpx.Timeout(timeout, connect=self.timeouts.connect)

        def send() -> httpx.Response:
            return self._http.request(method, path, params=dict(query or {}), json=body, timeout=limit)

        call = " ".join([method, path, *([str(body["method"])] if body and "method" in body else [])])
        try:
            answer = self._retrying(repeat)(send)
        except httpx.HTTPError as error:
            raise unexpected(call, f"no answer: {type(error).__name__}: {error}") from error
        if absent_ok and answer.status_code == httpx.codes.NOT_FOUND:
            return {}
        return _read(call, answer)

    def _retrying(self, repeat: bool) -> tenacity.Retrying:
        never_sent = (httpx.ConnectError, httpx.ConnectTimeout)
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(httpx.TransportError if repeat else never_sent),
            stop=tenacity.stop_after_attempt(self._attempts),
            wait=tenacity.wait_exponential(multiplier=self._wait_s, max=5),
            reraise=True,
        )


def _read(call: str, answer: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer of 200; anything else raises."""
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise stated(answer.text) or unexpected(call, f"HTTP 404, {_NO_ROUTE}")
    if answer.status_code != httpx.codes.OK:
        raise stated(answer.text) or unexpected(call, f"HTTP {answer.status_code}: {said(answer.text)}")
    try:
        found = answer.json()
    except ValueError:
        raise unexpected(call, f"not JSON: {answer.text}") from None
    if not isinstance(found, dict):
        raise unexpected(call, f"not an object: {found}")
    return found


_NO_ROUTE = "no such route: start vLLM with VLLM_SERVER_DEV_MODE=1, and give the server's root as the URL"
_MASK = "<path>"
"""What vLLM puts for paths into errors that it answers (``entrypoints/serve/exception_handling/utils.py``)."""


def _field(call: str, answer: Mapping[str, Any], name: str) -> object:
    if name not in answer:
        raise unexpected(call, f"no {name} in {dict(answer)}")
    return answer[name]


def _expect(call: str, answer: Mapping[str, Any], name: str, wanted: str) -> None:
    if _field(call, answer, name) != wanted:
        raise unexpected(call, f"expected {name} {wanted}, found {dict(answer)}")
