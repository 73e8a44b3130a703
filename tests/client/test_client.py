"""The client reads every answer: what it does with each, at each call, and where it leaves the engine."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from refdelta.spec import DeltaError, Reason
from refdelta.vllm.calls.client import Client, LocalEngine
from tests.client.fake_server import FakeServer, Reaction, answer, done_but_unheard, failed, lost

STATUS = ["is_paused", "refdelta_status", "weight_info"]
UPDATE = ["start_weight_update", "update_weights", "finish_weight_update"]


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def refused(call: Callable[[], object]) -> DeltaError:
    with pytest.raises(DeltaError) as found:
        call()
    return found.value


def serves(server: FakeServer, *versions: str) -> None:
    """Not paused, no session, one of the versions."""
    assert not server.paused
    assert server.staged is None
    assert server.held in versions


# --- one update --------------------------------------------------------------------------------------------------


def test_keep(server: FakeServer) -> None:
    result = server.client().sync("/d1", weight_version="v1")
    pause = ["pause", "is_paused"]
    assert server.calls == ["server_info", *STATUS, *pause, *UPDATE, *STATUS, "resume", "is_paused"]
    serves(server, "base+/d1")
    assert server.cache == "base", "keep must not clear the cache"
    assert (result.before.version, result.version, result.digest) == (0, 1, "rd1:0000000000000002")
    assert result.after.weight_version == "v1"
    assert result.after.paused
    assert result.after.last_update is not None
    assert result.after.last_update.written == 8


def test_keep_says_so_to_vllm(server: FakeServer) -> None:
    """Without the parameter vLLM clears the cache, also in mode keep."""
    server.client().sync("/d1")
    (pause,) = [request for request in server.requests if request.url.path == "/pause"]
    assert dict(pause.url.params) == {"mode": "keep", "clear_cache": "false"}


@pytest.mark.parametrize(("kv", "mode", "running"), [("reset_prefix", "keep", "true"), ("abort", "abort", "false")])
def test_the_cache_is_reset_after_the_write(server: FakeServer, kv: Any, mode: str, running: str) -> None:
    server.client().sync("/d1", kv=kv)
    assert server.cache == ""
    by_path = {request.url.path: request for request in server.requests}
    assert by_path["/pause"].url.params["mode"] == mode
    assert by_path["/reset_prefix_cache"].url.params["reset_running_requests"] == running
    order = server.calls
    assert order.index("finish_weight_update") < order.index("reset_prefix_cache") < order.index("resume")


def test_parts_and_options_go_into_one_session(server: FakeServer) -> None:
    server.client().sync(["/p0", "/p1"], lineage="required", repeat="write", mode="native")
    bodies = [request.content for request in server.requests if request.url.path == "/update_weights"]
    options = b'"lineage":"required","repeat":"write","mode":"native"'
    assert bodies == [b'{"update_info":{"target_weights_path":"/p%d",%s}}' % (part, options) for part in range(2)]
    assert server.sources == ("/p0", "/p1")
    assert server.sessions == 1


def test_an_anchor(server: FakeServer) -> None:
    server.client().anchor("/full", run_id="r", version=7, digest="rd1:0000000000000000")
    (body,) = [request.content for request in server.requests if request.url.path == "/update_weights"]
    named = b'"run_id":"r","version":7,"digest":"rd1:0000000000000000"'
    assert body == b'{"update_info":{"target_weights_path":"/full",%s}}' % named
    assert server.cache == ""


def test_without_resume_it_stays_paused(server: FakeServer) -> None:
    server.client().sync("/d1", resume=False)
    assert server.paused
    assert server.held == "base+/d1"


def test_phases_are_returned_and_logged(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the backend are the slowest rank's; the others are the client's own."""
    with caplog.at_level(logging.INFO, "refdelta.client"):
        seconds = server.client().sync("/d1", kv="reset_prefix").seconds
    inner = {phase: round(seconds[phase], 6) for phase in ("read", "stage", "write", "verify")}
    assert inner == {"read": 0.2, "stage": 0.2, "write": 0.35, "verify": 0.4}
    outer = [seconds[phase] for phase in ("pause", "update", "finish", "kv", "resume")]
    assert all(0 < each < seconds["total"] for each in outer)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "version 0 of run r, rd1:0000000000000001 -> version 1 of run r" in line
    assert all(f"{phase} " in line for phase in seconds)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kv": "drop"}, "kv"),
        ({"delta": []}, "no delta"),
        ({"delta": None}, "delta: expected a path, or several, found NoneType"),
        ({"delta": ["/d1", None]}, "delta: expected a path, found NoneType"),
        ({"weight_version": 5}, "weight_version: expected a string or None, found int 5"),
    ],
)
def test_bad_arguments_reach_no_engine(server: FakeServer, arguments: dict[str, Any], named: str) -> None:
    error = refused(lambda: server.client().sync(**{"delta": "/d1", **arguments}))
    assert error.reason is Reason.BAD_OPTION
    assert named in error.detail
    assert server.calls == []


