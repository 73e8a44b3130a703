"""`refdelta conformance`: the conformance suite from any directory, with pytest's arguments passed on."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import typer

from refdelta.cli.output import REFUSED, print_error

_NEEDS_EXTRA = 3
"""The suite's code for "the infrastructure failed"."""
_PYTEST_USAGE, _PYTEST_NOTHING = 4, 5


HELP = """Usage: refdelta conformance [--engine NAME] [OPTIONS] [PYTEST OPTIONS]

Judge an engine by the conformance suite. Exit 0: passed; 1: failed; 2: bad usage, or nothing to judge; 3: the
infrastructure failed. Everything that pytest takes is passed on (-k EXPRESSION, -x, --junitxml=FILE, ...).
"""


def conformance(context: typer.Context) -> int:
    """Judge an engine by the conformance suite (see refdelta conformance --help)."""
    suite, pytest = _imported("conformance"), _imported("pytest")
    if suite is None or pytest is None or _imported("conformance.options") is None:
        return _NEEDS_EXTRA
    arguments = list(context.args)
    if "--help" in arguments:
        print(_help())
        return 0
    # Nothing is to be written into the working directory.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    directory = Path(str(suite.__file__)).parent
    # That this command had imported both packages before pytest did is no news.
    quiet = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = int(pytest.main([str(directory), *quiet, *_settings(arguments), *arguments]))
    return REFUSED if code in (_PYTEST_USAGE, _PYTEST_NOTHING) else code


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print_error("missing", f"the suite needs {error.name or name}: pip install 'refdelta[conformance]'")
        return None


def _settings(arguments: list[str]) -> list[str]:
    """The suite's own settings, not those of a project that the command happens to be started in."""
    given = any(word in ("-c", "--config-file") or word.startswith("--config-file=") for word in arguments)
    return [] if given else ["-c", os.devnull, "--rootdir", str(Path.cwd())]


def _help() -> str:
    from conformance.options import OPTIONS

    lines = [f"  {option.name} {option.metavar}".ljust(32) + option.help for option in OPTIONS]
    return HELP + "\n" + "\n".join(lines)
