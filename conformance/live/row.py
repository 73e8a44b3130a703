"""One column of the live matrix: a checkpoint at one tensor-parallel size, its engine, and the state it should hold."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import oracle
from ..driving import ranges
from ..driving.codec import skip_for
from ..driving.options import UPDATE_INFO, filled
from ..engines import capabilities
from ..findings import EngineFailed, Finding, InfrastructureFailed, Late, Mismatch, require
from ..inputs import checkpoints
from ..inputs.checkpoints import Checkpoint, State, aliases, load, with_state
from . import changes, judge
from .encoder import Encode, encode_with_oracle, encode_with_refdelta
from .engine import Output
from .refusals import words
from .runner import Host, HostDied, HostError, HostTimedOut, environment, twice_if_late
from .setup import PLAIN, Setup
from .truth import Truth, Truths, prompts

_REASON = re.compile(r"\[([a-z_]+)\]")
"""A reason stands in square brackets in the error's text, for refdelta's backend after its name."""
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
    """refdelta's own: it encodes its deltas, and keeps CPU weights unpacked by itself."""
    init_info: Mapping[str, Any] = field(default_factory=dict)
    """Its `init_info`."""
    update_info: str = UPDATE_INFO
    """Its `update_info` as JSON, ``{path}`` standing for the delta's directory."""
    capabilities: frozenset[str] = frozenset(capabilities.of_kind(capabilities.LIVE))
    """What it offers."""
    fail_at: str = f"{__package__}.failing:fail_next_write"
    """``module:function`` that lets a write fail, where it offers `fail_at`; see `failing`."""

    def offers(self, capability: str) -> bool:
        """Whether it declares this."""
        return capability in self.capabilities

    def info(self, delta: Path) -> dict[str, Any]:
        """Its `update_info` for a delta."""
        return filled(self.update_info, str(delta))

    @property
    def encode(self) -> Encode:
        """Writes its deltas."""
        return encode_with_refdelta if self.ours else encode_with_oracle


