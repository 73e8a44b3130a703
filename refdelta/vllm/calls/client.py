"""The sender's side of a live update. One call brings an engine to the next version, or leaves it at the old one.

    client = Client("http://sampler:8000")           # or Client(LocalEngine(llm))
    result = client.sync("/shared/run/step-000001", kv="reset_prefix", weight_version="1")

What becomes of the KV cache, which holds keys and values of the old weights, is the caller's choice:

- ``keep``: cache and running requests stay. Nothing is lost and nothing is recomputed; a running request goes on with
  old keys and values for its old tokens, and so does every later prompt that shares a cached prefix: its
  log-probabilities are those of no single version. Off-policy correction has to account for it.
- ``reset_prefix``: running requests stay and lose their keys and values: the tokens that they have are computed again
  with the new weights, then they go on. The prefix cache is emptied after the write. Every token that is made
  afterwards comes from the new weights alone; the tokens made before stay in the answer.
- ``abort``: running requests end where they are (``finish_reason`` abort), and the prefix cache is emptied after the
  write. No answer mixes tokens of two versions. Requests that arrive meanwhile wait, and see the new weights only.

Nothing here imports vLLM. An engine on another backend is refused before a call that it does not know would reach its
workers, where it would leave the RPC channel of several ranks out of step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from types import NoneType
from typing import Final, Literal, get_args

from refdelta.codec.arguments import check_path
from refdelta.spec import DeltaError, Reason, check_argument
from refdelta.vllm import BACKENDS
from refdelta.vllm.calls.engine_calls import Engine, LocalEngine, unexpected, without_backend
from refdelta.vllm.calls.status import Audit, Status, read_audit, read_status

__all__ = ["Audit", "Client", "Kv", "LocalEngine", "Status", "SyncResult"]

logger = logging.getLogger("refdelta.client")

Kv = Literal["keep", "reset_prefix", "abort"]
Source = str | PathLike[str]

_PHASES: Final = {"read": "read", "stage": "stage", "prepare": "write", "write": "write", "audit": "verify"}
"""Phase of the backend -> phase of a result."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """A finished update."""

    before: Status
    after: Status
    kv: Kv
    seconds: Mapping[str, float]
    """Phase -> seconds: ``pause``, ``update``, ``finish``, ``kv``, ``resume`` and ``total`` as the client waited;
    ``read``, ``stage`` (inside update), ``write``, ``verify`` (inside finish) as the slowest rank worked."""

    @property
    def digest(self) -> str | None:
        """State digest of the engine's weights."""
        return self.after.digest

    @property
    def version(self) -> int | None:
        """Version that the engine holds."""
        return self.after.version

    @property
    def unproven(self) -> tuple[str, ...]:
        """What of the engine was let in though no live test of refdelta ever ran on it, such as ``device=cuda``."""
        return self.after.unproven


