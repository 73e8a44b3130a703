"""Run what takes too long for each run of `make test`, step by step, and write down what each step said.

A step that ended is kept in `.nightly/` and is not run again on the same commit: a killed run goes on where it stopped.
When all have ended, `docs/nightly.json` and `docs/NIGHTLY.md` hold date, commit, verdict and seconds of each, to be
committed. Exit 0 where all passed, 1 where one failed, 2 for bad usage.

    python scripts/nightly.py [--fresh] [--list] [--only STEP]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, LATE = "passed", "failed", "late"
TOTAL_S = 80 * 60
"""What the whole run may take on two idle cores."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command, from the repository's root."""

    name: str
    does: str
    words: tuple[str, ...]
    """Arguments of Python; ``{seed}`` is the run's."""
    resumed: tuple[str, ...] = ()
    """What is added when an earlier try of this step was killed."""
    limit_s: float = 3600.0
    """A step that is not done by then is killed, and failed."""


STEPS = (
    Step(
        "tests",
        "tests marked nightly, without engines",
        ("-m", "pytest", "tests/", "--ignore", "tests/live", "-m", "nightly", "-q"),
    ),
    Step("tests-live", "tests marked nightly, on live engines", ("-m", "pytest", "tests/live", "-m", "nightly", "-q")),
    Step(
        "mutants",
        "every mutant under all tests and seeds; docs/MUTANTS.md",
        ("-m", "conformance.mutants", "--write"),
        ("--missing",),
    ),
    Step(
        "thresholds",
        "codecs that go wrong from a size on, under three seeds",
        ("-m", "conformance.mutants.thresholds", "--seeds", "3"),
    ),
    Step(
        "sentences",
        "every engine that breaks a sentence of SPEC.md; docs/SENTENCES.md",
        ("-m", "conformance.mutants.sentences", "--write"),
    ),
    Step("loaders", "every changed copy of vLLM's loader", ("-m", "conformance.mutants.loader_run")),
    Step(
        "conformance",
        "the suite on the reference codec, 1,000 examples a property",
        ("-m", "pytest", "conformance/", "--engine", "reference", "--hypothesis-profile", "nightly", "-q"),
    ),
    Step("fuzz-reader", "100,000 damaged deltas", ("scripts/fuzz_reader.py", "--seed", "{seed}")),
    Step("kill-writer", "200 writers that are killed", ("scripts/kill_writer.py", "--seed", "{seed}")),
    Step("memory-bound", "commands on checkpoints of 2 GiB", ("scripts/memory_bound.py",)),
    Step("layout-table", "layouts of real sizes, rules against vLLM's loader", ("scripts/layout_table.py",)),
)


@dataclass(slots=True)
class Ended:
    """How a step ended."""

    verdict: str
    seconds: float
    command: str
    last: str
    """The last line that it printed."""


