"""Mutants of refdelta's own parts, each under the test of refdelta's that must catch it, in a forked process."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from .cells import KILLED, PASSED, Cell, Judged
from .registry import OWN, Mutant, mutants

ROOT = Path(__file__).parents[2]
"""The repository: an installed suite has no tests of refdelta's."""


def _run(node: str, place: str | None) -> tuple[int, str]:
    """pytest's exit code for one test, and what it printed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        if place is not None:
            module, _, name = place.partition(":")
            getattr(importlib.import_module(module), name)(patch)
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"--rootdir={ROOT}", str(ROOT / node)])
    return int(code), said.getvalue()


def _outcome(node: str, place: str | None) -> tuple[str, str]:
    code, said = _run(node, place)
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"{node} did not run: {said[-1500:]}"
    errors = [line[2:] for line in said.splitlines() if line.startswith("E ")]
    return (PASSED, "") if code == pytest.ExitCode.OK else (KILLED, errors[0] if errors else "failed")


def run(wanted: Sequence[Mutant], *, processes: int) -> Iterator[Judged]:
    """Every mutant under its test, which must pass without it."""
    mutants(OWN)
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        nodes = sorted({mutant.by for mutant in wanted})
        for node, (word, finding) in zip(nodes, pool.starmap(_outcome, [(node, None) for node in nodes]), strict=True):
            assert word == PASSED, f"{node} fails without a mutant: {finding}"
        for mutant in wanted:
            began, cell = time.monotonic(), Cell(mutant.check)
            cell.add(*pool.apply(_outcome, (mutant.by, mutant.place)))
            yield Judged(mutant.name, {mutant.by: cell}, time.monotonic() - began)
