"""Engines that are not small: what chunks, counters and names of one digit hide in the others.

qwen3-large      twelve layers of twelve experts, an embedding of more than 2^24 elements, three files, one
                 key-value head (so that two ranks hold the same one)
qwen3-float32    four bytes an element
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from .driving.options import Options, options_of
from .findings import require
from .inputs import checkpoints
from .inputs.checkpoints import EMBEDDING, State
from .live import changes
from .live.backends import backend_of
from .live.row import Row
from .live.setup import setup_of
from .live.truth import Truths
from .oracle import digests

pytestmark = [pytest.mark.timeout(600), pytest.mark.check("sizes")]
LARGE, WIDE = "qwen3-large", "qwen3-float32"
BOUNDARIES = (1 << 8, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 24)
"""Around each of these, and of each multiple of 2^18 (a block of refdelta's digests), elements change."""
MANY = 70_000
"""Changes of one tensor beside these: more than 16 bits count."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    model = WIDE if metafunc.function.__name__ == "test_four_byte_values" else LARGE
    tp = max(set(options_of(metafunc.config).tp) & {1, 2}, default=1) if model == LARGE else 1
    params = [pytest.param((model, tp), marks=pytest.mark.row(f"{model} tp={tp}"), id=f"{model}-tp{tp}")]
    metafunc.parametrize("row", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def row(
    request: pytest.FixtureRequest,
    options: Options,
    offered: frozenset[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Row]:
    """The engine under test and its fresh ones."""
    (model, tp), scratch = request.param, tmp_path_factory.mktemp("sizes")
    if options.checkpoint or tp not in options.tp:
        pytest.skip("sizes are judged on the suite's own checkpoints, at the sizes of --tp")
    setup = setup_of(model)
    truths = Truths(tmp_path_factory.mktemp("truth"), setup)
    made = Row(checkpoints.make(model, scratch / "base"), tp, backend_of(options, offered), truths, scratch, setup)
    yield made
    made.close()
    truths.close()


@pytest.fixture
def live(row: Row) -> Row:
    """The row with an engine that holds its current state; skipped where the backend does not offer what it needs."""
    row.skip_unless_offered()
    row.ready()
    return row


def _large_change(live: Row, seed: str) -> State:
    """Every tensor in part, and of the embedding both sides of each boundary, its ends, and many places between."""
    embedding = next(name for name in live.current if name.endswith(EMBEDDING))
    numel = live.current[embedding].numel()
    draw = changes._generator(f"{seed} large")
    marks = [*BOUNDARIES, *range(1 << 18, numel, 1 << 18)]
    beside = [mark + step for mark in marks for step in (-1, 0, 1)]
    at = np.unique([0, *(place for place in beside if place < numel), numel - 1, *draw.integers(0, numel, MANY)])

    def positions(name: str, tensor: object) -> changes.Positions:
        return at if name == embedding else changes._some(draw, live.current[name].numel(), 40)

    return changes.changed(
        live.current,
        live.current,
        live.aliases,
        positions,
        lambda name, t, where: changes.moved(t, where, f"{seed} {name}", 0.25),
    )


def test_a_large_change(live: Row) -> None:
    """There, and on from there: the second is rolled on what the first left in every block."""
    for seed in ("large one", "large two"):
        live.accepts(_large_change(live, seed))
        if live.backend.ours:
            _accounts_for(live)
    live.answers_as_truth()


def test_four_byte_values(live: Row) -> None:
    """Values that two bytes do not hold."""
    live.accepts(live.other)
    live.accepts(changes.special_values(live.current, 0, live.aliases, nan=live.backend.offers("nan_values")))
    live.accepts(live.base)
    live.answers_as_truth()


def _accounts_for(live: Row) -> None:
    """The engine's own digest is that of the weights, and an audit reads all of them and finds nothing."""
    known = digests.state_digest(live.current)
    for answer in live.call("rpc", method="refdelta_status"):
        require(answer["digest"] == known, "status digest", expected=known, found=answer["digest"], context=live.name)
    answers = live.call("rpc", method="refdelta_audit")
    found = [answer["mismatched"] for answer in answers]
    require(not any(found), "audit", expected="nothing differs", found=found, context=live.name)
    read, held = sum(answer["elements"] for answer in answers), sum(t.numel() for t in live.current.values())
    require(read >= held, "elements audited", expected=f"at least {held}", found=read, context=live.name)
