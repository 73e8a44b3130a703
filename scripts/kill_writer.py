"""Kill writers with SIGKILL and look at what they leave: the old delta or checkpoint, the new one, or none.

Each round forks a writer of a delta (new, or in place of another one) or of a checkpoint, and kills it: at a line of
refdelta's own code that is drawn before (every line of the writing is reached), or after a drawn time. Then the target
must read as exactly one of the states that were to be there, and nothing beside it as a delta or checkpoint. A reader
reads all the while and must see whole states only. Deterministic up to the times. Exit 1 on any failure.

    python scripts/kill_writer.py [--kills 200] [--seed 1] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import save_file

from refdelta.apply import apply_to_checkpoint, read_delta
from refdelta.checkpoints.reading import Checkpoint
from refdelta.encode import diff, write_delta
from refdelta.spec import Delta, DeltaError, Lineage

SOURCES = str(Path(sys.modules["refdelta.spec"].__file__ or "").parent)
ELEMENTS = (257, 1021)
"""Shape of the one tensor; large enough that a write of its change takes several system calls."""

State = str
"""``old``, ``new`` or ``none``: what a target holds."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One kind of writing."""

    name: str
    target: Path
    write: Callable[[], object]
    look: Callable[[], State]
    """What the target holds; raises where it is neither."""
    before: State
    prepare: Callable[[], object]
    """Puts the target into the state before."""


@dataclass(slots=True)
class Tally:
    """What the kills left."""

    left: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    attempts: int = 0
    kills: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    """What the reader saw."""