class Client:
    """Updates one engine. Use one client at a time: of two, one gets an error, because the session was the other's."""

    def __init__(self, engine: Engine | str) -> None:
        """``engine``: a URL (needs ``refdelta[client]``), or an `Engine`."""
        if not isinstance(engine, str) and not callable(getattr(engine, "is_paused", None)):
            expected = "a URL, or an Engine such as LocalEngine(llm)"
            raise DeltaError(Reason.BAD_OPTION, f"engine: expected {expected}, found {type(engine).__name__}")
        if isinstance(engine, str):
            from refdelta.vllm.calls.http import HttpEngine

            engine = HttpEngine(engine)
        self.engine = engine

    # --- what an engine is ---

    def status(self) -> Status:
        """The engine's status, on which all ranks agree.

        Raises `DeltaError`: ``unsupported_engine`` for another backend, ``rank_disagreement``, ``bad_answer``.
        """
        self._check_backend()
        return self._status()

    def audit(self) -> Audit:
        """Let every rank read all its weights and compare them with its digests. A difference fences the engine."""
        self._check_backend()
        return read_audit(self.engine.rpc("refdelta_audit"))

    # --- what changes it ---

    def sync(
        self,
        delta: Source | Sequence[Source],
        *,
        kv: Kv = "keep",
        weight_version: str | None = None,
        resume: bool = True,
        lineage: str | None = None,
        repeat: str | None = None,
        mode: str | None = None,
    ) -> SyncResult:
        """Apply a delta, the parts of one in any order, or several that follow each other, as one update.

        Paths are the engine's. ``lineage``, ``repeat``, ``mode``: see `refdelta.vllm.update.options.Options`; None
        leaves the engine's own. With ``resume=False`` the engine stays paused.

        Raises `DeltaError`. The engine then holds the version that it held and goes on serving. Where it did not answer
        (``bad_answer``) it holds the old version or the new one; `recover` finds out which.

        With ``client = Client("http://sampler:8000")``:

        >>> result = client.sync("/shared/step-000001", kv="reset_prefix", weight_version="1")
        >>> result.before.version, result.version
        (0, 1)
        >>> result.after.last_update.written  # elements, as the engine counts them
        8
        >>> client.sync("/shared/step-000002", kv="forget")
        Traceback (most recent call last):
        refdelta.spec.DeltaError: refdelta[bad_option]: kv: expected one of keep, reset_prefix, abort, found 'forget'
        """
        given = {"lineage": lineage, "repeat": repeat, "mode": mode}
        options = {name: value for name, value in given.items() if value is not None}
        check_argument("delta", delta, (str, PathLike, Sequence), "a path, or several")
        sources = [delta] if isinstance(delta, str | PathLike) else list(delta)
        for source in sources:
            check_path("delta", source)
        if not sources:
            raise DeltaError(Reason.BAD_OPTION, "no delta to send")
        infos: list[Mapping[str, object]] = [{"target_weights_path": fspath(source), **options} for source in sources]
        return self._update(infos, kv, weight_version, resume)

    def anchor(
        self,
        checkpoint: Source,
        *,
        run_id: str | None = None,
        version: int | None = None,
        digest: str | None = None,
        kv: Kv = "reset_prefix",
        weight_version: str | None = None,
        resume: bool = True,
    ) -> SyncResult:
        """Load a whole checkpoint, which also lifts a fence. ``run_id`` and ``version`` name it. ``digest`` must be its
        digest."""
        check_path("checkpoint", checkpoint)
        given = {"run_id": run_id, "version": version, "digest": digest}
        info: dict[str, object] = {name: value for name, value in given.items() if value is not None}
        return self._update([{"target_weights_path": fspath(checkpoint), **info}], kv, weight_version, resume)

    def recover(self, *, kv: Kv = "reset_prefix") -> Status:
        """After any interruption: make the engine serve one version, and say which.

        Pauses, drops an open session (nothing of it was written), applies ``kv`` (whether the interrupted update had
        done so is not known), and resumes. Whether the interrupted update took place is in the version and digest of
        the answer. Safe on an engine that needs no recovery, and to repeat.

        Raises `DeltaError` and leaves the engine paused: ``fenced``, ``rank_disagreement``, ``bad_answer``. A fenced
        engine takes an `anchor`; the others are restarted.
        """
        _check_kv(kv)
        self._check_backend()
        self._pause(kv)
        self._abort()
        status = self._status()
        if status.fence is not None:
            raise DeltaError(Reason.FENCED, status.fence)
        self._apply(kv)
        self._resume()
        logger.info("refdelta: recovered; the engine serves %s", status.name)
        return self._status()

    # --- steps ---

    def _status(self) -> Status:
        paused = self.engine.is_paused()
        answers = self.engine.rpc("refdelta_status")
        return read_status(answers, paused=paused, weight_version=self.engine.weight_version())

    def _update(
        self, infos: Sequence[Mapping[str, object]], kv: Kv, weight_version: str | None, resume: bool
    ) -> SyncResult:
        _check_kv(kv)
        check_argument("weight_version", weight_version, (str, NoneType), "a string or None")
        before, clock = self.status(), _Clock()
        try:
            with clock.timed("pause"):
                self._pause(kv)
            self._write(infos, weight_version, clock)
            with clock.timed("kv"):
                self._apply(kv)
            after = self._committed(infos)
            if resume:
                with clock.timed("resume"):
                    self._resume()
        except DeltaError as failure:
            self._settle(failure, before, kv, resume)
            raise
        assert after.last_update is not None
        result = SyncResult(before, after, kv, clock.phases(after.last_update.seconds))
        took = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in result.seconds.items())
        unproven = f"; unproven: {', '.join(result.unproven)}" if result.unproven else ""
        logger.info("refdelta: %s -> %s; kv %s; seconds: %s%s", before.name, after.name, kv, took, unproven)
        return result

    def _write(self, infos: Sequence[Mapping[str, object]], weight_version: str | None, clock: _Clock) -> None:
        with clock.timed("update"):
            self.engine.start()
            for info in infos:
                self.engine.update(info)
        with clock.timed("finish"):
            self.engine.finish(weight_version)

    def _committed(self, infos: Sequence[Mapping[str, object]]) -> Status:
        """The state after the update, which must be this one: another client's start drops a session."""
        status = self._status()
        sent = tuple(str(info["target_weights_path"]) for info in infos)
        found = status.last_update.sources if status.last_update else ()
        if found != sent:
            detail = f"another client was at work: the engine last took {list(found)}, not {list(sent)}"
            raise DeltaError(Reason.NO_SESSION, detail)
        return status

    def _settle(self, failure: DeltaError, before: Status, kv: Kv, resume: bool) -> None:
        """After a failed update: no session is open, no stale cache, and it serves, unless it is fenced now."""
        try:
            self._abort()
            status = self._status()
            if status.fence is not None and before.fence is None:
                failure.add_note(f"refdelta: the engine is fenced and stays paused: {status.fence}")
                return
            if status.last_update != before.last_update:
                self._apply(kv)
            if resume:
                self._resume()
        except DeltaError as second:
            failure.add_note(f"refdelta: the engine may be paused, call recover(): {second}")

    def _check_backend(self) -> None:
        """Once in each call of the caller's: the server may be another one than it was."""
        found = self.engine.backend()
        if found is not None and found not in BACKENDS:
            raise without_backend(found)

    def _abort(self) -> None:
        answers = self.engine.rpc("refdelta_abort")
        if any(answer is not None for answer in answers):
            raise unexpected("refdelta_abort", answers)

    def _pause(self, kv: Kv) -> None:
        self.engine.pause("abort" if kv == "abort" else "keep")
        if not self.engine.is_paused():
            raise unexpected("pause", "answered well, but the engine is not paused")

    def _resume(self) -> None:
        self.engine.resume()
        if self.engine.is_paused():
            raise unexpected("resume", "answered well, but the engine is paused")

    def _apply(self, kv: Kv) -> None:
        if kv != "keep" and not self.engine.reset_prefix_cache(running=kv == "reset_prefix"):
            raise unexpected("reset_prefix_cache", "the prefix cache is still in use")


class _Clock:
    """Times phases."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measure the time of a block."""
        began = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - began

    def phases(self, of_backend: Mapping[str, float]) -> dict[str, float]:
        """The seconds of all phases so far, those that the backend measured included."""
        inner = dict.fromkeys(_PHASES.values(), 0.0)
        for phase, seconds in of_backend.items():
            inner[_PHASES.get(phase, phase)] = inner.get(_PHASES.get(phase, phase), 0.0) + seconds
        return {**self._seconds, **inner, "total": time.perf_counter() - self._began}


def _check_kv(kv: str) -> None:
    if kv not in get_args(Kv):
        raise DeltaError(Reason.BAD_OPTION, f"kv: expected one of {', '.join(get_args(Kv))}, found {kv!r}")
