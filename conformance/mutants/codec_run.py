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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import core as hypothesis_core

from ..driving.options import Options
from ..engines.codecs import FullCodec, Reference
from ..inputs import strategies
from .cells import KILLED, PASSED, SKIPPED, Cell, Cells, Judged
from .registry import CODEC, Mutant, mutants
from .right import Plain

SUITE = Path(__file__).parents[1]
PROFILE = "mutants"
NAMED_EXAMPLES = 100
"""Of the tests that must kill, as in an adopter's run; the others have fewer, and twenty seeds."""
TRACED = "conformance.mutants.right:Plain"
_CHILD = "test_fresh_processes"
"""Encodes in processes of its own, where nothing is recorded; run where it is named, since they cost an import each."""
_HISTORY = "test_any_history"
"""Draws whole histories, ten at the least."""
_SIZES = "sizes"
"""The chapter of large states, whose mutants are generated (`thresholds`); others meet it where they name it."""
_FEW = 4
_TRACED_EXAMPLES = 8


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
    item: str
    """`TEST[PARAMETERS]`."""

    @property
    def id(self) -> str:
        """Of all cases of the function together."""
        return f"{self.chapter}::{self.name}"

    def run(self, engine: FullCodec, place: str, examples: int) -> tuple[str, str]:
        """Outcome and finding on an engine that `place` loads; ``examples`` at most, where it draws."""
        if not self.needs <= engine.capabilities:
            return SKIPPED, ""
        settings.load_profile(f"{PROFILE}{examples}")
        # What the decorator would set; the tests were decorated under the profile of their collection.
        self.function._hypothesis_internal_use_settings = settings.get_profile(f"{PROFILE}{examples}")  # type: ignore[attr-defined]
        with tempfile.TemporaryDirectory() as root:
            values: dict[str, object] = {
                "engine": engine,
                "codes": strategies.domain_of(engine.capabilities),
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


def register_profile(examples: int) -> str:
    """The profile of so many examples: nothing shrunk, kept or printed, seeds heeded."""
    settings.register_profile(
        f"{PROFILE}{examples}",
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
    return f"{PROFILE}{examples}"


def collect() -> list[Test]:
    """Every codec test of the suite."""
    profile = register_profile(NAMED_EXAMPLES)
    grabber = _Grabber()
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", f"--hypothesis-profile={profile}", "--engine", TRACED]
    with redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*options, str(SUITE)], [grabber])
    assert code == pytest.ExitCode.OK, f"the suite could not be collected: {said.getvalue()[-2000:]}"
    return [_test(cast(pytest.Function, item)) for item in grabber.items]


def _test(item: pytest.Function) -> Test:
    from ..suite import matrix, plugin

    arguments = item.callspec.params if hasattr(item, "callspec") else {}
    return Test(
        item.path.stem.removeprefix("test_codec_"),
        item.originalname,
        matrix.check_of(item) or "",
        frozenset(str(mark.args[0]) for mark in item.iter_markers("needs")),
        item.obj,
        arguments,
        plugin.run_of(item.config).options,
        hasattr(item.obj, "hypothesis") or item.originalname == _HISTORY,
        item.name,
    )


def engine_at(place: str) -> FullCodec:
    """A new codec of the class at ``module:Class``."""
    module, _, name = place.partition(":")
    return cast(FullCodec, getattr(importlib.import_module(module), name)())


class Seeds:
    """Runs with one seed after another."""

    def __init__(self, count: int) -> None:
        self.count = count

    def of(self, test: Test, *, whole: bool = True) -> Iterator[int]:
        """The seeds under which a test is worth running; a long one, unless ``whole``, under a few of them."""
        count = min(self.count, _FEW) if test.name == _HISTORY and not whole else self.count
        yield from Seeds(count if test.seeded else 1).numbers()

    def numbers(self) -> Iterator[int]:
        """Each seed, while it is the one that tests draw with."""
        for seed in range(self.count):
            hypothesis_core.global_force_seed = seed  # type: ignore[assignment]  # what ``--hypothesis-seed`` sets
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
    if test.chapter == _SIZES:
        return set()
    engine = cast(FullCodec, Recording())
    for _ in seeds.of(test):
        word, finding = test.run(engine, TRACED, _TRACED_EXAMPLES)
        assert word != KILLED, f"the right codec fails {test.id}: {finding}"
    return seen


