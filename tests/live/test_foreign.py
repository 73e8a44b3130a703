"""Somebody else's backend through the live suite: its own `update_info`, what it declines, and what may not pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = '{"snapshot": {"at": "{path}"}}'
TESTS = {
    "register": ("base", "first_element", "special_values", "declined", "unknown_name", "one_rank_fails"),
    "register_silent": ("declined",),
}


def _run(function: str, report: Path) -> tuple[int, str, dict[str, dict[str, Any]]]:
    nodes = [f"conformance/test_live.py::test_{name}[qwen3-untied-tp1]" for name in TESTS[function]]
    backend = ["--backend", "refdelta", "--plugin", f"tests.live.foreign:{function}", "--update-info", TEMPLATE]
    options = ["--engine", "vllm", *backend, "--report", str(report), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *nodes, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    tests = {
        test["id"].partition("::test_")[2].partition("[")[0]: test for test in json.loads(report.read_text())["tests"]
    }
    return done.returncode, done.stdout, tests


@pytest.mark.timeout(400)
def test_what_it_offers_passes_and_what_it_declines_is_refused(tmp_path: Path) -> None:
    code, text, tests = _run("register", tmp_path / "report.json")
    outcomes = {name: tests[name]["outcome"] for name in TESTS["register"]}
    assert outcomes == dict.fromkeys(TESTS["register"], "passed") | {"one_rank_fails": "skipped"}, text[-4000:]
    assert code == 0
    assert tests["one_rank_fails"]["capability"] == "per_rank"


@pytest.mark.timeout(400)
def test_what_it_declines_in_silence_is_caught(tmp_path: Path) -> None:
    """Dropped NaNs: accepted, and other bits than a fresh engine's, with fields to find them by."""
    code, text, tests = _run("register_silent", tmp_path / "report.json")
    assert code == 1, text[-4000:]
    finding = tests["declined"]["findings"][0]
    assert finding["rank"] == 0
    assert finding["expected"].startswith("0x")
    assert finding["position"] is not None
    assert "parameters or buffers differ" in text
