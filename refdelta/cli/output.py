"""What commands print: refusals in one line, tables, JSON, and a progress bar where somebody watches."""

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

FAILED = 1
REFUSED = 2

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is at the output, if it is of the same kind.")]
Delta = Annotated[Path, typer.Argument(metavar="DELTA", help="Directory of a delta.", show_default=False)]


@contextmanager
def refusals() -> Iterator[None]:
    """Ends the command with the one line of a `DeltaError`."""
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
    """``text`` with everything that is not printable escaped, line ends too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(value: object) -> None:
    """``value`` on standard output."""
    print(json.dumps(value, indent=2))


def print_table(table: Table) -> None:
    """``table`` on standard output, cut to the width of a terminal only."""
    console().print(table)


def console() -> Console:
    """Standard output."""
    found = Console()
    return found if found.is_terminal else Console(width=100_000)  # a file or a pipe has no width to fit


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A function to be told of bytes done, which a bar on standard error shows if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.advance(task, done)