def test_an_anchor_or_an_engine_of_another_type(server: FakeServer) -> None:
    error = refused(lambda: server.client().anchor(None))  # type: ignore[arg-type]
    assert (error.reason, error.detail) == (Reason.BAD_OPTION, "checkpoint: expected a path, found NoneType")
    assert server.calls == []
    for engine in (None, FakeLLM()):
        error = refused(lambda engine=engine: Client(engine))  # type: ignore[misc]
        expected = "engine: expected a URL, or an Engine such as LocalEngine(llm), found "
        assert (error.reason, error.detail) == (Reason.BAD_OPTION, expected + type(engine).__name__)


# --- answers that are none ---------------------------------------------------------------------------------------

CALLS = ["pause", "is_paused", *UPDATE, "reset_prefix_cache", "refdelta_status", "weight_info", "resume"]
ODD: dict[str, Reaction] = {
    "HTTP 500": lambda request: failed("EngineDeadError: EngineCore encountered an issue"),
    "HTTP 404": answer({"detail": "Not Found"}, 404),
    "HTTP 503": lambda request: httpx.Response(503, text="no healthy upstream"),
    "not JSON": lambda request: httpx.Response(200, text="<html>a proxy</html>"),
    "a list": answer([]),
    "another object": answer({"unexpected": 1}),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("call", CALLS)
def test_an_odd_answer_at_any_call(server: FakeServer, call: str, odd: str) -> None:
    """Once: the update fails with the call's name, and the engine serves its old version or its new one."""
    client = server.client()
    client.status()
    server.react(call, ODD[odd])
    error = refused(lambda: client.sync("/d1", kv="reset_prefix"))
    assert error.reason is Reason.BAD_ANSWER
    assert call in error.detail
    assert not server.paused
    client.recover()
    serves(server, "base", "base+/d1")
    client.sync("/d2", kv="reset_prefix")
    serves(server, "base+/d2", "base+/d1+/d2")


def test_a_server_without_the_routes_is_told_what_to_do(server: FakeServer) -> None:
    """Every route of development mode is missing, the first one too."""
    client = server.client()
    for call in ("server_info", "is_paused"):
        server.react(call, answer({"detail": "Not Found"}, 404))
    error = refused(lambda: client.sync("/d1"))
    assert error.reason is Reason.BAD_ANSWER
    what = "start vLLM with VLLM_SERVER_DEV_MODE=1, and give the server's root as the URL"
    assert error.detail == f"GET /is_paused: HTTP 404, no such route: {what}"


def test_nothing_is_percent_encoded_that_a_server_says(server: FakeServer) -> None:
    server.react("start_weight_update", lambda request: failed('Call failed: "a" is no b'))
    error = refused(lambda: server.client().sync("/d1"))
    assert str(error) == "refdelta[bad_answer]: POST /start_weight_update: HTTP 500: Call failed: 'a' is no b"


NO_BACKEND = "the engine has no weight-transfer backend: start vLLM with a --weight-transfer-config whose backend is"


@pytest.mark.parametrize("call", ["sync", "status", "audit", "recover", "anchor"])
def test_an_engine_without_a_backend_is_never_asked(server: FakeServer, call: str) -> None:
    server.react("server_info", answer({"vllm_config": {"weight_transfer_config": None}}))
    error = refused(lambda: getattr(server.client(), call)(*(["/d"] if call in ("sync", "anchor") else [])))
    assert (error.reason, error.detail) == (Reason.UNSUPPORTED_ENGINE, f"{NO_BACKEND} delta_snapshot")
    assert server.calls == ["server_info"]


def test_an_engine_that_does_not_say_that_it_has_none(server: FakeServer) -> None:
    server.react("server_info", answer({"detail": "Not Found"}, 404))
    server.react("refdelta_status", lambda request: failed("Method 'refdelta_status' is not implemented."))
    error = refused(server.client().status)
    assert (error.reason, error.detail) == (Reason.UNSUPPORTED_ENGINE, f"{NO_BACKEND} delta_snapshot")


def test_a_masked_path_is_named(server: FakeServer) -> None:
    """vLLM puts <path> for every path into what it answers."""
    server.react("update_weights", lambda request: failed("refdelta[not_a_delta]: no file metadata.json in <path>"))
    error = refused(lambda: server.client().sync("/tmp/run/d1"))
    assert error.reason is Reason.NOT_A_DELTA
    assert error.detail == "no file metadata.json in <path> (vLLM masks paths; the update was of /tmp/run/d1)"


@pytest.mark.parametrize("call", UPDATE)
def test_the_backends_reason_comes_back(server: FakeServer, call: str) -> None:
    worker = "refdelta[index_range] tensor=a.b: 9 of 4"
    text = f"Worker failed with error '{worker}', please check the stack trace above for the root cause"
    server.react(call, lambda request: failed(text))
    error = refused(lambda: server.client().sync("/d1"))
    assert (error.reason, error.detail, error.tensor) == (Reason.INDEX_RANGE, "9 of 4", "a.b")
    serves(server, "base")


def test_a_pause_that_does_not_pause(server: FakeServer) -> None:
    server.react("pause", answer({"status": "paused"}))
    error = refused(lambda: server.client().sync("/d1"))
    assert "the engine is not paused" in error.detail
    assert "start_weight_update" not in server.calls


def test_a_resume_that_does_not_resume(server: FakeServer) -> None:
    server.react("resume", answer({"status": "resumed"}))
    assert "the engine is paused" in refused(lambda: server.client().sync("/d1")).detail


def test_a_cache_that_is_not_reset(server: FakeServer) -> None:
    """vLLM answers 200 with success false."""
    server.react("reset_prefix_cache", answer({"success": False}))
    error = refused(lambda: server.client().sync("/d1", kv="reset_prefix"))
    assert "still in use" in error.detail
    assert server.cache == "", "the second attempt, after the failure, went well"
    serves(server, "base+/d1")


def test_a_failure_before_the_write_keeps_the_cache(server: FakeServer) -> None:
    server.react("update_weights", lambda request: failed("refdelta[unreadable]: gone"))
    refused(lambda: server.client().sync("/d1", kv="reset_prefix"))
    assert server.cache == "base"


def test_an_engine_that_answers_nothing_any_more(server: FakeServer) -> None:
    """The first error is the one that is raised; the note says what to do."""
    client = server.client(attempts=1)
    client.status()
    for call in ("finish_weight_update", "refdelta_abort"):
        server.react(call, lost(httpx.ReadError))
    error = refused(lambda: client.sync("/d1"))
    assert "finish_weight_update" in error.detail
    assert "call recover()" in error.__notes__[0]
    assert server.paused


# --- timeouts and retries ----------------------------------------------------------------------------------------

REPEATED = ["server_info", *STATUS, "pause", "start_weight_update", "reset_prefix_cache", "resume"]


@pytest.mark.parametrize("kind", [httpx.ReadTimeout, httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError])
@pytest.mark.parametrize("call", REPEATED)
def test_what_may_be_repeated_is(server: FakeServer, call: str, kind: type[httpx.TransportError]) -> None:
    server.react(call, lost(kind), done_but_unheard(server, kind))
    server.client().sync("/d1", kv="reset_prefix")
    serves(server, "base+/d1")


@pytest.mark.parametrize("call", REPEATED)
def test_not_for_ever(server: FakeServer, call: str) -> None:
    server.react(call, *[lost(httpx.ReadTimeout)] * 3)
    error = refused(lambda: server.client().sync("/d1", kv="reset_prefix"))
    assert error.reason is Reason.BAD_ANSWER
    assert "no answer: ReadTimeout" in error.detail


@pytest.mark.parametrize("unheard", [False, True])
@pytest.mark.parametrize("call", ["update_weights", "finish_weight_update"])
def test_staging_and_finishing_are_not_repeated(server: FakeServer, call: str, unheard: bool) -> None:
    """Their outcome is unknown: the engine ends in one of both versions, and says which."""
    reaction = done_but_unheard(server, httpx.ReadTimeout) if unheard else lost(httpx.ReadTimeout)
    server.react(call, reaction)
    error = refused(lambda: server.client().sync("/d1", kv="reset_prefix"))
    assert error.reason is Reason.BAD_ANSWER
    assert server.calls.count(call) == 1
    written = unheard and call == "finish_weight_update"
    serves(server, "base+/d1" if written else "base")
    assert server.cache == ("" if written else "base")
    assert server.client().recover().version == int(written)


@pytest.mark.parametrize("call", ["update_weights", "finish_weight_update"])
def test_they_are_where_nothing_was_sent(server: FakeServer, call: str) -> None:
    server.react(call, lost(httpx.ConnectError), lost(httpx.ConnectTimeout))
    server.client().sync("/d1")
    serves(server, "base+/d1")
    assert server.sources == ("/d1",)


def test_a_pause_that_aborts_is_not_repeated(server: FakeServer) -> None:
    """A second one would end the requests that came in between."""
    server.react("pause", lost(httpx.ReadTimeout))
    refused(lambda: server.client().sync("/d1", kv="abort"))
    assert server.calls.count("pause") == 1


def test_every_call_has_its_time_limit(server: FakeServer) -> None:
    server.client().sync("/d1")
    limits = {request.url.path: request.extensions["timeout"]["read"] for request in server.requests}
    assert limits["/update_weights"] == limits["/finish_weight_update"] == 600
    assert limits["/is_paused"] == limits["/resume"] == 30
    assert all(limits.values())


# --- ranks, other clients, other backends ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", "rd1:00000000000000ff"),
        ("version", 5),
        ("session", 3),
        ("fence", "x"),
        ("refused", {"w": "x"}),
        ("vllm", "0"),
    ],
)
def test_ranks_that_disagree(server: FakeServer, field: str, value: object) -> None:
    results = [server.status_of(0), server.status_of(1) | {field: value}]
    server.react("refdelta_status", answer({"results": results}))
    error = refused(server.client().status)
    assert error.reason is Reason.RANK_DISAGREEMENT
    assert f"{field} {results[0][field]} and {value}" in error.detail


