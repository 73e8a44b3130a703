"""`make demo`: the sound engine's verdict and the broken one's, and an exit code that would tell."""

from __future__ import annotations

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
