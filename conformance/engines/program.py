"""Any program as an engine: `--engine exec:COMMAND`, in any language, over files and exit codes.

    COMMAND encode BASE TARGET OUT            write the delta from BASE to TARGET into the directory OUT
    COMMAND apply DELTA BASE OUT              write the state that DELTA makes of BASE into the file OUT
    COMMAND capabilities                      print names of `engines.capabilities`, or refuse: then it has none

    COMMAND invert DELTA BASE OUT INVERSE     with `inverts`: apply, and write the inverse into the directory INVERSE
    COMMAND compose OUT DELTA...              with `composes`: one delta that equals several, into the directory OUT
    COMMAND digest STATE                      with `digests`: print the digest of a state
    COMMAND follow DELTA BASE DIGEST OUT      with `lineage`: apply to the state of DIGEST, print the digest after

A state is a safetensors file, a delta a directory; OUT and INVERSE do not exist before. Exit 0: done. Exit 3: refused,
with the reason on standard error; with the capability `reasons` its code stands there in square brackets. Anything else
is a failure of the program, a call that takes longer than the time-out too. Inputs must be left as they are, and after
a refusal OUT must not be there. The program runs in the working directory of the suite.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import assume, currently_in_test_context
from torch import Tensor

from .. import oracle
from ..findings import EngineFailed, InfrastructureFailed
from ..oracle import CODES, DELTA_FILE, METADATA_FILE, State
from . import capabilities, interrupts
from .capabilities import PROGRAM

TIMEOUT = 60.0
DONE, REFUSED = 0, 3
_CANNOT_RUN = (126, 127)
"""What a shell exits with for a command that it cannot run or find; a wrapper script passes it on."""
_REASON = re.compile(r"\[([a-z_]+)\]")
_SHOWN = 2000
_LAST_WORDS_S = 5.0


class Refused(Exception):
    """The program refused, and left everything as it was."""

    def __init__(self, text: str) -> None:
        super().__init__(text or "refused without a word on standard error")
        self.said = bool(text)
        found = _REASON.search(text)
        self.reason = found.group(1) if found else None


@dataclass(frozen=True, slots=True)
class Program:
    """A codec behind a command line."""

    command: tuple[str, ...]
    timeout: float
    """Seconds that one call may take."""
    capabilities: frozenset[str] = frozenset()

    @classmethod
    def of(cls, command: str, timeout: float, declared: frozenset[str] | None) -> Program:
        """The program of a command line, split as a shell would, with what it or ``declared`` says that it can do."""
        words = tuple(shlex.split(command))
        if not words:
            raise ValueError("exec: needs a command, as in exec:./codec.")
        program = cls(words, timeout)
        names = program.asked() if declared is None else declared
        return cls(words, timeout, capabilities.checked(names, PROGRAM, f"Engine 'exec:{command}'"))

    @property
    def name(self) -> str:
        """Shown in the matrix: the command without directories."""
        return " ".join(Path(word).name for word in self.command)

    def asked(self) -> frozenset[str]:
        """What `COMMAND capabilities` prints; nothing where it refuses."""
        try:
            return frozenset(self.call("capabilities").split())
        except Refused:
            return frozenset()
        except EngineFailed as error:
            hint = "Let it print names, or exit 3 for commands that it does not know, or give --capabilities."
            raise EngineFailed(f"{error} {hint}") from error

    # -- the protocol of a codec -------------------------------------------------------------------------------------

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        """`encode`; ``out`` is the directory of the delta."""
        with _Files() as files:
            self.run("encode", files.state(base), files.state(target), files.new_delta(out))

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        """`apply`; the tensors of ``weights`` are replaced when the program is done."""
        with _Files() as files:
            after = files.out(files.path("after"))
            self.run("apply", files.delta(delta), files.state(weights), after)
            _take(after, weights)

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        """`invert`; the tensors of ``weights`` are replaced when the program is done."""
        with _Files() as files:
            after = files.out(files.path("after"))
            self.run("invert", files.delta(delta), files.state(weights), after, files.new_delta(out))
            _take(after, weights)

    def compose(self, deltas: Sequence[Path], out: Path) -> None:
        """`compose`."""
        with _Files() as files:
            self.run("compose", files.new_delta(out), *map(files.delta, deltas))

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        """`digest`."""
        with _Files() as files:
            return self.run("digest", files.state(weights)).strip()

    def follow(self, delta: Path, weights: MutableMapping[str, Tensor], digest: str) -> str:
        """`follow`; the tensors of ``weights`` are replaced when the program is done."""
        with _Files() as files:
            after = files.out(files.path("after"))
            said = self.run("follow", files.delta(delta), files.state(weights), _Word(digest), after)
            _take(after, weights)
            return said.strip()

    # -- the process -------------------------------------------------------------------------------------------------

    def run(self, verb: str, *arguments: _Argument) -> str:
        """Call the program and hold it to the protocol; returns its standard output. Raises Refused or EngineFailed."""
        label = f"`{shlex.join(self.command)} {verb}`"
        try:
            said = self.call(verb, *(argument.text for argument in arguments))
        except Refused as error:
            for argument in arguments:
                argument.check_refused(label, error)
            if not error.said:
                raise EngineFailed(f"{label} refused (exit 3) without a reason on standard error.") from None
            raise
        for argument in arguments:
            argument.check_done(label)
        return said

    def call(self, verb: str, *arguments: str) -> str:
        """One call; its standard output. Raises Refused, EngineFailed, or InfrastructureFailed if it cannot be run."""
        line = [*self.command, verb, *arguments]
        label = f"`{shlex.join([*self.command, verb])}`"
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        process = None
        try:
            with interrupts.held():  # what is started is known, and can be killed
                process = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
            out, err = (raw.decode(errors="replace") for raw in process.communicate(timeout=self.timeout))
        except subprocess.TimeoutExpired:
            _kill(process)
            raise EngineFailed(f"{label} hung: no end after {self.timeout:g} seconds, so it was killed.") from None
        except OSError as error:
            _kill(process)
            raise InfrastructureFailed(f"{label} cannot be run: {error.strerror}: {error.filename}.") from error
        except BaseException:  # an interrupt, which does not reach a session of its own
            _kill(process)
            raise
        if process.returncode == REFUSED:
            raise Refused(err.strip())
        if process.returncode in _CANNOT_RUN and not out:
            raise InfrastructureFailed(f"{label} cannot be run: exit {process.returncode}: {err.strip()[-_SHOWN:]}")
        if process.returncode != DONE:
            raise EngineFailed(
                f"{label} failed: exit {_code(process.returncode)}, where 0 is done and 3 is refused: "
                f"{err.strip()[-_SHOWN:]}"
            )
        return out


def _code(code: int) -> str:
    """An exit code for people: a negative one is the signal that ended the program."""
    try:
        return f"{code} ({signal.Signals(-code).name})" if code < 0 else str(code)
    except ValueError:  # a real-time signal has no name
        return str(code)


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    """End the program and what it started."""
    if process is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # what left the group may hold its output open
        process.communicate(timeout=_LAST_WORDS_S)


# -- arguments of a call, and what must hold of each afterwards --------------------------------------------------------


@dataclass(slots=True)
class _Argument:
    """A path that is handed over."""

    path: Path

    @property
    def text(self) -> str:
        return str(self.path)

    def check_done(self, label: str) -> None:
        """What must hold after exit 0."""

    def check_refused(self, label: str, error: Refused) -> None:
        """What must hold after exit 3."""


class _Word(_Argument):
    """A word that is no path."""

    def __init__(self, word: str) -> None:
        super().__init__(Path(word))


class _Input(_Argument):
    """A file or directory that must stay as it is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.before = _contents(path)

    def check_done(self, label: str) -> None:
        if _contents(self.path) != self.before:
            raise EngineFailed(f"{label} changed its input {self.path.name}.")

    def check_refused(self, label: str, error: Refused) -> None:
        self.check_done(label)


