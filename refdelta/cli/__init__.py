"""The `refdelta` command. Exit 0: it holds; 1: a check failed; 2: bad usage or refused input.

Everything refused is one line on standard error, ``error: [reason] detail``. torch is imported by the commands that
need it, so that help and usage errors are quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

# Typer carries its own copy of click and exports none of its exceptions' base.
from typer._click.exceptions import ClickException

from refdelta.cli.audit import audit
from refdelta.cli.checkpoints import apply, diff, verify
from refdelta.cli.conformance import conformance
from refdelta.cli.deltas import compose, inspect
from refdelta.cli.layout import layout
from refdelta.cli.output import REFUSED, print_error

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (diff, apply, inspect, verify, compose, layout, audit):
    app.command()(command)
# Its options are the suite's and pytest's, and so is its help.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})(
    conformance
)


@app.callback()
def refdelta() -> None:
    """Sparse deltas (sparse_delta v2): make, apply, check and compose them, map them to engines, audit engines."""


def main() -> None:
    """Entry point of the `refdelta` command."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again when it ends
        code = code or _unwritten(error)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the command with ``arguments`` and return its exit code."""
    try:
        code = app(list(arguments), standalone_mode=False)
    except ClickException as error:
        print_error("bad_option", error.format_message())
        return REFUSED
    except typer.Abort:
        return 130
    except OSError as error:
        return _unwritten(error)
    return code if isinstance(code, int) else 0


def _unwritten(error: OSError) -> int:
    """What is read is refused by its own errors; what is left is output that nothing takes."""
    if not isinstance(error, BrokenPipeError):  # else who read has gone, and nothing is left to be said
        print_error("write_failed", f"{error.filename or 'output'}: {error.strerror}")
    return REFUSED
