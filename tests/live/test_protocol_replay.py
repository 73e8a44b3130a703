"""What the protocol model says, on live engines at TP=2: call by call, answer by answer, rank by rank.

The schedules are those in which the model finds vLLM's own protocol wanting, and every single fault at every point.
With a backend that raises where it fails, the live engine goes wrong exactly as the model says: a reply of another
call, a mixture that serves, a session that never opens again. On ``delta_snapshot`` the same schedules do no harm.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from conformance import oracle
from conformance.inputs import checkpoints
from conformance.live.runner import Host, HostError, environment
from tests.live.test_transactions import PROMPTS, changed, info
from tests.live.variables import FAULT
from tests.protocol.chance import Fault, Scripted
from tests.protocol.explore import LIE, MIXTURE, PROPERTIES, REPLY, STUCK, Protocol, explore, perform
from tests.protocol.model import Engine, Native, Refdelta, State, Worker

Schedule = tuple[tuple[str, tuple[Fault, ...]], ...]
FOUND = explore(Protocol(Native, programs=("plain",), clients=1, budget=1)).traces
STOPPED = explore(Protocol(Native, programs=("plain",), clients=1, budget=0)).traces

KINDS = [
    ("start", "start", "fails"),
    ("update", "read", "fails"),
    ("update", "read", "stale"),
    ("update", "write", "fails before"),
    ("update", "write", "fails in the middle"),
    ("update", "write", "fails after"),
    ("finish", "finish", "fails"),
]


def every_single_fault() -> Iterator[tuple[str, Schedule]]:
    """The calls of a client that goes on whatever happens, with one fault; then the same again without."""
    for call, point, kind in KINDS:
        for ranks in ((0,), (1,), (0, 1)):
            faults = tuple(Fault(rank, point, kind) for rank in ranks)
            once = [(each, faults if each == call else ()) for each in ("pause", "start", "update", "finish", "resume")]
            yield f"{point} {kind} on {ranks}", (*once, *((each, ()) for each, _ in once))


def traces() -> Iterator[tuple[str, Schedule]]:
    """The counterexamples, without the clients' stops, which no engine sees."""
    for name, trace in [*FOUND.items(), *((f"{name}, no fault", trace) for name, trace in STOPPED.items())]:
        yield name, tuple((step.call, step.faults) for step in trace.steps if step.call != "stops")


SCHEDULES = dict([*traces(), *every_single_fault()])


@dataclass
class Predicted:
    """The model's engine, driven along a schedule."""

    worker: type[Worker]
    state: State = field(default_factory=State)

    def call(self, name: str, faults: Sequence[Fault]) -> bool:
        """Whether the call is answered well."""
        engine = Engine(self.state, Scripted(faults), self.worker)
        answer = perform(engine, name, "a")
        self.state = engine.state
        return answer.ok

    def echo(self, nonce: str) -> list[object] | None:
        """What the ranks seem to answer; None for an error."""
        engine = Engine(self.state, Scripted(()), self.worker)
        answer = engine.collective_rpc("echo", nonce)
        self.state = engine.state
        return list(answer.values) if answer.ok else None


@dataclass
class Live:
    """An engine in a child process."""

    host: Host
    scratch: Path
    fault: Path
    numbers: Iterator[int] = field(default_factory=count)

    def nonce(self) -> str:
        """A new text."""
        return f"nonce{next(self.numbers)}"

    def ok(self, command: str, **arguments: Any) -> bool:
        """Whether a call is answered well."""
        try:
            self.host.call(command, **arguments)
        except HostError:
            return False
        return True

    def struck(self, ranks: set[int], seconds: float = 1.0) -> None:
        """Wait until these ranks have read their faults: vLLM answers when the first one fails, and a late one would
        find the next call's. One that the call never reached has none to read."""
        marks, end = [Path(f"{self.fault}.{rank}") for rank in ranks], time.monotonic() + seconds
        while not all(mark.exists() for mark in marks) and time.monotonic() < end:
            time.sleep(0.01)
        for mark in marks:
            mark.unlink(missing_ok=True)

    def drained(self) -> int:
        """Take what was left in the replies' queues; how much it was."""
        (left,) = self.host.call("rpc", method="test_drain")
        return int(left)

    def echo(self, nonce: str) -> list[object] | None:
        """What the ranks seem to answer; None for an error."""
        try:
            answers = self.host.call("echo", nonce=nonce)
        except HostError:
            return None
        return [answer[1] if isinstance(answer, list) else answer for answer in answers]


