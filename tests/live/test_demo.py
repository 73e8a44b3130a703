"""`make demo`: the sound engine's verdict and the broken one's, and an exit code that would tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance import demo


@pytest.mark.timeout(1800)
def test_both_verdicts(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    said = capfd.readouterr().out
    sound, _, broken = said.partition("2. ")
    assert "Verdict: equal. 29 parameters and buffers, bit for bit" in sound
    assert "Verdict: NOT EQUAL" in broken
    assert "model.layers.0.self_attn.qkv_proj.weight" in broken


def test_a_fault_that_is_not_caught_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    for verdicts in ([True, True], [False, False]):
        given = iter(verdicts)
        monkeypatch.setattr(demo, "_verdict", lambda row, say, given=given: next(given))
        assert demo.main() == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demonstration_says_so_and_tidies(number: int, tmp_path: Path) -> None:
    """One line, exit 130, and none of its directories is left."""
    env = os.environ | {"TMPDIR": str(tmp_path)}
    words = [sys.executable, "-m", "conformance.demo"]
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("conformance-zygote-*")):
        assert time.monotonic() < deadline, "no engine is started"
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == demo.INTERRUPTED, said
    assert said.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in said
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(("conformance-", "refdelta-"))]
