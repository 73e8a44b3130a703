"""Every schedule of clients, faults and calls, breadth first; the shortest one that breaks each property."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tests.protocol.chance import Chance, Fault, outcomes
from tests.protocol.model import Answer, Engine, Refdelta, State, Worker

MIXTURE: Final = "a mixture serves"
REPLY: Final = "a reply belongs to another call"
LIE: Final = "a client reports an update that the engine does not hold"
STUCK: Final = "no sequence of calls leads to an update that works"
PROPERTIES: Final = (MIXTURE, REPLY, LIE, STUCK)


@dataclass(frozen=True)
class Program:
    """What a client calls, in order. After an error it goes to its last call, if that is not where it is."""

    calls: tuple[str, ...]
    says: str | None = None
    """The call after whose good answer it tells its caller that the update is there."""


ANYTHING: Final = ("pause", "start", "update", "finish", "abort", "audit", "resume")
CALLS: Final = ("pause", "start", "update", "finish", "resume")
PROGRAMS: Final[Mapping[str, Program]] = {
    # The usual client of vLLM's own interface: it resumes whatever happens.
    "plain": Program(("pause", "start", "update", "finish", "resume"), "finish"),
    # refdelta.vllm.client.Client.sync; `check` reads what was committed last.
    "sync": Program(("pause", "start", "update", "finish", "check", "resume"), "check"),
    # refdelta.vllm.client.Client.recover.
    "recover": Program(("abort", "audit", "resume")),
    # Anybody, at any time.
    **{call: Program((call,)) for call in ANYTHING},
}
LONGEST_QUEUE: Final = 2
"""Replies left in a queue; states beyond it only repeat what was found before."""


@dataclass(frozen=True)
class Client:
    """One client: idle, or before step ``at`` of a program."""

    program: str | None = None
    at: int = 0
    failed: bool = False


@dataclass(frozen=True)
class World:
    """The engine, its clients, and how many faults may still strike."""

    engine: State = field(default_factory=State)
    clients: tuple[Client, ...] = (Client(),)
    budget: int = 2


@dataclass(frozen=True)
class Step:
    """One transition: a client's call and what went wrong inside it, or something that happened."""

    client: int
    call: str
    faults: tuple[Fault, ...] = ()
    answer: Answer | None = None
    reports: bool = False
    """Whether the client then tells its caller that the update is there."""

    def __str__(self) -> str:
        who = f"client {self.client}: " if self.client >= 0 else ""
        faults = f" [{'; '.join(map(str, self.faults))}]" if self.faults else ""
        return f"{who}{self.call}{faults}" + (f" -> {self.answer}" if self.answer else "")


@dataclass(frozen=True)
class Trace:
    """A shortest way to break a property."""

    broken: str
    steps: tuple[Step, ...]
    end: State

    def __str__(self) -> str:
        weights = ", ".join(rank.weights for rank in self.end.ranks)
        lines = [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)]
        return "\n".join([f"{self.broken}:", *lines, f"  ranks hold {weights}; {self.end.life}"])


@dataclass(frozen=True)
class Protocol:
    """What is explored."""

    worker: type[Worker] = Refdelta
    mutations: frozenset[str] = frozenset()
    programs: tuple[str, ...] = ("sync", "recover")
    clients: int = 2
    budget: int = 2
    """Faults in one schedule."""
    stops: bool = True
    """Whether clients may stop anywhere."""


@dataclass
class Found:
    """What a search saw."""

    states: int = 0
    transitions: int = 0
    updates: int = 0
    """Transitions in which a client rightly reports an update."""
    traces: dict[str, Trace] = field(default_factory=dict)


def explore(protocol: Protocol) -> Found:
    """Search all of ``protocol``; stops early only when every property is broken."""
    first = World(clients=(Client(),) * protocol.clients, budget=protocol.budget)
    came: dict[World, tuple[World, Step] | None] = {first: None}
    found = Found()
    stuck: dict[State, bool] = {}
    frontier = deque([first])
    while frontier and len(found.traces) < len(PROPERTIES):
        world = frontier.popleft()
        found.states += 1
        for step, after, broken in _transitions(world, protocol):
            found.transitions += 1
            found.updates += step.reports and LIE not in broken
            new = after not in came
            if new:
                came[after] = (world, step)
            bad = [*broken, *_broken(after.engine, protocol, stuck)] if new or broken else []
            for name in bad:
                if name not in found.traces:
                    found.traces[name] = Trace(name, (*_steps(world, came), step), after.engine)
            if new and all(len(queue) <= LONGEST_QUEUE for queue in after.engine.queues):
                frontier.append(after)
    return found


