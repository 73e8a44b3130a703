"""An engine as an update meets it: ranks, vLLM's RPC channel, the core, and the two protocols that run on it.

What each part stands for, in vLLM 0.32 and in refdelta:

| here | there |
|---|---|
| `Engine.collective_rpc` | ``MultiprocExecutor.collective_rpc`` (``v1/executor/multiproc_executor.py``): replies are read in rank order up to the first failure, the rest stay queued |
| `Engine.pause` | ``EngineCore.pause_scheduler``, which calls ``synchronize_device`` on all ranks |
| `Native` | ``Worker.start_weight_update``, ``update_weights``, ``finish_weight_update`` (``v1/worker/gpu_worker.py``) with a backend that writes in update and raises where it fails |
| `Refdelta.start`, ``update``, ``finish``, ``abort``, ``audit``, ``_step``, ``_one_rank_raises``, ``_tell``, ``_undo``, ``_open``, ``_stage``, ``_write`` | the methods of `refdelta.vllm.backend.DeltaSnapshotEngine` of these names (``update_from`` and so on); its steps ``prepare`` and ``settle`` are one here |
| `Refdelta.run_on_all_ranks`, ``is_reporting_rank`` | `refdelta.vllm.update.ranks.RankGroup.run_on_all_ranks`, ``is_reporting_rank`` |
| `Worker.write` | `refdelta.vllm.update.Update.write` and ``undo``, `refdelta.vllm.update.session.Session` holds what they write |
| `Refdelta.call`, ``active`` | `refdelta.vllm.worker.wrap_worker`: the Worker's flag follows the backend's session |
| ``EngineEnds`` | `refdelta.vllm.backend._end_engine` |

The core runs one call at a time and no scheduler step inside one, so a call is one transition; inside it the ranks run
side by side between their agreements and touch nothing but their own state, so their order does not matter. A worker that
is killed ends the engine: the executor's monitor shuts the core down, and no step completes without that rank. Whether a
delta fits the weights that it meets is the ledger's matter; here a payload replaces a version as a whole.
"""  # noqa: E501  # a table

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from tests.protocol.chance import Chance

RANKS = 2
MIXED = "mixed"
"""Weights of a rank that hold a part of an update."""
OLD = "old"
STALE = "stale"
"""What a rank reads that finds another payload than the one that was sent."""


@dataclass(frozen=True)
class Rank:
    """One worker between two calls."""

    weights: str = OLD
    active: bool = False
    """``Worker._weight_update_active``."""
    staged: tuple[str, ...] | None = None
    """What the open session of refdelta's backend holds; None where none is open."""
    count: int = 0
    """How many sessions were opened here, less the fewest of any rank."""
    last: str | None = None
    """The payload of the last update that was committed here."""


@dataclass(frozen=True)
class Reply:
    """One reply in a rank's queue."""

    method: str
    ok: bool
    value: object = None
    late: bool = False
    """Whether the call that it answers is over. The core cannot see this; the checks do."""


@dataclass(frozen=True)
class State:
    """An engine between two calls."""

    ranks: tuple[Rank, ...] = (Rank(),) * RANKS
    queues: tuple[tuple[Reply, ...], ...] = ((),) * RANKS
    paused: bool = False
    life: str = "alive"
    """alive; dead (health checks fail, nothing serves); hung (a rank waits for another for ever)."""

    @property
    def mixture(self) -> bool:
        """Whether the ranks do not hold one whole version."""
        held = {rank.weights for rank in self.ranks}
        return len(held) > 1 or MIXED in held

    @property
    def serves(self) -> bool:
        """Whether requests are being answered."""
        return self.life == "alive" and not self.paused


@dataclass(frozen=True)
class Answer:
    """What a client is told."""

    ok: bool
    late: bool = False
    """Whether a reply of an earlier call was taken for one of this call."""
    values: tuple[object, ...] = ()

    def __str__(self) -> str:
        return ("ok" if self.ok else "error") + (", by a reply to an earlier call" if self.late else "")


