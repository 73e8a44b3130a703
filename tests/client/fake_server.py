"""vLLM's development-mode routes with a refdelta engine behind them, in one object; every answer can be replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from refdelta.vllm.calls.client import Client
from refdelta.vllm.calls.http import HttpEngine

Reaction = Callable[[httpx.Request], httpx.Response | None]
"""What happens instead of a call: an answer, an exception, or None for the usual answer."""


@dataclass
class FakeServer:
    """State as of an engine at TP=2; ``calls`` is what was asked, in order."""

    backend: str = "delta_snapshot"
    paused: bool = False
    staged: list[str] | None = None
    sessions: int = 0
    weights: tuple[str, ...] = ("base",)
    sources: tuple[str, ...] | None = None
    weight_version: str = "default"
    cache: str = "base"
    """Which weights the cached keys are of; empty where the cache was reset."""
    fence: str | None = None
    unproven: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    reactions: dict[str, list[Reaction]] = field(default_factory=dict)
    """Call -> what happens the next times."""

    @property
    def held(self) -> str:
        """The version that both ranks hold."""
        return "+".join(self.weights)

    def client(self, **options: Any) -> Client:
        """A client that waits for nothing."""
        transport = httpx.MockTransport(self.handle)
        return Client(HttpEngine("http://fake", transport=transport, wait_s=0, **options))

    def react(self, call: str, *reactions: Reaction) -> None:
        """Let the next ``call``s go this way."""
        self.reactions.setdefault(call, []).extend(reactions)

    def handle(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        body = json.loads(request.content or b"null")
        path = request.url.path.lstrip("/")
        call = body["method"] if path == "collective_rpc" else path
        self.calls.append(call)
        self.requests.append(request)
        if self.reactions.get(call):
            answer = self.reactions[call].pop(0)(request)
            if answer is not None:
                return answer
        found = getattr(self, f"do_{call}")(request, body)
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)

    # --- the routes ---

    def do_server_info(self, request: httpx.Request, body: Any) -> Any:
        return {"vllm_config": {"weight_transfer_config": {"backend": self.backend}}}

    def do_pause(self, request: httpx.Request, body: Any) -> Any:
        self.paused = True
        if request.url.params["clear_cache"] == "true":
            self.cache = ""
        return {"status": "paused"}

    def do_resume(self, request: httpx.Request, body: Any) -> Any:
        self.paused = False
        return {"status": "resumed"}

    def do_is_paused(self, request: httpx.Request, body: Any) -> Any:
        return {"is_paused": self.paused}

    def do_start_weight_update(self, request: httpx.Request, body: Any) -> Any:
        self.sessions += 1
        self.staged = []
        return {"message": "Weight update started"}

    def do_update_weights(self, request: httpx.Request, body: Any) -> Any:
        if self.staged is None:
            return failed("refdelta[no_session]: no update session is open")
        self.staged.append(body["update_info"]["target_weights_path"])
        return {"message": "Weights updated"}

    def do_finish_weight_update(self, request: httpx.Request, body: Any) -> Any:
        if self.staged is None:
            return failed("refdelta[no_session]: no update session is open")
        if self.staged:
            self.weights += tuple(self.staged)
            self.sources = tuple(self.staged)
        self.staged = None
        if body["weight_version"] is not None:
            self.weight_version = body["weight_version"]
        return {"message": "Weight update finished"}

    def do_reset_prefix_cache(self, request: httpx.Request, body: Any) -> Any:
        self.cache = ""
        return {"success": True}

    def do_weight_info(self, request: httpx.Request, body: Any) -> Any:
        return {"weight_version": self.weight_version}

    def do_refdelta_abort(self, request: httpx.Request, body: Any) -> Any:
        self.staged = None
        return {"results": [None, None]}

    def do_refdelta_audit(self, request: httpx.Request, body: Any) -> Any:
        found = {"elements": 10, "mismatched": {}, "unmapped": {}, "unproven": list(self.unproven)}
        return {"results": [{"rank": rank, **found} for rank in range(2)]}

    def do_refdelta_status(self, request: httpx.Request, body: Any) -> Any:
        return {"results": [self.status_of(rank) for rank in range(2)]}

    def status_of(self, rank: int) -> dict[str, Any]:
        """What one rank says."""
        seconds = {"read": 0.1 * (1 + rank), "stage": 0.2, "prepare": 0.05, "write": 0.3, "audit": 0.4}
        last = {"sources": list(self.sources or ()), "changed": 7, "written": 4, "dropped": {}, "seconds": seconds}
        last["unproven"] = list(self.unproven)
        return {
            "rank": rank,
            "backend": "delta_snapshot",
            "refdelta": "0.1.0",
            "vllm": "0.32.0",
            "unproven": list(self.unproven),
            "run_id": "r",
            "version": len(self.weights) - 1,
            "digest": f"rd1:{len(self.weights):016x}",
            "verified": True,
            "unmapped": {},
            "fence": self.fence,
            "refused": {},
            "session": self.sessions if self.staged is not None else None,
            "staged": len(self.staged or ()),
            "last_error": None,
            "last_update": last if self.sources else None,
        }


def failed(text: str, status: int = 500) -> httpx.Response:
    """The answer of vLLM's exception handler."""
    return httpx.Response(status, json={"error": {"message": text, "type": "InternalServerError", "code": status}})


def answer(body: object, status: int = 200) -> Reaction:
    """Answer this; the engine does nothing."""
    return lambda request: httpx.Response(status, json=body)


def lost(kind: type[httpx.TransportError]) -> Reaction:
    """The call does not reach the engine."""

    def react(request: httpx.Request) -> httpx.Response:
        raise kind("injected", request=request)

    return react


def done_but_unheard(server: FakeServer, kind: type[httpx.TransportError]) -> Reaction:
    """The engine does it, and the answer is lost."""

    def react(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"null")
        call = server.calls[-1]
        getattr(server, f"do_{call}")(request, body)
        raise kind("injected", request=request)

    return react
