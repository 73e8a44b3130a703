"""How large everything is that a run drives an engine with: what the suite plans, and what an engine really saw.

`RANGES` is the plan: quantities, by what the engine is asked to do, and the sizes that each run must reach. `Recorder`
stands around the engine under test and notes what goes through it. The end of a run prints the largest of what was
seen; what lies beyond is not judged. A test holds the plan to the record: a size that no test drives fails it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engines.codecs import FullCodec
from ..engines.program import Program
from ..inputs import sizes
from ..inputs.wide import numbers
from ..oracle import CODES, DELTA_FILE, METADATA_FILE, State, expected_patches
from ..oracle.layouts import Layout

ENCODE, APPLY, INVERT, COMPOSE, DIGEST, FOLLOW, ROUTE = (
    *("encode", "apply", "invert", "compose", "digest", "follow", "route"),
)
UPDATE = "update"
"""Of a live engine."""
ELEMENTS, CHANGES, IN_ALL, POSITIONS = "elements", "changes", "changes in a delta", "positions"
AXES, TENSORS, DELTAS, THREADS, REGIONS = "axes", "tensors", "deltas", "threads", "elements of a region"
LAYERS, EXPERTS, FILES, RANKS = "layers", "experts", "files", "ranks to a kv head"
WORDS: Mapping[str, str] = {
    ELEMENTS: "elements in a tensor",
    REGIONS: "elements in a region",
    CHANGES: "changes in a tensor",
    IN_ALL: "changes in a delta",
    POSITIONS: "as a position",
    AXES: "axes",
    TENSORS: "tensors",
    DELTAS: "deltas in one",
    THREADS: "threads",
    LAYERS: "layers",
    EXPERTS: "experts",
    FILES: "files",
    RANKS: "ranks to a kv head",
}

IN_PROCESS = "in process"
"""What a codec in Python has beside its capabilities, and a program has not: the suite's number of threads."""


@dataclass(frozen=True, slots=True)
class Range:
    """The sizes of one quantity that a run reaches, for one of the things that an engine does."""

    verb: str
    quantity: str
    sizes: tuple[int, ...]
    needs: str = ""
    """The capability without which it is not driven."""

    def is_driven(self, has: Collection[str]) -> bool:
        """Whether an engine with these capabilities, and perhaps `IN_PROCESS`, meets it."""
        return (not self.needs or self.needs in has) and (self.quantity != THREADS or IN_PROCESS in has)


_UP_TO = (*sizes.BOUNDARIES, sizes.FLOAT32)
_PLACES = tuple(at for boundary in _UP_TO for at in sizes.beside(boundary))
_FEW_CHANGES = tuple(n for n in sizes.CHANGES if n < 2**20)
_BEYOND = (sizes.I32 - 1, sizes.I32, sizes.I32 + 1)
RANGES: tuple[Range, ...] = (
    *(Range(verb, ELEMENTS, (*sizes.ELEMENTS, *sizes.LARGE_ELEMENTS)) for verb in (ENCODE, APPLY)),
    *(Range(verb, POSITIONS, _PLACES) for verb in (ENCODE, APPLY)),
    *(Range(verb, CHANGES, sizes.CHANGES) for verb in (ENCODE, APPLY)),
    *(Range(verb, IN_ALL, (72_000,)) for verb in (ENCODE, APPLY)),
    *(Range(verb, TENSORS, sizes.TENSORS) for verb in (ENCODE, APPLY)),
    *(Range(verb, AXES, sizes.DIMENSIONS) for verb in (ENCODE, APPLY)),
    Range(ENCODE, THREADS, sizes.THREADS),
    Range(APPLY, THREADS, sizes.THREADS),
    Range(ENCODE, ELEMENTS, (sizes.I32, sizes.I32 + 2**16), "large"),
    Range(APPLY, ELEMENTS, (sizes.I32 + 2**16,), "large"),
    *(Range(verb, POSITIONS, _BEYOND, "large") for verb in (ENCODE, APPLY)),
    Range(INVERT, ELEMENTS, (*sizes.ELEMENTS, sizes.FLOAT32 + sizes.PAGE), "inverts"),
    Range(INVERT, CHANGES, _FEW_CHANGES, "inverts"),
    Range(INVERT, TENSORS, (300,), "inverts"),
    Range(COMPOSE, ELEMENTS, (*sizes.ELEMENTS, sizes.FLOAT32 + sizes.PAGE), "composes"),
    Range(COMPOSE, CHANGES, _FEW_CHANGES, "composes"),
    Range(COMPOSE, TENSORS, (300,), "composes"),
    Range(COMPOSE, DELTAS, sizes.DELTAS, "composes"),
    Range(DIGEST, ELEMENTS, (*sizes.ELEMENTS, sizes.FLOAT32 + sizes.PAGE), "digests"),
    Range(DIGEST, AXES, sizes.DIMENSIONS, "digests"),
    Range(DIGEST, TENSORS, (300,), "digests"),
    Range(DIGEST, THREADS, sizes.THREADS, "digests"),
    Range(FOLLOW, ELEMENTS, (*sizes.ELEMENTS, sizes.FLOAT32 + sizes.PAGE), "lineage"),
    Range(FOLLOW, CHANGES, _FEW_CHANGES, "lineage"),
    Range(FOLLOW, TENSORS, (300,), "lineage"),
    Range(ROUTE, ELEMENTS, (*sizes.ELEMENTS, sizes.FLOAT32 + sizes.PAGE), "routes"),
    Range(ROUTE, POSITIONS, _PLACES, "routes"),
    Range(ROUTE, REGIONS, (2**18 + 5, sizes.FLOAT32), "routes"),
    Range(ROUTE, CHANGES, (2**16 + 1, 70_000), "routes"),
)
"""What each run of a codec reaches. Paths used again, sessions and deltas in one are of live engines."""
_MARKED: Mapping[str, Any] = {
    verb: np.unique([at for r in RANGES if (r.verb, r.quantity) == (verb, POSITIONS) for at in r.sizes])
    for verb in (ENCODE, APPLY, ROUTE)
}


