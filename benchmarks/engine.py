"""What an update costs in a live engine, against the number of changed elements, at two model sizes.

Two Qwen3 checkpoints of random weights are served one after the other by vLLM in this process, with the
``delta_snapshot`` backend. Each delta changes a given number of elements, spread evenly over all tensors; its phases
are those that the backend measures (`refdelta_status`). The baseline is an anchor in the same engine: the whole
checkpoint through the same backend. ``write`` and ``prepare`` follow the change, and ``audit`` its budget.

    python benchmarks/engine.py [--changes 1000 10000 100000 1000000] [--repeats 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES = {"small": (256, 704, 4), "large": (1024, 2816, 10)}
"""Name -> hidden size, intermediate size, layers."""
VOCABULARY = 8000
PHASES = ("read", "stage", "prepare", "write", "audit")


@dataclass(frozen=True, slots=True)
class Measured:
    """One row: medians of the repeats, in milliseconds."""

    model: str
    parameters: int
    changed: int
    read: float
    stage: float
    prepare: float
    write: float
    audit: float
    against_anchor: float
    """Seconds of all phases over those of an anchor in the same engine."""


def make(name: str, directory: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of random weights and return its state."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, inner, layers = SIZES[name]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="100GB")
    (weights,) = directory.glob("*.safetensors")
    state = load_file(weights)
    for tensor in state.values():
        tensor.copy_(torch.randn(tensor.shape) * 0.02)
    save_file(state, weights, metadata={"format": "pt"})
    return state


def serve(directory: Path) -> Any:
    """An ``LLM`` with the backend."""
    from vllm import LLM

    return LLM(
        model=str(directory),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        weight_transfer_config={"backend": "delta_snapshot"},
    )


def update(llm: Any, path: Path) -> dict[str, float]:
    """One update; seconds of each phase."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"target_weights_path": str(path)}})
    llm.finish_weight_update()
    (status,) = llm.collective_rpc("refdelta_status")
    seconds: dict[str, float] = status["last_update"]["seconds"]
    return seconds


def changed(state: dict[str, torch.Tensor], count: int, turn: int) -> dict[str, torch.Tensor]:
    """``count`` elements flipped in their lowest bit, evenly over the tensors."""
    total, after = sum(tensor.numel() for tensor in state.values()), {}
    for name, tensor in state.items():
        share = max(1, round(count * tensor.numel() / total))
        stride = max(1, tensor.numel() // share)
        after[name] = tensor.clone()
        after[name].view(torch.int16).view(-1)[turn % stride :: stride] ^= 1
    return after


def rows(name: str, counts: list[int], repeats: int) -> Iterator[Measured]:
    """The rows of one model."""
    from refdelta import DeltaEncoder, write_delta

    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        state = make(name, base)
        parameters = sum(tensor.numel() for tensor in state.values())
        llm = serve(base)
        anchor = statistics.median(sum(update(llm, base).values()) for _ in range(3))
        encoder = DeltaEncoder(state, run_id="bench")
        for count in (count for count in counts if count <= parameters):
            found = []
            for turn in range(repeats):
                state = changed(state, count, turn)
                delta = encoder.encode(state)
                path = write_delta(delta, Path(scratch) / f"delta{count}-{turn}")
                found.append(update(llm, path))
                encoder.commit(delta)
            phases = {phase: statistics.median(seconds[phase] for seconds in found) for phase in PHASES}
            milliseconds = {phase: round(1000 * seconds, 3) for phase, seconds in phases.items()}
            whole = sum(phases.values()) / anchor
            yield Measured(name, parameters, delta.changed_elements, **milliseconds, against_anchor=round(whole, 4))
        del llm


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--changes", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [row for name in SIZES for row in rows(name, options.changes, options.repeats)]
    if options.json:
        print(json.dumps([asdict(row) for row in found]))
        return
    print("model   parameters    changed   read ms  stage ms  prepare ms  write ms  audit ms  of an anchor")
    for row in found:
        print(
            f"{row.model:6} {row.parameters:11,} {row.changed:10,} {row.read:9.2f} {row.stage:9.2f} {row.prepare:11.2f}"
            f" {row.write:9.2f} {row.audit:9.2f} {row.against_anchor:13.3f}"
        )


if __name__ == "__main__":
    main()
