"""Live mutants against the suite's live tests, on one engine for each row, which an anchor resets in between.

The engine starts unbroken. Mutants are switched on and off in its workers while it runs (`switch`); before each test it
is given a whole checkpoint, unbroken, and after each it still is the same engine, unless a mutant ended it.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType

import pytest

from ..driving.checks import LIVE_CHECKS
from ..findings import InfrastructureFailed
from ..inputs import checkpoints, wide
from ..inputs.checkpoints import State
from ..live import changes
from ..live.row import Backend, Row
from ..live.setup import PLAIN
from ..live.truth import Truths
from ..test_live_sizes import SETUPS
from . import switch
from .cells import KILLED, PASSED, SKIPPED, Cell, Judged
from .live import FLOAT32, ROWS, WIDE
from .registry import LIVE, Mutant, mutants
from .report import UNBROKEN

Check = Callable[[Row], None]


class SharedRow(Row):
    """A row whose engine is kept: it is reset by an anchor, with the mutant off, and broken again."""

    mutant: Mutant | None = None
    resets = 0
    starts = 0

    def ready(self) -> None:
        """Reset the engine if it is not known to hold `current`; start one if there is none, or a dead one."""
        if self._settled:
            return
        try:
            self._reset()
        except (AssertionError, InfrastructureFailed):
            self.close()
            self._reset()

    def begin(self, state: State, mutant: Mutant | None) -> None:
        """From now on the row's base is ``state``, and the engine is broken by ``mutant``."""
        self.base = self.current = state
        self.__dict__.pop("other", None)
        self.mutant = mutant
        self._settled = False

    def _reset(self) -> None:
        self._break(None)
        self.every_rank_answers()  # a mutant may have left replies of its own in the channel
        anchor = self._anchor(self.base)
        found = self.sync({"target_weights_path": str(anchor)})
        assert found is None, f"{self.name}: the anchor was refused: {found}"
        self.current = self.base
        self._break(self.mutant)
        self.resets += 1
        self._settled = True

    def _break(self, mutant: Mutant | None) -> None:
        if self._host is None:
            self._start()
            self.starts += 1
        place = None if mutant is None else mutant.place
        switch.set_mutant(place if mutant is not None and mutant.kind == "encoder" else None)  # this process encodes
        self.call("rpc", method="mutant_switch", arguments=[place])

    def _anchor(self, state: State) -> Path:
        if id(state) not in self._anchors:
            directory = self._scratch / f"anchor{next(self._count)}"
            self._anchors[id(state)] = state, checkpoints.with_state(self.checkpoint.directory, state, directory)
        return self._anchors[id(state)][1]

    @cached_property
    def _anchors(self) -> dict[int, tuple[State, Path]]:
        """By the id of a state, which is kept, so that no other state gets the id."""
        return {}


def live_tests(row: str) -> dict[str, tuple[str, Check]]:
    """Test -> its check and its function, of those that a row runs."""
    from .. import test_live, test_live_sizes, test_live_time, test_live_versions

    first = row == next(iter(ROWS))
    if row in (WIDE, FLOAT32):
        return _tests_in([test_live_sizes], ROWS[row])
    return (
        _tests_in([test_live, test_live_versions, test_live_time], None) if first else _tests_in([test_live], ROWS[row])
    )


def _tests_in(modules: Sequence[ModuleType], checks: Container[str] | None) -> dict[str, tuple[str, Check]]:
    """The tests of these modules, of these checks alone."""
    found: dict[str, tuple[str, Check]] = {}
    for module in modules:
        for name, function in vars(module).items():
            if not name.startswith("test_") or getattr(function, "__module__", "") != module.__name__:
                continue
            check = _check_of(function, module)
            if checks is None or check in checks:
                found[f"{module.__name__.rpartition('.')[2].removeprefix('test_')}::{name}"] = check, function
    return found


def _check_of(function: object, module: object) -> str:
    whole = getattr(module, "pytestmark", [])
    marks = [*getattr(function, "pytestmark", []), *(whole if isinstance(whole, list) else [whole])]
    names = [str(mark.args[0]) for mark in marks if getattr(mark, "name", "") == "check"]
    assert names, f"{function} names no check"
    assert names[0] in LIVE_CHECKS, names
    return names[0]


@contextlib.contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Let every change of the suite be drawn anew for this seed."""
    generator = changes._generator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "_generator", lambda text: generator(f"{seed} {text}" if seed else text))
        yield


@contextlib.contextmanager
def row_of(name: str, scratch: Path) -> Iterator[SharedRow]:
    """The row and its engines, which end with the block."""
    model, _, tp = name.partition(" tp=")
    (scratch / "truth").mkdir(parents=True)
    large = name in (WIDE, FLOAT32)
    setup = SETUPS[model, int(tp)] if large else PLAIN
    truths = Truths(scratch / "truth", setup)
    backend = Backend(modules=("conformance.mutants.switch",))
    checkpoint = (wide if large else checkpoints).make(model, scratch / "base")
    row = SharedRow(checkpoint, int(tp), backend, truths, scratch, setup)
    try:
        yield row
    finally:
        switch.set_mutant(None)
        row.close()
        truths.close()


def judge(row: SharedRow, mutant: Mutant | None, test: Check) -> tuple[str, str]:
    """Outcome and finding of one test on the row as it is."""
    try:
        row.ready()
        test(row)
    except pytest.skip.Exception:
        return SKIPPED, ""
    except (AssertionError, InfrastructureFailed) as error:
        row.begin(row.base, mutant)
        return KILLED, f"{type(error).__name__}: {error}"
    return PASSED, ""


def run(wanted: Sequence[Mutant], *, seeds: int, quick: bool = False, passed: Container[str] = ()) -> Iterator[Judged]:
    """Every mutant on its row, and `UNBROKEN` on every row but those that it has ``passed`` already.

    ``quick``: under the test that must kill it alone.
    """
    mutants(LIVE)
    for name in ROWS:
        mine = [mutant for mutant in wanted if mutant.row == name]
        if not mine:
            continue
        broken = [*([] if name in passed else [None]), *mine]
        with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, row_of(name, Path(scratch)) as row:
            yield from _of_row(row, broken, seeds, quick=quick)


def _of_row(row: SharedRow, broken: Sequence[Mutant | None], seeds: int, *, quick: bool) -> Iterator[Judged]:
    tests = live_tests(row.name)
    states = [row.base, *(changes.every_tensor(row.base, f"seed {n}", row.aliases) for n in range(1, seeds))]
    for mutant in broken:
        cells, began = dict[str, Cell](), time.monotonic()
        named = {one.by for one in broken if one} if mutant is None else {mutant.by}
        for test, (check, function) in tests.items():
            mine = test.partition("::")[2] in named
            if quick and not mine:
                continue
            cell = cells[f"{test} [{row.name}]"] = Cell(check)
            # How surely a test kills is asked of the named ones; the unbroken engine has to pass them all.
            for seed, state in enumerate(states if mine or mutant is None else states[:1]):
                with _drawn_from(seed):
                    row.begin(state, mutant)
                    cell.add(*judge(row, mutant, function))
        yield Judged(mutant.name if mutant else UNBROKEN, cells, time.monotonic() - began)
