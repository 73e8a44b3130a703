"""Commands on checkpoints, files or directories of safetensors shards: diff, apply, verify."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from refdelta.cli.deltas import print_written
from refdelta.cli.output import (
    FAILED,
    AsJson,
    Delta,
    Force,
    console,
    one_line,
    print_json,
    print_table,
    progress,
    refusals,
)

if TYPE_CHECKING:
    from refdelta.checkpoints.verifying import Finding
    from refdelta.spec import Lineage

__all__ = ["apply", "diff", "verify"]

_CHECKPOINT_HELP = "A safetensors file, or a directory of them."


def diff(
    base: Annotated[Path, typer.Argument(metavar="BASE", help=_CHECKPOINT_HELP, show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help=_CHECKPOINT_HELP, show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="Directory of the delta.", show_default=False)],
    run_id: Annotated[str | None, typer.Option(help="Run that the lineage names.")] = None,
    version: Annotated[int | None, typer.Option(help="Version of TARGET in the run.")] = None,
    base_version: Annotated[int | None, typer.Option(help="Version of BASE in the run.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make the delta between two checkpoints. With --run-id and --version it gets a lineage with digests."""
    with refusals(), ExitStack() as stack:
        from refdelta.checkpoints.diffing import diff_checkpoints
        from refdelta.checkpoints.reading import Checkpoint
        from refdelta.files.writing import check_output, write_delta

        lineage = _lineage(run_id, version, base_version)
        check_output(output, overwrite=force)
        old, new = (stack.enter_context(Checkpoint(path)) for path in (base, target))
        advance = stack.enter_context(progress("diff", new.total_bytes))
        delta = diff_checkpoints(old, new, lineage=lineage, advance=advance)
        write_delta(delta, output, overwrite=force)
    print_written(output, delta, as_json)


def _lineage(run_id: str | None, version: int | None, base_version: int | None) -> Lineage | None:
    from refdelta.spec import DeltaError, Lineage, Reason

    if run_id is None and version is None and base_version is None:
        return None
    if run_id is None or version is None:
        raise DeltaError(Reason.BAD_OPTION, "a lineage needs both --run-id and --version")
    return Lineage(run_id, version, base_version)


def apply(
    delta: Delta,
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help=_CHECKPOINT_HELP, show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The new checkpoint.", show_default=False)],
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint with a delta applied: shards keep names, order and metadata, other files are copied."""
    with refusals(), ExitStack() as stack:
        from refdelta.checkpoints.patching import check_output, patch_checkpoint
        from refdelta.checkpoints.reading import Checkpoint
        from refdelta.files.reading import read_delta

        source = stack.enter_context(Checkpoint(checkpoint))
        check_output(source, output, overwrite=force)
        change = read_delta(delta)
        advance = stack.enter_context(progress("apply", source.total_bytes))
        left_out = patch_checkpoint(change, source, output, overwrite=force, advance=advance)
        report = {"checkpoint": str(output), "shards": len(source.shards), "tensors": len(source)}
    if as_json:
        print_json({**report, "changed_elements": change.changed_elements, "left_out": left_out})
        return
    size = f"{report['tensors']} tensors in {report['shards']} files, {change.changed_elements:,} elements changed"
    console().print(Text(f"{one_line(str(output))}: {size}"))
    if left_out:
        console().print(Text(f"not copied: {', '.join(map(one_line, left_out))}"))


def verify(
    delta: Delta,
    base: Annotated[Path | None, typer.Option(help="The checkpoint that the delta starts from.")] = None,
    target: Annotated[Path | None, typer.Option(help="The checkpoint that it leads to.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="What is only noted fails, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every invariant that the inputs allow. Exit 1 when one fails."""
    with refusals(), ExitStack() as stack:
        from refdelta.checkpoints import verifying as checkpoint_verify
        from refdelta.checkpoints.reading import Checkpoint

        old, new = (None if path is None else stack.enter_context(Checkpoint(path)) for path in (base, target))
        state = new if old is None else old
        advance = stack.enter_context(progress("verify", 0 if state is None else state.total_bytes))
        findings = checkpoint_verify.verify(delta, old, new, advance=advance)
    failures = {"fails", "noted"} if strict else {"fails"}
    holds = not any(finding.status in failures for finding in findings)
    if as_json:
        rows = [{"id": f.id, "status": f.status.value, "detail": f.detail} for f in findings]
        print_json({"delta": str(delta), "holds": holds, "findings": rows})
    else:
        print_table(_table(findings))
    if not holds:
        raise typer.Exit(FAILED)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("check", "outcome"):
        table.add_column(title, no_wrap=True)
    table.add_column("detail", overflow="fold")
    styles = {"fails": "bold red", "holds": "green", "noted": "yellow"}
    for finding in findings:
        outcome = Text(finding.status.value.replace("_", " "), style=styles.get(finding.status.value, "dim"))
        table.add_row(finding.id, outcome, Text(one_line(finding.detail)))
    return table