def test_ranks_that_committed_different_updates(server: FakeServer) -> None:
    server.sources = ("/d1",)
    results = [server.status_of(0), server.status_of(1)]
    results[1]["last_update"] = results[1]["last_update"] | {"sources": ["/d2"]}
    server.react("refdelta_status", answer({"results": results}))
    assert refused(server.client().status).reason is Reason.RANK_DISAGREEMENT


@pytest.mark.parametrize("stale", [None, "text", {"rank": 0}, {"rank": 1, "elements": 1}, []])
def test_a_reply_to_another_call(server: FakeServer, stale: object) -> None:
    """As vLLM's channel gives it once a lower rank has raised: rank 1's answer to the call before."""
    server.react("refdelta_status", answer({"results": [server.status_of(0), stale]}))
    error = refused(server.client().status)
    assert error.reason is Reason.BAD_ANSWER
    assert "rank 1 answered" in error.detail


@pytest.mark.parametrize("field", ["digest", "version", "verified", "unmapped", "unproven"])
def test_a_status_of_other_types(server: FakeServer, field: str) -> None:
    server.react("refdelta_status", answer({"results": [server.status_of(rank) | {field: 1.5} for rank in range(2)]}))
    assert refused(server.client().status).reason is Reason.BAD_ANSWER


def test_an_error_that_a_rank_remembers(server: FakeServer) -> None:
    told = {"reason": "write_failed", "detail": "rank 1: no", "tensor": "a"}
    server.react("refdelta_status", answer({"results": [server.status_of(r) | {"last_error": told} for r in range(2)]}))
    error = server.client().status().last_error
    assert error is not None
    assert (error.reason, error.detail, error.tensor) == (Reason.WRITE_FAILED, "rank 1: no", "a")


