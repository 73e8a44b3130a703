"""All commands, and how their errors are reported. Only commands that need torch import it, so that help and usage
errors are quick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

# Typer carries its own copy of click and exports none of its exceptions' base.
from typer._click.exceptions import ClickException
from typer.core import TyperGroup

from refdelta import __version__
from refdelta.cli.audit import audit
from refdelta.cli.checkpoints import apply, diff, verify
from refdelta.cli.conformance import conformance
from refdelta.cli.deltas import compose, inspect
from refdelta.cli.layout import layout
from refdelta.cli.output import REFUSED, print_error

__all__ = ["app", "invoke", "refdelta", "unwritten"]


class _Interrupted(Exception):
    """Ctrl-C in a command. Of a KeyboardInterrupt click would print an empty line."""


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None


app = typer.Typer(cls=_Group, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (diff, apply, inspect, verify, compose, layout, audit):
    app.command()(command)
# Its options are the suite's and pytest's, and so is its help.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})(
    conformance
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"refdelta {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")


@app.callback()
def refdelta(version: Annotated[bool, _VERSION] = False) -> None:
    """Sparse deltas (sparse_delta v2): make, apply, check and compose them, map them to engines, audit engines."""


def invoke(arguments: Sequence[str]) -> int:
    """Run the command with ``arguments`` and return its exit code. Raises KeyboardInterrupt."""
    try:
        code = app(list(arguments), standalone_mode=False)
    except ClickException as error:
        print_error("bad_option", error.format_message())
        return REFUSED
    except (typer.Abort, _Interrupted):
        raise KeyboardInterrupt from None
    except OSError as error:
        return unwritten(error)
    return code if isinstance(code, int) else 0


def unwritten(error: OSError) -> int:
    """The refusal for an OSError. Reading has refusals of its own, so what is left is output that cannot be written."""
    if not isinstance(error, BrokenPipeError):  # else who read has gone, and nothing is left to be said
        print_error("write_failed", f"{error.filename or 'output'}: {error.strerror}")
    return REFUSED
