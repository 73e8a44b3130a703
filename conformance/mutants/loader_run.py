"""Copies of vLLM's loader that are wrong in one place (`loaders`), and which witness sees each of them.

The engine under test loads with the copy, under refdelta's backend; the witnesses are

- ``start``: the engine, or the backend on it, does not start;
- ``live``: the suite's check `base`, against a fresh engine on vLLM's own loader;
- ``rules``: the map that the backend traced from the copy is not the one that the family's rules give;
- ``position``: what stands in the engine after it loaded a position-coded checkpoint is not what the rules say.

The last two hold where a fault is vLLM's own and every engine shares it: they never ask another engine. ``trace`` says
whether the traced map is what the position code reads, which it must be, however wrong the loader is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from refdelta.layout_map import Box, LayoutMap, TensorInfo, layout_from_config

from ..inputs import checkpoints
from ..inputs.checkpoints import Checkpoint
from ..live import host, judge, probe
from ..live.engine import Engine
from ..live.position_code import Code, Numbers, read
from ..live.runner import environment
from ..live.truth import Truths
from .loaders import BY_NAME, EDITS, Edit, install

MODEL, TP = "qwen3-untied", 2
STORED = Path(__file__).with_name("loaders.json")
WITNESSES = ("start", "live", "rules", "position")
_CAUSE = re.compile(r"(?:refdelta\[|ValueError: |AssertionError: |RuntimeError: (?!Engine core|Worker)).*")
"""How the log of an engine that did not start says why; the last one counts."""
Findings = dict[str, str]
"""Witness -> what it said; absent where it saw nothing."""


def numbers_of(layout: LayoutMap, code: Code) -> dict[str, Numbers]:
    """What the parameters hold according to a map, right after loading; an element written twice fails."""
    held = {name: np.zeros(info.numel, np.int64) for name, info in layout.params.items()}
    for region in layout.regions:
        target = _view(held[region.param], region.param_box)
        assert not target.any(), f"{region.source} writes into {region.param} where another tensor did"
        target[...] = _view(code.numbers(region.source), region.source_box)
    return held


def _view(flat: Numbers, box: Box) -> Numbers:
    strides = [8 * stride for stride in box.strides]
    return np.lib.stride_tricks.as_strided(flat[box.offset :], box.shape, strides)


def run(wanted: Sequence[Edit] = EDITS) -> dict[str, Findings]:
    """What each witness says of each copy, and of vLLM's own loader under the name ``unchanged``."""
    with tempfile.TemporaryDirectory(prefix="loaders-") as scratch:
        root = Path(scratch)
        checkpoint = checkpoints.make(MODEL, root / "base")
        code = Code.of(checkpoints.load(checkpoint.directory))
        digits = code.checkpoints(checkpoint.directory, root)
        (root / "truth").mkdir()
        truths = Truths(root / "truth")
        outs = {name: root / name for name in ["unchanged", *(edit.name for edit in wanted)]}
        try:
            (truth,) = truths.of([checkpoint], TP)
            jobs = {"names": list(outs), "root": scratch, "checkpoint": str(checkpoint.directory), "digits": digits}
            _load_all(json.dumps(jobs, default=str), root / "engines.log")
            return {name: _judged(out, truth.dumps, checkpoint, code, len(digits)) for name, out in outs.items()}
        finally:
            truths.close()


def _load_all(jobs: str, log: Path) -> None:
    """A child that imports vLLM once, and forks one engine after another."""
    command = [sys.executable, "-m", "conformance.mutants.loader_run", jobs]
    env = environment(plugins="refdelta")
    with log.open("ab") as output:
        done = subprocess.run(command, env=env, stdout=output, stderr=output, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"the engines' process ended with {done.returncode}: {log.read_text()[-2000:]}")


