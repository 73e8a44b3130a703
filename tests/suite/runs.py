"""Runs of the suite, in one child process: importing torch once is most of what forty runs cost.

As a program: arguments for one run per line on standard input, one JSON object per run on standard output.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CONFORMANCE = REPOSITORY / "conformance"
QUIET = ("-q", "-p", "no:cacheprovider", "--tb=short", "--hypothesis-profile=quick")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of the suite ended with."""

    code: int
    """pytest's exit code."""
    text: str
    """Everything that it printed."""

    def words(self) -> dict[str, str]:
        """Check -> word of its first column in the matrix."""
        lines = self.text.partition(" conformance ")[2].splitlines()
        cells = (line.split() for line in lines)
        return {cell[0]: cell[1] for cell in cells if len(cell) == 2 and cell[1] in WORDS}

    def failed(self) -> set[str]:
        """Checks that failed."""
        return {check for check, word in self.words().items() if word == "FAIL"}


WORDS = ("pass", "pass*", "FAIL", "infra", "skip", "-")


def small_suite(folder: Path) -> None:
    """Make an existing folder a suite of its own, with the fixtures of `conformance`; it still has no tests.

    The conftest's imports are relative, and the folder is no package: they name the suite's package instead.
    """
    text = (CONFORMANCE / "conftest.py").read_text()
    (folder / "conftest.py").write_text(re.sub(r"^from \.", "from conformance.", text, flags=re.MULTILINE))


def environment() -> dict[str, str]:
    """The environment of a child that can import the suite, and leaves no bytecode."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100"}


def run(*arguments: str, cwd: Path, **variables: str) -> Outcome:
    """One run as an adopter starts it: `python -m pytest ARGUMENTS` in a process of its own.

    variables: added to its environment.
    """
    return command([sys.executable, "-m", "pytest", *arguments], cwd, **variables)


def command(words: Sequence[str], cwd: Path, **variables: str) -> Outcome:
    """Any command in such a process."""
    done = subprocess.run(
        words, cwd=cwd, env={**environment(), **variables}, capture_output=True, text=True, timeout=880, check=False
    )
    return Outcome(done.returncode, done.stdout + done.stderr)


def run_all(runs: Sequence[Sequence[str]], cwd: Path) -> list[Outcome]:
    """Many runs, one after another, in one child process."""
    lines = "\n".join(json.dumps(list(arguments)) for arguments in runs)
    done = subprocess.run(
        [sys.executable, "-m", "tests.suite.runs"],
        input=lines,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=1200,
        check=True,
    )
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]


def _main() -> None:
    import pytest

    for line in sys.stdin.read().splitlines():
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            code = int(pytest.main(json.loads(line)))
        print(json.dumps({"code": code, "text": printed.getvalue()}), flush=True)


if __name__ == "__main__":
    _main()
