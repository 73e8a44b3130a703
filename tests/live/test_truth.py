"""Truths are sound (a forked fresh engine equals one that forked nothing), and hosts leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.inputs import checkpoints
from conformance.live import judge
from conformance.live.runner import START_TIMEOUT, Host, HostDied, HostError, environment, start_arguments
from conformance.live.truth import Truths


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("model", "tp"), [("gemma4-text", 1), ("qwen3-untied", 2)])
def test_forked_engine_equals_a_plain_one(model: str, tp: int, tmp_path: Path) -> None:
    """Bits, aliases, tokens and log-probabilities, on every rank."""
    checkpoint = checkpoints.make(model, tmp_path / "base")
    truths = Truths(tmp_path)
    try:
        (forked,), plain = truths.of([checkpoint], tp), truths.plain(checkpoint, tp)
    finally:
        truths.close()
    assert [dump.rank for dump in forked.dumps] == list(range(tp))
    assert judge.compare(model, plain.dumps, forked.dumps) == []
    assert judge.compare_outputs(model, plain.outputs, forked.outputs) == []
    assert judge.finite(plain.outputs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("unpack", [False, True])
def test_packed_layers_are_seen(unpack: bool, tmp_path: Path) -> None:
    """Without the switch vLLM's CPU layers read packed copies, and the probe says which."""
    checkpoint = checkpoints.make("qwen3-tied", tmp_path / "base")
    with Host(environment(plugins="", unpack=unpack), tmp_path / "log") as host:
        host.start(checkpoint)
        (packed,) = host.call("packed_layers")
    layers = {"model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens"}
    assert layers.isdisjoint(packed) if unpack else layers <= set(packed)


@pytest.mark.timeout(300)
def test_a_killed_zygote_takes_its_children_along(tmp_path: Path) -> None:
    checkpoint = checkpoints.make("qwen3-tied", tmp_path / "base")
    start = start_arguments(checkpoint)
    outs = [tmp_path / f"out{number}" for number in range(20)]
    for out in outs:
        out.mkdir()
    jobs = [{"start": start, "prompts": [], "out": str(out)} for out in outs]
    host = Host(environment(plugins="", unpack=True), tmp_path / "log")
    try:
        host.call("warm", timeout=START_TIMEOUT)
        with pytest.raises(HostDied):
            host.call("forked_truths", timeout=0.3, jobs=jobs, at_once=1, limit_s=60.0)
    finally:
        host.kill()
    deadline = time.monotonic() + 10
    while (left := list(writers(tmp_path / "log"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert not (outs[-1] / "outputs.json").exists(), "a child went on without its zygote, or all were done before"


def writers(log: Path) -> Iterator[str]:
    """Processes whose standard output is ``log``."""
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if output.readlink() == log:
                yield output.parts[2]


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(120)
def test_a_late_answer_ends_the_host(tmp_path: Path) -> None:
    with Host(environment(plugins=""), tmp_path / "log", plain=True) as host:
        with pytest.raises(HostError, match="nothing_like_it"):
            host.call("nothing_like_it")
        began = time.monotonic()
        with pytest.raises(HostDied, match="warm: TimedOut"):
            host.call("warm", timeout=0.2)
        assert time.monotonic() - began < 10
        assert not alive(host.pid)


@pytest.mark.timeout(300)
def test_a_truth_that_cannot_start_says_so(tmp_path: Path) -> None:
    """An unreadable checkpoint is an error of the suite, never a truth."""
    checkpoint = checkpoints.make("qwen3-tied", tmp_path / "base")
    (checkpoint.directory / "model.safetensors").write_bytes(b"no tensors")
    truths = Truths(tmp_path)
    try:
        with pytest.raises(HostError, match="ended with status 1"):
            truths.of([checkpoint], 1)
    finally:
        truths.close()
