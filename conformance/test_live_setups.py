"""Engines that are not plain: compiled, and with a LoRA adapter beside. Judged as in `test_live`, by engines alike.

A compiled graph or a wrapped layer could hold its own copy of a weight: then the bits would be right and the answers
stale. So each change here is first seen to move a fresh engine's answers, in every family of parameters at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .driving.options import Options, asked_for, options_of
from .inputs import checkpoints
from .inputs.checkpoints import State
from .live import changes, judge
from .live.backends import backend_of
from .live.row import Row
from .live.setup import COMPILED, beside_adapter
from .live.truth import Truths

pytestmark = pytest.mark.timeout(900)

ROWS = [
    ("compiled", "qwen3-moe", 1),
    ("compiled", "gemma4-text", 1),
    ("compiled", "gemma4-moe", 1),
    ("compiled", "qwen3-tied", 2),
    ("lora", "qwen3-tied", 1),
    ("lora", "qwen3-untied", 2),
]
"""Between them: every architecture, tied and untied, experts, one rank and two; every family of parameters in each."""

REPEATED = "qwen3-moe compiled tp=1"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = [
        pytest.param(
            r,
            marks=[pytest.mark.row(f"{r[1]} {r[0]} tp={r[2]}"), pytest.mark.needs(r[0])],
            id=f"{r[1]}-{r[0]}-tp{r[2]}",
        )
        for r in ROWS
        if r[2] in asked_for((1, 2), options_of(metafunc.config))
    ]
    metafunc.parametrize("row", marked, indirect=True, scope="module")


@pytest.fixture(scope="module")
def row(
    request: pytest.FixtureRequest, options: Options, offered: frozenset[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Row]:
    """The engine under test and its own fresh ones."""
    kind, model, tp = request.param
    if options.checkpoint:
        pytest.skip("set-ups are judged on the suite's own checkpoints")
    if tp not in options.tp:
        pytest.skip(f"--tp asks for {','.join(map(str, options.tp))}")
    scratch = tmp_path_factory.mktemp("setup")
    checkpoint = checkpoints.make(model, scratch / "base")
    base = checkpoints.load(checkpoint.directory)
    setup = COMPILED if kind == "compiled" else beside_adapter(base, scratch / "adapter")
    truths = Truths(scratch / "truths", setup)
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


def _all_changed(live: Row) -> State:
    """What family after family of `test_behaviour` leads to."""
    return changes.of_families(live.base, live.base, live.aliases)


@pytest.mark.check("base")
def test_base(live: Row) -> None:
    """Before any delta the engine equals a fresh one of its kind; an adapter changes the answers."""
    assert [len(graphs) for graphs in live.call("compiled_graphs")] == [live.setup is COMPILED] * live.tp
    live.truths_of([live.base, _all_changed(live)])  # both of them, at once
    live.holds_current()
    live.answers_as_truth()
    outputs = live.truth(live.base).outputs
    assert judge.finite(outputs), "the base checkpoint's log-probabilities are not finite"
    if live.setup.adapter:
        half = len(outputs) // 2
        assert all(a != b for a, b in zip(outputs[:half], outputs[half:], strict=True)), "the adapter does nothing"


@pytest.mark.check("behaviour")
def test_behaviour(live: Row) -> None:
    """Family after family changes: each moves the answers by itself, and in the end they are a fresh engine's.

    Then back, which is the base again.
    """
    families = changes.families(live.base, live.aliases)
    families.pop("towers", None)
    target, answers = live.base, live.answers()
    for family, names in families.items():
        target = changes.of_families(target, names, live.aliases)
        found = live.sync(live.backend.info(live.delta(target)))
        assert found is None, f"{live.name}: {family}: a good delta was refused: {found}"
        live.current, before = target, answers
        answers = live.answers()
        assert answers != before, f"{live.name}: the answers do not read {family}"
    live.holds_current()
    live.answers_as_truth()
    live.accepts(live.base)
    live.answers_as_truth()


@pytest.mark.check("restarted")
def test_a_second_engine_on_a_filled_cache(live: Row) -> None:
    """An engine that finds the first one's kernels on disk reads its own weights, and new ones.

    (vLLM 0.32.0 saves whole graphs too, cannot load them for a CPU and says so, and compiles them again from kernels.)
    """
    if live.name != REPEATED:
        pytest.skip(f"run for {REPEATED} alone: the cache does not know models apart")
    live.close()
    live.ready()
    assert [len(graphs) for graphs in live.call("compiled_graphs")] == [1] * live.tp
    live.answers_as_truth()
    live.accepts(_all_changed(live))
    live.answers_as_truth()
