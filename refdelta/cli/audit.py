"""The audit command, for live engines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from refdelta.cli.output import FAILED, AsJson, console, one_line, print_json, print_table, refusals

if TYPE_CHECKING:
    from refdelta.vllm.auditing.report import AuditReport

__all__ = ["audit"]

_CHECKPOINT_HELP = "Directory of the checkpoint, where the engine reads it."


def audit(
    url: Annotated[str, typer.Argument(metavar="URL", help="vLLM's API server in development mode.")],
    checkpoint: Annotated[str, typer.Option("--checkpoint", metavar="DIR", help=_CHECKPOINT_HELP)],
    deltas: Annotated[
        list[str] | None, typer.Option("--delta", metavar="DELTA", help="A delta applied since; repeat in order.")
    ] = None,
    allow_incomparable: Annotated[
        bool, typer.Option("--allow-incomparable", help="What cannot be compared is no failure.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds to wait for the answer.")] = 3600.0,
    as_json: AsJson = False,
) -> int:
    """Compare a live engine, whatever updated it, with a checkpoint plus deltas, bit for bit. Writes nothing.

    The server runs with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls refdelta.vllm.audit.AuditExtension. Exit 1
    where anything differs or cannot be compared.
    """
    with refusals():
        paths = [os.path.abspath(path) for path in deltas or ()]
        report = _ask(url, [os.path.abspath(checkpoint), paths], timeout)
    if as_json:
        print_json(_plain(report))
    else:
        _print(report)
    worst = report.outcome.value
    return 0 if worst == "equal" or (worst == "not_comparable" and allow_incomparable) else FAILED


def _ask(url: str, arguments: Sequence[object], timeout: float) -> AuditReport:
    import httpx

    from refdelta.spec import DeltaError, Reason
    from refdelta.vllm.auditing.report import METHOD, AuditReport

    try:
        body = {"method": METHOD, "args": arguments, "timeout": timeout}
        answer = httpx.post(f"{url.rstrip('/')}/collective_rpc", json=body, timeout=timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeltaError(Reason.UNREADABLE, f"{url}: {type(error).__name__}: {error}") from None
    if answer.status_code != httpx.codes.OK:
        raise DeltaError(Reason.UNSUPPORTED_ENGINE, f"{url}: {_refusal(answer.status_code, answer.text)}")
    try:
        results = answer.json()["results"]
    except (ValueError, KeyError, TypeError):
        raise DeltaError(Reason.UNSUPPORTED_ENGINE, f"{url} answered {answer.text[:200]!r}") from None
    return AuditReport.from_plain(results if isinstance(results, list) else [results])


def _refusal(status: int, text: str) -> str:
    """What an answer that is no 200 means here."""
    from refdelta.vllm.auditing.report import METHOD
    from refdelta.vllm.calls.engine_calls import said

    if status == 404:
        return "no /collective_rpc: the server must run with VLLM_SERVER_DEV_MODE=1"
    extension = "--worker-extension-cls refdelta.vllm.audit.AuditExtension"
    if METHOD in text and "is not implemented" in text:
        return f"the engine has no audit: start vLLM with {extension}"
    return f"status {status}: {said(text)[:200]!r}; was it started with {extension}?"


def _plain(report: AuditReport) -> dict[str, Any]:
    return {
        "outcome": report.outcome.value,
        "tensors": {name: {"outcome": o.value, "detail": why} for name, (o, why) in report.outcomes.items()},
        "parameters": [
            {"rank": rank, "name": name, "outcome": o.value, "detail": why} for rank, name, o, why in report.parameters
        ],
        "ranks": [rank.to_plain() for rank in report.ranks],
    }


def _rows(report: AuditReport) -> Iterator[tuple[str, str, str]]:
    """(outcome, name, detail) of everything that is not equal."""
    for name, (outcome, why) in report.outcomes.items():
        if outcome.value != "equal":
            yield outcome.value, name, why
    for rank, name, outcome, why in report.parameters:
        yield outcome.value, name, f"rank {rank}, a runtime parameter: {why}"


def _print(report: AuditReport) -> None:
    rows = sorted(_rows(report))
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("outcome", "tensor", "detail"):
        table.add_column(title, no_wrap=title == "outcome", overflow="fold")
    for outcome, name, why in rows:
        style = "bold red" if outcome == "differs" else "yellow"
        table.add_row(Text(outcome.replace("_", " "), style=style), Text(one_line(name)), Text(one_line(why)))
    if rows:
        print_table(table)
    found = [outcome.value for outcome, _ in report.outcomes.values()]
    counts = ", ".join(
        f"{found.count(kind)} {kind.replace('_', ' ')}" for kind in ("equal", "differs", "not_comparable")
    )
    console().print(Text(f"{len(found)} checkpoint tensors on {len(report.ranks)} ranks: {counts}"))
