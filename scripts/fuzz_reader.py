"""Fuzz the readers of deltas and checkpoints: every read ends in a `DeltaError` or in what the bytes say.

Deterministic: the seed fixes every case. What is read without an error is compared with what the
suite's own reader makes of it. The address space is limited, so that an allocation that the files do not
warrant ends as a MemoryError, which counts as a failure like every exception but `DeltaError`. Prints counts by fault
and by reason. Exit 1 where a read failed; its files are kept with --keep.

    python scripts/fuzz_reader.py [--reads 100000] [--seed 1] [--keep DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import os
import random
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conformance import oracle
from refdelta.apply import read_delta
from refdelta.checkpoints.reading import INDEX_FILE, Checkpoint
from refdelta.spec import Delta, DeltaError

HEADROOM_BYTES = 256 << 20
"""Address space beyond what the process has when fuzzing starts."""

Files = dict[str, bytes]
Fault = Callable[[random.Random, Files], str | None]
"""Changes the files in place; returns the name of what it did on disk instead, or None."""


# What is put in


HOSTILE: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400),
    *(0.5, -0.0, 1.0, 33.333, 1e308, 9007199254740993, 10**30),
    *("", "0.indices", "I32", "BF16", "F4", "BOOL", "\ud800", "\x00", "x" * 300, "../../etc/passwd", "/dev/zero"),
    *([], {}, [[]], [0], [-1], [2**40, 2**40], [2**63], [0, 2**62, 2**62], [2**40, 2**40, 0], [1.5], [True], ["a"]),
    *([None], {"a": 1}, ["a", "a"], list(range(50)), [2**31 - 1] * 200),
)
"""JSON values of unexpected types and sizes."""


RAW_NUMBERS: Sequence[bytes] = (
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"-1e999",
        b"1E400",
        b"1e-400",
        b"-0",
        b"9" * 5000,
        b"1" * 400 + b".5",
    ),
    *(b"0x10", b"01", b"1.", b"--1", b"1_000", "\u0661".encode(), b"1" + b"0" * 400),
)
"""Numbers, and what other parsers take for them."""


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for at in range(len(value)):
            yield from _places(value[at], (*path, at))


def _mutate_json(rng: random.Random, value: Any) -> Any:
    """Replace, remove, rename, repeat or nest something in a JSON value."""
    path = rng.choice(list(_places(value))[1:] or [()])
    if not path:
        return copy.deepcopy(rng.choice(HOSTILE))
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    last, action = path[-1], rng.choice(["replace", "replace", "remove", "rename", "nest", "swap", "number"])
    if action == "remove":
        del parent[last]
    elif action == "rename" and isinstance(parent, dict):
        parent[str(copy.deepcopy(rng.choice(HOSTILE)))] = parent.pop(last)
    elif action == "nest":
        parent[last] = [parent[last]]
    elif action == "swap" and isinstance(parent, list) and len(parent) > 1:
        parent.reverse()
    elif action == "number" and isinstance(parent[last], int):
        parent[last] += rng.choice([-1, 1, 2, 8, 2**31, -(2**31), 2**64])
    else:
        parent[last] = copy.deepcopy(rng.choice(HOSTILE))
    return value


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _split(raw: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + length], raw[8 + length :]


def _join(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _payload_of(rng: random.Random, files: Files) -> str:
    return rng.choice([name for name in files if name.endswith(".safetensors")])


def _json_of(rng: random.Random, files: Files) -> str | None:
    names = [name for name in files if name.endswith(".json")]
    return rng.choice(names) if names else None


# Faults


def truncated(rng: random.Random, files: Files) -> None:
    name = rng.choice(list(files))
    files[name] = files[name][: rng.randrange(len(files[name]) + 1)]


def bits_flipped(rng: random.Random, files: Files) -> None:
    name = rng.choice(list(files))
    raw = bytearray(files[name])
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    files[name] = bytes(raw)


def bytes_moved(rng: random.Random, files: Files) -> None:
    name = rng.choice(list(files))
    raw = files[name]
    first, stop = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    piece = rng.choice([raw[first:stop] * 2, b"", bytes(reversed(raw[first:stop])), rng.randbytes(stop - first)])
    files[name] = raw[:first] + piece + raw[stop:]


def header_length(rng: random.Random, files: Files) -> None:
    name = _payload_of(rng, files)
    lies = [
        0,
        1,
        2,
        7,
        len(files[name]) - 8,
        len(files[name]),
        100_000_000,
        100_000_001,
        2**31,
        2**32,
        2**63,
        2**64 - 1,
    ]
    real = int.from_bytes(files[name][:8], "little")
    files[name] = (rng.choice([*lies, real - 1, real + 1, real + 8]) % 2**64).to_bytes(8, "little") + files[name][8:]


def header_value(rng: random.Random, files: Files) -> None:
    name = _payload_of(rng, files)
    header, data = _split(files[name])
    files[name] = _join(_dumps(_mutate_json(rng, json.loads(header))), data)


def json_value(rng: random.Random, files: Files) -> None:
    name = _json_of(rng, files)
    if name is not None:
        files[name] = _dumps(_mutate_json(rng, json.loads(files[name])))


def _in_text(rng: random.Random, files: Files, change: Callable[[bytes], bytes]) -> None:
    """Change the JSON text of a header or of a JSON file."""
    name = rng.choice(list(files))
    if name.endswith(".json"):
        files[name] = change(files[name])
    else:
        header, data = _split(files[name])
        files[name] = _join(change(header), data)


def number_in_text(rng: random.Random, files: Files) -> None:
    def change(text: bytes) -> bytes:
        digits = [at for at, byte in enumerate(text) if 48 <= byte < 58]
        at = rng.choice(digits or [0])
        end = at
        while end < len(text) and 48 <= text[end] < 58:
            end += 1
        return text[:at] + rng.choice(RAW_NUMBERS) + text[end:]

    _in_text(rng, files, change)


def key_twice(rng: random.Random, files: Files) -> None:
    def change(text: bytes) -> bytes:
        value = json.loads(text)
        key = rng.choice(list(value) or ["x"])
        again = _dumps({key: rng.choice([value.get(key), copy.deepcopy(rng.choice(HOSTILE))])})
        return text.rstrip()[:-1] + b"," + again[1:]

    _in_text(rng, files, change)


def nested_deeply(rng: random.Random, files: Files) -> None:
    depth = rng.choice([50, 900, 1100, 20_000, 200_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    bomb = opening * depth + rng.choice([b"1", b""]) + closing * rng.choice([depth, 0])

    def change(text: bytes) -> bytes:
        return rng.choice([bomb, text.rstrip()[:-1] + b',"deep":' + bomb + b"}"])

    _in_text(rng, files, change)


def data_changed(rng: random.Random, files: Files) -> None:
    """Positions and values: the bytes behind the header."""
    name = _payload_of(rng, files)
    header, data = _split(files[name])
    words = bytearray(data)
    for _ in range(rng.choice([1, 2, 4])):
        if len(words) >= 4:
            at = rng.randrange(len(words) - 3)
            number = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(2**32)])
            words[at : at + 4] = number.to_bytes(4, "little")
    files[name] = _join(header, bytes(words))


def file_missing(rng: random.Random, files: Files) -> None:
    del files[rng.choice(list(files))]


def file_empty(rng: random.Random, files: Files) -> None:
    files[rng.choice(list(files))] = b""


def path_of_index(rng: random.Random, files: Files) -> None:
    """An index that names other places; for deltas, layer names that look like them."""
    name = _json_of(rng, files)
    if name is None:
        return
    value = json.loads(files[name])
    paths = [
        "../a.safetensors",
        "/etc/passwd",
        "a/../b.safetensors",
        "./a.safetensors",
        "",
        ".",
        "..",
        "a\0b",
        "/dev/zero",
    ]
    entries = value.get("weight_map") or dict.fromkeys(value.get("layer_names") or ["w"], "")
    entries[rng.choice(list(entries))] = rng.choice(paths)
    files[name] = _dumps(value)


def special_file(rng: random.Random, files: Files) -> str:
    return rng.choice(["directory", "fifo", "link to nothing", "link to itself", "link to a device", "link to another"])


FAULTS: Sequence[tuple[Fault, int]] = (
    (truncated, 8),
    (bits_flipped, 20),
    (bytes_moved, 8),
    (header_length, 5),
    (header_value, 16),
    (json_value, 16),
    (number_in_text, 8),
    (key_twice, 4),
    (nested_deeply, 2),
    (data_changed, 8),
    (file_missing, 1),
    (file_empty, 1),
    (path_of_index, 2),
    (special_file, 1),
)
"""Each fault with its share of the cases."""


# What is broken


def seeds(directory: Path) -> list[Files]:
    """The files of valid deltas and checkpoints, all small, of different dtypes and kinds."""
    rng = np.random.default_rng(3)
    shapes = {"model.a": ("BF16", (2, 3)), "model.b": ("F32", (7,)), "scale": ("F32", ())}
    plain = _state(rng, shapes)
    mixed = _state(rng, {**shapes, "odd": ("U8", (3, 1)), "steps": ("I64", (2,)), "mask": ("BOOL", (5,))})
    tiny = _state(rng, {"f4": ("F4", (2, 3)), "f8": ("F8_E4M3", (9,)), "c": ("C64", (3,)), "none": ("BF16", (0, 4))})
    lineage = {"run_id": "run", "version": 3, "base_version": 2, "digest": "rd1:0123456789abcdef", "part": [0, 1]}
    deltas = [
        _delta(directory / "plain", plain, rng),
        _delta(directory / "mixed", mixed, rng, requires=[oracle.NON_FLOATING]),
        _delta(directory / "tiny", tiny, rng, indices="I64", lineage=lineage),
        _delta(directory / "empty", {}, rng),
    ]
    return [*deltas, *_checkpoints(plain | mixed | tiny)]


def _state(rng: np.random.Generator, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    return {
        name: oracle.from_bits(rng.integers(0, 2, int(np.prod(shape))).astype(oracle.unsigned(code)), code, shape)
        for name, (code, shape) in shapes.items()
    }


def _delta(directory: Path, state: Mapping[str, Any], rng: np.random.Generator, **options: Any) -> Files:
    patches = [
        oracle.delta_patch(
            name, t, sorted(rng.permutation(t.numel())[: 1 + t.numel() // 2]), t.flatten()[: 1 + t.numel() // 2]
        )
        for name, t in state.items()
        if t.numel()
    ]
    # Numbers that no check but that of JSON itself looks at.
    options |= {"timestamp": 1767322645.5, "step": 12, "more": {"loss": 0.25}}
    return _files(oracle.write_delta(directory, patches, oracle.total_elements(state) + 7, **options))


def _files(directory: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def _checkpoints(state: Mapping[str, Any]) -> list[Files]:
    names = list(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    shards = {
        file: oracle.pack(
            [
                oracle.Entry(
                    n,
                    (c := oracle.CODES[state[n].dtype]),
                    oracle.file_shape(c, state[n].shape),
                    oracle.bits(state[n]).tobytes(),
                )
                for n in held
            ],
            {"format": "pt"},
        )
        for file, held in parts.items()
    }
    index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, held in parts.items() for n in held}}
    return [{**shards, INDEX_FILE: _dumps(index)}, {"model.safetensors": shards["a.safetensors"]}]


# Reading


@dataclass(slots=True)
class Tally:
    """What became of the reads."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    @property
    def reads(self) -> int:
        return sum(self.outcomes.values())

    def lines(self) -> Iterator[str]:
        """A report."""
        yield f"{self.reads} reads, {len(self.failures)} failures, slowest {self.slowest_s:.2f} s"
        for title, counter in (("by fault", self.faults), ("by outcome", self.outcomes)):
            yield f"{title}: " + ", ".join(f"{name} {count}" for name, count in counter.most_common())
        yield from self.failures[:20]


