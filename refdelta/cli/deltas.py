"""Commands on deltas alone: inspect, compose."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from refdelta.cli.output import AsJson, Delta, Force, console, one_line, print_json, refusals

if TYPE_CHECKING:
    from refdelta import spec

__all__ = ["compose", "inspect", "print_written"]


def inspect(delta: Delta, as_json: AsJson = False) -> None:
    """What a delta holds: tensors, changed elements, density, bytes, lineage. Validates all of it."""
    with refusals():
        from refdelta.files.reading import read_delta

        report = _report(read_delta(delta))
    if as_json:
        print_json(report)
    else:
        _print_report(report)


def compose(
    deltas: Annotated[
        list[Path], typer.Argument(metavar="DELTA...", help="Deltas in the order of applying.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Directory of the new delta.", show_default=False)],
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """One delta that does what several do when applied in order; the later one wins."""
    with refusals():
        from dataclasses import replace

        from refdelta.checkpoints.verifying import COMPOSED_OF
        from refdelta.codec.composition import compose
        from refdelta.files.reading import read_delta
        from refdelta.files.writing import check_output, write_delta

        check_output(output, overwrite=force)
        parts = [read_delta(path) for path in deltas]
        whole = compose(parts)
        whole = replace(whole, extra={**whole.extra, COMPOSED_OF: sum(map(_count, parts))})
        write_delta(whole, output, overwrite=force)
    print_written(output, whole, as_json)


def _count(delta: spec.Delta) -> int:
    from refdelta.checkpoints.verifying import COMPOSED_OF

    known = delta.extra.get(COMPOSED_OF)
    return known if isinstance(known, int) else 1


def print_written(output: Path, delta: spec.Delta, as_json: bool) -> None:
    """What a new delta holds, in short."""
    totals = _totals(delta)
    if as_json:
        print_json({"delta": str(output), **totals})
    else:
        console().print(Text(f"{one_line(str(output))}: {_in_words(totals)}"))


def _report(delta: spec.Delta) -> dict[str, Any]:
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
        "totals": _totals(delta),
        "lineage": None if delta.lineage is None else delta.lineage.to_json(),
        "extra": dict(delta.extra),
    }


def _totals(delta: spec.Delta) -> dict[str, Any]:
    return {
        "tensors": len(delta.patches),
        "changed_elements": delta.changed_elements,
        "total_elements": delta.total_elements,
        "density_pct": delta.density_pct,
        "payload_bytes": delta.payload_bytes,
    }


def _in_words(totals: Mapping[str, Any]) -> str:
    counts = f"{totals['changed_elements']:,} of {totals['total_elements']:,} elements changed"
    size = f"density {totals['density_pct']:.3f} %, {totals['payload_bytes']:,} payload bytes"
    return f"{totals['tensors']} tensors, {counts}, {size}"


def _print_report(report: Mapping[str, Any]) -> None:
    out = console()
    out.print(_tensor_table(report["tensors"]))
    out.print(Text(_in_words(report["totals"])))
    for title in ("lineage", "extra"):
        if fields := report[title]:
            out.print(Text(f"{title}: {', '.join(f'{k}={one_line(_plain(v))}' for k, v in fields.items())}"))


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
        table.add_row(Text(one_line(row["name"])), *map(Text, cells))
    return table


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
