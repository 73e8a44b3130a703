"""The truth of a checkpoint: what a freshly started engine holds and answers, without refdelta's plugin.

A host that has imported vLLM forks a child for every truth, which then starts an engine of its own from the files. A
fork carries no engine state: that host never builds one, and `tests/live/test_truth.py` compares a forked engine with a
plain one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..inputs.checkpoints import Checkpoint, content_digest
from .engine import Output
from .judge import RankDump, read_dumps
from .runner import START_TIMEOUT, Host, HostTimedOut, environment, start_arguments
from .setup import PLAIN, Setup

KEEP_BYTES = 1 << 30
"""Truths on disk beyond this many bytes are dropped, the oldest first; the tiny models never reach it."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The directory that a fresh engine wrote."""

    directory: Path

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.directory.iterdir())

    @property
    def dumps(self) -> list[RankDump]:
        """Parameters and buffers of every rank."""
        return read_dumps(self.directory)

    @property
    def outputs(self) -> list[Output]:
        """Tokens and log-probabilities for the fixed prompts; JSON keeps every bit of a finite number."""
        parsed: list[Output] = json.loads((self.directory / "outputs.json").read_text())
        return [output | {k: _pairs(output[k]) for k in ("logprobs", "prompt_logprobs")} for output in parsed]


def _pairs(positions: Sequence[Any]) -> list[list[tuple[int, float]]]:
    return [[(int(token), float(value)) for token, value in entry] for entry in positions]


def prompts(vocab_size: int) -> list[list[int]]:
    """Three fixed prompts that reach over the vocabulary; the longest passes the sliding window of the tiny models."""
    return [
        [(start + 7 * i * i) % vocab_size for i in range(length)] for start, length in ((3, 14), (101, 29), (57, 5))
    ]


class Truths:
    """Fresh engines of one set-up on demand, remembered by checkpoint bytes, tp and overrides while it is open."""

    def __init__(self, root: Path, setup: Setup = PLAIN) -> None:
        self._root, self._setup = root, setup
        root.mkdir(exist_ok=True)
        self._known: OrderedDict[tuple[str, int, str], Truth] = OrderedDict()
        # vLLM is imported from now on, while the engine under test starts.
        self._zygote = Host(self._environment, root / "zygote.log")
        self.asked = 0
        """How many engines were started."""

    def of(self, wanted: Sequence[Checkpoint], tp: int) -> list[Truth]:
        """The truths of checkpoints at tensor-parallel size ``tp``; several fresh engines run at once."""
        keys = [self._key(checkpoint, tp) for checkpoint in wanted]
        missing = {key: checkpoint for key, checkpoint in zip(keys, wanted, strict=True) if key not in self._known}
        jobs = {key: self._job(checkpoint, tp) for key, checkpoint in missing.items()}
        if jobs:
            self._fork(list(jobs.values()), tp)
        self._known.update((key, Truth(Path(job["out"]))) for key, job in jobs.items())
        found = [self._known[key] for key in keys]
        for key in keys:
            self._known.move_to_end(key)
        self._drop_oldest(len(keys))
        return found

    def plain(self, checkpoint: Checkpoint, tp: int) -> Truth:
        """The same from a child that forks nothing, not remembered."""
        with Host(self._environment, self._root / "plain.log", plain=True) as host:
            job = self._job(checkpoint, tp)
            host.call("plain_truth", timeout=START_TIMEOUT, **job)
        return Truth(Path(job["out"]))

    @property
    def _environment(self) -> dict[str, str]:
        return environment(plugins="", unpack=True) | self._setup.variables(self._root)

    def close(self) -> None:
        """End the zygote."""
        self._zygote.kill()

    def _fork(self, jobs: list[dict[str, Any]], tp: int) -> None:
        at_once = max(1, (os.cpu_count() or 1) // tp)
        timeout = START_TIMEOUT * len(jobs)
        try:
            self._zygote.call("forked_truths", timeout=timeout, jobs=jobs, at_once=at_once, limit_s=START_TIMEOUT)
        except HostTimedOut:
            self._zygote = Host(self._environment, self._root / "zygote.log")
            raise

    @staticmethod
    def _key(checkpoint: Checkpoint, tp: int) -> tuple[str, int, str]:
        overrides = json.dumps(dict(checkpoint.hf_overrides), sort_keys=True)
        return content_digest(checkpoint.directory), tp, overrides

    def _job(self, checkpoint: Checkpoint, tp: int) -> dict[str, Any]:
        self.asked += 1
        out = self._root / f"truth{self.asked}"
        out.mkdir()
        start = start_arguments(checkpoint, tp, **self._setup.arguments)
        adapter = self._setup.adapter and str(self._setup.adapter)
        return {"start": start, "prompts": prompts(checkpoint.vocab_size), "out": str(out), "adapter": adapter}

    def _drop_oldest(self, in_use: int) -> None:
        while len(self._known) > in_use and sum(truth.size for truth in self._known.values()) > KEEP_BYTES:
            _, oldest = self._known.popitem(last=False)
            shutil.rmtree(oldest.directory)