def files_of(directory: Path) -> dict[str, str]:
    """File -> SHA-256 of its bytes, of everything below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _directories(info: object) -> list[Path]:
    """The directories that an `update_info` names, wherever in it."""
    if isinstance(info, Mapping):
        return [path for value in info.values() for path in _directories(value)]
    if isinstance(info, list):
        return [path for value in info for path in _directories(value)]
    return [Path(info)] if isinstance(info, str) and Path(info).is_absolute() and Path(info).is_dir() else []


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
            raise InfrastructureFailed(self._start_failure)
        self._start()
        self._settled = True

    def close(self) -> None:
        """End the engine, if there is one."""
        if self._host is not None:
            self._host.kill()
        self._host = None
        self._settled = False

    def call(self, command: str, **arguments: Any) -> Any:
        """One call of `engine.Engine`; an error, a late answer or a dead engine fails the check with its text."""
        assert self._host is not None, "ready() first"
        try:
            return self._host.call(command, **arguments)
        except HostError as error:
            raise AssertionError(f"{self.name}: {command} failed: {error}") from None
        except HostDied as error:
            self._settled = False
            text = f"{self.name}: {command} failed: {error}"
            raise Late(text, starved=error.starved) if isinstance(error, HostTimedOut) else EngineFailed(text) from None

    def _start(self) -> None:
        try:
            twice_if_late(self._start_once)
        except (HostError, HostDied) as error:
            log = self._scratch / "engine.log"
            self._start_failure = f"{self.name}: the engine did not start: {error} (log {log})"
            raise InfrastructureFailed(self._start_failure) from None

    def _start_once(self) -> None:
        self.close()
        env = environment(plugins=self.backend.plugins, modules=self.backend.modules, unpack=not self.backend.ours)
        self._host = Host(env | self.setup.variables(self._scratch), self._scratch / "engine.log")
        self._host.start(self.checkpoint, self.tp, self.backend.name, **self.setup.arguments)
        self._host.call("init_transfer", init_info=dict(self.backend.init_info))

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
            wanted = [replace(self.checkpoint, directory=directory) for directory in made]
            return twice_if_late(lambda: self.truths.of(wanted, self.tp))
        except (HostError, HostDied) as error:
            raise InfrastructureFailed(f"{self.name}: no truth: a fresh engine failed: {error}") from None
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
        given = {path: files_of(path) for path in _directories(info)}
        answer: str | None = self.call("sync", info=info)
        self._check_files(given)
        return answer

    def session(self, *infos: object, finish: bool = True) -> str | None:
        """Several updates in one session; None, or the error's text. ``finish=False``: the session is left open."""
        self._settled = False
        given = {path: files_of(path) for info in infos for path in _directories(info)}
        self.call("pause")
        try:
            self.call("start_update")
            for info in infos:
                self.call("update", info=info)
            if finish:
                self.call("finish")
        except EngineFailed:  # dead or late, which is no refusal
            raise
        except AssertionError as error:
            return str(error)
        finally:
            self.call("resume")
            self._check_files(given)
        return None

    def _check_files(self, given: Mapping[Path, Mapping[str, str]]) -> None:
        """What was sent is as it was: other engines, and a second try, read the same files."""
        for path, files in given.items():
            found = files_of(path)
            changed = sorted(name for name in files.keys() | found.keys() if files.get(name) != found.get(name))
            require(
                not changed,
                "files of a delta",
                expected="as they were before the update",
                found=f"{', '.join(changed)} changed, came or went",
                context=f"{self.name}: {path.name}",
            )

    def accepts(self, target: State, delta: Path | None = None) -> None:
        """Send ``delta`` (made here unless given); it must succeed and leave every rank with the bits of ``target``."""
        found = self.sync(self.backend.info(delta or self.delta(target)))
        require(
            found is None, "update", expected="taken", found=found, context=f"{self.name}: a good delta was refused"
        )
        before = self.current
        self.is_at(target)
        ranges.note_live(self.checkpoint.directory, before, target, self.tp)

    def is_at(self, target: State) -> None:
        """Whatever led there, every rank holds the bits of ``target``; the next check goes on from it."""
        self.current = target
        self.holds_current()
        self._settled = True

    def refuses(self, info: object, reasons: frozenset[str], *, outputs: bool = True) -> None:
        """Send ``info``; it must be refused with text, with one of ``reasons`` if it states any, and change nothing.

        A backend without rollback has refused when it said so: its engine is not used any more.
        """
        found = self.sync(info)
        self._check_refusal(found, reasons)
        if not self.backend.offers("rollback"):
            return
        self.every_rank_answers()
        self.holds_current()
        if outputs:
            self.answers_as_truth()
        self._settled = True

    def _check_refusal(self, found: str | None, reasons: frozenset[str]) -> None:
        wanted = f"a refusal ({', '.join(sorted(reasons))})"
        require(found is not None, "refusal", expected=wanted, found="the update succeeded", context=self.name)
        assert found is not None
        require(words(found), "refusal", expected=wanted, found="a refusal without text", context=self.name)
        if self.backend.offers("reasons"):
            code = next(iter(_REASON.findall(found)), None)
            require(code in reasons, "reason", expected=" or ".join(sorted(reasons)), found=found, context=self.name)

    @cached_property
    def features(self) -> dict[str, list[str]]:
        """The capabilities that this row needs of a backend, and the checkpoint tensors that need them."""
        embedding = [name for name in self.base if name.endswith((checkpoints.EMBEDDING, checkpoints.HEAD))]
        found = {
            "sharding": list(self.base) if self.tp > 1 else [],
            "tied": embedding if self.checkpoint.tied else [],
            "experts": [name for name in self.base if ".experts." in name],
            "buffers": [name for name in self.base if name.endswith(checkpoints.BUFFERS)],
        }
        return {feature: names for feature, names in found.items() if names}

    def skip_unless_offered(self) -> None:
        """Skip the running test where the backend does not offer what this row needs."""
        for feature in self.features:
            if not self.backend.offers(feature):
                skip_for(feature)

    def declines(self, target: State) -> None:
        """Send the change to ``target``; it is refused, with nothing changed, or done right."""
        found = self.sync(self.backend.info(self.delta(target)))
        if found is None:
            self.current = target
        else:
            require(words(found), "refusal", expected="a refusal", found="a refusal without text", context=self.name)
            if not self.backend.offers("rollback"):
                return
        self.every_rank_answers()
        self.holds_current()
        self._settled = True

    def refuses_delta(self, draft: oracle.Draft, *reasons: str) -> None:
        """`refuses` for a delta that was taken apart and spoilt."""
        self.ready()
        self.refuses(self.backend.info(self.write(draft)), frozenset(reasons))

    def good_delta_succeeds(self) -> None:
        """After refusals: a good delta to a known state, with its answers."""
        self.ready()
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
        if findings:
            shown = findings[:_MAX_SHOWN]
            head = f"{len(findings)} parameters or buffers differ from a fresh engine's:\n"
            raise Mismatch(*shown, text=head + "\n".join(map(str, shown)))

    def answers_as_truth(self) -> None:
        """Tokens and log-probabilities equal a fresh engine's exactly."""
        truth = json.loads(json.dumps(self.truth(self.current).outputs))
        lines = judge.compare_outputs(self.name, truth, self.answers())
        if lines:
            shown = [Finding("outputs of a fresh engine", context=line) for line in lines[:_MAX_SHOWN]]
            raise Mismatch(*shown, text="outputs differ from a fresh engine's:\n" + "\n".join(lines))

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
            text = f"{self.name}: after a refusal, expected the echo {wanted}, found {found}"
            if found != wanted:
                raise Mismatch(Finding("echo", expected=str(wanted), found=str(found), context=self.name), text=text)
