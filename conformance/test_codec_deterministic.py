"""deterministic: the same two states give byte-identical delta.safetensors, on every run and thread count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .driving.codec import Scratch, assert_same_bytes, encoded
from .driving.features import require_offered
from .driving.options import Options
from .engines.codecs import FullCodec
from .inputs import strategies
from .oracle import DELTA_FILE, State, clone

pytestmark = pytest.mark.check("deterministic")

_CHILD = """
import sys
from pathlib import Path
from conformance import oracle
from conformance.engines import codecs as engines
name, base, target, out = sys.argv[1:]
engine = engines.load(name, engines.Loading(Path.cwd(), frozenset()))
engine.encode(oracle.load_state(Path(base)), oracle.load_state(Path(target)), Path(out))
"""


def _sizeable() -> tuple[State, State]:
    """Tensors large enough for several threads, with names whose hashes order differently from run to run."""
    rng = np.random.default_rng(7)
    base, target = {}, {}
    for number in range(12):
        old = rng.integers(0, 2**16, 257 * 1031 if number < 2 else 15).astype(np.uint16) & 0xBFFF  # no NaN
        shape = (257, 1031) if number < 2 else (3, 5)
        base[f"layer.{number}"] = oracle.from_bits(old, "BF16", shape)
        target[f"layer.{number}"] = oracle.from_bits(old ^ (rng.random(old.size) < 0.05), "BF16", shape)
    return base, target


@given(st.data())
def test_twice_in_one_process(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    base, target = data.draw(strategies.pairs(codes))
    with scratch() as tmp:
        first, second = (encoded(engine, base, target, tmp / name) / DELTA_FILE for name in ("first", "second"))
        assert_same_bytes(first.read_bytes(), second.read_bytes(), "payload of the same call again")


def test_thread_counts(engine: FullCodec, scratch: Scratch) -> None:
    base, target = _sizeable()
    before, payloads = torch.get_num_threads(), {}
    try:
        with scratch() as tmp:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                engine.encode(clone(base), clone(target), tmp / str(count))
                payloads[count] = (tmp / str(count) / DELTA_FILE).read_bytes()
    finally:
        torch.set_num_threads(before)
    for count, payload in payloads.items():
        assert_same_bytes(payloads[1], payload, f"payload with {count} threads, not 1,")


def test_fresh_processes(engine: FullCodec, options: Options, scratch: Scratch) -> None:
    """Two processes whose text hashes differ: the order of a set or a clock would show."""
    require_offered(engine, *_sizeable())
    with scratch() as tmp:
        base, target = (
            oracle.save_state(tmp / f"{name}.safetensors", state)
            for name, state in zip(("base", "target"), _sizeable(), strict=True)
        )
        payloads = [_encode_in_child(options.engine, base, target, tmp / seed, seed) for seed in ("1", "2")]
    assert_same_bytes(payloads[0], payloads[1], "payload of a second process")


def _encode_in_child(engine: str, base: Path, target: Path, out: Path, seed: str) -> bytes:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", _CHILD, engine, str(base), str(target), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"encode in a process of its own failed: {done.stderr[-2000:]}"
    return (out / DELTA_FILE).read_bytes()