COMMANDS = {"pause": "pause", "start": "start_update", "finish": "finish", "resume": "resume"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Checkpoint:
    return checkpoints.make("qwen3-untied", tmp_path_factory.mktemp("replay") / "base")


def engine(backend: str, modules: tuple[str, ...], checkpoint: checkpoints.Checkpoint, scratch: Path) -> Iterator[Live]:
    fault = scratch / "fault.json"
    fault.write_text("")
    plugins = "" if backend == "raising" else "refdelta"
    env = environment(plugins=plugins, modules=modules, unpack=not plugins) | {FAULT: str(fault)}
    with Host(env, scratch / "engine.log") as host:
        host.start(checkpoint, 2, backend)
        yield Live(host, scratch, fault)


# --- vLLM's own protocol -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raising(checkpoint: checkpoints.Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """vLLM's own session and a backend that raises; only a look into the executor's queues brings it back."""
    yield from engine("raising", ("tests.live.raising",), checkpoint, tmp_path_factory.mktemp("raising"))


def replayed(live: Live, schedule: Schedule) -> Predicted:
    """The schedule on both; every answer must be as predicted."""
    live.drained()
    live.host.call("rpc", method="test_mended")
    model = Predicted(Native)
    for number, (call, faults) in enumerate(schedule):
        live.fault.write_text(json.dumps(faults))
        arguments: dict[str, Any] = {"info": info(Path("a"))} if call == "update" else {}
        predicted = model.call(call, faults)
        assert live.ok(COMMANDS.get(call, "update"), **arguments) == predicted, (number, call)
        live.struck({fault[0] for fault in faults})
    live.fault.write_text("")
    return model


def held(live: Live) -> list[str]:
    """What the ranks hold, past their replies."""
    nonce = live.nonce()
    live.ok("rpc", method="test_held", arguments=[str(live.scratch), nonce])
    files = [live.scratch / f"{nonce}.{rank}" for rank in range(2)]
    deadline = time.monotonic() + 30
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [file.read_text() for file in files]


@pytest.mark.parametrize("name", SCHEDULES)
def test_vllm_alone_does_as_the_model_says(raising: Live, name: str) -> None:
    """Each answer, the echo afterwards (stale where predicted, and with that very reply), and each rank's weights."""
    model = replayed(raising, SCHEDULES[name])
    for _ in range(2):
        nonce = raising.nonce()
        assert raising.echo(nonce) == model.echo(nonce)
    assert held(raising) == [rank.weights for rank in model.state.ranks]
    assert (raising.drained() > 0) == any(model.state.queues)


def test_every_property_breaks_live(raising: Live) -> None:
    """The four findings in so many words, apart from the model's predictions."""
    assert set(FOUND) == set(PROPERTIES)

    replayed(raising, SCHEDULES[MIXTURE])
    assert raising.host.call("generate", prompts=PROMPTS), "it serves"
    assert len(set(held(raising))) == 2, "and its ranks hold different weights"

    replayed(raising, SCHEDULES[LIE])
    assert held(raising) == ["a", "stale"], "every call was answered well"

    replayed(raising, SCHEDULES[REPLY])
    answers = raising.echo("mine")
    assert answers is not None
    assert answers[0] == "mine"
    assert answers[1] != "mine"

    replayed(raising, SCHEDULES[STUCK])
    for _ in range(3):
        outcomes = [raising.ok("start_update"), raising.ok("update", info=info(Path("a"))), raising.ok("finish")]
        assert raising.echo("mine") != ["mine", "mine"], f"{outcomes}: no call brings it back"


# --- the same on refdelta ----------------------------------------------------------------------------------------


@dataclass
class Deltas:
    """The way there and back, and another delta that is valid too."""

    there: Path
    back: Path
    stale: Path


@pytest.fixture(scope="module")
def snapshot(checkpoint: checkpoints.Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    yield from engine("delta_snapshot", ("tests.live.faults",), checkpoint, tmp_path_factory.mktemp("snapshot"))


@pytest.fixture(scope="module")
def deltas(checkpoint: checkpoints.Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Deltas:
    root = tmp_path_factory.mktemp("deltas")
    old = checkpoints.load(checkpoint.directory)
    new = changed(old)
    other = {**old, "lm_head.weight": new["lm_head.weight"]}
    for name, (before, after) in {"there": (old, new), "back": (new, old), "stale": (old, other)}.items():
        oracle.write_delta(root / name, oracle.expected_patches(before, after), oracle.total_elements(before))
    return Deltas(root / "there", root / "back", root / "stale")


POINTS = {
    ("start", "fails"): ("start", 1),
    ("read", "fails"): ("read", 1),
    ("write", "fails before"): ("before_write", 1),
    ("write", "fails in the middle"): ("write", 5),
    ("write", "fails after"): ("after_write", 1),
    ("prepare", "fails"): ("prepare", 1),
}
"""Fault of the model -> that of `tests.live.faults`, and at which call."""


def as_refdelta(schedule: Schedule) -> Schedule:
    """The same faults where this backend meets them: it writes in finish, and what vLLM's finish does is prepared."""
    moved: list[tuple[str, tuple[Fault, ...]]] = []
    pending: tuple[Fault, ...] = ()
    for call, faults in schedule:
        here = tuple(fault._replace(point="prepare") if fault.point == "finish" else fault for fault in faults)
        if call == "update":
            pending = tuple(fault for fault in here if fault.point == "write")
            here = tuple(fault for fault in here if fault.point != "write")
        elif call == "finish":
            here, pending = (*here, *pending), ()
        moved.append((call, here))
    return tuple(moved)


def inject(live: Live, faults: Sequence[Fault]) -> None:
    """Let the next call meet the faults, which are all of one kind."""
    struck = [fault for fault in faults if fault.kind != "stale"]
    if not struck:
        live.fault.write_text("")
        return
    point, call = POINTS[struck[0].point, struck[0].kind]
    fault = {"point": point, "ranks": [fault.rank for fault in struck], "call": call, "n": live.nonce()}
    live.fault.write_text(json.dumps(fault))


def dump(live: Live) -> list[bytes]:
    """Every rank's weights."""
    out = live.scratch / live.nonce()
    out.mkdir()
    return [Path(file).read_bytes() for file in live.host.call("dump", directory=str(out))]


def good(live: Live, delta: Path) -> None:
    """An update that nothing disturbs."""
    assert live.host.call("sync", info=info(delta)) is None


@pytest.fixture(scope="module")
def versions(snapshot: Live, deltas: Deltas) -> dict[str, list[bytes]]:
    """Old, new and stale weights of every rank."""
    old = dump(snapshot)
    good(snapshot, deltas.there)
    new = dump(snapshot)
    good(snapshot, deltas.back)
    assert dump(snapshot) == old
    good(snapshot, deltas.stale)
    stale = dump(snapshot)
    good(snapshot, deltas.back)
    assert dump(snapshot) == old
    return {"old": old, "a": new, "stale": stale}


@pytest.mark.parametrize("name", SCHEDULES)
def test_on_refdelta_they_do_no_harm(
    snapshot: Live, deltas: Deltas, versions: dict[str, list[bytes]], name: str
) -> None:
    """Each answer as predicted, every echo its own, one version on all ranks; then there and back without a fault."""
    model = Predicted(Refdelta)
    for number, (call, faults) in enumerate(as_refdelta(SCHEDULES[name])):
        inject(snapshot, faults)
        stale = {fault.rank for fault in faults if fault.kind == "stale"}
        sent = [info(deltas.stale if rank in stale else deltas.there) for rank in range(2)]
        arguments: dict[str, Any] = {"info": sent} if call == "update" else {}
        predicted = model.call(call, faults)
        assert snapshot.ok(COMMANDS.get(call, "update"), **arguments) == predicted, (number, call)
        nonce = snapshot.nonce()
        assert snapshot.echo(nonce) == model.echo(nonce) == [nonce, nonce]
        found = dump(snapshot)
        (version,) = {rank.weights for rank in model.state.ranks}
        assert found == versions[version]
    snapshot.fault.write_text("")
    assert snapshot.ok("resume")
    assert snapshot.host.call("generate", prompts=PROMPTS)
    good(snapshot, deltas.there)
    assert dump(snapshot) == versions["a"]
    good(snapshot, deltas.back)


def test_an_audit_that_fails_on_one_rank(snapshot: Live) -> None:
    """It reads every weight, so it may: the ranks agree on that too, and none waits for another."""
    for ranks in ([0], [1], [0, 1]):
        snapshot.fault.write_text(json.dumps({"point": "look", "ranks": ranks, "call": 1, "n": snapshot.nonce()}))
        with pytest.raises(HostError, match=r"refdelta\[rank_failed\]: rank \d: RuntimeError: injected at look"):
            snapshot.host.call("rpc", method="refdelta_audit", timeout=60)
        snapshot.fault.write_text("")
        nonce = snapshot.nonce()
        assert snapshot.echo(nonce) == [nonce, nonce]
    assert [answer["mismatched"] for answer in snapshot.host.call("rpc", method="refdelta_audit")] == [{}, {}]