def scenes(directory: Path) -> list[Scene]:
    """A new delta, a delta in place of another, a new checkpoint, a checkpoint in its own place."""
    torch.manual_seed(7)
    a = {"w": torch.randn(ELEMENTS)}
    b = {"w": torch.where(torch.rand(ELEMENTS) < 0.3, a["w"] + 1, a["w"])}
    old, new = (Delta(d.patches, d.total_elements, Lineage("run", v)) for v, d in ((1, diff(b, a)), (2, diff(a, b))))
    source = directory / "source"
    source.mkdir(parents=True)
    save_file(a, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    change = write_delta(new, directory / "change")
    delta, checkpoint = directory / "deltas" / "target", directory / "checkpoints" / "target"
    for target in (delta, checkpoint):
        target.parent.mkdir()

    def look_at_delta() -> State:
        return _look(lambda: str(read_delta(delta).lineage.version), {"1": "old", "2": "new"})  # type: ignore[union-attr]

    def look_at_checkpoint() -> State:
        def held() -> str:
            with Checkpoint(checkpoint) as found:
                w = found["w"]
            assert _holds(checkpoint, "config.json"), "a checkpoint without its other files"
            return "a" if torch.equal(w, a["w"]) else "b" if torch.equal(w, b["w"]) else "a mixture"

        return _look(held, {"a": "old", "b": "new"})

    def write_old() -> None:
        write_delta(old, delta, overwrite=True)

    def copy_source() -> None:
        apply_to_checkpoint(write_empty(directory), source, checkpoint, overwrite=True)

    return [
        Scene("new delta", delta, lambda: write_delta(new, delta), look_at_delta, "none", lambda: _clear(delta)),
        Scene(
            "delta replaced", delta, lambda: write_delta(new, delta, overwrite=True), look_at_delta, "old", write_old
        ),
        Scene(
            "new checkpoint",
            checkpoint,
            lambda: apply_to_checkpoint(change, source, checkpoint),
            look_at_checkpoint,
            "none",
            lambda: _clear(checkpoint),
        ),
        Scene(
            "checkpoint replaced",
            checkpoint,
            lambda: apply_to_checkpoint(change, checkpoint, checkpoint, overwrite=True),
            look_at_checkpoint,
            "old",
            copy_source,
        ),
    ]


def _holds(folder: Path, name: str) -> bool:
    """Whether a directory has a file, if it has not been cleared meanwhile."""
    return (folder / name).exists() or not folder.exists()


def write_empty(directory: Path) -> Path:
    """A delta that changes nothing."""
    path = directory / "nothing"
    return path if path.exists() else write_delta(Delta((), ELEMENTS[0] * ELEMENTS[1]), path)


def _look(held: Callable[[], str], states: dict[str, State]) -> State:
    try:
        return states[held()]
    except DeltaError as error:
        if error.reason in ("not_a_delta", "not_a_checkpoint"):
            return "none"
        raise


def put_back(scene: Scene) -> None:
    """The state before, without what kills have left, so that a writing takes the same lines each time."""
    for beside in scene.target.parent.glob(".*"):
        _clear(beside)
    scene.prepare()


def _clear(path: Path) -> None:
    """Remove a directory at one stroke for those who read it."""
    aside = path.with_name(".cleared")
    if path.exists():
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


# Killing


def lines_of(write: Callable[[], object]) -> int:
    """How many lines of refdelta's code a writing takes."""
    return _forked(lambda: _traced(write, None))


def _traced(write: Callable[[], object], kill_at: int | None) -> int:
    """Write, counting lines; ends the process by SIGKILL before line ``kill_at``."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal count
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line":
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    write()
    sys.settrace(None)
    return count


def _forked(work: Callable[[], int]) -> int:
    """The number that ``work`` gives in a child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, str(work()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return int(text)


def killed(scene: Scene, rng: random.Random, lines: int, seconds: float) -> bool:
    """Fork a writer and kill it; whether it was still running."""
    at_line = rng.random() < 0.6
    first = rng.choice([1, max(1, lines - 60)])  # the target appears close to the end
    kill_at = rng.randrange(first, lines + 1) if at_line else None
    child = os.fork()
    if not child:
        try:
            _traced(scene.write, kill_at) if at_line else scene.write()
        finally:
            os._exit(0)
    if not at_line:
        time.sleep(rng.random() * 1.2 * seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def watching(scene: Scene) -> Iterator[Counter[str]]:
    """Start a reader that looks again and again; stop it at the next step, and give what it saw."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        seen: Counter[str] = Counter()
        while not stop:
            try:
                seen[scene.look()] += 1
            except BaseException as error:
                seen[f"FAILED {type(error).__name__}: {error}"[:200]] += 1
        os.write(writing, json.dumps(seen).encode())
        os._exit(0)
    os.close(writing)
    yield Counter()
    os.kill(child, signal.SIGTERM)
    with os.fdopen(reading) as pipe:
        found: dict[str, int] = json.loads(pipe.read())
    os.waitpid(child, 0)
    yield Counter(found)


def run(kills: int, seed: int, directory: Path) -> Tally:
    """Kill that many writers, of each kind in turn."""
    torch.set_num_threads(1)  # forks hold no other threads
    rng, tally = random.Random(seed), Tally()
    for number, scene in enumerate(scenes(directory)):
        scene.prepare()
        lines = lines_of(scene.write)
        scene.prepare()
        start = time.perf_counter()
        scene.write()
        seconds = time.perf_counter() - start
        reader = watching(scene)
        next(reader)
        quota = tally.kills + kills // 4 + (number < kills % 4)
        while tally.kills < quota:
            put_back(scene)
            tally.attempts += 1
            tally.kills += killed(scene, rng, lines, seconds)
            _judge(scene, tally)
        for state, count in next(reader).items():
            tally.seen[f"{scene.name}: {state}"] += count
            if state not in (scene.before, "new"):
                tally.failures.append(f"{scene.name}: a reader saw {state} {count} times")
    return tally


def _judge(scene: Scene, tally: Tally) -> None:
    try:
        state = scene.look()
    except Exception as error:
        tally.failures.append(f"{scene.name}: neither old nor new: {type(error).__name__}: {error}")
        return
    tally.left[f"{scene.name}: {state}"] += 1
    if state not in (scene.before, "new"):
        tally.failures.append(f"{scene.name}: {scene.before} before, {state} after")
    for beside in scene.target.parent.iterdir():
        if beside != scene.target and _is_taken(beside):
            tally.failures.append(f"{scene.name}: what a kill left is taken for a delta or checkpoint: {beside}")


def _is_taken(path: Path) -> bool:
    for reader in (read_delta, Checkpoint):
        try:
            reader(path)
        except DeltaError:
            continue
        return True
    return False


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where to write; by default the system's temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        tally = run(options.kills, options.seed, Path(directory))
    print(f"{tally.kills} of {tally.attempts} writers killed (the others were done), {len(tally.failures)} failures")
    print("left: " + ", ".join(f"{what} {count}" for what, count in sorted(tally.left.items())))
    print("seen by readers: " + ", ".join(f"{what} {count}" for what, count in sorted(tally.seen.items())))
    print(*tally.failures[:20], sep="\n")
    raise SystemExit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