def judge(mutant: Mutant, tests: Sequence[Test], reaches: Mapping[int, set[str]], seeds: Seeds, examples: int) -> Cells:
    """Every test that can judge the mutant; a new engine for each run."""
    kind = type(engine_at(mutant.place))
    own = methods_of(kind, Plain if issubclass(kind, Plain) else Reference)
    able = [test for number, test in enumerate(tests) if own & reaches[number] or not test.needs <= Plain.capabilities]
    able = [test for test in able if test.name != _CHILD or _is_named(mutant, test)]
    cells = {cases[0].id: _cell(mutant, cases, seeds, examples) for cases in _by_function(able)}
    mine = [cases for cases in _by_function(able) if _is_named(mutant, cases[0])]
    if not any(cells[cases[0].id].always for cases in mine):  # as many examples as an adopter's run has
        cells |= {cases[0].id: _cell(mutant, cases, seeds, NAMED_EXAMPLES) for cases in mine}
    return cells


def named(mutant: Mutant, tests: Sequence[Test], seeds: Seeds) -> Cells:
    """The tests that must kill, up to the first that does."""
    cells: Cells = {}
    for cases in _by_function([test for test in tests if _is_named(mutant, test)]):
        cells[cases[0].id] = cell = _cell(mutant, cases, seeds, NAMED_EXAMPLES)
        if cell.always:
            break
    return cells


def _is_named(mutant: Mutant, test: Test) -> bool:
    return (test.chapter, test.check) == (mutant.by, mutant.check)


def _by_function(tests: Sequence[Test]) -> list[list[Test]]:
    found: dict[tuple[str, str], list[Test]] = {}
    for test in tests:
        found.setdefault((test.id, test.check), []).append(test)
    return list(found.values())


def _cell(mutant: Mutant, cases: Sequence[Test], seeds: Seeds, examples: int) -> Cell:
    """The cases of one function, under each seed up to the first that kills."""
    cell = Cell(cases[0].check)
    for _ in seeds.of(cases[0], whole=_is_named(mutant, cases[0])):
        words = {SKIPPED}
        for case in cases:
            word, finding = case.run(engine_at(mutant.place), mutant.place, examples)
            words.add(word)
            if word == KILLED:
                cell.add(word, finding)
                break
        else:
            cell.add(PASSED if PASSED in words else SKIPPED)
    return cell


_SHARED: dict[str, Any] = {}
"""What forked processes need and cannot be sent."""


def _reach(number: int) -> set[str]:
    return reached(_SHARED["tests"][number], Seeds(2))


def _judge(mutant: Mutant) -> Judged:
    began = time.process_time()
    cells = judge(mutant, *(_SHARED[name] for name in ("tests", "reaches", "seeds", "examples")))
    return Judged(mutant.name, cells, time.process_time() - began)


def quick(wanted: Sequence[Mutant], seeds: int) -> Iterator[Judged]:
    """Every mutant under the tests that must kill it alone."""
    tests = collect()
    for mutant in wanted:
        began = time.process_time()
        yield Judged(mutant.name, named(mutant, tests, Seeds(seeds)), time.process_time() - began)


def run(wanted: Sequence[Mutant], *, seeds: int, examples: int, processes: int) -> Iterator[Judged]:
    """Every mutant under every test that can judge it."""
    tests = collect()
    for count in (examples, _TRACED_EXAMPLES):
        register_profile(count)
    mutants(CODEC)
    _SHARED.update(tests=tests, seeds=Seeds(seeds), examples=examples)
    context = multiprocessing.get_context("fork")
    with context.Pool(processes) as pool:
        _SHARED["reaches"] = dict(enumerate(pool.map(_reach, range(len(tests)), chunksize=4)))
    with context.Pool(processes, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(_judge, wanted, chunksize=1)
