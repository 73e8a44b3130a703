"""Codec mutants against the suite's codec tests, in processes that are forked when everything is imported.

pytest collects; the tests are then called directly, under one Hypothesis seed after another. A test that calls none of
the methods that a mutant has of its own cannot judge it, and is left out: what tests reach is recorded on the right
codec first.
"""

from __future__ import annotations

import importlib
import inspect
import io
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import core as hypothesis_core

from conformance import strategies
from conformance.engines import FullCodec
from conformance.mutants.cells import KILLED, PASSED, SKIPPED, Cell, Cells
from conformance.mutants.registry import CODEC, Mutant, mutants
from conformance.mutants.right import Plain
from conformance.options import Options

SUITE = Path(__file__).parents[1]
PROFILE = "mutants"
TRACED = "conformance.mutants.right:Plain"
_CHILD = "test_fresh_processes"
"""Encodes in processes of its own, where nothing is recorded."""


@dataclass(frozen=True)
class Test:
    """One collected test."""

    chapter: str
    name: str
    """Of its function."""
    check: str
    needs: frozenset[str]
    function: Callable[..., None]
    arguments: Mapping[str, object]
    """Of its parameters."""
    options: Options
    seeded: bool
    """Whether it draws, so that another seed is another test."""

    @property
    def id(self) -> str:
        """Of all cases of the function together."""
        return f"{self.chapter}::{self.name}"

    def run(self, engine: FullCodec, place: str) -> tuple[str, str]:
        """Outcome and finding on an engine that `place` loads."""
        if not self.needs <= engine.capabilities:
            return SKIPPED, ""
        with tempfile.TemporaryDirectory() as root:
            values: dict[str, object] = {
                "engine": engine,
                "codes": strategies.codes_for(engine.capabilities),
                "options": replace(self.options, engine=place),
                "scratch": partial(_scratch, Path(root)),
                **self.arguments,
            }
            wanted = inspect.signature(self.function).parameters
            try:
                self.function(**{name: value for name, value in values.items() if name in wanted})
            except pytest.skip.Exception:
                return SKIPPED, ""
            except Exception as error:  # whatever a broken engine raises is a finding
                return KILLED, f"{type(error).__name__}: {error}"
        return PASSED, ""


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=root) as directory:
        yield Path(directory)


class _Grabber:
    """Keeps what pytest collected."""

    items: Sequence[pytest.Item] = ()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def collect(examples: int) -> list[Test]:
    """Every codec test of the suite, whose properties have so many examples."""
    settings.register_profile(
        PROFILE,
        max_examples=examples,
        derandomize=False,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    grabber = _Grabber()
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", f"--hypothesis-profile={PROFILE}", "--engine", TRACED]
    with redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*options, str(SUITE)], [grabber])
    assert code == pytest.ExitCode.OK, f"the suite could not be collected: {said.getvalue()[-2000:]}"
    return [_test(cast(pytest.Function, item)) for item in grabber.items]


def _test(item: pytest.Function) -> Test:
    from conformance import matrix, plugin

    arguments = item.callspec.params if hasattr(item, "callspec") else {}
    return Test(
        item.path.stem.removeprefix("test_codec_"),
        item.originalname,
        matrix.check_of(item) or "",
        frozenset(str(mark.args[0]) for mark in item.iter_markers("needs")),
        item.obj,
        arguments,
        plugin.run_of(item.config).options,
        hasattr(item.obj, "hypothesis") or item.originalname == "test_any_history",
    )


def engine_at(place: str) -> FullCodec:
    """A new codec of the class at ``module:Class``."""
    module, _, name = place.partition(":")
    return cast(FullCodec, getattr(importlib.import_module(module), name)())


class Seeds:
    """Runs with one seed after another."""

    def __init__(self, count: int) -> None:
        self.count = count

    def of(self, test: Test) -> Iterator[int]:
        """The seeds under which a test is worth running; Hypothesis draws from each in turn."""
        for seed in range(self.count if test.seeded else 1):
            hypothesis_core.global_force_seed = seed  # what ``--hypothesis-seed`` sets
            yield seed


def methods_of(engine: type, right: type) -> set[str]:
    """The methods of ``right`` that ``engine`` has of its own."""
    between = engine.__mro__[: engine.__mro__.index(right)]
    own = {name for cls in between for name in vars(cls) if not name.startswith("__")}
    return {name for name in own if hasattr(right, name)} | ({"name"} if not own else set())


def reached(test: Test, seeds: Seeds) -> set[str]:
    """The methods of the right codec that a test calls, one calling the other included."""
    seen: set[str] = set()

    class Recording(Plain):
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    if test.name == _CHILD:
        return {"encode", "find", "total", "name"}
    engine = cast(FullCodec, Recording())
    for _ in seeds.of(test):
        word, finding = test.run(engine, TRACED)
        assert word != KILLED, f"the right codec fails {test.id}: {finding}"
    return seen


def judge(mutant: Mutant, tests: Sequence[Test], reaches: Mapping[int, set[str]], seeds: Seeds) -> Cells:
    """Every test against one mutant; a new engine for each seed."""
    cells: Cells = {}
    kind = type(engine_at(mutant.place))
    own = methods_of(kind, Plain) if issubclass(kind, Plain) else None
    for number, test in enumerate(tests):
        if own is not None and not own & reaches[number]:
            continue
        cell = cells.setdefault(test.id, Cell(test.check))
        for _ in seeds.of(test):
            cell.add(*test.run(engine_at(mutant.place), mutant.place))
    return cells


_SHARED: dict[str, Any] = {}
"""What forked processes need and cannot be sent."""


def _reach(number: int) -> set[str]:
    return reached(_SHARED["tests"][number], Seeds(2))


def _judge(mutant: Mutant) -> Cells:
    return judge(mutant, _SHARED["tests"], _SHARED["reaches"], _SHARED["seeds"])


def run(
    wanted: Sequence[Mutant],
    *,
    seeds: int,
    examples: int,
    processes: int,
    told: Callable[[Mutant, Cells], None],
    quick: bool = False,
) -> dict[str, Cells]:
    """The cells of every mutant; `told` hears of each when it is done. ``quick``: the named check's tests alone."""
    tests = collect(examples)
    mutants(CODEC)
    _SHARED.update(tests=tests, seeds=Seeds(seeds))
    if quick:
        return {mutant.name: _named(mutant, tests, Seeds(seeds), told) for mutant in wanted}
    context = multiprocessing.get_context("fork")
    with context.Pool(processes) as pool:
        _SHARED["reaches"] = dict(enumerate(pool.map(_reach, range(len(tests)), chunksize=1)))
    found: dict[str, Cells] = {}
    with context.Pool(processes, maxtasksperchild=1) as pool:
        for mutant, cells in zip(wanted, pool.imap(_judge, wanted, chunksize=1), strict=True):
            found[mutant.name] = cells
            told(mutant, cells)
    return found


def _named(mutant: Mutant, tests: Sequence[Test], seeds: Seeds, told: Callable[[Mutant, Cells], None]) -> Cells:
    """The named tests, up to the first that kills under each seed."""
    cells: Cells = {}
    for test in tests:
        if (test.chapter, test.check) != (mutant.by, mutant.check):
            continue
        cell = cells.setdefault(test.id, Cell(test.check))
        for _ in seeds.of(test):
            cell.add(*test.run(engine_at(mutant.place), mutant.place))
        if cell.killed == cell.ran > 0:
            break
    told(mutant, cells)
    return cells