@dataclass(slots=True)
class State:
    """What is known of a run."""

    commit: str
    began: str
    seed: int
    ended: dict[str, Ended] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    """Steps that were started, ended or not."""

    @classmethod
    def read(cls, path: Path) -> State | None:
        """What an earlier run left; None where there is none, or no whole file."""
        try:
            raw: dict[str, Any] = json.loads(path.read_text("utf-8"))
            ended = {name: Ended(**found) for name, found in raw.pop("ended").items()}
            return cls(**raw, ended=ended)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, path: Path) -> None:
        """Store it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")
        beside.replace(path)


def run(steps: Sequence[Step], state: State, home: Path) -> None:
    """Run each step that has not ended; the state is stored before and after each."""
    for number, step in enumerate(steps, 1):
        known = state.ended.get(step.name)
        if known is not None:
            print(f"[{number}/{len(steps)}] {step.name}: {known.verdict} before, in {known.seconds:.0f} s", flush=True)
            continue
        again = step.name in state.begun
        state.begun += [] if again else [step.name]
        state.write(home / "state.json")
        print(f"[{number}/{len(steps)}] {step.name}: {step.does}{' (again)' if again else ''} ...", flush=True)
        ended = state.ended[step.name] = perform(step, state.seed, home / f"{step.name}.log", resumed=again)
        state.write(home / "state.json")
        print(f"    {ended.verdict} in {ended.seconds:.0f} s: {ended.last}", flush=True)


def perform(step: Step, seed: int, log: Path, *, resumed: bool) -> Ended:
    """Run one step in a process group of its own, which ends with it."""
    words = [word.format(seed=seed) for word in (*step.words, *(step.resumed if resumed else ()))]
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            verdict = PASSED if child.wait(step.limit_s) == 0 else FAILED
        except subprocess.TimeoutExpired:
            verdict = LATE
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Ended(verdict, round(time.monotonic() - began, 1), " ".join(["python", *words]), lines[-1] if lines else "")


def table(state: State, steps: Sequence[Step]) -> str:
    """docs/NIGHTLY.md."""
    rows = [
        f"| {step.name} | {step.does} | {ended.verdict} | {ended.seconds:.0f} | {ended.last[:160].replace('|', '/')} |"
        for step in steps
        for ended in [state.ended[step.name]]
    ]
    total = sum(ended.seconds for ended in state.ended.values())
    return "\n".join(
        [
            "# The nightly run",
            "",
            "Made by `make nightly` (`scripts/nightly.py`); not edited by hand. What takes too long for each run of",
            "`make test` is done here: at most 80 minutes on two idle cores.",
            "",
            f"Begun {state.began} on commit `{state.commit}`, seed {state.seed}; {total / 60:.0f} minutes.",
            "",
            "| step | what it does | verdict | seconds | last line |",
            "| --- | --- | --- | ---: | --- |",
            *rows,
            "",
        ]
    )


def head() -> str:
    """The commit that is checked out."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def started(home: Path, *, fresh: bool, now: datetime, commit: str) -> State:
    """The run to go on with: an earlier one of the same commit that is not done, or a new one."""
    known = None if fresh else State.read(home / "state.json")
    if known is not None and known.commit == commit and known.ended.keys() < {step.name for step in STEPS}:
        return known
    return State(commit, now.strftime("%Y-%m-%d %H:%M UTC"), int(now.strftime("%Y%m%d")))


def main(arguments: Sequence[str] | None = None, *, home: Path = ROOT / ".nightly", docs: Path = ROOT / "docs") -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run left")
    parser.add_argument("--list", action="store_true", help="show the steps")
    parser.add_argument("--only", action="append", metavar="STEP", choices=[step.name for step in STEPS], help="repeat")
    options = parser.parse_args(arguments)
    if options.list:
        for step in STEPS:
            print(f"{step.name}: {step.does}: python {' '.join(step.words)}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step's processes are ended, too
    state = started(home, fresh=options.fresh, now=datetime.now(UTC), commit=head())
    run([step for step in STEPS if not options.only or step.name in options.only], state, home)
    return _report(state, docs)


def _report(state: State, docs: Path) -> int:
    """Say how it ended, and write it down where all steps have."""
    failed = [name for name, ended in state.ended.items() if ended.verdict != PASSED]
    left = [step.name for step in STEPS if step.name not in state.ended]
    total = sum(ended.seconds for ended in state.ended.values())
    print(f"{len(state.ended)} of {len(STEPS)} steps, {total:.0f} s; failed: {', '.join(failed) or 'none'}")
    if total > TOTAL_S:
        print(f"longer than the {TOTAL_S} s that it may take on two idle cores")
    if left:
        print(f"not run yet: {', '.join(left)}")
        return 1 if failed else 0
    whole: Mapping[str, object] = {name: found for name, found in asdict(state).items() if name != "begun"}
    (docs / "nightly.json").write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    (docs / "NIGHTLY.md").write_text(table(state, STEPS), "utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