@dataclass(slots=True)
class Record:
    """What engines of a run saw: (verb, quantity) -> sizes."""

    seen: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    """Of live engines' checkpoints."""

    def note(self, verb: str, quantity: str, found: Iterable[int]) -> None:
        """These sizes went through the engine."""
        self.seen.setdefault((verb, quantity), set()).update(map(int, found))

    def clear(self) -> None:
        """Forget what an earlier run of this process saw."""
        self.seen.clear()
        self.dtypes.clear()

    def missing(self, offered: Iterable[str]) -> list[tuple[Range, list[int]]]:
        """What of the plan was not reached, of what the engine's capabilities (and `IN_PROCESS`) allow."""
        has = set(offered)
        rows = [row for row in RANGES if row.is_driven(has)]
        lacking = [(row, sorted({*row.sizes} - self.seen.get((row.verb, row.quantity), set()))) for row in rows]
        return [(row, lack) for row, lack in lacking if lack]

    def lines(self) -> list[str]:
        """The largest of each quantity, one line for each verb; what lies beyond was not judged."""
        verbs = dict.fromkeys(verb for verb, _ in self.seen)
        lines = [f"range {verb}: {'; '.join(self._largest(verb))}" for verb in verbs]
        return [*lines, "Beyond these ranges nothing was judged."] if lines else []

    def _largest(self, verb: str) -> Iterator[str]:
        for quantity, words in WORDS.items():
            if found := self.seen.get((verb, quantity)):
                yield f"{sizes.power(max(found))} {words}"
        if verb == UPDATE and self.dtypes:
            yield f"dtypes {', '.join(sorted(self.dtypes))}"

    def fields(self) -> list[dict[str, object]]:
        """For JSON."""
        return [
            {"verb": verb, "quantity": quantity, "sizes": len(found), "largest": max(found)}
            for (verb, quantity), found in self.seen.items()
            if found
        ]


LIVE = Record()
"""What live engines of this process took."""


