"""Checkpoints whose elements say where they come from, and what a fresh engine made of them, element by element.

Every element of a checkpoint gets a number of its own, counted over all tensors from 1, and one checkpoint is written
for each of the number's base-256 digits (bf16 holds 0 to 255 exactly). What an engine that loaded these checkpoints
holds at a place are the digits of the checkpoint element that it put there; 0 is what no element reached. So the map
from checkpoint to engine is read off, without a rule, without a trace, and through everything that happens after
loading. Needs no engine's cooperation: the loader must copy values, which it does with any checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..inputs.checkpoints import State, with_state
from .judge import RankDump

BASE = 256
Numbers = NDArray[np.int64]
"""Flat row-major; each element the number of a checkpoint element, or 0."""


@dataclass(frozen=True, slots=True)
class Code:
    """The numbering of a checkpoint's elements: element ``p`` of a tensor has the number ``first[name] + p``."""

    first: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    digits: int
    """How many checkpoints carry it."""

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor], same: tuple[str, str] | None = None) -> Code:
        """Number the elements of ``state``. ``same`` are two names of one tensor (tied, with equal bytes).

        They get equal numbers: vLLM ties them only where their bytes are equal, so that two codes would make it load
        another model than the one asked about.
        """
        first: dict[str, int] = {}
        following = 1
        for name, tensor in state.items():
            while _alike(following):  # it would read the same in every digit, as a constant does
                following += 1
            first[name] = following
            following += tensor.numel()
        if same:
            first[same[1]] = first[same[0]]
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        return cls(first, shapes, len(_digits(following - 1)))

    def numbers(self, name: str) -> Numbers:
        """The numbers of a tensor's elements, flat."""
        return np.arange(int(np.prod(self.shapes[name])), dtype=np.int64) + self.first[name]

    def source(self, number: int) -> str:
        """``name[position]`` of the element with this number."""
        if number == 0:
            return "nothing"
        name = max((name for name in self.first if self.first[name] <= number), key=lambda name: self.first[name])
        return f"{name}[{number - self.first[name]}]"

    def checkpoints(self, base: Path, out: Path) -> list[Path]:
        """Write the checkpoints under ``out``, lowest digit first, with the files and the config of ``base``."""
        return [with_state(base, self._state(digit), out / f"digit{digit}") for digit in range(self.digits)]

    def _state(self, digit: int) -> State:
        return {
            name: torch.from_numpy(self.numbers(name) // BASE**digit % BASE).to(torch.bfloat16).reshape(shape)
            for name, shape in self.shapes.items()
        }


def _digits(number: int) -> list[int]:
    powers = itertools.takewhile(lambda power: power <= number, (BASE**k for k in itertools.count()))
    return [number // power % BASE for power in powers]


def _alike(number: int) -> bool:
    return len(set(_digits(number))) == 1 and number >= BASE


@dataclass(frozen=True, slots=True)
class Reading:
    """What one rank of an engine holds: the numbers of every tensor that the checkpoint reached, and the rest."""

    rank: int
    numbers: Mapping[str, Numbers]
    """Parameter or buffer -> numbers. Aliases under their first name only."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the same names."""
    untouched: tuple[str, ...]
    """Parameters and buffers that are the same whatever digits were loaded."""
    unread: tuple[str, ...]
    """Those that depend on the checkpoint and hold something else than its elements: derived, or packed away."""
    aliases: Mapping[str, str]
    """Further name -> first name."""

    def difference(self, expected: Mapping[str, Numbers], code: Code) -> list[str]:
        """Where what is read is not what a map says: one line a parameter, with the first wrong element.

        ``expected``: parameter or buffer -> numbers, of everything that the checkpoint should reach.
        """
        lines = [
            f"{name}: the map does not know it, the checkpoint reaches it" for name in self._reached - set(expected)
        ]
        for name, wanted in expected.items():
            found = self.numbers.get(name)
            if found is None or len(found) != len(wanted):
                kind = "unread" if name in self.unread else "untouched" if name in self.untouched else "absent"
                lines.append(
                    f"{name}: the map gives {len(wanted)} elements, {kind if found is None else len(found)} found"
                )
                continue
            wrong = np.flatnonzero(found != wanted)
            if len(wrong):
                at = int(wrong[0])
                lines.append(
                    f"{name}[{at}]: the map says {code.source(int(wanted[at]))}, the engine holds "
                    f"{code.source(int(found[at]))} ({len(wrong)} elements differ)"
                )
        return sorted(lines)

    @property
    def _reached(self) -> set[str]:
        return {*self.numbers, *self.unread}


def read(digits: Sequence[Sequence[RankDump]]) -> list[Reading]:
    """Read the dumps of the engines that loaded `Code.checkpoints`, in the same order; one `Reading` a rank."""
    return [_read_rank(rank) for rank in zip(*digits, strict=True)]


def _read_rank(digits: Sequence[RankDump]) -> Reading:
    entries = digits[0].entries
    assert all(dump.entries == entries for dump in digits), "the engines differ in more than values"
    own = [name for name, entry in entries.items() if entry["alias_of"] == name]
    numbers: dict[str, Numbers] = {}
    untouched, unread = [], []
    for name in own:
        raw = [dump.raw(name) for dump in digits]
        values = [_values(bytes_, entries[name]) for bytes_ in raw]
        if all(np.array_equal(raw[0], other) for other in raw[1:]):
            untouched.append(name)
        elif all(np.all((v >= 0) & (v < BASE) & (v == np.floor(v))) for v in values):
            numbers[name] = sum(
                (v.astype(np.int64) * BASE**digit for digit, v in enumerate(values)), np.zeros(len(values[0]), np.int64)
            )
        else:
            unread.append(name)
    return Reading(
        rank=digits[0].rank,
        numbers=numbers,
        shapes={name: tuple(entries[name]["shape"]) for name in numbers},
        untouched=tuple(untouched),
        unread=tuple(unread),
        aliases={name: entry["alias_of"] for name, entry in entries.items() if entry["alias_of"] != name},
    )


def _values(raw: NDArray[np.uint8], entry: Mapping[str, Any]) -> NDArray[np.float64]:
    dtype = getattr(torch, entry["dtype"])
    return torch.from_numpy(raw.copy()).view(dtype).to(torch.float64).numpy()
