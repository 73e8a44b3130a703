"""Live engines that are large where faults hide: twelve layers and experts, several blocks, several files, F32.

Judged as in `test_live`. Each test first says of the suite's own delta that it is as large as it should be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from . import oracle
from .driving import ranges
from .driving.options import Options, asked_for, options_of
from .findings import InfrastructureFailed
from .inputs import wide
from .inputs.checkpoints import State
from .live import changes
from .live.backends import backend_of
from .live.row import Row
from .live.setup import PLAIN, Setup
from .live.truth import Truths

pytestmark = pytest.mark.timeout(600)

SETUPS: Mapping[tuple[str, int], Setup] = {
    ("qwen3-wide", 2): PLAIN,
    ("qwen3-float32", 1): Setup(arguments={"dtype": "float32"}),
}
BLOCK = 2**18
"""Elements of one block of refdelta's own bookkeeping; a shard of the wide embedding has more than two."""
LEAST: Mapping[str, Mapping[str, int]] = {
    "qwen3-wide": {
        ranges.ELEMENTS: 4 * BLOCK,
        ranges.CHANGES: 2 * 2**16 + 2,
        ranges.LAYERS: 12,
        ranges.EXPERTS: 12,
        ranges.FILES: 4,
        ranges.RANKS: 2,
    },
    "qwen3-float32": {ranges.FILES: 2, ranges.ELEMENTS: 2**24 + 2**16},
}
"""What the delta of `test_every_tensor` reaches at the least, by row."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    params = [
        pytest.param(
            (model, tp),
            marks=[pytest.mark.row(f"{model} tp={tp}"), *([pytest.mark.needs("float32")] if setup.arguments else [])],
            id=f"{model}-tp{tp}",
        )
        for (model, tp), setup in SETUPS.items()
        if tp in asked_for((1, 2), options_of(metafunc.config))
    ]
    metafunc.parametrize("row", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def row(
    request: pytest.FixtureRequest, options: Options, offered: frozenset[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Row]:
    """The engine under test and its own fresh ones."""
    model, tp = request.param
    if options.checkpoint:
        pytest.skip("sizes are judged on the suite's own checkpoints")
    if tp not in options.tp:
        pytest.skip(f"--tp asks for {','.join(map(str, options.tp))}")
    scratch, setup = tmp_path_factory.mktemp("sizes"), SETUPS[request.param]
    truths = Truths(scratch / "truths", setup)
    checkpoint = wide.make(model, scratch / "base")
    made = Row(checkpoint, tp, backend_of(options, offered), truths, scratch, setup)
    yield made
    made.close()
    truths.close()


@pytest.fixture
def live(row: Row) -> Row:
    """The row with an engine that holds its current state."""
    row.skip_unless_offered()
    row.ready()
    return row


def _all_and_many(live: Row) -> State:
    """A share of every tensor, and a third of each that has no more than some blocks."""
    some = changes.every_tensor(live.base, "sizes", live.aliases)
    large = [name for name in wide.vocabulary(some) if some[name].numel() < 8 * BLOCK]
    return changes.of_families(some, large, live.aliases)


@pytest.mark.check("every_tensor")
def test_every_tensor(live: Row) -> None:
    """Every layer and expert by its whole number; more than 65,536 changes in one region; blocks behind the first."""
    target = _all_and_many(live)
    found = ranges.of_change(live.checkpoint.directory, live.base, target, live.tp)
    small = {q: (least, max(found[q])) for q, least in LEAST[live.checkpoint.name].items() if max(found[q]) < least}
    if small:
        raise InfrastructureFailed(f"{live.name}: the suite's own delta is smaller than planned: {small}")
    live.accepts(target)
    live.answers_as_truth()


def _edges(shape: tuple[int, ...], ranks: int) -> changes.Positions:
    """Both sides of every block's and every 2^16th element's end, counted from the start of each rank's rows."""
    size = int(np.prod(shape, dtype=np.int64))
    starts = [0, *(rank * -(-shape[0] // 64) * 64 // ranks * (size // shape[0]) for rank in range(1, ranks))]
    steps = [start + step for start in starts for unit in (2**12, 2**16, BLOCK) for step in range(0, size, unit)]
    found = np.unique([at + beside for at in steps for beside in (-1, 0, 1)] + [size - 1])
    return found[(found >= 0) & (found < size)].astype(np.int64)


@pytest.mark.check("shard_boundaries")
def test_block_boundaries(live: Row) -> None:
    """Single elements on both sides of where blocks, chunks and 16-bit counters of a rank's share end."""
    target = changes.changed(
        live.current,
        live.current,
        live.aliases,
        lambda name, t: _edges(tuple(t.shape), live.tp),
        lambda name, t, at: changes.moved(t, at, f"block {name}", 0.25),
    )
    live.accepts(target)
    live.answers_as_truth()


@pytest.mark.check("special_values")
def test_special_values(live: Row) -> None:
    """Bits that a detour through another dtype, or through arithmetic, would not leave as they are."""
    finite, nan = live.current, live.backend.offers("nan_values")
    live.accepts(changes.special_values(finite, 0, live.aliases, nan=nan))
    assert oracle.difference(finite, live.current), "the suite's special values change nothing"
    live.accepts(finite)
