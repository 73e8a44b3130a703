"""Speed of the codec, beside `torch.equal` on the same bytes in the same run.

One bf16 state of several tensors, a share of its elements changed. Every step is timed several times and the fastest
counts; rates are bytes of one state per second. The goal for `diff` is the speed of `torch.equal` on two equal integer
tensors of that size: the ratio in the last column is time over its time. Nothing here is asserted anywhere.

    python benchmarks/codec.py [--mib 512] [--density 1.0] [--threads N] [--json]

With ``--sizes`` it measures bytes instead of time: the files of a whole state beside those of a delta, at several
densities. README.md shows that table, and a test measures its ratios again.

    python benchmarks/codec.py --sizes [--mib 512] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from refdelta.apply import apply_delta, read_delta
from refdelta.digest import roll_digest, state_digest
from refdelta.encode import DeltaEncoder, diff, write_delta
from refdelta.spec import Delta

COLUMNS = 4096
TENSORS = 8
REPEATS = 5
DENSITIES = (0.1, 1.0, 2.5, 10.0, 30.0)
"""Changed elements in percent, for ``--sizes``: settled RL steps lie near 1, first steps near 10; 33.3 breaks even."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One step."""

    step: str
    seconds: float
    gib_per_s: float
    """GiB of one state per second."""
    ratio: float
    """Seconds over those of torch.equal."""


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes on disk at one density."""

    density_pct: float
    changed: int
    full: int
    """Bytes of the whole state as one safetensors file."""
    delta: int
    """Bytes of both files of the delta."""
    ratio: float
    """``full`` over ``delta``."""


def make(mib: int, density_pct: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two states of random bits; at evenly spread random positions the lowest bit of the second differs."""
    rng = np.random.default_rng(3)
    rows = mib * 2**20 // 2 // COLUMNS // TENSORS
    base, target = {}, {}
    for number in range(TENSORS):
        raw = rng.integers(0, 2**16, rows * COLUMNS, dtype=np.uint16)
        other = raw ^ (rng.random(len(raw), dtype=np.float32) < density_pct / 100)
        name = f"model.layers.{number}.weight"
        base[name], target[name] = (
            torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).view(rows, COLUMNS) for x in (raw, other)
        )
    return base, target


def fastest(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest of several runs; the first one warms up and does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure(mib: int, density_pct: float, directory: Path) -> list[Measured]:
    """Every step of the codec on one pair of states."""
    base, target = make(mib, density_pct)
    integers = [(t.view(torch.int16), t.view(torch.int16).clone()) for t in base.values()]
    delta, encoder = diff(base, target), DeltaEncoder(base)
    weights = {name: t.clone() for name, t in base.items()}
    inverse, digest = apply_delta(delta, weights), state_digest(base)
    write_delta(delta, directory / "read")
    steps: dict[str, Callable[[], object]] = {
        "torch.equal, int16": lambda: all(torch.equal(a, b) for a, b in integers),
        "diff": lambda: diff(base, target),
        "diff of equal states": lambda: diff(base, base),
        "DeltaEncoder.encode": lambda: encoder.encode(target),
        "apply_delta, there and back": lambda: (apply_delta(inverse, weights), apply_delta(delta, weights)),
        "state_digest": lambda: state_digest(base),
        "roll_digest": lambda: [
            roll_digest(digest, new, old.values) for new, old in zip(delta.patches, inverse.patches, strict=True)
        ],
        "write_delta": lambda: _write(delta, directory / "write"),
        "read_delta": lambda: read_delta(directory / "read"),
    }
    size = sum(t.nbytes for t in base.values())
    seconds = {step: fastest(work) for step, work in steps.items()}
    reference = next(iter(seconds.values()))
    return [Measured(step, s, size / s / 2**30, s / reference) for step, s in seconds.items()]


def size(mib: int, density_pct: float, directory: Path) -> Size:
    """Write a whole state and a delta to disk and count their bytes."""
    base, target = make(mib, density_pct)
    delta = diff(base, target)
    save_file(target, directory / "full.safetensors")
    _write(delta, directory / "delta")
    full = (directory / "full.safetensors").stat().st_size
    sparse = sum(file.stat().st_size for file in (directory / "delta").iterdir())
    return Size(density_pct, delta.changed_elements, full, sparse, full / sparse)


def _write(delta: Delta, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    write_delta(delta, path)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of one state")
    parser.add_argument("--density", type=float, default=1.0, help="changed elements, in percent")
    parser.add_argument("--threads", type=int, help="threads of torch; by default its own choice")
    parser.add_argument("--sizes", action="store_true", help="bytes on disk at several densities, and no times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    where = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    head: dict[str, object] = {**where, "threads": torch.get_num_threads(), "mib": options.mib}
    with tempfile.TemporaryDirectory() as directory:
        if options.sizes:
            report(head, [size(options.mib, density, Path(directory)) for density in DENSITIES], options.json)
        else:
            head["density_pct"] = options.density
            report(head, measure(options.mib, options.density, Path(directory)), options.json)


def report(head: dict[str, object], rows: Sequence[Measured | Size], as_json: bool) -> None:
    """Print what was measured, under what it was measured with."""
    if as_json:
        json.dump({**head, "steps": [asdict(row) for row in rows]}, sys.stdout, indent=2)
        print()
        return
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    names = [field.name for field in fields(rows[0])]
    print("".join(f"{name:>30}" if name == "step" else f"{name:>14}" for name in names))
    for row in rows:
        values = asdict(row)
        print("".join(_cell(values[name]) for name in names))


def _cell(value: object) -> str:
    if isinstance(value, str):
        return f"{value:>30}"
    return f"{value:14.4f}" if isinstance(value, float) else f"{value:14,}"


if __name__ == "__main__":
    main()
