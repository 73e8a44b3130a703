"""Every broken live engine is killed by the test that is meant for it, on one engine for each row.

The whole matrix: ``python -m conformance.mutants --write``.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.mutants.ci import NAMES
from conformance.mutants.registry import LIVE, mutants

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("which", [["--ci"], pytest.param([], marks=pytest.mark.nightly)], ids=["ci", "all"])
def test_every_mutant_is_killed_by_its_own_test(which: list[str]) -> None:
    command = [sys.executable, "-m", "conformance.mutants", "--kind", LIVE, "--quick", "--seeds", "1", *which]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1180, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    told = {line.partition(":")[0] for line in done.stdout.splitlines()}
    wanted = {mutant.name for mutant in mutants(LIVE)}
    assert (wanted & NAMES if which else wanted) <= told


@dataclass(frozen=True, slots=True)
class Caught:
    """A mutant by option, and how the suite must report it."""

    mutant: str
    """A function of `conformance.mutants.live`."""
    node: str
    finding: str


CASES = (
    Caught(
        "k_and_v_swapped",
        "test_live.py::test_every_tensor[qwen3-untied-tp1]",
        "rank 0 model.layers.0.self_attn.qkv_proj.weight at ",
    ),
    Caught(
        "linear_weights_held_by_value",
        "test_live_setups.py::test_behaviour[qwen3-tied-lora-tp1]",
        "the answers do not read mlp.down_proj",
    ),
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=pytest.mark.nightly) for case in CASES[1:])],
    ids=lambda case: case.mutant,
)
def test_a_mutant_by_option_is_reported(case: Caught, tmp_path: Path) -> None:
    node, place = f"conformance/{case.node}", f"conformance.mutants.live:{case.mutant}"
    command = [sys.executable, "-m", "pytest", node, "--engine", "vllm", "--mutant", place]
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}"]
    run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert run.returncode == 1, run.stdout[-4000:] + run.stderr[-2000:]
    assert f"FAILED {node}" in run.stdout, f"another check failed, or the set-up did:\n{run.stdout[-4000:]}"
    assert case.finding in run.stdout, f"the finding does not say {case.finding!r}:\n{run.stdout[-4000:]}"
