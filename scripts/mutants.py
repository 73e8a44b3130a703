"""Mutation test: change one place of a module at a time and see whether a test notices.

Mutants are made from the syntax tree: comparisons, arithmetic, booleans, conditions, numbers and constants, filters,
statements left out. Tests are collected once; each mutant is a fork of that process in which the code of one function
is another one, and runs the tests that reach its lines, quick ones first, until one fails. Mutants outside functions
import the changed module anew, in a fork that holds only the libraries. One process at a time.

What nothing notices is printed with its place. Which tests reach a line is found by tracing them once; tests slower
than --slow are left out, as are lines that tests reach in processes of their own only.

    python scripts/mutants.py refdelta/apply.py ... [--tests tests/codec] [--most 150] [--seed 1] [--at 120 130-140]
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import random
import resource
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import numpy  # noqa: F401 (forks inherit it)
import pytest
import safetensors.torch  # noqa: F401
import torch  # noqa: F401
import typer  # noqa: F401
from hypothesis import HealthCheck, Phase

# As `ci` in tests/conftest.py, but a failure is not made smaller.
hypothesis.settings.register_profile(
    "mutants",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)

MEMORY_BYTES = 12 * 2**30
COLD_SECONDS = 120

# Mutants

SWAPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv,),
    ast.FloorDiv: (ast.Mult,),
    ast.Div: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitOr,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
CALLED = {"all": "any", "any": "all", "min": "max", "max": "min", "sorted": "list"}


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    path: Path
    node: int
    """Number of the changed node in `ast.walk`."""
    choice: int
    """Which of its `alternatives`."""
    lines: tuple[int, int]
    """First and last line of the statement, without the blocks below it."""
    function: int | None
    """First line of the outermost function around it; None outside of functions."""
    text: str

    def code(self) -> types.CodeType:
        """The changed module's code."""
        tree = ast.parse(self.path.read_text())
        node = list(ast.walk(tree))[self.node]
        new = ast.copy_location(alternatives(node)[self.choice], node)
        for parent in ast.walk(tree):
            for name, value in ast.iter_fields(parent):
                if value is node:
                    setattr(parent, name, new)
                elif isinstance(value, list) and any(x is node for x in value):
                    value[:] = [new if x is node else x for x in value]
        return compile(ast.fix_missing_locations(tree), str(self.path), "exec")

    def __str__(self) -> str:
        return f"{self.path.name}:{self.lines[0]}: {self.text}"


def alternatives(node: ast.AST) -> list[ast.AST]:
    """What may stand in the place of ``node``."""
    found: list[ast.AST] = []
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            found += [_with(node, "ops", i, other()) for other in SWAPPED[type(operator)]]
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SWAPPED:
        found += [_with(node, "op", None, other()) for other in SWAPPED[type(node.op)]]
    elif isinstance(node, ast.BoolOp):
        found += [_with(node, "op", None, other()) for other in SWAPPED[type(node.op)]]
        found += [_without(node, i) for i in range(len(node.values))]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        found.append(node.operand)
    elif isinstance(node, ast.Constant):
        found += [ast.Constant(value) for value in _other_values(node.value)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLED:
        found.append(_with(node, "func", None, ast.Name(CALLED[node.func.id], ast.Load())))
    if isinstance(node, ast.If | ast.IfExp):
        found += [_with(node, "test", None, ast.Constant(value)) for value in (True, False)]
    elif isinstance(node, ast.While):
        found.append(_with(node, "test", None, ast.Constant(False)))
    elif isinstance(node, ast.comprehension):
        found += [_with(node, "ifs", i, ast.Constant(True)) for i in range(len(node.ifs))]
    elif _can_be_left_out(node):
        found.append(ast.Pass())
    return found


def _can_be_left_out(node: ast.AST) -> bool:
    """A statement without which there is still a program; a name that is never set is no fault that tests look for."""
    if isinstance(node, ast.Assign):
        return not all(isinstance(target, ast.Name) for target in node.targets)
    return isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Delete | ast.Break | ast.Continue)


def _with(node: ast.AST, name: str, index: int | None, value: ast.AST) -> ast.AST:
    """``node`` with another field, or with another entry of a field."""
    new = copy.copy(node)
    entries = value if index is None else [value if i == index else x for i, x in enumerate(getattr(node, name))]
    setattr(new, name, entries)
    return new


