"""The example of a backend on vLLM's own patch loader: what it offers passes, and the suite shows what it cannot do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.suite.runs import command
from tests.suite.test_adopters import files, line

HOME = Path(__file__).parents[2] / "examples" / "native_backend"
SUITE = Path(__file__).parents[2] / "conformance" / "test_live.py"
ROWS = {
    "qwen3-untied-tp1": ("every_tensor", "special_values", "declined", "malformed_second", "unknown_name"),
    "qwen3-tied-both-tp1": ("every_tensor", "separate_tied"),
    "qwen3-moe-tp1": ("every_tensor", "declined"),
    "gemma4-text-tp1": ("every_tensor",),
    "qwen3-untied-tp2": ("every_tensor", "one_rank_fails"),
}
DECLINED = {("every_tensor", "qwen3-moe-tp1"): "experts", ("one_rank_fails", "qwen3-untied-tp2"): "per_rank"}
"""What is skipped, and the capability that it would need."""


QUICK = ("qwen3-untied-tp1", "qwen3-untied-tp2")
"""The rows of the quick profile; the nightly run has all of them."""


@pytest.fixture(
    scope="module", params=[QUICK, pytest.param(tuple(ROWS), marks=pytest.mark.nightly)], ids=["some", "all"]
)
def rows(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The rows to run."""
    chosen: tuple[str, ...] = request.param
    return chosen


@pytest.fixture(scope="module")
def document(rows: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one run over the rows."""
    report = tmp_path_factory.mktemp("native") / "report.json"
    nodes = [f"{SUITE}::test_{check}[{row}]" for row in rows for check in ROWS[row]]
    backend = ["--backend", "native", "--plugin", "native_backend:register", "--update-info", '{"delta": "{path}"}']
    options = ["--engine", "vllm", *backend, "--report", str(report), "-q", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(SUITE.parents[1]), str(HOME)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *nodes, *options],
        cwd=HOME,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    parsed: dict[str, Any] = json.loads(report.read_text())
    return parsed | {"code": done.returncode, "text": done.stdout}


@pytest.mark.timeout(900)
def test_what_it_offers_passes(document: dict[str, Any], rows: tuple[str, ...]) -> None:
    outcomes: dict[tuple[str, str], str] = {}
    for test in document["tests"]:
        found = re.fullmatch(r"test_live\.py::test_(\w+)\[(.+)\]", test["id"])
        if found and test["outcome"] != "not run":
            outcomes[found[1], found[2]] = test["outcome"]
    expected = {
        (check, row): "skipped" if (check, row) in DECLINED else "passed" for row in rows for check in ROWS[row]
    }
    assert outcomes == expected, document["text"][-4000:]
    assert document["code"] == 0


@pytest.mark.timeout(900)
def test_what_it_cannot_do_is_said(document: dict[str, Any], rows: tuple[str, ...]) -> None:
    """Skips name the capability; of the levels the one that needs a rollback is declined."""
    for capability in (DECLINED[case] for case in DECLINED if case[1] in rows):
        assert f"does not declare the capability {capability!r}" in document["text"]
    verdicts = {level["id"]: level["verdict"] for level in document["levels"]}
    assert verdicts["transactional"] == verdicts["served"] == "declined"


MY_PACKAGE = """
from pathlib import Path

from native_backend.reader import known_tensors
from native_backend.reader import read as read_checked
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

def read(at, vllm_config):
    return read_checked(Path(at), known_tensors(Path(vllm_config.model_config.model)))

def write(delta, model):
    patches = [CheckpointWeightPatch(p.name, p.shape, p.values.dtype, p.values, p.indices) for p in delta]
    load_checkpoint_weight_patches(model, patches)
"""


@pytest.mark.timeout(400)
def test_the_readme_s_backend_is_green(tmp_path: Path) -> None:
    """conformance/README.md's two files and its command, around code that reads and writes; a part of the tests."""
    for name, text in files("python").items():
        (tmp_path / name).write_text(text)
    (tmp_path / "my_package.py").write_text(MY_PACKAGE)
    wanted = "-k 'test_live.py and qwen3-untied and (every_tensor or special_values or unknown_name)'"
    words = ["sh", "-ec", line("--plugin").replace("-k qwen3-untied", wanted)]
    assert wanted in words[-1]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = command(words, cwd=tmp_path, PATH=path, PYTHONPATH=os.pathsep.join([str(SUITE.parents[1]), str(HOME)]))
    assert done.code == 0, done.text[-4000:]
    assert "3 passed" in done.text


def test_it_uses_vllm_alone() -> None:
    imported: set[str] = set()
    for file in (HOME / "native_backend").glob("*.py"):
        imported |= set(re.findall(r"^\s*(?:import|from) (\w+)", file.read_text(), re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"vllm", "torch", "safetensors", "native_backend"}