def _judged(out: Path, truth: Sequence[judge.RankDump], checkpoint: Checkpoint, code: Code, digits: int) -> Findings:
    """What the witnesses say of the engine that wrote ``out``."""
    refused = out / "refused.txt"
    if refused.exists():
        said = _CAUSE.findall((out / "log").read_text(errors="replace"))
        return {"start": _short(said[-1] if said else refused.read_text())}
    found: Findings = {}
    if differing := judge.compare(MODEL, truth, judge.read_dumps(out / "loaded")):
        found["live"] = _short(str(differing[0]))
    readings = read([judge.read_dumps(out / f"digit{digit}") for digit in range(digits)])
    for rank, reading in enumerate(readings):
        rules = numbers_of(_rules(checkpoint, rank), code)
        traced = LayoutMap.from_json((out / f"layout{rank}.json").read_text())
        _add(found, "position", reading.difference(rules, code), rank)
        try:
            held = numbers_of(traced, code)
        except AssertionError as error:  # one element written twice
            _add(found, "rules", [str(error)], rank)
            continue
        wrong = [name for name, wanted in rules.items() if not np.array_equal(held.get(name, ()), wanted)]
        _add(found, "rules", [f"{name}: the trace is not what the rules say" for name in wrong], rank)
        _add(found, "trace", [line for line in reading.difference(held, code) if "unread" not in line], rank)
    return found


def _add(found: Findings, witness: str, lines: Sequence[str], rank: int) -> None:
    if lines:
        found.setdefault(witness, _short(f"rank {rank}: {lines[0]}"))


def _short(text: str) -> str:
    return " ".join(text.split())[:240]


def _rules(checkpoint: Checkpoint, rank: int) -> LayoutMap:
    state = checkpoints.load(checkpoint.directory)
    tensors = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    return layout_from_config(checkpoint.config, tp_size=TP, tp_rank=rank, tensors=tensors)


# --- in the process of the engines ------------------------------------------------------------------------------------


def _fork_all(jobs: dict[str, Any]) -> None:
    """Fork a child for each name, which loads with that copy, and wait for it."""
    Engine.import_vllm()
    for name in jobs["names"]:
        (Path(jobs["root"]) / name).mkdir()
        child = host.fork(partial(_in_child, name, jobs["checkpoint"], jobs["digits"], Path(jobs["root"]) / name))
        _, status = os.waitpid(child, 0)
        host.kill_group(child)
        if os.waitstatus_to_exitcode(status) != 0:
            raise RuntimeError(f"{name}: its process ended with status {status}")


def _in_child(edit: str, checkpoint: str, digits: list[str], out: Path) -> None:
    with (out / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if edit in BY_NAME:
        install(BY_NAME[edit])
    engine = Engine(worker_start="fork")
    try:
        engine.start(checkpoint, TP, backend="delta_snapshot")
    except Exception as error:
        (out / "refused.txt").write_text(f"{type(error).__name__}: {error}")
        return
    _read_all(engine, checkpoint, digits, out)


def _read_all(engine: Engine, checkpoint: str, digits: Sequence[str], out: Path) -> None:
    (out / "loaded").mkdir()
    engine.dump(str(out / "loaded"))
    engine.rpc("loader_layout", [checkpoint, str(out)])
    for number, directory in enumerate(digits):
        (out / f"digit{number}").mkdir()
        engine.load(directory, str(next(Path(directory).glob("*.safetensors"))))
        engine.dump(str(out / f"digit{number}"))


def _layout(self: probe.Probe, checkpoint: str, out: str) -> None:
    """Write what the backend would trace on this rank."""
    from refdelta.checkpoints.reading import Checkpoint as Files
    from refdelta.vllm.tracing.recorder import trace_model

    with Files(checkpoint) as files:
        tensors: dict[str, Any] = {name: (info.shape, info.dtype) for name, info in files.infos().items()}
    traced = trace_model(self.model_runner.get_model(), tensors)
    (Path(out) / f"layout{self.rank}.json").write_text(traced.to_json())


setattr(probe.Probe, "loader_layout", _layout)  # noqa: B010  # a method of every worker


def main() -> int:
    """Run all, store what was found, and say what nothing saw."""
    found = run()
    STORED.write_text(json.dumps(found, indent=1) + "\n")
    for name, findings in found.items():
        print(f"{name}: {'; '.join(f'{witness}: {said}' for witness, said in findings.items()) or 'nothing'}")
    missed = [name for name, findings in found.items() if bool(findings) == (name == "unchanged")]
    return 1 if missed else 0


if __name__ == "__main__":
    # Workers know this module by its name; the program must not be another one.
    from . import loader_run

    if len(sys.argv) > 1:
        loader_run._fork_all(json.loads(sys.argv[1]))
    else:
        sys.exit(loader_run.main())