def place(files: Files, special: str | None, rng: random.Random, directory: Path) -> None:
    """Make ``directory`` hold exactly the files, one of them replaced by something special."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, raw in files.items():
        (directory / name).write_bytes(raw)
    if special is None or not files:
        return
    path = directory / rng.choice(list(files))
    content = path.read_bytes()
    path.unlink()
    if special == "directory":
        path.mkdir()
    elif special == "fifo":
        os.mkfifo(path)
    elif special == "link to another":
        (directory.parent / "elsewhere").write_bytes(content)
        path.symlink_to(directory.parent / "elsewhere")
    else:
        places = {"link to nothing": "nowhere", "link to itself": path.name, "link to a device": "/dev/zero"}
        path.symlink_to(places[special])


def read(directory: Path, is_delta: bool) -> str:
    """Read and compare: ``read``, or ``refused: `` with the reason."""
    try:
        if is_delta:
            compare_delta(read_delta(directory), directory)
        else:
            with Checkpoint(directory) as checkpoint:
                compare_checkpoint(checkpoint, directory)
    except DeltaError as error:
        if DeltaError.parse(str(error)) is None:
            raise ValueError("the text of the error cannot be parsed") from error
        return f"refused: {error.reason}"
    return "read"


def compare_delta(delta: Delta, directory: Path) -> None:
    """What was read is what the suite's reader reads."""
    expected = oracle.read_delta(directory)
    assert delta.total_elements == expected.metadata["total_elements"]
    assert [patch.name for patch in delta.patches] == [patch.name for patch in expected.patches]
    for patch, want in zip(delta.patches, expected.patches, strict=True):
        assert patch.shape == want.shape, f"shape {patch.shape} read, {want.shape} in the file"
        assert patch.indices.tolist() == want.indices.tolist(), f"positions of {patch.name}"
        assert oracle.CODES[patch.dtype] == want.code, f"dtype of {patch.name}"
        assert (oracle.bits(patch.values) == want.bits).all(), f"values of {patch.name}"


