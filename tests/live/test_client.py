"""The client on live engines: what each KV policy does to requests and cache, and what killed clients leave."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from conformance import oracle
from conformance.inputs import checkpoints
from conformance.inputs.checkpoints import State
from conformance.live import changes
from conformance.live.runner import Host, environment
from conformance.live.server import Server
from refdelta import DeltaEncoder, write_delta
from refdelta.digest import state_digest
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.calls.client import Client
from refdelta.vllm.calls.http import HttpEngine
from tests.live.cut import Cut, Killed

ROOT = Path(__file__).parents[2]
VOCABULARY = 203
BLOCK = 128
PROMPT = [(3 + 7 * i * i) % VOCABULARY for i in range(2 * BLOCK + 40)]
"""Two whole cache blocks and a rest."""
RUNNING = [(11 + 5 * i * i) % VOCABULARY for i in range(2 * BLOCK + 20)]


def checkpoint_in(tmp: Path) -> checkpoints.Checkpoint:
    """A tiny Qwen3 that takes prompts of more than two cache blocks."""
    checkpoint = checkpoints.make("qwen3-untied", tmp / "base")
    assert checkpoint.vocab_size >= VOCABULARY
    config = checkpoint.directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2048}))
    return checkpoint


# --- policies, against fresh engines ---------------------------------------------------------------------------------


def child(scratch: Path, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run `kv_child` in a process of its own; truths run without refdelta's plugin."""
    ours = job["backend"] is not None
    with Host(environment(plugins="refdelta" if ours else "", unpack=not ours), scratch / f"{name}.log") as host:
        found: dict[str, Any] = host.call("run", function="tests.live.kv_child:run", arguments=[job])
    return found


@dataclass
class Kv:
    """What an engine answered before and after two updates, and what fresh engines answer."""

    found: dict[str, Any]
    truths: list[dict[str, Any]]
    """Of versions 1 and 2."""
    digests: list[str]


def beside(name: str, base: str, *update: list[str]) -> list[list[Any]]:
    """Steps: a request, ``update`` in the middle of it, and back to the state before."""
    return [["begin", name, RUNNING, 24, 8], *update, ["end", name], ["back", base]]


@pytest.fixture(scope="module")
def kv(tmp_path_factory: pytest.TempPathFactory) -> Kv:
    """One engine through both policies with a request in flight each, then a fresh one for each version."""
    tmp = tmp_path_factory.mktemp("kv")
    checkpoint = checkpoint_in(tmp)
    states = [checkpoints.load(checkpoint.directory)]
    encoder = DeltaEncoder(states[0], run_id="kv")
    for number in (1, 2):
        states.append(changes.every_tensor(states[-1], f"kv{number}"))
        delta = encoder.encode(states[-1])
        write_delta(delta, tmp / f"d{number}")
        encoder.commit(delta)
    base = str(checkpoint.directory)
    steps = [
        *beside("no update", base),
        *beside("a pause", base, ["sync", str(tmp / "d1"), "keep"]),
        *beside("no pause", base, ["write", str(tmp / "d1")]),
        ["ask", "cold", PROMPT, 4],
        ["ask", "warm", PROMPT, 4],
        ["begin", "kept", RUNNING, 24, 8],
        ["sync", str(tmp / "d1"), "keep"],
        ["end", "kept"],
        ["ask", "after keep", PROMPT, 4],
        ["begin", "recomputed", RUNNING, 24, 8],
        ["sync", str(tmp / "d2"), "reset_prefix"],
        ["end", "recomputed"],
        ["ask", "after reset", PROMPT, 4],
        ["ask", "warm again", PROMPT, 4],
    ]
    found = child(tmp, "live", {"checkpoint": base, "backend": "delta_snapshot", "steps": steps})
    made = found["recomputed before"]["tokens"]
    asks = [["ask", "prompt", PROMPT, 4], ["ask", "rest", RUNNING + made, 24 - len(made)]]
    truths = []
    for number, state in enumerate(states[1:], 1):
        directory = checkpoints.with_state(checkpoint.directory, state, tmp / f"state{number}")
        truths.append(child(tmp, f"fresh{number}", {"checkpoint": str(directory), "backend": None, "steps": asks}))
    return Kv(found, truths, [state_digest(state) for state in states])


