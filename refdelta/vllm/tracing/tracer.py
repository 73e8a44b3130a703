"""Layouts traced from a config, in a process of their own: `Tracer` talks to `refdelta.vllm.tracing.child`.

Nothing of vLLM's or torch's distributed state reaches the calling process, which imports neither.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from refdelta.checkpoints.model_files import ModelFiles
from refdelta.layout.families import table_of
from refdelta.layout.families.config import dtype_of
from refdelta.layout.map import LayoutMap
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.tracing.meta_engine import ENVIRONMENT, Sizes

__all__ = ["Traced", "Tracer", "trace_config", "trace_config_ranks"]

START_SECONDS = 300.0
REPLY_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Traced:
    """One rank's traced layout and what it took."""

    rank: int
    layout: LayoutMap
    seconds: float
    """To build the model and trace its loader."""
    peak_mib: float
    """The process's highest memory since the request began, in MiB (Linux)."""


def trace_config(
    config_dir: str | Path,
    *,
    tp_size: int = 1,
    tp_rank: int = 0,
    expert_parallel: bool = False,
    pp_size: int = 1,
    pp_rank: int = 0,
    architecture: str | None = None,
) -> LayoutMap:
    """vLLM's own layout of one rank, from a config alone: meta device, no weights, in a child process.

    Args:
        config_dir: a directory with a config.json, or that file. Safetensors files beside it say what the checkpoint
            holds; without them, the rules of the family do (`refdelta.layout_map.layout_from_config`).
        tp_size, tp_rank: tensor parallelism.
        expert_parallel: deal whole experts out to the tensor-parallel ranks, as vLLM's ``--enable-expert-parallel``.
        pp_size, pp_rank: pipeline parallelism.
        architecture: vLLM's model class; by default a multimodal Gemma 4 config is served as its text model.

    Raises `DeltaError`: ``unsupported_engine`` where vLLM refuses the config or size, or its loader does more than copy
    boxes; ``unreadable`` where there is no config.
    """
    files, sizes = ModelFiles.read(config_dir), Sizes(tp_size, pp_size, expert_parallel)
    with Tracer() as tracer:
        (traced,) = tracer.trace(files, sizes, [pp_rank * tp_size + tp_rank], architecture)
        return traced.layout


def trace_config_ranks(
    config_dir: str | Path,
    *,
    tp_size: int = 1,
    ranks: Sequence[int] | None = None,
    expert_parallel: bool = False,
    pp_size: int = 1,
    architecture: str | None = None,
) -> list[LayoutMap]:
    """`trace_config` for several ranks (default: all), in one child process. Rank = pp_rank * tp_size + tp_rank."""
    files, sizes = ModelFiles.read(config_dir), Sizes(tp_size, pp_size, expert_parallel)
    with Tracer() as tracer:
        return [traced.layout for traced in tracer.trace(files, sizes, ranks, architecture)]


class Tracer:
    """A process that traces layouts, for as long as the context is open. After an error of vLLM it can go on."""

    def __init__(
        self,
        *,
        start_seconds: float = START_SECONDS,
        reply_seconds: float = REPLY_SECONDS,
        python_path: Sequence[Path] = (),
    ) -> None:
        """``python_path``: further places where the process finds modules, after those of the caller."""
        self._reply_seconds = reply_seconds
        # The process outlives this call, and so does its log.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-m", "refdelta.vllm.tracing.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(python_path),
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self._child.stdout, self._lines), daemon=True).start()
        try:
            self.vllm_version = str(self._reply(start_seconds)["ready"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and whatever it started."""
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()

    def trace(
        self,
        files: ModelFiles,
        sizes: Sizes,
        ranks: Iterable[int] | None = None,
        architecture: str | None = None,
    ) -> Iterator[Traced]:
        """The layout of each rank (default: all), one after the other. Take all of them before the next call."""
        world = sizes.tp_size * sizes.pp_size
        wanted = list(range(world)) if ranks is None else list(ranks)
        if any(not 0 <= rank < world for rank in wanted):
            raise DeltaError(Reason.UNSUPPORTED_ENGINE, f"layout: ranks {wanted} of an engine of {world}")
        self._ask(_request(files, sizes, wanted, architecture))
        while "rank" in (reply := self._reply(self._reply_seconds)):
            layout = LayoutMap.from_json(self._line(self._reply_seconds))
            yield Traced(reply["rank"], layout, reply["seconds"], reply["peak_mib"])

    def _ask(self, request: Mapping[str, object]) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
        except OSError as error:
            raise self._dead() from error

    def _reply(self, seconds: float) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._line(seconds))
        if "error" in reply:
            raise DeltaError.parse(reply["error"]) or DeltaError(Reason.UNSUPPORTED_ENGINE, reply["error"])
        return reply

    def _line(self, seconds: float) -> str:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise DeltaError(
                Reason.UNSUPPORTED_ENGINE, f"layout: the tracing process gave no answer within {seconds:.0f} s"
            ) from None
        if not line:
            raise self._dead()
        return line

    def _dead(self) -> DeltaError:
        code = self._child.wait()
        self._log.seek(0)
        last = [line.strip() for line in self._log if line.strip()][-1:]
        return DeltaError(
            Reason.UNSUPPORTED_ENGINE, f"layout: the tracing process ended with {code}: {''.join(last)[:400]}"
        )


def _request(files: ModelFiles, sizes: Sizes, ranks: Sequence[int], architecture: str | None) -> dict[str, object]:
    tensors = files.tensors or table_of(files.config, architecture=architecture).tensors()
    return {
        "config": _served(files.config, architecture),
        "sizes": asdict(sizes),
        "dtype": _name(dtype_of(files.config, files.config.get("text_config") or {})),
        "ranks": list(ranks),
        "tensors": {name: [list(info.shape), _name(info.dtype)] for name, info in tensors.items()},
    }


def _served(config: Mapping[str, Any], architecture: str | None) -> dict[str, Any]:
    """The config as vLLM gets it, naming the class that is to serve it."""
    if architecture is None and config.get("model_type") == "gemma4":
        architecture = "Gemma4ForCausalLM"
    return {**config, "architectures": [architecture]} if architecture else dict(config)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _environment(python_path: Sequence[Path]) -> dict[str, str]:
    package = Path(__file__).resolve().parents[3]
    places = [str(package), os.environ.get("PYTHONPATH", ""), *map(str, python_path)]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, places))}


def _pump(pipe: IO[str] | None, lines: queue.SimpleQueue[str]) -> None:
    """Move lines from the pipe to the queue; an empty one marks the end."""
    assert pipe is not None
    try:
        for line in pipe:
            lines.put(line)
    except ValueError:
        pass  # closed while reading
    lines.put("")
