"""Compares what the ranks of two engines hold, bit for bit, and what they answer, number for number."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ..findings import Finding
from .engine import Output


@dataclass(frozen=True, slots=True)
class RankDump:
    """What `probe.Probe.probe_dump` wrote for one rank."""

    rank: int
    entries: dict[str, dict[str, Any]]
    payload: dict[str, np.ndarray[Any, np.dtype[np.uint8]]]

    @classmethod
    def read(cls, path: Path) -> RankDump:
        """Read ``rank{N}.safetensors`` and the description beside it."""
        return cls(
            int(path.stem.removeprefix("rank")), json.loads(path.with_suffix(".json").read_text()), load_file(path)
        )

    def raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a parameter or buffer, of its first name where it has several."""
        return self.payload[self.entries[name]["alias_of"]]


def read_dumps(directory: Path) -> list[RankDump]:
    """The dumps of every rank, in rank order."""
    return [RankDump.read(path) for path in sorted(directory.glob("rank*.safetensors"))]


def compare(model: str, expected: Sequence[RankDump], found: Sequence[RankDump]) -> list[Finding]:
    """Every parameter and buffer of every rank that differs in name, kind, dtype, shape, aliasing or bits."""
    assert expected, f"{model}: the truth holds no rank"
    ranks = [dump.rank for dump in expected]
    if ranks != [dump.rank for dump in found]:
        return [_unlike(model, None, "ranks", ranks, [dump.rank for dump in found])]
    return [finding for pair in zip(expected, found, strict=True) for finding in _compare_rank(model, *pair)]


def _compare_rank(model: str, expected: RankDump, found: RankDump) -> Iterator[Finding]:
    assert expected.entries, f"{model}: the truth of rank {expected.rank} holds no parameter"
    for name in sorted(expected.entries.keys() | found.entries.keys()):
        want, have = expected.entries.get(name), found.entries.get(name)
        if want is None or have is None or want != have:
            yield _unlike(model, expected.rank, name, want or "absent", have or "absent")
        elif want["alias_of"] == name:
            yield from _compare_bits(model, expected.rank, name, want, expected.raw(name), found.raw(name))


def _compare_bits(model: str, rank: int, name: str, entry: dict[str, Any], want: Any, have: Any) -> Iterator[Finding]:
    if np.array_equal(want, have):
        return
    shape = tuple(entry["shape"])
    width = len(want) // (math.prod(shape) or 1)
    wrong = np.flatnonzero((want != have).reshape(-1, width).any(axis=1))
    first = int(wrong[0])
    position = tuple(int(axis) for axis in np.unravel_index(first, shape)) if shape else ()
    one = slice(first * width, (first + 1) * width)
    yield Finding(
        "bits",
        name,
        position,
        expected=_hexadecimal(want[one]),
        found=_hexadecimal(have[one]),
        dtype=f"torch.{entry['dtype']}",
        differing=len(wrong),
        rank=rank,
        context=model,
    )


def _unlike(model: str, rank: int | None, name: str, expected: object, found: object) -> Finding:
    """What cannot be compared element by element."""
    words = str(expected), str(found)
    return Finding("parameters and buffers", name, expected=words[0], found=words[1], rank=rank, context=model)


def _hexadecimal(element: Any) -> str:
    """Bytes of one little-endian element as the number that they hold."""
    return "0x" + bytes(element)[::-1].hex()


def compare_outputs(model: str, expected: Sequence[Output], found: Sequence[Output]) -> list[str]:
    """Where tokens or log-probabilities are not exactly equal, in words; one line a prompt."""
    lines = []
    for number, (want, have) in enumerate(zip(expected, found, strict=True)):
        for key in ("tokens", "prompt_logprobs", "logprobs"):
            if want[key] != have[key]:
                lines.append(f"{model} prompt {number} {key}: expected {_first(want[key], have[key])}")
                break
    return lines


def _first(want: Sequence[Any], have: Sequence[Any]) -> str:
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b]
    place, a, b = pairs[0] if pairs else (min(len(want), len(have)), "the end", "more")
    return f"{a} at position {place}, found {b}"


def finite(outputs: Sequence[Output]) -> bool:
    """Whether every log-probability is finite."""
    positions = [entry for output in outputs for key in ("logprobs", "prompt_logprobs") for entry in output[key]]
    return all(math.isfinite(value) for entry in positions for _, value in entry)