def answer(record: dict[str, Any]) -> tuple[Any, Any]:
    """Tokens and exact log-probabilities."""
    return record["tokens"], record["logprobs"]


def test_the_versions_answer_differently(kv: Kv) -> None:
    """Else the rest shows nothing."""
    answers = [kv.found["cold"], *(truth["prompt"] for truth in kv.truths)]
    assert len({json.dumps(answer(record)) for record in answers}) == 3


def test_keep_keeps_hits_and_finishes_requests(kv: Kv) -> None:
    found = kv.found
    assert found["warm"]["cached"] == 2 * BLOCK
    assert found["after keep"]["cached"] == 2 * BLOCK
    assert 0 < len(found["kept before"]["tokens"]) < 24
    assert found["kept before"]["tokens"] == found["kept"]["tokens"][: len(found["kept before"]["tokens"])]
    assert (len(found["kept"]["tokens"]), found["kept"]["reason"]) == (24, "length")
    assert answer(found["after keep"]) != answer(kv.truths[0]["prompt"]), "stale keys, as documented"


def test_an_update_without_a_pause_is_one_that_keeps(kv: Kv) -> None:
    """It falls between two steps of a request, as after ``pause?mode=keep``: same tokens, same bits."""
    without, paused, unpaused = (kv.found[name] for name in ("no update", "a pause", "no pause"))
    made = len(kv.found["no pause before"]["tokens"])
    assert 0 < made < 24
    assert answer(unpaused) == answer(paused)
    assert [each["cached"] for each in (without, paused, unpaused)] == [0, 0, 0]
    assert unpaused["logprobs"][:made] == without["logprobs"][:made]
    assert unpaused["logprobs"][made] != without["logprobs"][made], "the first step after the write is of new weights"


def test_reset_prefix_answers_as_a_fresh_engine(kv: Kv) -> None:
    """A prompt that was cached before; and a running request, whose further tokens are of the new weights alone."""
    found = kv.found
    assert found["after keep"]["cached"] > 0
    assert found["after reset"]["cached"] == 0
    assert answer(found["after reset"]) == answer(kv.truths[1]["prompt"])
    assert found["warm again"]["cached"] == 2 * BLOCK
    made = len(found["recomputed before"]["tokens"])
    assert 0 < made < 24
    assert (len(found["recomputed"]["tokens"]), found["recomputed"]["reason"]) == (24, "length")
    assert found["recomputed"]["tokens"][made:] == kv.truths[1]["rest"]["tokens"]
    assert found["recomputed"]["logprobs"][made:] == kv.truths[1]["rest"]["logprobs"]


def test_what_a_local_sync_returns(kv: Kv) -> None:
    for version, policy in enumerate(("keep", "reset_prefix"), 1):
        done = kv.found[f"sync {policy}"]
        assert (done["version"], done["digest"]) == (version, kv.digests[version])
        assert (done["paused"], done["weight_version"]) == (False, policy)
        phases = {"pause", "update", "finish", "kv", "resume", "read", "stage", "write", "verify", "total"}
        assert set(done["seconds"]) == phases
        assert all(seconds > 0 for phase, seconds in done["seconds"].items())


# --- over HTTP, on two ranks -------------------------------------------------------------------------------------


@dataclass
class Http:
    """A server at TP=2, two states, and the deltas between them."""

    server: Server
    there: Path
    back: Path
    whole: Path
    """A checkpoint of the second state."""
    digests: list[str]

    def client(self, transport: httpx.BaseTransport | None = None) -> Client:
        """A new client."""
        return Client(HttpEngine(self.server.url, transport=transport))

    def at(self) -> int:
        """Which state the engine is in, as all ranks say."""
        return self.digests.index(str(self.client().status().digest))

    def delta(self) -> Path:
        """From the state that the engine is in to the other."""
        return (self.there, self.back)[self.at()]

    def ask(self, salt: str | None = None, tokens: int = 4) -> tuple[int, list[tuple[int, float]]]:
        """Cached tokens, and the new ones with their log-probabilities. A salt of its own finds no cache."""
        sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 1}
        body = {"token_ids": PROMPT, "sampling_params": sampling} | ({"cache_salt": salt} if salt else {})
        found = self.server.post("/inference/v1/generate", body).raise_for_status().json()
        content = found["choices"][0]["logprobs"]["content"]
        made = [(each["token_id"], each["logprob"]) for each in content]
        return found["usage"]["prompt_tokens_details"]["cached_tokens"], made


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    tmp = tmp_path_factory.mktemp("http")
    checkpoint = checkpoint_in(tmp)
    old = checkpoints.load(checkpoint.directory)
    new = changes.every_tensor(old, "http")

    def delta(name: str, before: State, after: State) -> Path:
        path = tmp / name
        oracle.write_delta(path, oracle.expected_patches(before, after), oracle.total_elements(before))
        return path

    arguments = ["--tensor-parallel-size", "2", "--enable-prefix-caching", "--max-model-len", "2048"]
    arguments += ["--worker-extension-cls", "conformance.live.probe.Probe"]  # its ranks sleep while they wait
    env = environment(plugins="refdelta")
    with Server(
        checkpoint.directory,
        "delta_snapshot",
        env,
        tmp / "server.log",
        [*arguments, "--enable-prompt-tokens-details"],
    ) as server:
        server.wait_until_ready()
        digests = [state_digest(old), state_digest(new)]
        whole = checkpoints.with_state(checkpoint.directory, new, tmp / "whole")
        yield Http(server, delta("there", old, new), delta("back", new, old), whole, digests)