def _steps(world: World, came: Mapping[World, tuple[World, Step] | None]) -> tuple[Step, ...]:
    steps: list[Step] = []
    while (arrival := came[world]) is not None:
        world, step = arrival
        steps.append(step)
    return tuple(reversed(steps))


def _broken(engine: State, protocol: Protocol, stuck: dict[State, bool]) -> Iterator[str]:
    if engine.serves and engine.mixture:
        yield MIXTURE
    if engine not in stuck:
        stuck[engine] = not _can_update(engine, protocol)
    if stuck[engine]:
        yield STUCK


# --- what can happen next ---------------------------------------------------------------------------------------


def _transitions(world: World, protocol: Protocol) -> Iterator[tuple[Step, World, list[str]]]:
    if world.engine.life == "dead":
        yield Step(-1, "the engine is restarted"), replace(world, engine=State(), clients=_idle(world)), []
        return
    if world.engine.life == "hung":
        return
    if world.budget:
        dead = replace(world.engine, life="dead")
        yield Step(-1, "a worker is killed"), replace(world, engine=dead, budget=world.budget - 1), []
    for number, client in enumerate(world.clients):
        if client.program is not None:
            if protocol.stops:
                yield Step(number, "stops"), _with(world, number, Client()), []
            yield from _next(world, number, client, protocol)
        else:
            for program in protocol.programs:
                yield from _next(world, number, Client(program), protocol)


def _idle(world: World) -> tuple[Client, ...]:
    return (Client(),) * len(world.clients)


def _with(world: World, number: int, client: Client, **fields: object) -> World:
    clients = (*world.clients[:number], client, *world.clients[number + 1 :])
    return replace(world, clients=clients, **fields)  # type: ignore[arg-type]  # by name


def payload_of(number: int) -> str:
    """Every client sends a version of its own."""
    return "ab"[number]


def _next(world: World, number: int, client: Client, protocol: Protocol) -> Iterator[tuple[Step, World, list[str]]]:
    assert client.program is not None
    program = PROGRAMS[client.program]
    call = program.calls[client.at]

    def run(chance: Chance) -> tuple[State, Answer]:
        engine = Engine(world.engine, chance, protocol.worker, protocol.mutations)
        answer = perform(engine, call, payload_of(number))
        return engine.state, answer

    for faults, (engine, answer) in outcomes(run, world.budget):
        after, reports = _advanced(client, program, answer)
        broken = [REPLY] if answer.late else []
        if reports and any(rank.weights != payload_of(number) for rank in engine.ranks):
            broken.append(LIE)
        left = world.budget - len(faults)
        yield (
            Step(number, call, faults, answer, reports),
            _with(world, number, after, engine=engine, budget=left),
            broken,
        )


def perform(engine: Engine, call: str, payload: str) -> Answer:
    """One call of a client, as it reads the answer."""
    if call == "pause":
        return engine.pause()
    if call == "resume":
        return engine.resume()
    if call == "check":
        answer = engine.collective_rpc("status")
        return replace(answer, ok=answer.ok and all(_held(value) == payload for value in answer.values))
    return engine.collective_rpc(call, payload)


def _held(status: object) -> object:
    return status[0] if isinstance(status, tuple) else None


def _advanced(client: Client, program: Program, answer: Answer) -> tuple[Client, bool]:
    """The client after an answer, and whether it now tells its caller that the update is there."""
    failed = client.failed or not answer.ok
    says = program.calls[client.at] == program.says and not failed
    last = len(program.calls) - 1
    if client.at == last:
        return Client(), says
    return Client(client.program, last if failed else client.at + 1, failed), says


# --- whether there is a way out ----------------------------------------------------------------------------------


def _can_update(engine: State, protocol: Protocol) -> bool:
    """Whether some sequence of calls, with no fault any more, ends in an update whose answers are its own."""
    if engine.life != "alive":
        return engine.life == "dead"  # health checks fail, so it is restarted
    if any(engine.queues):
        return False  # every call adds a reply to each queue and takes at most one: what is left over stays
    seen = {engine}
    frontier = deque([engine])
    while frontier:
        here = frontier.popleft()
        for call in CALLS:
            then = Engine(here, Chance(0), protocol.worker, protocol.mutations)
            answer = perform(then, call, "a")
            whole = all(rank.weights == rank.last == "a" for rank in then.state.ranks)
            if call == "finish" and answer.ok and not answer.late and whole and not any(then.state.queues):
                return True
            if then.state not in seen and not any(then.state.queues):
                seen.add(then.state)
                frontier.append(then.state)
    return False