class Refused(Exception):
    """A worker's method raises, and goes on working."""


class StepFailed(Refused):
    """A step failed on some rank, as every rank knows (`refdelta.vllm.update.ranks.StepFailed`)."""


class EngineEnds(Exception):
    """The process of a worker ended: it was killed, or ended itself."""


Report: TypeAlias = tuple[str, object, str | None]
Run: TypeAlias = Generator[Report, list[Report], object]
"""A worker's method: it yields what it reports to an agreement and gets back everybody's reports."""


@dataclass
class Worker:
    """One rank inside a call. ``call`` runs one of the Worker's methods."""

    rank: int
    state: Rank
    chance: Chance
    mutations: frozenset[str] = frozenset()

    def call(self, method: str, payload: str | None) -> Run:
        """Run ``method``, which raises `Refused` where vLLM's would raise."""
        if method == "synchronize_device":
            return None
        if method == "status":
            return self.state.last, self.state.staged
        if method == "echo":
            return payload
        run: Run = getattr(self, method)(payload)
        return (yield from run)

    def change(self, **fields: object) -> None:
        """Set fields of the rank's state."""
        self.state = replace(self.state, **fields)  # type: ignore[arg-type]  # by name

    def may_fail(self, point: str) -> None:
        """This point may raise, or the worker be killed."""
        kind = self.chance.fault(self.rank, point, "fails", "killed")
        if kind == "killed":
            raise EngineEnds(f"rank {self.rank} killed in {point}")
        if kind:
            raise Refused(point)

    def write(self, point: str, value: str) -> None:
        """Write ``value`` over the weights; may fail before, in the middle and after."""
        kind = self.chance.fault(self.rank, point, "fails before", "fails in the middle", "fails after", "killed")
        if kind == "killed":
            raise EngineEnds(f"rank {self.rank} killed in {point}")
        self.change(weights={None: value, "fails before": self.state.weights, "fails after": value}.get(kind, MIXED))
        if kind:
            raise Refused(point)

    def read(self, payload: str) -> str:
        """The payload as this rank finds it; the disk may fail, or show another one."""
        kind = self.chance.fault(self.rank, "read", "fails", STALE, "killed")
        if kind == "killed":
            raise EngineEnds(f"rank {self.rank} killed in read")
        if kind == "fails":
            raise Refused("read")
        return kind or payload


class Native(Worker):
    """vLLM's own session and a backend that writes in update and raises where it fails, on that rank alone."""

    def start(self, payload: str | None) -> Run:
        """``Worker.start_weight_update``."""
        yield from ()
        if self.state.active:
            raise Refused("already active")
        self.may_fail("start")
        self.change(active=True)
        return None

    def update(self, payload: str | None) -> Run:
        """``Worker.update_weights``: a failure clears the flag on this rank."""
        yield from ()
        assert payload is not None
        if not self.state.active:
            raise Refused("not active")
        try:
            found = self.read(payload)
            self.write("write", found)
        except Refused:
            self.change(active=False)
            raise
        self.change(last=found)
        return None

    def finish(self, payload: str | None) -> Run:
        """``Worker.finish_weight_update``: a failure leaves the flag set."""
        yield from ()
        if not self.state.active:
            raise Refused("not active")
        self.may_fail("finish")
        self.change(active=False)
        return None