LONG = 1700
"""Tokens of a request that is still running when the update comes, on a slow machine too; 700 were too few once."""


ATTEMPTS = 6
"""How often a request may have ended before the update came: on a busy machine the engine is faster than its client."""


def in_flight(http: Http, update: Callable[[], object]) -> tuple[str, int, list[str]]:
    """Start a long request, ``update`` while it runs, and read it to its end: how it finished, how many tokens, and the
    versions that vLLM says they are of."""
    sampling = {"temperature": 0.0, "max_tokens": LONG, "ignore_eos": True}
    body = {"token_ids": RUNNING, "sampling_params": sampling, "stream": True}
    reason, tokens, versions = "", 0, list[str]()
    with httpx.stream(
        "POST", f"{http.server.url}/inference/v1/generate", json=body, timeout=120, trust_env=False
    ) as it:
        for line in it.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                if tokens == 0:
                    update()
                tokens += len(choice.get("token_ids") or ())
                reason = choice.get("finish_reason") or reason
                versions = [span["version"] for span in choice.get("weight_versions") or ()] or versions
    return reason, tokens, versions


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A request during which an update came."""

    before: str
    """The version that it began with."""
    label: str
    """The update's."""
    reason: str
    tokens: int
    versions: list[str]


def overtaken(http: Http, name: str, update: Callable[[Path, str], object]) -> Overtaken:
    """Send a delta while a request runs. One that had ended already is asked again: a starved client is late.

    Before that the cache is filled anew, so that what it holds is of the version that the request begins with.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            http.client().sync(http.delta(), kv="reset_prefix")
            http.ask()
        at, delta, label = http.at(), http.delta(), f"{name} {attempt}"
        before = http.client().status().weight_version
        found = Overtaken(before, label, *in_flight(http, partial(update, delta, label)))
        assert http.at() != at
        if (found.reason, found.versions) != ("length", [before]):
            break
    return found


@pytest.mark.parametrize(("kv", "ends"), [("keep", "length"), ("reset_prefix", "length"), ("abort", "abort")])
def test_policies_over_http(http: Http, kv: Any, ends: str) -> None:
    """Requests in flight and the cache, by vLLM's own counters."""
    http.ask()
    assert http.ask()[0] == 2 * BLOCK
    client = http.client()
    client.status()
    found = overtaken(http, kv, lambda delta, label: client.sync(delta, kv=kv, weight_version=label))
    assert found.reason == ends
    assert (found.tokens == LONG) == (ends == "length")
    versions = [found.before, found.label] if ends == "length" else [found.before]
    assert found.versions == versions, "it ran before and after, or ended"
    cached, made = http.ask()
    assert cached == (2 * BLOCK if kv == "keep" else 0)
    uncached, alone = http.ask(salt=f"salt of {kv}")
    assert uncached == 0
    assert (made == alone) == (kv != "keep"), "stale keys answer, or do not"
    assert http.client().status().weight_version == found.label
    http.client().recover()


