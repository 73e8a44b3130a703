"""`refdelta conformance`: the conformance suite from any directory, with pytest's arguments passed on."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import typer

from refdelta.cli import INTERRUPTED
from refdelta.cli.output import REFUSED, print_error
from refdelta.cli.suite import suite_folder

__all__ = ["HELP", "conformance"]

_NEEDS_EXTRA = 3
"""The suite's code for "the infrastructure failed"."""
_PYTEST_USAGE, _PYTEST_NOTHING = 4, 5
_NEEDED = ("pytest", "hypothesis")

HELP = """Usage: refdelta conformance [--engine NAME] [OPTIONS] [PYTEST OPTIONS]

Judge an engine by the conformance suite. Exit 0: passed; 1: failed; 2: bad usage, or nothing to judge; 3: the
infrastructure failed; 130: interrupted. Everything that pytest takes is passed on (-k EXPRESSION, -x,
--junitxml=FILE, ...).
"""


def conformance(context: typer.Context) -> int:
    """Judge an engine by the conformance suite (see refdelta conformance --help)."""
    suite = suite_folder()
    if suite is None:
        print_error("missing", "the suite is not installed beside refdelta: pip install 'refdelta[conformance]'")
        return _NEEDS_EXTRA
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print_error("missing", f"the suite needs {missing[0]}: pip install 'refdelta[conformance]'")
        return _NEEDS_EXTRA
    arguments = list(context.args)
    if "--help" in arguments:
        print(_help(suite.name))
        return 0
    # Nothing is to be written into the working directory.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # The suite is left for pytest to import, which rewrites its assertions so that they say what they found.
    import pytest

    watch = _Watch()
    words = [str(suite), "-p", "no:cacheprovider", *_settings(arguments), *arguments]
    code = int(pytest.main(words, plugins=[watch]))
    if watch.interrupted:
        return INTERRUPTED
    return REFUSED if code in (_PYTEST_USAGE, _PYTEST_NOTHING) else code


class _Watch:
    """A plugin of pytest that sees Ctrl-C, of which pytest's code is the suite's for bad usage."""

    interrupted = False

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        """pytest calls this for `pytest.exit` as well, which is no interruption by the keyboard."""
        self.interrupted |= excinfo.type is KeyboardInterrupt


def _settings(arguments: list[str]) -> list[str]:
    """The suite's own settings, not those of a project that the command happens to be started in."""
    given = any(word in ("-c", "--config-file") or word.startswith("--config-file=") for word in arguments)
    return [] if given else ["-c", os.devnull, "--rootdir", str(Path.cwd())]


def _help(suite: str) -> str:
    options = importlib.import_module(f"{suite}.driving.options").OPTIONS
    lines = [f"  {option.name} {option.metavar}".ljust(32) + option.help for option in options]
    return HELP + "\n" + "\n".join(lines)
