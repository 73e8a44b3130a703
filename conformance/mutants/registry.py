"""Every broken engine by name, and every check with what it is for: the rows and columns of the kill matrix."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

CODEC, LIVE, OWN = "codec", "live", "own"
"""How a mutant is run: as a codec, in a live engine, or under refdelta's own test of a part that the suite lacks."""
RUNS = (CODEC, LIVE, OWN)
SENTENCE = "sentence"
"""A run of its own, beside the kill matrix: what breaks one sentence of SPEC.md (`conformance.mutants.sentences`)."""

SEEDS: Mapping[str, int] = {CODEC: 20, LIVE: 3}
"""Of a whole run."""
EXAMPLES = 2
"""Of a property under each seed, where it is not the one that must kill."""

_MODULES: Mapping[str, tuple[str, ...]] = {
    CODEC: ("encoders", "appliers", "readers", "histories", "routers", "unusual"),
    LIVE: ("live", "live_time", "live_sizes"),
    OWN: ("publisher", "client"),
    SENTENCE: ("by_sentence", "by_sentence_own"),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """An engine that is wrong in one way."""

    name: str
    """Of its class or function; unique."""
    kind: str
    """The part that is wrong."""
    run: str
    """One of `RUNS`, or `SENTENCE`."""
    place: str
    """``module:object``."""
    does: str
    """What it does wrong, in a line."""
    check: str
    """The check that must catch it; for `OWN` the id of a test of refdelta's."""
    by: str
    """The test that holds the killing one: a chapter (``test_codec_{by}.py``), or a live test's function."""
    fault: int | None
    """The public fault that it stands for (`FAULTS`); None where it breaks an invariant of the format alone."""
    row: str = ""
    """For `LIVE`: the engine on which it must be caught (`conformance.mutants.live.ROWS`)."""
    breaks: tuple[str, ...] = ()
    """For `SENTENCE`: ids of SPEC.md."""


Broken = Callable[[pytest.MonkeyPatch], None]
"""Breaks a process through what can be undone."""

_REGISTERED: dict[str, Mutant] = {}


def register(mutant: Mutant) -> None:
    """Add a mutant. Its name is unique, its description one line, its fault a known one."""
    known = _REGISTERED.get(mutant.name)
    assert known in (None, mutant), f"two mutants are called {mutant.name}"
    assert len(mutant.does.splitlines()) == 1, f"{mutant.name}: a description of one line"
    assert mutant.fault is None or mutant.fault in FAULTS, f"{mutant.name}: fault {mutant.fault}"
    _REGISTERED[mutant.name] = mutant


def codec_mutants(kind: str) -> Callable[..., Callable[[type], type]]:
    """The decorator that registers classes of codecs: ``@caught_by(check, chapter, fault=NUMBER)``."""

    def caught_by(check: str, chapter: str = "", *, fault: int | None) -> Callable[[type], type]:
        def decorate(engine: type) -> type:
            place = f"{engine.__module__}:{engine.__name__}"
            does = engine.__dict__.get("__doc__") or ""
            register(Mutant(engine.__name__, kind, CODEC, place, does, check, chapter or check, fault))
            return engine

        return decorate

    return caught_by


def own_mutants(kind: str, where: str) -> Callable[..., Callable[[Broken], Broken]]:
    """The decorator that registers functions which refdelta's own tests catch: ``@caught_by(test, fault=NUMBER)``.

    where: the directory of a test that is given as ``file::test``, or the file of one that is given as ``test``.
    """

    def caught_by(test: str, *, fault: int | None) -> Callable[[Broken], Broken]:
        def decorate(broken: Broken) -> Broken:
            node = f"{where}::{test}" if where.endswith(".py") else f"{where}/{test}"
            place = f"{broken.__module__}:{broken.__name__}"
            register(Mutant(broken.__name__, kind, OWN, place, broken.__doc__ or "", node, node, fault))
            return broken

        return decorate

    return caught_by


def mutants(*runs: str) -> list[Mutant]:
    """All mutants of these runs (of all, without any), in the order of `_MODULES` and of their definition there."""
    places = [f"conformance.mutants.{module}" for run in runs or RUNS for module in _MODULES[run]]
    for place in places:
        importlib.import_module(place)
    # Whoever imported one of them earlier has put its mutants first.
    mine = [mutant for mutant in _REGISTERED.values() if mutant.run in (runs or RUNS)]
    return sorted(mine, key=lambda mutant: places.index(mutant.place.partition(":")[0]))


FAULTS: Mapping[int, str] = {
    1: "numbers are compared instead of bits",
    2: "a detector looks at part of the bits",
    3: "NaN stands for unchanged",
    4: "positions beyond 32 bits",
    5: "positions out of range or order; written before everything is checked",
    6: "strided inputs",
    7: "density over changed tensors only",
    8: "a header with more than it should have",
    9: "unaligned data",
    10: "saving over what is mapped",
    11: "metadata that disagrees with the payload",
    12: "values of another dtype",
    13: "scalars, empty, integer tensors",
    14: "names that look like keys",
    15: "a delta on another base",
    16: "failed or empty updates and versions",
    17: "the baseline moves too early",
    18: "anchors that lack tensors",
    19: "files of an earlier run in the same place",
    20: "pruned while it is read",
    21: "only the last step's changes",
    22: "errors taken for success",
    23: "fused weights skipped in silence",
    24: "one rule for layers that differ",
    25: "fused tensors cut evenly",
    26: "a missing transpose, hidden by square matrices",
    27: "experts and their ranks",
    28: "halves rearranged after loading",
    29: "prefixes of names",
    30: "wrappers' prefixes",
    31: "padded vocabulary",
    32: "prefix cache of old weights",
    33: "an update during a forward pass",
    34: "sleep and wake",
    35: "another base than the trainer's, byte for byte",
    36: "a failed update that never finishes",
    37: "answers that nobody reads",
    38: "one rank of several fails",
    39: "two tensors swapped",
    40: "a tensor that the loader drops for everybody",
}
"""Kinds of faults that were seen in public: number -> in a few words. The numbers are those of the project's list."""
