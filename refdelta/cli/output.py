"""What commands print: refusals in one line, tables, JSON, and a progress bar if standard error is a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

__all__ = [
    "FAILED",
    "REFUSED",
    "AsJson",
    "Delta",
    "Force",
    "console",
    "one_line",
    "print_error",
    "print_json",
    "print_table",
    "progress",
    "refusals",
]

FAILED = 1
REFUSED = 2

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is at the output, if it is of the same kind.")]
Delta = Annotated[Path, typer.Argument(metavar="DELTA", help="Directory of a delta.", show_default=False)]


@contextmanager
def refusals() -> Iterator[None]:
    """Turn a `DeltaError` into its one line, and end the command."""
    from refdelta.spec import DeltaError

    try:
        yield
    except DeltaError as error:
        tensor = "" if error.tensor is None else f"tensor {error.tensor}: "
        print_error(error.reason.value, tensor + error.detail)
        raise typer.Exit(REFUSED) from None


def print_error(reason: str, detail: str) -> None:
    """The line of a refusal."""
    print(f"error: [{reason}] {one_line(detail)}", file=sys.stderr)


def one_line(text: str) -> str:
    """``text`` in one line: everything that is not printable is escaped, line ends too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(value: object) -> None:
    """Print ``value`` on standard output."""
    print(json.dumps(value, indent=2))


def print_table(table: Table) -> None:
    """Print ``table`` on standard output. It is cut to the width of a terminal, and not cut elsewhere."""
    console().print(table)


def console() -> Console:
    """Standard output."""
    found = Console()
    return found if found.is_terminal else Console(width=100_000)  # a file or a pipe has no width to fit


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A function that takes the number of bytes done since its last call. A bar on standard error shows it on a
    terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.advance(task, done)