def of_change(directory: Path, base: State, target: State, tp: int) -> dict[str, list[int]]:
    """The sizes of one delta for a live engine of ``tp`` ranks, from the checkpoint's directory and two states."""
    changes = [len(patch.indices) for patch in expected_patches(base, target)]
    config = json.loads((directory / "config.json").read_text())
    heads = int(config.get("text_config", config).get("num_key_value_heads", tp) or tp)
    return {
        ELEMENTS: [tensor.numel() for tensor in target.values()],
        CHANGES: changes,
        IN_ALL: [sum(changes)],
        TENSORS: [len(target)],
        LAYERS: [len(numbers(target, "layers"))],
        EXPERTS: [len(numbers(target, "experts"))],
        FILES: [len(list(directory.glob("*.safetensors")))],
        RANKS: [-(-tp // heads)],
    }


def note_live(directory: Path, base: State, target: State, tp: int) -> None:
    """A live engine took this change."""
    for quantity, found in of_change(directory, base, target, tp).items():
        LIVE.note(UPDATE, quantity, found)
    LIVE.dtypes.update(CODES[tensor.dtype] for tensor in target.values())


class Recorder:
    """An engine under test, with a note of all that it was given and did not refuse."""

    def __init__(self, engine: FullCodec, record: Record) -> None:
        self._engine, self._record = engine, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        self._engine.encode(base, target, out)
        self._state(ENCODE, target)
        self._delta(ENCODE, out)

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        self._engine.apply(delta, weights)
        self._state(APPLY, weights)
        self._delta(APPLY, delta)

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        self._engine.invert(delta, weights, out)
        self._state(INVERT, weights)
        self._delta(INVERT, delta)

    def compose(self, deltas: Sequence[Path], out: Path) -> None:
        self._engine.compose(deltas, out)
        self._record.note(COMPOSE, DELTAS, [len(deltas)])
        self._delta(COMPOSE, out)

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        found = self._engine.digest(weights)
        self._state(DIGEST, weights)
        return found

    def follow(self, delta: Path, weights: MutableMapping[str, Tensor], digest: str) -> str:
        found = self._engine.follow(delta, weights, digest)
        self._state(FOLLOW, weights)
        self._delta(FOLLOW, delta)
        return found

    def route(self, layout: Layout, name: str, indices: Tensor, values: Tensor) -> Sequence[tuple[str, Tensor, Tensor]]:
        found = self._engine.route(layout, name, indices, values)
        self._record.note(ROUTE, ELEMENTS, [int(np.prod(layout.sources[name], dtype=np.int64))])
        self._record.note(ROUTE, CHANGES, [len(indices)])
        self._record.note(
            ROUTE, REGIONS, (int(np.prod(p.sizes, dtype=np.int64)) for p in layout.pieces if p.source == name)
        )
        self._places(ROUTE, indices.numpy())
        return found

    def _state(self, verb: str, weights: Mapping[str, Tensor]) -> None:
        note = self._record.note
        note(verb, ELEMENTS, (tensor.numel() for tensor in weights.values()))
        note(verb, AXES, (tensor.dim() for tensor in weights.values()))
        note(verb, TENSORS, [len(weights)])
        if not isinstance(self._engine, Program):  # which has threads of its own
            note(verb, THREADS, [torch.get_num_threads()])

    def _delta(self, verb: str, directory: Path) -> None:
        """What a delta holds that the engine wrote or took; one that cannot be read is a matter of other checks."""
        try:
            shapes = json.loads((directory / METADATA_FILE).read_bytes())["layer_shapes"]
            found = list(_positions(directory / DELTA_FILE, len(shapes)))
            if verb == COMPOSE:
                elements = (int(np.prod(shape, dtype=np.int64)) for shape in shapes)
                self._record.note(verb, ELEMENTS, elements)
                self._record.note(verb, TENSORS, [len(shapes)])
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._record.note(verb, CHANGES, (len(positions) for positions in found))
        self._record.note(verb, IN_ALL, [sum(map(len, found))])
        for positions in found:
            self._places(verb, positions)

    def _places(self, verb: str, positions: Any) -> None:
        """The positions of the plan that are among these, and the last."""
        if not len(positions):
            return
        marked = _MARKED.get(verb, np.empty(0, np.int64))
        at = np.searchsorted(positions, marked).clip(max=len(positions) - 1)
        self._record.note(verb, POSITIONS, [*marked[positions[at] == marked], positions[-1]])


def _positions(payload: Path, layers: int) -> Iterator[Any]:
    """The indices of each layer, mapped, not read."""
    with payload.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    raw = np.memmap(payload, mode="r", dtype=np.uint8)
    for number in range(layers):
        entry = header[f"{number}.indices"]
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        yield raw[begin:end].view("<i4" if entry["dtype"] == "I32" else "<i8")