class Refdelta(Worker):
    """`DeltaSnapshotEngine` behind the wrapped Worker, or a version of it with `mutations`."""

    MUTATIONS: ClassVar[frozenset[str]] = frozenset(
        {
            "lowest rank raises",
            "no first agreement",
            "no second agreement",
            "write in update",
            "no undo",
            "flag not reset",
            "payloads not compared",
            "refuses before the agreement",
            "audits before the agreement",
            "survives a failed undo",
        }
    )

    def call(self, method: str, payload: str | None) -> Run:
        """The Worker's flag follows the session (`worker._for_this_backend`)."""
        if method in ("synchronize_device", "status", "echo"):
            return (yield from super().call(method, payload))
        if "flag not reset" in self.mutations:
            return (yield from self._behind_the_flag(method, payload))
        if "refuses before the agreement" in self.mutations:
            self.may_fail("before the agreement")
        try:
            return (yield from super().call(method, payload))
        finally:
            self.change(active=self.state.staged is not None)

    def _behind_the_flag(self, method: str, payload: str | None) -> Run:
        """As the Worker does it where it is not wrapped."""
        if method in ("start", "update", "finish") and (method == "start") == self.state.active:
            raise Refused("the Worker's own flag")
        try:
            yield from super().call(method, payload)
        except Refused:
            if method == "update":
                self.change(active=False)
            raise
        if method in ("start", "finish"):
            self.change(active=method == "start")
        return None

    def start(self, payload: str | None) -> Run:
        """`start_weight_update`: one that was never finished is dropped."""
        self.change(staged=None, count=self.state.count + 1)
        yield from self._one_rank_raises(self._step("start", self._open))
        return None

    def update(self, payload: str | None) -> Run:
        """`update_from`: reads, validates, stages; writes nothing."""
        assert payload is not None
        yield from self._one_rank_raises(self._step("update", lambda: self._stage(payload)))
        return None

    def finish(self, payload: str | None) -> Run:
        """`finish_weight_update`: all ranks or none."""
        yield from self._one_rank_raises(self._finished())
        return None

    def _finished(self) -> Generator[Report, list[Report], None]:
        staged, before = self.state.staged, self.state.weights
        if "no first agreement" in self.mutations:
            self._prepared()
        else:
            yield from self._step("prepare", self._prepared)
        if staged is None:
            return
        try:
            if "no second agreement" in self.mutations:
                self._write(staged)
            else:
                yield from self.run_on_all_ranks("write", lambda: self._write(staged))
        except Refused:
            yield from self._undo(before)
            raise
        finally:
            self.change(staged=None)
        if staged:
            self.change(last=staged[-1])

    def abort(self, payload: str | None) -> Run:
        """`abort_weight_update`: drops what is open."""
        yield from self._one_rank_raises(self._step("abort", lambda: self.change(staged=None)))
        return None

    def audit(self, payload: str | None) -> Run:
        """`audit`: reads every weight, which may fail."""
        if "audits before the agreement" in self.mutations:
            self.may_fail("audit")
        yield from self._one_rank_raises(self._step("audit", lambda: self.may_fail("audit")))
        return None

    @property
    def is_reporting_rank(self) -> bool:
        """`RankGroup.is_reporting_rank`."""
        return self.rank == (0 if "lowest rank raises" in self.mutations else RANKS - 1)

    def run_on_all_ranks(self, step: str, action: Callable[[], object]) -> Generator[Report, list[Report], None]:
        """`RankGroup.run_on_all_ranks`: everybody reports, then everybody knows."""
        agreed, error = None, None
        try:
            agreed = action()
        except Refused as failure:
            error = str(failure)
        reports = yield step, agreed, error
        if any(failed for _, _, failed in reports):
            raise StepFailed(step)
        if len(set(reports)) > 1:
            raise StepFailed("rank_disagreement")

    def _step(self, name: str, action: Callable[[], object]) -> Generator[Report, list[Report], None]:
        try:
            yield from self.run_on_all_ranks(name, action)
        except StepFailed:
            self.change(staged=None)
            raise

    def _one_rank_raises(self, steps: Generator[Report, list[Report], None]) -> Generator[Report, list[Report], None]:
        """Around each call: every rank ends it where a step failed, and one rank tells."""
        try:
            yield from steps
        except StepFailed as failure:
            self._tell(failure)

    def _tell(self, failure: StepFailed) -> None:
        if self.is_reporting_rank:
            raise failure

    def _undo(self, before: str) -> Generator[Report, list[Report], None]:
        if "no undo" in self.mutations:
            return
        if "no second agreement" in self.mutations:
            self.write("undo", before)
            return
        try:
            yield from self.run_on_all_ranks("undo", lambda: self.write("undo", before))
        except StepFailed as second:
            if "survives a failed undo" not in self.mutations:
                raise EngineEnds("undo") from second

    def _open(self) -> object:
        self.may_fail("start")
        self.change(staged=())
        return self.state.count

    def _opened(self) -> tuple[str, ...]:
        if self.state.staged is None:
            raise Refused("no_session")
        return self.state.staged

    def _stage(self, payload: str) -> object:
        staged = self._opened()
        found = self.read(payload)
        if "write in update" in self.mutations:
            self.write("write", found)
        self.change(staged=(*(other for other in staged if other != found), found))  # finite; the last one counts
        return self._compared(found)

    def _prepared(self) -> object:
        staged = self._opened()
        self.may_fail("prepare")
        return self._compared(*staged)

    def _compared(self, *payloads: str) -> object:
        return () if "payloads not compared" in self.mutations else (self.state.count, *payloads)

    def _write(self, staged: tuple[str, ...]) -> None:
        if staged:
            self.write("write", staged[-1])


