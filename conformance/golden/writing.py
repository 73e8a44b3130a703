"""The golden vectors: small deltas with the states before and after, for readers and writers in any language.

Every file is made from bytes and formulas, with the suite's own oracle and without refdelta; `golden.corpus`
reads them back, `conformance/vectors/README.md` says what each file means. `valid` and `invalid` hold the vectors
themselves.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from . import invalid, valid
from .corpus import KINDS
from .parts import Corpus, Vector


def corpus() -> list[Vector]:
    """Every vector, in the order of paths."""
    made = Corpus()
    fills: list[Callable[[Corpus], None]] = [valid.fill, invalid.fill]
    for fill in fills:
        fill(made)
    return [made.vectors[path] for path in sorted(made.vectors)]


def write(directory: Path) -> int:
    """Write the corpus into `directory`, in place of what was generated there before; returns the number of vectors."""
    for name in KINDS:
        shutil.rmtree(directory / name, ignore_errors=True)
    vectors = corpus()
    for name, content in (item for vector in vectors for item in vector.content().items()):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return len(vectors)
