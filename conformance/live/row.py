"""One column of the live matrix: a checkpoint at one tensor-parallel size, its engine, and the state it should hold."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from conformance import oracle
from conformance.checkpoints import Checkpoint, State, aliases, load, with_state
from conformance.live import changes, judge, probe
from conformance.live.encoder import Encode, encode_with_oracle, encode_with_refdelta
from conformance.live.engine import Output
from conformance.live.runner import START_TIMEOUT, Host, HostDied, HostError, environment
from conformance.live.setup import PLAIN, Setup
from conformance.live.truth import Truth, Truths, prompts

_REASON = re.compile(r"refdelta\[([a-z_]+)\]")
_MAX_SHOWN = 8
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Backend:
    """The weight-transfer backend under test."""

    name: str = "delta_snapshot"
    """vLLM's ``weight_transfer_config.backend``."""
    plugins: str = "refdelta"
    """``VLLM_PLUGINS`` of its engines."""
    modules: tuple[str, ...] = ()
    """What every process of its engines loads (`probe.load`) before the backend is created."""
    ours: bool = True
    """refdelta's own: it encodes its deltas, states reasons, and keeps CPU weights unpacked by itself."""

    @property
    def encode(self) -> Encode:
        """Writes its deltas."""
        return encode_with_refdelta if self.ours else encode_with_oracle


def our_backend(mutant: str | None) -> Backend:
    """refdelta's, with the fault ``--mutant MODULE:FUNCTION`` in this process (which encodes) and in every worker."""
    if mutant is None:
        return Backend()
    probe.load(mutant)
    return Backend(modules=(mutant,))