@dataclass
class Engine:
    """An engine during one transition; `state` is what it leaves."""

    state: State
    chance: Chance
    worker: type[Worker]
    mutations: frozenset[str] = frozenset()
    calls: list[tuple[str, Answer]] = field(default_factory=list)

    def pause(self) -> Answer:
        """``pause_scheduler``: mode keep."""
        self.state = replace(self.state, paused=True)
        return self.collective_rpc("synchronize_device")

    def resume(self) -> Answer:
        """``resume_scheduler``: no worker is asked."""
        if self.state.life != "alive":
            return Answer(False)
        self.state = replace(self.state, paused=False)
        return Answer(True)

    def collective_rpc(self, method: str, payload: str | None = None) -> Answer:
        """One call on every rank, and as many replies as vLLM reads."""
        if self.state.life != "alive":
            return Answer(False)
        workers = [self.worker(i, rank, self.chance, self.mutations) for i, rank in enumerate(self.state.ranks)]
        try:
            replies = self._run(workers, method, payload)
        except EngineEnds:
            self.state = replace(self.state, life="dead")
            return Answer(False)
        fewest = min(worker.state.count for worker in workers)
        ranks = tuple(replace(worker.state, count=worker.state.count - fewest) for worker in workers)
        self.state = replace(self.state, ranks=ranks)
        if replies is None:
            self.state = replace(self.state, life="hung")
            return Answer(False)
        return self._read(replies)

    @staticmethod
    def _run(workers: list[Worker], method: str, payload: str | None) -> list[Reply] | None:
        """The ranks side by side, from agreement to agreement. None where one waits for a rank that is through."""
        runs = {worker.rank: worker.call(method, payload) for worker in workers}
        replies: dict[int, Reply] = {}
        heard: list[Report] | None = None
        while len(replies) < len(workers):
            reports: dict[int, Report] = {}
            for rank, run in runs.items():
                try:
                    reports[rank] = next(run) if heard is None else run.send(heard)
                except StopIteration as end:
                    replies[rank] = Reply(method, True, end.value)
                except Refused as error:
                    replies[rank] = Reply(method, False, str(error))
            if reports and replies:
                return None
            heard = list(reports.values())
        return [replies[worker.rank] for worker in workers]

    def _read(self, replies: list[Reply]) -> Answer:
        queues = [[*queue, reply] for queue, reply in zip(self.state.queues, replies, strict=True)]
        read: list[Reply] = []
        for queue in queues:
            read.append(queue.pop(0))
            if not read[-1].ok:
                break
        self.state = replace(self.state, queues=tuple(tuple(replace(r, late=True) for r in q) for q in queues))
        late = any(reply.late for reply in read)
        return Answer(read[-1].ok, late, tuple(reply.value for reply in read))
