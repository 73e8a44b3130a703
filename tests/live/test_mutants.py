"""The live suite fails on every broken backend, in the check that is there to catch it, and says where."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Caught:
    """A mutant, and how the suite must report it."""

    mutant: str
    """A function of `tests.live.mutants`."""
    check: str
    """The check that fails, and the only one that is run."""
    finding: str
    """Text of the finding."""
    row: str = "qwen3-untied-tp1"
    file: str = "test_live.py"


CASES = (
    Caught("fused_weights_skipped", "every_tensor", "rank 0 model.layers.0.mlp.gate_up_proj.weight at "),
    Caught("k_and_v_swapped", "every_tensor", "rank 0 model.layers.0.self_attn.qkv_proj.weight at "),
    Caught("q_norm_and_k_norm_swapped", "every_tensor", "rank 0 model.layers.0.self_attn.k_norm.weight at "),
    Caught("values_added", "every_tensor", "rank 0 lm_head.weight at "),
    Caught("encoded_by_value", "special_values", "expected 0x8000, found 0x0000"),
    Caught("written_by_value", "special_values", "expected 0x8000, found 0x0000"),
    Caught("second_rank_gets_first_rows", "every_tensor", "rank 1 model.layers.0.", "qwen3-untied-tp2"),
    Caught("first_rank_raises_alone", "one_rank_fails", "after a refusal, expected the echo", "qwen3-untied-tp2"),
    Caught(
        "linear_weights_held_by_value",
        "behaviour",
        "the answers do not read mlp.down_proj",
        "qwen3-tied-lora-tp1",
        "test_live_setups.py",
    ),
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mutant)
def test_mutant_is_caught(case: Caught, tmp_path: Path) -> None:
    node = f"conformance/{case.file}::test_{case.check}[{case.row}]"
    command = [
        sys.executable,
        "-m",
        "pytest",
        node,
        "--engine",
        "vllm",
        "--mutant",
        f"tests.live.mutants:{case.mutant}",
    ]
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}"]
    run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert run.returncode == 1, run.stdout[-4000:] + run.stderr[-2000:]
    assert f"FAILED {node}" in run.stdout, f"another check failed, or the set-up did:\n{run.stdout[-4000:]}"
    assert case.finding in run.stdout, f"the finding does not say {case.finding!r}:\n{run.stdout[-4000:]}"