def compare_checkpoint(checkpoint: Checkpoint, directory: Path) -> None:
    """What was read is what the suite's reader reads."""
    for shard in checkpoint.shards:
        theirs = oracle.load_state(directory / shard.name)
        for name in shard.header.entries:
            assert oracle.difference(theirs[name], checkpoint[name]) == "", f"{name} of {shard.name}"
            runs = [run for _, run in checkpoint.runs(name)]
            assert sum(len(run) for run in runs) == theirs[name].numel(), f"runs of {name}"


def every_truncation(corpus: Sequence[Files]) -> Iterator[tuple[str, Files, str | None]]:
    """Each file of each seed, cut at every byte."""
    for files in corpus:
        for name, raw in files.items():
            for length in range(len(raw)):
                yield "truncated at every byte", {**files, name: raw[:length]}, None


def random_faults(corpus: Sequence[Files], rng: random.Random) -> Iterator[tuple[str, Files, str | None]]:
    """Without end: a seed with one fault, at times with several."""
    faults, weights = zip(*FAULTS, strict=True)
    while True:
        files = dict(rng.choice(corpus))
        special = None
        for fault in rng.choices(faults, weights, k=rng.choice([1, 1, 1, 1, 2, 3])):
            # An earlier fault may have left nothing to change.
            with contextlib.suppress(ValueError, LookupError, AttributeError, TypeError, RecursionError):
                special = fault(rng, files) or special
        yield fault.__name__, files, special


