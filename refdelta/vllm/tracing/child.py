"""The process in which layouts are traced from a config: `python -m refdelta.vllm.tracing.child`.

One JSON request a line on standard input, until it ends. Replies go to what was standard output; whatever vLLM prints
goes to standard error. A reply is one JSON line: ``{"ready": version}`` first; then, per request, for each rank
``{"rank": r, ...}`` followed by one line with the map, and ``{"done": true}``; or ``{"error": text of a DeltaError}``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from refdelta.spec import DeltaError, Reason
from refdelta.vllm.assumptions.versions import installed_version
from refdelta.vllm.tracing.meta_engine import MetaRank, Sizes, engine_config, patch_vllm
from refdelta.vllm.tracing.recorder import trace_model

__all__ = ["main"]


def main() -> None:
    """Serve requests until standard input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    patch_vllm()
    # Maps are hundreds of thousands of small objects that live on: collecting as they come would double the time.
    gc.freeze()
    gc.disable()
    _say(replies, {"ready": installed_version()})
    for line in sys.stdin:
        try:
            _serve(json.loads(line), replies)
            _say(replies, {"done": True})
        except DeltaError as error:
            _say(replies, {"error": str(error)})
        except Exception as error:
            text = f"layout: the tracing process failed: {type(error).__name__}: {error}"
            _say(replies, {"error": str(DeltaError(Reason.UNSUPPORTED_ENGINE, text))})


def _serve(request: Mapping[str, Any], replies: TextIO) -> None:
    _forget_peak()
    sizes = Sizes(**request["sizes"])
    dtype = getattr(torch, request["dtype"])
    tensors = {name: (shape, getattr(torch, kind)) for name, (shape, kind) in request["tensors"].items()}
    with tempfile.TemporaryDirectory(prefix="refdelta-config-") as directory:
        # Only the config: what else stands in a model's directory must not decide anything here.
        (Path(directory) / "config.json").write_text(json.dumps(request["config"]), "utf-8")
        config = engine_config(Path(directory), sizes, dtype)
        for rank in request["ranks"]:
            started = time.perf_counter()
            with MetaRank(config, sizes, rank).model() as model:
                layout = trace_model(model, tensors)
            seconds = time.perf_counter() - started
            _say(replies, {"rank": rank, "seconds": seconds, "peak_mib": _peak_mib()})
            print(layout.to_json(), file=replies, flush=True)
            del model, layout
            gc.collect()


def _peak_mib() -> float:
    # Not getrusage: its peak includes the parent's, from before this program was executed.
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "utf-8")


def _say(replies: TextIO, reply: Mapping[str, object]) -> None:
    print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