def test_no_pause_over_http(http: Http) -> None:
    """As ``keep``: the request that runs is of both versions, the cache stays, and all ranks hold the new version."""
    http.ask()

    def update(delta: Path, label: str) -> None:
        calls: list[tuple[str, Any]] = [
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"target_weights_path": str(delta)}}),
            ("/finish_weight_update", {"weight_version": label}),
        ]
        for path, body in calls:
            http.server.post(path, body).raise_for_status()

    found = overtaken(http, "no pause", update)
    assert (found.reason, found.tokens, found.versions) == ("length", LONG, [found.before, found.label])
    assert http.client().audit().holds
    cached, made = http.ask()
    uncached, alone = http.ask(salt="salt of no pause")
    assert (cached, uncached) == (2 * BLOCK, 0)
    assert made != alone, "stale keys answer"
    http.client().recover()


def test_a_refusal_leaves_it_serving(http: Http) -> None:
    """The reason crosses two processes and an HTTP answer; the next update works."""
    before, answers = http.at(), http.ask(salt="refusal")
    for _ in range(2):
        with pytest.raises(DeltaError) as found:
            http.client().sync("/nonexistent", kv="reset_prefix")
        assert found.value.reason is Reason.NOT_A_DELTA
        assert found.value.detail == "rank 0: no directory /nonexistent"
    status = http.client().status()
    assert (status.paused, status.session, http.at()) == (False, None, before)
    assert status.last_error is not None
    assert status.last_error.reason is Reason.NOT_A_DELTA
    assert http.ask(salt="refusal once more") == answers
    http.client().sync(http.delta(), kv="reset_prefix")
    assert http.at() != before


def test_an_anchor(http: Http) -> None:
    """A whole checkpoint, named and with its digest; a wrong one is refused."""
    if http.at() == 1:
        http.client().sync(http.delta(), kv="reset_prefix")
    with pytest.raises(DeltaError) as found:
        http.client().anchor(http.whole, digest=http.digests[0])
    assert found.value.reason is Reason.DIGEST_MISMATCH
    assert (http.at(), http.client().status().paused) == (0, False)
    result = http.client().anchor(http.whole, run_id="r", version=5, digest=http.digests[1])
    assert (result.after.run_id, result.version, result.digest) == ("r", 5, http.digests[1])
    assert result.after.verified
    assert http.ask()[0] == 0


def calls_of_a_sync(http: Http) -> list[str]:
    """The calls of one whole update, in order."""
    transport = Cut(10_000, unheard=False)
    http.client(transport).sync(http.delta(), kv="reset_prefix", weight_version="whole")
    return transport.calls


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_client_that_ends_between_any_two_calls(http: Http, every: int) -> None:
    """Before a call is sent and after it was done unheard: a new client brings the engine back.

    At every call in the nightly run; else at every third, and on both sides of the one that writes.
    """
    answers = {}
    for _ in range(2):
        answers[http.at()] = http.ask(salt=f"state {http.at()}")[1]
        http.client().sync(http.delta(), kv="reset_prefix")
    assert answers[0] != answers[1]
    calls = calls_of_a_sync(http)
    assert calls[-2:] == ["/resume", "/is_paused"]
    finish = calls.index("/finish_weight_update")
    cuts = [
        (number, unheard)
        for number in range(len(calls))
        for unheard in (False, True)
        if (2 * number + unheard) % every == 0 or number == finish
    ]
    changed = []
    for number, unheard in cuts:
        before = http.at()
        with pytest.raises(Killed):
            http.client(Cut(number, unheard=unheard)).sync(http.delta(), kv="reset_prefix", weight_version="cut")
        status = http.client().recover()
        where = f"{'after' if unheard else 'before'} call {number}, {calls[number]}"
        assert (status.paused, status.session, status.fence, status.ranks) == (False, None, None, 2), where
        after = http.digests.index(str(status.digest))
        assert http.ask()[1] == answers[after], where
        changed.append(after != before)
    assert changed == [cut > (finish, False) for cut in cuts], "old before finish was done, new after"


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume"])
def test_a_client_that_is_killed_in_a_call(http: Http, path: str) -> None:
    """A real process and SIGKILL: old or new, serving, and the next update works."""
    command = [sys.executable, "-m", "tests.live.cut", http.server.url, str(http.delta()), path]
    done = subprocess.run(command, cwd=ROOT, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    status = http.client().recover()
    assert (status.paused, status.session) == (False, None)
    before = http.at()
    http.client().sync(http.delta(), kv="reset_prefix")
    assert http.at() != before
    assert http.client().audit().holds
