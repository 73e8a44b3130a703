"""A live engine with refdelta's backend, the state that it should hold, and the trainer's encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from conformance.inputs import checkpoints
from conformance.inputs.checkpoints import Checkpoint, State
from conformance.live import changes, judge
from conformance.live.runner import Host, environment
from conformance.live.truth import Truths
from refdelta import Delta, DeltaEncoder, write_delta
from tests.live.variables import FAULT


@dataclass
class Engine:
    """A live engine, the state that it should hold, and the trainer's encoder."""

    host: Host
    checkpoint: Checkpoint
    truths: Truths
    tp: int
    scratch: Path
    fault: Path
    state: State
    encoder: DeltaEncoder
    numbers: Iterator[int]

    def path(self, name: str) -> Path:
        """A new path."""
        return self.scratch / f"{name}{next(self.numbers)}"

    def sync(self, path: Path, **overrides: object) -> str | None:
        """One whole update; the error's text, or None."""
        found: str | None = self.host.call("sync", info={"target_weights_path": str(path), **overrides})
        return found

    def several(self, paths: Sequence[Path]) -> str | None:
        """Several updates in one session; the first error's text, or None."""
        self.host.call("start_update")
        try:
            for path in paths:
                self.host.call("update", info={"target_weights_path": str(path)})
            self.host.call("finish")
        except Exception as error:
            return str(error)
        return None

    def status(self) -> dict[str, Any]:
        """What every rank says alike."""
        answers = self.host.call("rpc", method="refdelta_status")
        own = ("rank", "last_update")
        first, *others = [{key: value for key, value in answer.items() if key not in own} for answer in answers]
        assert all(other == first for other in others), answers
        found: dict[str, Any] = first
        return found

    def next(self, seed: str, names: str = "") -> State:
        """The state with some of every tensor changed whose name contains ``names``."""
        changed = changes.every_tensor(self.state, seed)
        return {name: changed[name] if names in name else tensor for name, tensor in self.state.items()}

    def write(self, delta: Delta) -> Path:
        """Write a delta to a new path."""
        return write_delta(delta, self.path("delta"))

    def accepts(self, target: State, delta: Delta | None = None) -> None:
        """The encoder's next delta succeeds, and every rank says its version and digest."""
        delta = delta or self.encoder.encode(target)
        assert self.sync(self.write(delta)) is None
        self.encoder.commit(delta)
        self.state = target
        self.is_current()

    def is_current(self) -> None:
        """Version and digest are the encoder's, and the digest is that of the state."""
        status = self.status()
        assert (status["run_id"], status["version"], status["digest"]) == (
            self.encoder.run_id,
            self.encoder.version,
            self.encoder.digest,
        )
        assert status["verified"]
        assert status["fence"] is None

    def holds(self, state: State) -> None:
        """Every parameter and buffer of every rank equals a fresh engine's on ``state``."""
        made = checkpoints.with_state(self.checkpoint.directory, state, self.path("truth"))
        (truth,) = self.truths.of([replace(self.checkpoint, directory=made)], self.tp)
        out = self.path("dump")
        out.mkdir()
        self.host.call("dump", directory=str(out))
        assert judge.compare(self.checkpoint.name, truth.dumps, judge.read_dumps(out)) == []

    def refuses(self, path: Path, reason: str, *texts: str, **overrides: object) -> None:
        """Refused with the reason and the texts; nothing that the engine knows or holds has changed."""
        before, dump = self.status(), self.dump()
        error = self.sync(path, **overrides)
        assert error is not None
        for text in (f"refdelta[{reason}]", *texts):
            assert text in error, error
        assert {**self.status(), "last_error": None} == {**before, "last_error": None}
        assert self.dump() == dump

    def dump(self) -> list[bytes]:
        """Every rank's weights, as bytes."""
        out = self.path("dump")
        out.mkdir()
        return [Path(file).read_bytes() for file in self.host.call("dump", directory=str(out))]

    def anchor(self, state: State) -> Path:
        """A checkpoint of ``state``."""
        return checkpoints.with_state(self.checkpoint.directory, state, self.path("anchor"))


@contextmanager
def running(
    checkpoint: Checkpoint, tp: int, tmp: Path, *, modules: Sequence[str] = (), **arguments: Any
) -> Iterator[Engine]:
    """An engine on ``checkpoint`` whose encoder stands at version 0 of ``run``; further arguments are ``LLM``'s.

    Every process of it imports ``modules`` too.
    """
    state = checkpoints.load(checkpoint.directory)
    fault = tmp / "fault.json"
    fault.write_text("")
    env = environment(plugins="refdelta", modules=("tests.live.faults", *modules)) | {FAULT: str(fault)}
    (tmp / "truth").mkdir()
    truths = Truths(tmp / "truth")
    try:
        with Host(env, tmp / "engine.log") as host:
            host.start(checkpoint, tp, "delta_snapshot", **arguments)
            encoder = DeltaEncoder(state, run_id="run")
            yield Engine(host, checkpoint, truths, tp, tmp, fault, state, encoder, count())
    finally:
        truths.close()