class Row:
    """A live engine and the state that it should hold. The checks of a row run in order, each from where the last left.

    A check that fails leaves the engine in an unknown state; `ready` then starts another one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tp: int,
        backend: Backend,
        truths: Truths,
        scratch: Path,
        setup: Setup = PLAIN,
    ) -> None:
        """``truths`` are of the same set-up."""
        self.checkpoint = checkpoint
        self.setup = setup
        self.tp = tp
        self.backend = backend
        self.truths = truths
        self.base: State = load(checkpoint.directory)
        self.aliases = aliases(self.base, tied=checkpoint.tied)
        self.current = self.base
        self._scratch = scratch
        self._count = itertools.count()
        self._host: Host | None = None
        self._start_failure: str | None = None
        self._settled = False
        self._last_truth: tuple[object, Truth] | None = None

    @property
    def name(self) -> str:
        """Its label in the matrix."""
        return " ".join(filter(None, (self.checkpoint.name, self.setup.name, f"tp={self.tp}")))

    # --- the engine ---

    def ready(self) -> None:
        """Make sure that an engine runs and holds `current`; after a failed check, that is a new one on the base."""
        if self._settled:
            return
        self.close()
        self.current = self.base
        if self._start_failure is not None:
            raise AssertionError(self._start_failure)
        self._start()
        self._settled = True

    def close(self) -> None:
        """End the engine, if there is one."""
        if self._host is not None:
            self._host.kill()
        self._host = None
        self._settled = False

    def call(self, command: str, **arguments: Any) -> Any:
        """One call of `engine.Engine`; an error or a dead engine fails the check with its text."""
        assert self._host is not None, "ready() first"
        try:
            return self._host.call(command, **arguments)
        except (HostError, HostDied) as error:
            raise AssertionError(f"{self.name}: {command} failed: {error}") from None

    def _start(self) -> None:
        env = environment(plugins=self.backend.plugins, modules=self.backend.modules, unpack=not self.backend.ours)
        self._host = Host(env | self.setup.variables(self._scratch), self._scratch / "engine.log")
        try:
            self._host.call(
                "start",
                timeout=START_TIMEOUT,
                checkpoint=str(self.checkpoint.directory),
                tp=self.tp,
                backend=self.backend.name,
                hf_overrides=dict(self.checkpoint.hf_overrides),
                arguments=dict(self.setup.arguments),
            )
            self._host.call("init_transfer")
        except (HostError, HostDied) as error:
            self._start_failure = f"{self.name}: the engine did not start: {error} (log {self._host.log})"
            raise AssertionError(self._start_failure) from None

    # --- states, truths, deltas ---

    def truth(self, state: State) -> Truth:
        """What a fresh engine on ``state`` holds and answers."""
        if self._last_truth is not None and self._last_truth[0] is state:
            return self._last_truth[1]
        (found,) = self.truths_of([state])
        self._last_truth = (state, found)
        return found

    def with_truths(self, states: Iterable[State]) -> Iterator[tuple[State, Truth]]:
        """Each state with its truth; as many as memory allows are asked for at once, so that engines start together."""
        size = sum(tensor.numel() * tensor.itemsize for tensor in self.base.values())
        pending = iter(states)
        while batch := list(itertools.islice(pending, max(1, _BATCH_BYTES // size))):
            yield from zip(batch, self.truths_of(batch), strict=True)

    def truths_of(self, states: Sequence[State]) -> list[Truth]:
        """The truths of several states."""
        base, root = self.checkpoint.directory, self._scratch
        made = [with_state(base, state, root / f"state{next(self._count)}") for state in states]
        try:
            return self.truths.of([replace(self.checkpoint, directory=directory) for directory in made], self.tp)
        finally:
            for directory in made:
                shutil.rmtree(directory)

    def delta(self, target: Mapping[str, Any]) -> Path:
        """The delta from `current` to ``target``, by the encoder under test."""
        out = self._scratch / f"delta{next(self._count)}"
        self.backend.encode(self.current, target, out)
        return out

    def patches(self, target: Mapping[str, Any]) -> tuple[oracle.Patch, ...]:
        """The same change as the oracle's patches, to be spoilt."""
        return oracle.expected_patches(self.current, target)

    def draft(self, patches: Sequence[oracle.Patch]) -> oracle.Draft:
        """The oracle's delta of ``patches`` for this row, taken apart."""
        return oracle.draft(patches, oracle.total_elements(self.base))

    def write(self, draft: oracle.Draft) -> Path:
        """Write a delta that was taken apart."""
        return draft.write(self._scratch / f"delta{next(self._count)}")

    @cached_property
    def other(self) -> State:
        """A finite state that differs from the base in every tensor; the target of `good_delta_succeeds`."""
        return changes.every_tensor(self.base, "every tensor", self.aliases)

    # --- verdicts ---

    def sync(self, info: object) -> str | None:
        """Pause, start, update, finish, resume. Returns None or the error's text."""
        self._settled = False
        answer: str | None = self.call("sync", info=info)
        return answer

    def accepts(self, target: State, delta: Path | None = None) -> None:
        """Send ``delta`` (made here unless given); it must succeed and leave every rank with the bits of ``target``."""
        found = self.sync({"target_weights_path": str(delta or self.delta(target))})
        assert found is None, f"{self.name}: a good delta was refused: {found}"
        self.current = target
        self.holds_current()
        self._settled = True

    def refuses(self, info: object, reasons: frozenset[str], *, outputs: bool = True) -> None:
        """Send ``info``; it must be refused with text, by our backend with one of ``reasons``, and change nothing."""
        found = self.sync(info)
        assert found is not None, f"{self.name}: expected a refusal ({sorted(reasons)}), and the update succeeded"
        assert found.strip(), f"{self.name}: the refusal carries no text"
        if self.backend.ours:
            code = next(iter(_REASON.findall(found)), None)
            assert code in reasons, f"{self.name}: expected a reason of {sorted(reasons)}, found: {found}"
        self.every_rank_answers()
        self.holds_current()
        if outputs:
            self.answers_as_truth()
        self._settled = True

    def refuses_delta(self, draft: oracle.Draft, *reasons: str) -> None:
        """`refuses` for a delta that was taken apart and spoilt."""
        self.refuses({"target_weights_path": str(self.write(draft))}, frozenset(reasons))

    def good_delta_succeeds(self) -> None:
        """After refusals: a good delta to a known state, with its answers."""
        at_base = not oracle.difference(self.base, self.current)
        self.accepts(self.other if at_base else self.base)
        self._settled = False
        self.answers_as_truth()
        self._settled = True

    def holds_current(self) -> None:
        """Every parameter and buffer of every rank equals a fresh engine's, bit for bit."""
        directory = self._scratch / f"dump{next(self._count)}"
        directory.mkdir()
        self.call("dump", directory=str(directory))
        findings = judge.compare(self.checkpoint.name, self.truth(self.current).dumps, judge.read_dumps(directory))
        shutil.rmtree(directory)
        shown = [str(finding) for finding in findings[:_MAX_SHOWN]]
        assert not findings, f"{len(findings)} parameters or buffers differ from a fresh engine's:\n" + "\n".join(shown)

    def answers_as_truth(self) -> None:
        """Tokens and log-probabilities equal a fresh engine's exactly."""
        truth = json.loads(json.dumps(self.truth(self.current).outputs))
        lines = judge.compare_outputs(self.name, truth, self.answers())
        assert not lines, "outputs differ from a fresh engine's:\n" + "\n".join(lines)

    def answers(self) -> list[Output]:
        """Tokens and log-probabilities for the fixed prompts; beside an adapter, without it and then with it."""
        adapter = self.setup.adapter and str(self.setup.adapter)
        found: list[Output] = self.call("generate", prompts=prompts(self.checkpoint.vocab_size), adapter=adapter)
        return found

    def every_rank_answers(self) -> None:
        """An echo with a nonce comes back from every rank, twice: no earlier reply waits in the channel."""
        for _ in range(2):
            nonce = uuid.uuid4().hex
            found = self.call("echo", nonce=nonce)
            wanted = [[rank, nonce] for rank in range(self.tp)]
            assert found == wanted, f"{self.name}: after a refusal, expected the echo {wanted}, found {found}"
