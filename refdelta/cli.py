"""The `refdelta` command. Exit 0: it holds; 1: a check failed; 2: bad usage or refused input.

Everything refused is one line on standard error, ``error: [reason] detail``. torch is imported by the commands that
need it, so that help and usage errors are quick.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Typer carries its own copy of click and exports none of its exceptions' base.
from typer._click.exceptions import ClickException

if TYPE_CHECKING:
    from refdelta.spec import Delta

REFUSED = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def refdelta() -> None:
    """Sparse deltas (sparse_delta v2): look into them."""


def main() -> None:
    """Entry point of the `refdelta` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with ``arguments`` and return its exit code."""
    try:
        code = app(list(arguments), standalone_mode=False)
    except ClickException as error:
        _print_error("bad_option", error.format_message())
        return REFUSED
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0


@app.command()
def inspect(
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="Directory of a delta.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What a delta holds: tensors, changed elements, density, bytes, lineage. Validates all of it."""
    with _refusals():
        from refdelta.apply import read_delta

        report = _report(read_delta(delta))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)


@contextmanager
def _refusals() -> Iterator[None]:
    from refdelta.spec import DeltaError

    try:
        yield
    except DeltaError as error:
        tensor = "" if error.tensor is None else f"tensor {error.tensor}: "
        _print_error(error.reason.value, tensor + error.detail)
        raise typer.Exit(REFUSED) from None


def _print_error(reason: str, detail: str) -> None:
    print(f"error: [{reason}] {_one_line(detail)}", file=sys.stderr)


def _one_line(text: str) -> str:
    """``text`` with everything that is not printable escaped, line ends too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _report(delta: Delta) -> dict[str, Any]:
    from refdelta.spec import DTYPE_CODES

    return {
        "tensors": [
            {
                "name": patch.name,
                "shape": list(patch.shape),
                "dtype": DTYPE_CODES[patch.dtype],
                "changed_elements": patch.changed,
                "density_pct": patch.density_pct,
                "index_dtype": DTYPE_CODES[patch.indices.dtype],
                "payload_bytes": patch.payload_bytes,
            }
            for patch in delta.patches
        ],
        "totals": {
            "tensors": len(delta.patches),
            "changed_elements": delta.changed_elements,
            "total_elements": delta.total_elements,
            "density_pct": delta.density_pct,
            "payload_bytes": delta.payload_bytes,
        },
        "lineage": None if delta.lineage is None else delta.lineage.to_json(),
        "extra": dict(delta.extra),
    }


def _print_report(report: Mapping[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=100_000)  # a file or a pipe has no width to fit: nothing is cut
    console.print(_tensor_table(report["tensors"]))
    totals = report["totals"]
    counts = f"{totals['changed_elements']:,} of {totals['total_elements']:,} elements changed"
    size = f"density {totals['density_pct']:.3f} %, {totals['payload_bytes']:,} payload bytes"
    console.print(Text(f"{totals['tensors']} tensors, {counts}, {size}"))
    for title in ("lineage", "extra"):
        if fields := report[title]:
            console.print(Text(f"{title}: {', '.join(f'{k}={_one_line(_plain(v))}' for k, v in fields.items())}"))


def _tensor_table(tensors: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("tensor", overflow="fold")
    for title in ("shape", "dtype"):
        table.add_column(title)
    for title in ("changed", "density %", "index", "bytes"):
        table.add_column(title, justify="right")
    for row in tensors:
        changed, density = f"{row['changed_elements']:,}", f"{row['density_pct']:.3f}"
        cells = (str(row["shape"]), row["dtype"], changed, density, row["index_dtype"], f"{row['payload_bytes']:,}")
        table.add_row(Text(_one_line(row["name"])), *map(Text, cells))
    return table


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