def fuzz(reads: int, seed: int, directory: Path, keep: Path | None = None, *, truncations: bool = True) -> Tally:
    """Every truncation first, then random faults, ``reads`` in all."""
    rng, tally = random.Random(seed), Tally()
    corpus = seeds(directory)
    limit_memory()
    cases = itertools.chain(every_truncation(corpus) if truncations else (), random_faults(corpus, rng))
    for _ in range(reads):
        name, files, special = next(cases)
        place(files, special, rng, directory / "case")
        start = time.perf_counter()
        try:
            outcome = read(directory / "case", is_delta=_looks_like_delta(files))
        except Exception as error:
            outcome = f"FAILED: {type(error).__name__}"
            tally.failures.append(f"read {tally.reads} ({name}): {type(error).__name__}: {str(error)[:300]}")
            if keep is not None:
                shutil.copytree(directory / "case", keep / str(tally.reads), symlinks=True, dirs_exist_ok=True)
        tally.slowest_s = max(tally.slowest_s, time.perf_counter() - start)
        tally.faults[name] += 1
        tally.outcomes[outcome] += 1
    return tally


def _looks_like_delta(files: Files) -> bool:
    return not any(name in files for name in (INDEX_FILE, "a.safetensors", "model.safetensors"))


def limit_memory() -> None:
    """Refuse address space beyond what there is now and some headroom."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="directory for the files of failed reads")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        start = time.perf_counter()
        tally = fuzz(options.reads, options.seed, Path(directory), options.keep)
    print(*tally.lines(), f"{time.perf_counter() - start:.0f} s, seed {options.seed}", sep="\n")
    raise SystemExit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
