"""Print the peak memory of `refdelta diff`, `apply`, `verify` and `compose` on large checkpoints; hold it to its bound.

The bound is one tensor (the largest) plus the delta plus 256 MiB, which has to hold the interpreter and torch as well.
For compose the deltas count that it is given: there, and back.
Peaks are the process's own high-water mark of resident memory, file mappings included. Exit 1 where one is above the
bound or a result is wrong.

    python scripts/memory_bound.py [--mib 2048] [--density 1.0] [--directory DIR]
"""

from __future__ import annotations

import argparse
import filecmp
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BUDGET_MIB = 256
COLUMNS = 2048
SHARDS = 4
CHILD = """
import sys
from refdelta.cli import run
code = run(sys.argv[1:])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(f"peak_kib={peak}", file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True, slots=True)
class Made:
    """Two checkpoints of bf16 tensors, equal but for some elements."""

    base: Path
    target: Path
    largest_bytes: int
    changed: int


def make(directory: Path, mib: int, density_pct: float) -> Made:
    """Shards with an index: one tensor of a quarter of all bytes, the rest in tensors of a 64th; random bits."""
    rows = mib * 2**20 // 2 // COLUMNS
    shapes = {"model.embed_tokens.weight": (rows // 4, COLUMNS)}
    shapes |= {f"model.layers.{i}.mlp.weight": (rows // 64, COLUMNS) for i in range(48)}
    rng, names, changed = np.random.default_rng(5), list(shapes), 0
    folders = [directory / "base", directory / "target"]
    weight_map: dict[str, str] = {}
    for folder in folders:
        folder.mkdir()
    for shard in range(SHARDS):
        file_name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        held = {name: shapes[name] for name in names[shard::SHARDS]}
        weight_map |= dict.fromkeys(held, file_name)
        changed += _write_shards([folder / file_name for folder in folders], held, rng, density_pct)
    for folder in folders:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (folder / "config.json").write_text("{}")
    return Made(folders[0], folders[1], 2 * COLUMNS * shapes[names[0]][0], changed)


def _write_shards(
    paths: list[Path], held: dict[str, tuple[int, int]], rng: np.random.Generator, density_pct: float
) -> int:
    header, at, changed = {}, 0, 0
    for name, shape in held.items():
        end = at + 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with paths[0].open("wb") as base, paths[1].open("wb") as target:
        for file in (base, target):
            file.write(len(text).to_bytes(8, "little") + text)
        for rows, columns in held.values():
            for start in range(0, rows, 2048):
                run = rng.integers(0, 2**16, min(2048, rows - start) * columns, dtype=np.uint16)
                base.write(run.data)
                flips = rng.random(len(run), dtype=np.float32) < density_pct / 100
                run ^= flips
                target.write(run.data)
                changed += int(flips.sum())
    return changed


def peak_mib(*arguments: str | Path) -> float:
    """Run the command in a process of its own; what its memory came to."""
    done = subprocess.run([sys.executable, "-c", CHILD, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"refdelta {arguments[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return int(done.stderr.rsplit("peak_kib=", 1)[1]) / 1024


def same_files(a: Path, b: Path) -> bool:
    """Whether two directories hold files of the same names and bytes."""
    names = sorted(path.name for path in a.iterdir())
    return names == sorted(path.name for path in b.iterdir()) and not any(filecmp.cmpfiles(a, b, names, False)[1:])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048, help="size of each checkpoint")
    parser.add_argument("--density", type=float, default=1.0, help="changed elements, in percent")
    parser.add_argument("--directory", type=Path, help="where to make them; by default the system's temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        if not measure(Path(directory), options.mib, options.density):
            raise SystemExit(1)


def measure(directory: Path, mib: int, density_pct: float) -> bool:
    """Print one line per command; whether all held."""
    made = make(directory, mib, density_pct)
    delta, back, both, out = (directory / name for name in ("delta", "back", "both", "out"))
    delta_bytes = 6 * made.changed
    print(f"two checkpoints of {mib} MiB; {made.changed:,} elements differ ({density_pct} %)")
    held = True
    for arguments in (
        ("diff", made.base, made.target, "-o", delta, "--run-id", "run", "--version", "1"),
        ("apply", delta, made.base, "-o", out),
        ("verify", delta, "--base", made.base, "--target", made.target),
        ("diff", made.target, made.base, "-o", back, "--run-id", "run", "--version", "2"),
        ("compose", delta, back, "-o", both),
    ):
        held &= _within(arguments, made.largest_bytes, delta_bytes * (2 if arguments[0] == "compose" else 1))
    if json.loads((both / "metadata.json").read_text())["changed_elements"] != made.changed:
        print("compose did not keep the positions of both")
        return False
    if not same_files(made.target, out):
        print("apply did not give the target's files")
        return False
    return held


def _within(arguments: tuple[str | Path, ...], largest_bytes: int, delta_bytes: int) -> bool:
    bound = (largest_bytes + delta_bytes) / 2**20 + BUDGET_MIB
    start = time.perf_counter()
    peak = peak_mib(*arguments)
    seconds, word = time.perf_counter() - start, "within" if peak <= bound else "ABOVE"
    parts = f"{largest_bytes / 2**20:.0f} (largest tensor) + {delta_bytes / 2**20:.0f} (deltas) + {BUDGET_MIB}"
    print(f"{arguments[0]:7} peak {peak:5.0f} MiB, {word} {bound:.0f} = {parts}; {seconds:.1f} s", flush=True)
    return peak <= bound


if __name__ == "__main__":
    main()