class _Output(_Argument):
    """A file or directory that the program makes."""

    def check_done(self, label: str) -> None:
        if not self.path.exists():
            raise EngineFailed(f"{label} exited with 0 and wrote no {self.path.name}.")

    def check_refused(self, label: str, error: Refused) -> None:
        if self.path.exists():
            raise EngineFailed(f"{label} refused ({error}), and yet it wrote {self.path.name}.")


class _NewDelta(_Output):
    """A directory that the program makes, with the files of a delta."""

    def check_done(self, label: str) -> None:
        _Output.check_done(self, label)
        for name in (METADATA_FILE, DELTA_FILE):
            if not (self.path / name).is_file():
                raise EngineFailed(f"{label} exited with 0 but wrote no {name}.")


def _contents(path: Path) -> Any:
    """Names, sizes and modification times of what lies at a path: cheap, and a write shows."""
    paths = [path, *sorted(path.rglob("*"))] if path.is_dir() else [path] if path.exists() else []
    return [(str(each), (found := _stat(each)).st_size, found.st_mtime_ns, found.st_ino) for each in paths]


def _stat(path: Path) -> os.stat_result:
    """Of what a link leads to, or of the link where it leads nowhere."""
    try:
        return path.stat()
    except OSError:
        return path.lstat()


class _Files:
    """The files of one call, in a directory that is gone afterwards."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="refdelta-exec-")
        self._count = 0

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        with interrupts.held():
            self._directory.cleanup()

    def path(self, name: str) -> Path:
        return Path(self._directory.name) / f"{name}.safetensors"

    def state(self, state: State) -> _Input:
        """A state as a file."""
        self._count += 1
        if not storable(state) and currently_in_test_context():
            assume(False)
        return _Input(oracle.save_state(self.path(f"state{self._count}"), state))

    def delta(self, path: Path) -> _Input:
        return _Input(path)

    def out(self, path: Path) -> _Output:
        return _Output(path)

    def new_delta(self, path: Path) -> _NewDelta:
        return _NewDelta(path)


def storable(state: State) -> bool:
    """Whether a safetensors file can hold the state: no name `__metadata__`, no F4 scalar."""
    return all(
        name != "__metadata__" and (CODES[tensor.dtype] != oracle.SUB_BYTE or tensor.dim())
        for name, tensor in state.items()
    )


def _take(after: _Output, weights: MutableMapping[str, Tensor]) -> None:
    """Put the state of a file into ``weights``."""
    try:
        state = oracle.load_state(after.path)
    except Exception as error:
        raise EngineFailed(f"the state that the program wrote cannot be read: {error}") from error
    for name in [*weights]:
        if name not in state:
            del weights[name]
    weights.update(state)