@pytest.mark.parametrize("when", ["update_weights", "finish_weight_update"])
def test_another_client_starts_meanwhile(server: FakeServer, when: str) -> None:
    """Its start drops the session; nothing is reported that the engine does not hold."""

    def start(request: httpx.Request) -> None:
        server.do_start_weight_update(request, None)

    server.react(when, start)
    client = server.client()
    if when == "update_weights":
        client.sync("/d1")  # staged in the other's session, and written
        serves(server, "base+/d1")
        return
    error = refused(lambda: client.sync("/d1"))
    assert error.reason is Reason.NO_SESSION
    assert "another client was at work" in error.detail
    serves(server, "base")


@pytest.mark.parametrize("call", ["sync", "status", "audit", "recover", "anchor"])
def test_another_backend_is_never_asked(call: str) -> None:
    """A method that its workers lack would leave the replies of several ranks out of step."""
    server = FakeServer(backend="nccl")
    arguments = ["/d"] if call in ("sync", "anchor") else []
    error = refused(lambda: getattr(server.client(), call)(*arguments))
    assert error.reason is Reason.UNSUPPORTED_ENGINE
    assert server.calls == ["server_info"]


@pytest.mark.parametrize("call", ["sync", "status", "audit", "recover", "anchor"])
def test_a_server_restarted_on_another_backend(server: FakeServer, call: str) -> None:
    """A client that knew the one before asks again, and leaves the other alone: `recover` paused it."""
    client = server.client()
    client.sync("/d1")
    server.backend = "nccl"
    server.calls.clear()
    arguments = ["/d2"] if call in ("sync", "anchor") else []
    error = refused(lambda: getattr(client, call)(*arguments))
    assert error.reason is Reason.UNSUPPORTED_ENGINE
    assert server.calls == ["server_info"]
    assert not server.paused