def _without(node: ast.BoolOp, index: int) -> ast.AST:
    rest = [value for i, value in enumerate(node.values) if i != index]
    return rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def _other_values(value: object) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value - 1]
    # What has a space is a message.
    return [f"{value}x"] if isinstance(value, str) and value and " " not in value else []


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(path.read_text())
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    found: list[Mutant] = []

    def visit(node: ast.AST, statement: ast.stmt | None, function: int | None) -> None:
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom) or _is_docstring(node):
            return
        statement = node if isinstance(node, ast.stmt) else statement
        for choice, new in enumerate(alternatives(node) if statement else []):
            assert statement is not None
            text = f"{_shown(node)}  ->  {_shown(new)}"
            found.append(Mutant(path, numbers[id(node)], choice, _span(statement), function, text))
        for name, child in _children(node):
            inside = isinstance(node, ast.FunctionDef) and name == "body" and function is None
            visit(child, statement, _first_line(node) if inside else function)

    visit(tree, None, None)
    return sorted(found, key=lambda mutant: mutant.lines)


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield name, child


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first_line(node: ast.AST) -> int:
    assert isinstance(node, ast.FunctionDef)
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _span(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    end = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return statement.lineno, max(statement.lineno, end)


def _shown(node: ast.AST) -> str:
    if isinstance(node, ast.comprehension):
        node = ast.ListComp(ast.Name("_", ast.Load()), [node])
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split("\n")[0]
    return text if len(text) <= 110 else f"{text[:107]}..."


# Forks


def in_fork(work: Callable[[], object], seconds: float) -> object:
    """What ``work`` returns in a process of its own; "timeout" or "died" where it does not."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            result = pickle.dumps(work())
            with open(writing, "wb") as out:
                out.write(result)
        os._exit(0)
    os.close(writing)
    timer = threading.Timer(seconds, os.killpg, (child, signal.SIGKILL))
    timer.start()
    with open(reading, "rb") as answer:
        data = answer.read()
    timed_out = not timer.is_alive()
    timer.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests left running
    os.waitpid(child, 0)
    return pickle.loads(data) if data else "timeout" if timed_out else "died"


def living(paths: set[str]) -> dict[tuple[str, str, int], list[types.FunctionType]]:
    """The functions of modules, by file, name and first line of their code."""
    found: dict[tuple[str, str, int], list[types.FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType and thing.__code__.co_filename in paths:
            code = thing.__code__
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(thing)
    return found


def put_in(mutant: Mutant, functions: dict[tuple[str, str, int], list[types.FunctionType]]) -> None:
    """Give the living functions of the changed module their changed code."""
    for code in _codes(mutant.code()):
        for function in functions.get((code.co_filename, code.co_qualname, code.co_firstlineno), []):
            if len(function.__code__.co_freevars) == len(code.co_freevars):
                function.__code__ = code


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


class ChangedModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the changed module in place of its own."""

    def __init__(self, name: str, mutant: Mutant) -> None:
        self.name, self.mutant = name, mutant

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Of this one module."""
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.mutant.path, loader=self)

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the changed code."""
        exec(self.mutant.code(), module.__dict__)


# Tests


@dataclass
class Reached:
    """What one test reaches."""

    seconds: float
    lines: set[tuple[str, int]] = field(default_factory=set)


@dataclass
class Run:
    """A pytest plugin: in place of its loop, the mutants."""

    mutants: list[Mutant]
    slow: float
    limit: float
    kept: Path | None = None
    reached: list[Reached | None] = field(default_factory=list)
    killers: dict[tuple[Path, int | None], list[int]] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)
    functions: dict[tuple[str, str, int], list[types.FunctionType]] = field(default_factory=dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Trace every test once, then every mutant."""
        traced = pickle.loads(self.kept.read_bytes()) if self.kept and self.kept.exists() else None
        if traced is None or len(traced) != len(session.items):
            traced = in_fork(lambda: self.trace(session), 3600)
        assert isinstance(traced, list), f"tracing the tests: {traced}"
        if self.kept:
            self.kept.write_bytes(pickle.dumps(traced))
        self.reached = traced
        kept = [entry for entry in self.reached if entry]
        say(f"{len(kept)} of {len(traced)} tests, {sum(entry.seconds for entry in kept):.0f} s of them, traced")
        self.functions = living({str(mutant.path) for mutant in self.mutants})
        for mutant in self.mutants:
            self.judge(session, mutant)
        return True

    def trace(self, session: pytest.Session) -> list[Reached | None]:
        """What each test reaches; None for those that are slow, skipped or fail."""
        files = {str(path.resolve()) for path in Path("refdelta").glob("*.py")}
        quiet(session)
        return [self._trace_one(session, i, files) for i in range(len(session.items))]

    def _trace_one(self, session: pytest.Session, number: int, files: set[str]) -> Reached | None:
        lines: set[tuple[str, int]] = set()

        def tracer(frame: types.FrameType, event: str, _: object) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            return tracer

        start = cpu_seconds()
        threading.settrace(tracer)
        sys.settrace(tracer)
        passed = run_items(session, [number])
        sys.settrace(None)
        threading.settrace(None)
        seconds = cpu_seconds() - start
        return Reached(seconds, lines) if passed and seconds <= self.slow else None

    def judge(self, session: pytest.Session, mutant: Mutant) -> None:
        """Run what reaches the mutant; print it if it survives."""
        path, (first, last) = str(mutant.path), mutant.lines
        spots = {(path, line) for line in range(first, last + 1)}
        seconds = {i: entry.seconds for i, entry in enumerate(self.reached) if entry and entry.lines & spots}
        known = self.killers.setdefault((mutant.path, mutant.function), [])
        order = [i for i in known if i in seconds]
        order += sorted(seconds.keys() - set(order), key=lambda i: seconds[i])

        def work() -> tuple[int | None, int]:
            quiet(session)
            put_in(mutant, self.functions)
            return first_failing(session, order, self.limit)

        outcome = in_fork(work, 10 * self.limit) if order else "unreached"
        if not isinstance(outcome, tuple):
            return self.note(mutant, str(outcome))
        killer, tests = outcome
        if killer is not None:
            known[:] = [killer, *(i for i in known if i != killer)]
        return self.note(mutant, "survived" if killer is None else "killed", f"{tests} of {len(order)} tests")

    def note(self, mutant: Mutant, outcome: str, detail: str = "") -> None:
        """Count it, and print what no test noticed."""
        self.outcomes.append(outcome)
        if outcome != "killed":
            say(f"{outcome:9} {mutant}   {detail}".rstrip())


def first_failing(session: pytest.Session, order: Sequence[int], limit: float) -> tuple[int | None, int]:
    """The first of these tests that fails within so many CPU seconds, and how many were run."""
    end = cpu_seconds() + limit
    for done, number in enumerate(order, start=1):
        if not run_items(session, [number]):
            return number, done
        if cpu_seconds() > end:
            return None, done
    return None, len(order)


def cpu_seconds() -> float:
    """Of this process and those that it waited for."""
    return sum(os.times()[:4])


def run_items(session: pytest.Session, numbers: Sequence[int]) -> bool:
    """Whether tests pass; each sets up and tears down everything that it needs."""
    failed = session.testsfailed
    for number in numbers:
        item = session.items[number]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    session.shouldfail = False
    return session.testsfailed == failed


def quiet(session: pytest.Session) -> None:
    """No output of pytest's own in this process."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 (ends with the process)


def say(line: str) -> None:
    """Print past pytest's capture."""
    os.write(OUT, f"{line}\n".encode())


OUT = os.dup(1)


def cold(mutant: Mutant, tests: Sequence[str]) -> str:
    """The outcome of a mutant outside of functions: a run of its own that imports everything."""

    def work() -> object:
        name = ".".join(mutant.path.relative_to(Path.cwd()).with_suffix("").parts)
        sys.meta_path.insert(0, ChangedModule(name, mutant))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        return "survived" if pytest.main([*tests, "-x", "-q"]) == 0 else "killed"

    return str(in_fork(work, COLD_SECONDS))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", type=Path)
    parser.add_argument("--tests", nargs="+", default=["tests/codec", "tests/layout"])
    parser.add_argument("--cold-tests", nargs="+", help="for mutants outside of functions; by default --tests")
    parser.add_argument("--most", type=int, help="mutants of each module, drawn evenly")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slow", type=float, default=6.0, help="CPU seconds, traced, above which a test is left out")
    parser.add_argument("--trace", type=Path, help="file that keeps what the tests reach between runs")
    parser.add_argument("--limit", type=float, default=15.0, help="CPU seconds of tests for one mutant")
    parser.add_argument("--at", nargs="+", default=[], help="only mutants of these lines: 120 or 120-140")
    parser.add_argument("--where", choices=["inside", "outside", "both"], default="both", help="of functions")
    parser.add_argument("--count", action="store_true", help="only count them")
    options = parser.parse_args()
    chosen = [mutant for path in options.modules for mutant in choose(path.resolve(), options)]
    if options.count:
        return
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    common = ["-p", "no:cacheprovider", f"--basetemp=/tmp/mutants-{os.getpid()}"]
    outside = [mutant for mutant in chosen if mutant.function is None]
    outcomes = []
    for mutant in outside:
        outcomes.append(cold(mutant, [*(options.cold_tests or options.tests), *common]))
        if outcomes[-1] != "killed":
            say(f"{outcomes[-1]:9} {mutant}")
    run = Run([mutant for mutant in chosen if mutant.function is not None], options.slow, options.limit, options.trace)
    if run.mutants:
        pytest.main([*options.tests, "-q", *common], plugins=[run])
    outcomes += run.outcomes
    say(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes))))


def choose(path: Path, options: argparse.Namespace) -> list[Mutant]:
    """The mutants of one module that are wanted."""
    every = mutants_of(path)
    spans = [(int(first), int(last or first)) for first, _, last in (at.partition("-") for at in options.at)]
    wanted = [m for m in every if not spans or any(first <= m.lines[0] <= last for first, last in spans)]
    wanted = [m for m in wanted if options.where in ("both", "outside" if m.function is None else "inside")]
    if options.most and len(wanted) > options.most:
        wanted = random.Random(options.seed).sample(wanted, options.most)
        wanted.sort(key=lambda mutant: mutant.lines)
    outside = sum(mutant.function is None for mutant in wanted)
    say(f"{path.name}: {len(wanted)} of {len(every)} mutants, {outside} of them outside functions; seed {options.seed}")
    return wanted


if __name__ == "__main__":
    main()
