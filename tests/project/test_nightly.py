"""The nightly run goes on where it was killed, tells failures, and has a step for all that `make test` leaves out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import nightly
import pytest
from nightly import FAILED, LATE, PASSED, Ended, State, Step

NOW = datetime(2026, 12, 1, 3, 4, tzinfo=UTC)


def steps(tmp_path: Path) -> tuple[Step, ...]:
    """One that passes and counts its runs, one that fails, one that is late."""
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); print('seed', {{seed}})"
    return (
        Step("good", "passes", ("-c", count)),
        Step("bad", "fails", ("-c", "import sys; print('why'); sys.exit(3)")),
        Step("slow", "hangs", ("-c", "import time; time.sleep(60)"), limit_s=0.3),
    )


def new() -> State:
    return State("abc", "then", 7)


def test_each_step_is_judged(tmp_path: Path) -> None:
    state = new()
    nightly.run(steps(tmp_path), state, tmp_path / "home")
    assert {name: ended.verdict for name, ended in state.ended.items()} == {"good": PASSED, "bad": FAILED, "slow": LATE}
    assert [state.ended[name].last for name in ("good", "bad", "slow")] == ["seed 7", "why", ""]
    assert State.read(tmp_path / "home" / "state.json") == state


def test_what_ended_is_not_run_again(tmp_path: Path) -> None:
    wanted = steps(tmp_path)[:2]
    nightly.run(wanted, new(), tmp_path / "home")
    known = State.read(tmp_path / "home" / "state.json")
    assert known is not None
    nightly.run(wanted, known, tmp_path / "home")
    assert (tmp_path / "runs").read_text() == "x"


def test_a_step_that_was_killed_is_told_so(tmp_path: Path) -> None:
    """It is begun and has not ended; its command can then go on, too."""
    step = Step("one", "says", ("-c", "import sys; print(sys.argv[1:])"), ("--missing",))
    for begun, said in (([], "[]"), (["one"], "['--missing']")):
        state = State("abc", "then", 7, begun=list(begun))
        nightly.run([step], state, tmp_path)
        assert state.ended["one"].last == said


def test_a_run_of_another_commit_starts_anew(tmp_path: Path) -> None:
    state = new()
    state.ended["tests"] = Ended(PASSED, 1.0, "c", "l")
    state.write(tmp_path / "state.json")
    assert nightly.started(tmp_path, fresh=False, now=NOW, commit="abc") == state
    assert nightly.started(tmp_path, fresh=False, now=NOW, commit="other").ended == {}
    assert nightly.started(tmp_path, fresh=True, now=NOW, commit="abc").seed == 20261201
    state.ended |= {step.name: Ended(PASSED, 1.0, "c", "l") for step in nightly.STEPS}
    state.write(tmp_path / "state.json")
    assert nightly.started(tmp_path, fresh=False, now=NOW, commit="abc").ended == {}, "a whole run is over"
    (tmp_path / "state.json").write_text("{")
    assert nightly.started(tmp_path, fresh=False, now=NOW, commit="abc").ended == {}


@pytest.mark.parametrize(("verdict", "code"), [(PASSED, 0), (FAILED, 1), (LATE, 1)])
def test_the_result_is_written_when_all_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, code: int
) -> None:
    monkeypatch.setattr(nightly, "STEPS", steps(tmp_path))
    state = new()
    state.ended = {name: Ended(PASSED, 2.0, "c", "a | b") for name in ("good", "bad")}
    assert nightly._report(state, tmp_path) == 0
    assert not (tmp_path / "NIGHTLY.md").exists(), "a step is left"
    state.ended["slow"] = Ended(verdict, 60.0, "c", "x")
    assert nightly._report(state, tmp_path) == code
    text = (tmp_path / "NIGHTLY.md").read_text()
    assert "Begun then on commit `abc`, seed 7; 1 minutes." in text
    assert f"| slow | hangs | {verdict} | 60 | x |" in text
    assert "| good | passes | passed | 2 | a / b |" in text
    assert json.loads((tmp_path / "nightly.json").read_text())["ended"]["slow"]["verdict"] == verdict


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_run_takes_its_step_along(tmp_path: Path) -> None:
    code = (
        "import signal, sys, nightly; from pathlib import Path\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"home = Path({str(tmp_path)!r})\n"
        'text = f\'import os, time; open({str(home / "pid")!r}, "w").write(str(os.getpid())); time.sleep(60)\'\n'
        "nightly.run([nightly.Step('s', 'hangs', ('-c', text))], nightly.State('c', 't', 1), home)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=Path(nightly.__file__).parent)
    deadline = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    known = State.read(tmp_path / "state.json")
    assert known is not None
    assert (known.begun, known.ended) == (["s"], {})


def test_every_step_can_be_started() -> None:
    """Scripts and options exist, and tests marked nightly are of two steps, none of both."""
    words = {step.name: step.words for step in nightly.STEPS}
    assert len(words) == len(nightly.STEPS)
    for step in nightly.STEPS:
        if step.words[0].startswith("scripts/"):
            assert (nightly.ROOT / step.words[0]).exists()
    assert words["tests"][2:5] == ("tests/", "--ignore", "tests/live")
    assert words["tests-live"][2] == "tests/live"
    for name in ("tests", "tests-live"):
        assert "nightly" in words[name]


def test_what_is_left_to_it_is_said(tmp_path: Path) -> None:
    marked = "import pytest\n@pytest.mark.nightly\ndef test_long(): pass\ndef test_short(): pass\n"
    (tmp_path / "conftest.py").write_text((nightly.ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(marked)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = nightly\n")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    said = {
        chosen: subprocess.run([*words, *chosen], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for chosen in ((), ("-m", "not nightly"))
    }
    assert "1 tests are left to the nightly run: make nightly" in said["-m", "not nightly"]
    assert "1 passed" in said["-m", "not nightly"]
    assert "left to the nightly run" not in said[()]
    assert "2 passed" in said[()]