def test_a_server_that_does_not_say_its_backend(server: FakeServer) -> None:
    server.react("server_info", answer({"detail": "Not Found"}, 404))
    assert server.client().status().ranks == 2


@pytest.mark.parametrize("unproven", [(), ("device=cuda", "load_format=hf")])
def test_what_was_never_seen_is_said_with_every_answer(
    server: FakeServer, unproven: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    server.unproven = unproven
    client = server.client()
    caplog.set_level("INFO", "refdelta.client")
    result = client.sync("/d1")
    assert result.after.last_update is not None
    assert result.unproven == result.before.unproven == result.after.last_update.unproven == unproven
    assert client.audit().unproven == client.recover().unproven == unproven
    (line,) = (record.getMessage() for record in caplog.records if "kv keep" in record.getMessage())
    assert line.partition("; unproven: ")[2] == ", ".join(unproven)


def test_audit(server: FakeServer) -> None:
    client = server.client()
    found = client.audit()
    assert found.holds
    assert found.elements == 20
    results = [
        {"rank": rank, "mismatched": {"a.b": "rows 0 to 1"} if rank else {}, "unmapped": {"c": "why"}}
        | {"elements": 10, "unproven": []}
        for rank in range(2)
    ]
    server.react("refdelta_audit", answer({"results": results}), answer({"results": [None, None]}))
    found = client.audit()
    assert not found.holds
    assert found.mismatched == {1: {"a.b": "rows 0 to 1"}}
    assert found.unmapped == {"c": "why"}
    assert refused(client.audit).reason is Reason.BAD_ANSWER


# --- recover -----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The client's process ends here."""


def kill(request: httpx.Request) -> httpx.Response:
    raise Killed


def steps(kv: Any) -> list[str]:
    whole = FakeServer()
    whole.client().sync("/d1", kv=kv, weight_version="v1")
    return whole.calls


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("kv", "cut"), [(kv, cut) for kv in ("keep", "reset_prefix", "abort") for cut in range(len(steps(kv)))]
)
def test_a_client_that_is_killed_anywhere(kv: Any, cut: int, after: bool) -> None:
    """Before its nth call reaches the engine, or before it hears the answer: a new client brings the engine back."""
    server = FakeServer()
    transport = httpx.MockTransport(lambda request: limited(server, request, cut, after=after))
    from refdelta.vllm.calls.http import HttpEngine

    with pytest.raises(Killed):
        Client(HttpEngine("http://fake", transport=transport)).sync("/d1", kv=kv, weight_version="v1")
    written = server.held == "base+/d1"
    status = server.client().recover()
    serves(server, "base", "base+/d1")
    assert status.version == int(written)
    assert not status.paused
    assert server.cache == "", "whether the interrupted update had dropped stale keys is not known"
    server.client().sync("/d2")
    serves(server, "base+/d2", "base+/d1+/d2")


def limited(server: FakeServer, request: httpx.Request, cut: int, *, after: bool) -> httpx.Response:
    if len(server.calls) == cut and not after:
        raise Killed
    found = server.handle(request)
    if len(server.calls) == cut + 1 and after:
        raise Killed
    return found


def test_recover_where_nothing_is_wrong(server: FakeServer) -> None:
    for _ in range(2):
        server.client().recover(kv="keep")
    serves(server, "base")
    assert server.cache == "base"


def test_a_fenced_engine_stays_paused(server: FakeServer) -> None:
    server.fence = "audit: rank 0: a changed without an update"
    error = refused(server.client().recover)
    assert (error.reason, error.detail) == (Reason.FENCED, server.fence)
    assert server.paused


def test_a_fence_that_an_update_brings_leaves_it_paused(server: FakeServer) -> None:
    def fencing(request: httpx.Request) -> httpx.Response:
        server.fence = "audit"
        return failed("refdelta[digest_mismatch] tensor=a: not what it was")

    server.react("finish_weight_update", fencing)
    error = refused(lambda: server.client().sync("/d1"))
    assert error.reason is Reason.DIGEST_MISMATCH
    assert "stays paused" in error.__notes__[0]
    assert server.paused


def test_a_delta_refused_by_a_fenced_engine_leaves_it_as_it_was(server: FakeServer) -> None:
    server.fence = "audit"
    server.react("update_weights", lambda request: failed("refdelta[fenced]: audit; only an anchor is taken"))
    assert refused(lambda: server.client().sync("/d1")).reason is Reason.FENCED
    assert not server.paused


def test_ranks_that_disagree_are_left_paused(server: FakeServer) -> None:
    """They might serve a mixture."""
    results = [server.status_of(0), server.status_of(1) | {"digest": None}]
    server.react("refdelta_status", answer({"results": results}))
    assert refused(server.client().recover).reason is Reason.RANK_DISAGREEMENT
    assert server.paused


def test_an_abort_that_is_answered_oddly(server: FakeServer) -> None:
    server.react("refdelta_abort", answer({"results": [None, "stale"]}))
    assert refused(server.client().recover).reason is Reason.BAD_ANSWER


# --- an LLM ------------------------------------------------------------------------------------------------------


class FakeLLM:
    """The calls of `vllm.LLM`, on a `FakeServer`'s state."""

    def __init__(self) -> None:
        self.state = FakeServer()
        self.log: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.asleep = False
        self.llm_engine = self
        self.vllm_config = self
        self.weight_transfer_config: FakeLLM | None = self
        self.backend = "delta_snapshot"

    def _do(self, name: str, body: Any = None) -> Any:
        if self.error and name == "finish_weight_update":
            raise self.error
        found = getattr(self.state, f"do_{name}")(httpx.Request("POST", "http://x/?clear_cache=false"), body)
        if isinstance(found, httpx.Response):
            raise RuntimeError(found.text)
        return found

    def sleep(self, level: int, mode: str) -> None:
        self.log.append(("sleep", level, mode))
        self._do("pause")

    def wake_up(self, tags: list[str]) -> bool:
        self.log.append(("wake_up", *tags))
        self._do("resume")
        return not self.asleep

    def is_sleeping(self) -> bool:
        return self.state.paused

    def start_weight_update(self) -> None:
        self._do("start_weight_update")

    def update_weights(self, request: Any) -> None:
        self._do("update_weights", request)

    def finish_weight_update(self, weight_version: str | None) -> None:
        self._do("finish_weight_update", {"weight_version": weight_version})

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self.log.append(("reset_prefix_cache", reset_running_requests))
        return bool(self._do("reset_prefix_cache")["success"])

    def collective_rpc(self, method: str) -> Any:
        return self._do(method)["results"]

    def get_weight_version(self) -> str:
        return self.state.weight_version


def test_an_llm() -> None:
    llm = FakeLLM()
    result = Client(LocalEngine(llm)).sync("/d1", kv="reset_prefix", weight_version="v1")
    assert result.after.weight_version == "v1"
    assert llm.log == [("sleep", 0, "keep"), ("reset_prefix_cache", True), ("wake_up", "scheduling")]
    serves(llm.state, "base+/d1")
    Client(LocalEngine(llm)).sync("/d2", kv="abort")
    assert llm.log[3:] == [("sleep", 0, "abort"), ("reset_prefix_cache", False), ("wake_up", "scheduling")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("Call failed: refdelta[write_failed] tensor=a: no", Reason.WRITE_FAILED), ("EngineDeadError", Reason.BAD_ANSWER)],
)
def test_what_an_llm_raises(text: str, reason: Reason) -> None:
    llm = FakeLLM()
    llm.error = Exception(text)
    error = refused(lambda: Client(LocalEngine(llm)).sync("/d1"))
    assert error.reason is reason
    assert error.__cause__ is llm.error
    serves(llm.state, "base")


def test_an_llm_that_does_not_wake_up_or_has_another_backend() -> None:
    llm = FakeLLM()
    llm.asleep = True
    assert "still asleep" in refused(lambda: Client(LocalEngine(llm)).sync("/d1")).detail
    llm.backend = "nccl"
    assert refused(Client(LocalEngine(llm)).status).reason is Reason.UNSUPPORTED_ENGINE
    llm.weight_transfer_config = None
    assert refused(Client(LocalEngine(llm)).status).detail == f"{NO_BACKEND} delta_snapshot"


# --- what it needs -----------------------------------------------------------------------------------------------

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize(
    ("blocked", "program"),
    [
        (["vllm"], "import refdelta.vllm.client, refdelta.vllm.http_engine"),
        (
            ["vllm", "httpx", "tenacity"],
            "from refdelta.vllm.client import Client, LocalEngine; Client(LocalEngine(None))",
        ),
    ],
)
def test_what_it_imports(blocked: list[str], program: str) -> None:
    """No vLLM; and for an `LLM` none of the extra's libraries."""
    code = BLOCKED.format(blocked=blocked) + program
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_url_is_enough() -> None:
    from refdelta.vllm.calls.http import HttpEngine

    client = Client("http://127.0.0.1:1")
    assert isinstance(client.engine, HttpEngine)
    with client.engine:
        assert "ConnectError" in refused(client.status).detail
