"""Deltas into a live vLLM engine, and a verdict on every bit: ``pytest conformance/ --engine vllm``.

Each row is a checkpoint at one tensor-parallel size. Its checks run in this order on one engine, each from the state
that the last one left. What a state should be is asked of a freshly started engine (`conformance.live.truth`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from . import oracle
from .driving.options import Options, options_of
from .findings import InfrastructureFailed, require
from .inputs import checkpoints
from .inputs.checkpoints import Checkpoint
from .live import changes, judge
from .live.backends import backend_of
from .live.row import Row
from .live.truth import Truths

pytestmark = pytest.mark.timeout(600)

FAMILIES_TOGETHER = {1: 1}
"""tp -> parameter families changed at once in `test_behaviour`; a fresh engine of several ranks costs more."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    options = options_of(metafunc.config)
    models = (options.checkpoint,) if options.checkpoint else checkpoints.MODELS
    rows = [(model, tp) for tp in options.tp for model in models]
    params = [pytest.param(r, marks=pytest.mark.row(f"{r[0]} tp={r[1]}"), id=f"{r[0]}-tp{r[1]}") for r in rows]
    metafunc.parametrize("row", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truths]:
    """Fresh engines, shared by all rows."""
    made = Truths(tmp_path_factory.mktemp("truth"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def row(
    request: pytest.FixtureRequest,
    options: Options,
    offered: frozenset[str],
    truths: Truths,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Row]:
    """The engine under test; started by the first check that needs it."""
    model, tp = request.param
    scratch = tmp_path_factory.mktemp("row")
    made = Row(_checkpoint(model, options, scratch), tp, backend_of(options, offered), truths, scratch)
    yield made
    made.close()


def _checkpoint(model: str, options: Options, scratch: Path) -> Checkpoint:
    return checkpoints.given(model) if options.checkpoint else checkpoints.make(model, scratch / "base")


@pytest.fixture
def live(row: Row) -> Row:
    """The row with an engine that holds its current state; skipped where the backend does not offer what it needs."""
    row.skip_unless_offered()
    row.ready()
    return row


# --- deltas that must be applied --------------------------------------------------------------------------------------


@pytest.mark.check("base")
def test_base(live: Row) -> None:
    """Before any delta the engine equals a fresh one, and its products read the live weights."""
    packed = live.call("packed_layers")
    assert packed == [[]] * live.tp, f"{live.name}: these layers read packed copies of their weights: {packed}"
    live.holds_current()
    live.answers_as_truth()


@pytest.mark.check("every_tensor")
def test_every_tensor(live: Row) -> None:
    """One delta that touches every tensor of the checkpoint."""
    untouched = {name for name in live.base if not oracle.difference(live.base[name], live.other[name])}
    assert not untouched, f"the suite's delta leaves {untouched} unchanged"
    live.accepts(live.other)
    live.answers_as_truth()


@pytest.mark.check("chain_of_three")
def test_chain_of_three(live: Row) -> None:
    """Three deltas, one after the other."""
    for link in ("one", "two"):
        target = changes.every_tensor(live.current, link, live.aliases)
        found = live.sync(live.backend.info(live.delta(target)))
        require(found is None, "update", expected="taken", found=found, context=f"{live.name}: {link} of three")
        live.current = target
    live.accepts(changes.every_tensor(live.current, "three", live.aliases))
    live.answers_as_truth()


@pytest.mark.check("twice")
def test_twice(live: Row) -> None:
    """The same delta twice leaves what it left once."""
    delta = live.delta(live.other)
    live.accepts(live.other, delta)
    live.accepts(live.other, delta)


@pytest.mark.check("empty")
def test_empty(live: Row) -> None:
    """A delta without tensors is a version like any other."""
    live.accepts(live.current)


@pytest.mark.check("first_element")
def test_first_element(live: Row) -> None:
    """The first element of every tensor."""
    live.accepts(changes.one_element(live.current, 0, live.aliases))


@pytest.mark.check("last_element")
def test_last_element(live: Row) -> None:
    """The last element of every tensor."""
    live.accepts(changes.one_element(live.current, -1, live.aliases))


@pytest.mark.check("shard_boundaries")
def test_shard_boundaries(live: Row) -> None:
    """Single elements on both sides of each cut into two shards (or as many as there are ranks)."""
    live.accepts(changes.shard_boundaries(live.current, max(2, live.tp), live.aliases))
    live.answers_as_truth()


@pytest.mark.check("special_values")
def test_special_values(live: Row) -> None:
    """Zeros, subnormals, infinities and NaN payloads; then each replaced by its neighbour; then finite again.

    Without NaNs for a backend that does not offer them; `test_declined` gives it some.
    """
    finite, nan = live.current, live.backend.offers("nan_values")
    for turn in (0, 1):
        live.accepts(changes.special_values(finite, turn, live.aliases, nan=nan))
    live.accepts(finite)
    live.answers_as_truth()


@pytest.mark.check("behaviour")
def test_behaviour(live: Row) -> None:
    """Per parameter family, a change that moves a fresh engine's log-probabilities moves the live engine's alike."""
    before = live.truth(live.base).outputs
    families = changes.families(live.base, live.aliases)
    assert judge.finite(before), "the base checkpoint's log-probabilities are not finite"
    groups = changes.family_groups(families.keys() - {"towers"}, FAMILIES_TOGETHER.get(live.tp, 4))
    targets = (
        changes.of_families(live.base, [name for family in group for name in families[family]], live.aliases)
        for group in groups
    )
    for group, (target, truth) in zip(groups, live.with_truths(targets), strict=True):
        after = truth.outputs
        assert judge.finite(after), f"{group}: the changed checkpoint's log-probabilities are not finite"
        assert after != before, f"{group}: the change moves no log-probability of a fresh engine, so it shows nothing"
        live.accepts(target)
        live.answers_as_truth()
    live.accepts(live.base)
    live.answers_as_truth()


# --- what the backend does not offer ---------------------------------------------------------------------------------


@pytest.mark.check("declined")
def test_declined(row: Row) -> None:
    """An engine that does not start says so; a delta is refused with nothing changed, or done right."""
    missing = {feature: names for feature, names in row.features.items() if not row.backend.offers(feature)}
    if not missing and row.backend.offers("nan_values"):
        pytest.skip("the backend offers everything that this row needs")
    row.truth(row.base)  # that a fresh engine starts: if one with the backend does not, it is the backend that declines
    try:
        row.ready()
    except InfrastructureFailed as error:
        require(missing, "start", expected="a start: nothing that this row needs is declined", found=error)
        return
    for names in missing.values():
        row.ready()
        row.declines(changes.of_families(row.current, names, row.aliases))
    if not row.backend.offers("nan_values"):
        row.ready()
        row.declines(changes.special_values(row.current, 0, row.aliases))
    # Whatever it holds now was judged; the next check starts from a known state.
    row.close()


# --- deltas that must be refused --------------------------------------------------------------------------------------


@pytest.mark.check("malformed_second")
def test_malformed_second(live: Row) -> None:
    """The second tensor of a delta is malformed; the first is good and must not be written."""
    whole = live.patches(changes.one_element(live.current, 0, live.aliases))
    patches = [patch for patch in whole if patch.name not in (live.aliases or ())]
    numel = patches[1].numel

    def spoilt(key: str, code: str, values: list[int], kind: type[np.generic]) -> oracle.Draft:
        draft = live.draft(patches)
        entry = oracle.Entry(key, code, (len(values),), np.array(values, kind).tobytes())
        draft.replace(key, lambda _: entry)
        return draft

    live.refuses_delta(spoilt("1.indices", "I32", [numel], np.int32), "index_range")
    live.refuses_delta(spoilt("1.indices", "I32", [-1], np.int32), "index_range", "index_order")
    live.refuses_delta(spoilt("1.indices", "I32", [0, 1], np.int32), "length_mismatch", "count_mismatch")
    live.refuses_delta(spoilt("1.values", "F32", [0], np.float32), "dtype_mismatch")
    draft = live.draft(patches)
    draft.entries = [entry for entry in draft.entries if entry.key != "1.values"]
    live.refuses_delta(draft, "keys_mismatch")
    live.good_delta_succeeds()


@pytest.mark.check("unknown_name")
def test_unknown_name(live: Row) -> None:
    """Names that the checkpoint lacks, among them some that vLLM's own loader passes over in silence."""
    patches = live.patches(changes.one_element(live.current, 0, live.aliases))
    good = next(patch for patch in patches if len(patch.shape) == 1)
    matrix = _matrix(patches)
    module = matrix.name.removesuffix(".weight")
    parent = module.rpartition(".")[0]
    for name in (
        f"{parent}.z_proj.weight",
        f"{module}.bias",
        f"{parent}.rotary_emb.inv_freq",
        f"{module}.weight_scale",
    ):
        live.refuses_delta(live.draft([good, replace(matrix, name=name)]), "unknown_tensor", "unmapped")
    live.good_delta_succeeds()


def _matrix(patches: Sequence[oracle.Patch]) -> oracle.Patch:
    """A q_proj where there is one, else any matrix that is not square."""
    matrices = [patch for patch in patches if len(patch.shape) == 2 and len(set(patch.shape)) == 2]
    return next((patch for patch in matrices if patch.name.endswith("self_attn.q_proj.weight")), matrices[-1])


@pytest.mark.check("wrong_shape")
def test_wrong_shape(live: Row) -> None:
    """A transposed tensor, a flattened one, one with a row too few; every position lies inside the true tensor."""
    patches = live.patches(changes.one_element(live.current, 0, live.aliases))
    matrix = _matrix(patches)
    rows, columns = matrix.shape
    for shape in ((columns, rows), (rows * columns,), (rows - 1, columns)):
        spoilt = [replace(patch, shape=shape) if patch is matrix else patch for patch in patches]
        live.refuses_delta(live.draft(spoilt), "shape_mismatch")
    live.good_delta_succeeds()


@pytest.mark.check("one_rank_fails")
@pytest.mark.needs("per_rank")
def test_one_rank_fails(live: Row) -> None:
    """One rank gets a delta that it must refuse, the others a good one: nobody writes, and every rank answers."""
    if live.tp == 1:
        pytest.skip("one rank cannot fail alone at tp=1")
    good = live.backend.info(live.delta(changes.one_element(live.current, 0, live.aliases)))
    bad = live.backend.info(live.write(live.draft([])) / "absent")
    for failing in range(live.tp):
        infos = [bad if rank == failing else good for rank in range(live.tp)]
        live.ready()
        live.refuses(infos, frozenset({"not_a_delta", "rank_failed"}))
    live.good_delta_succeeds()


@pytest.mark.check("separate_tied")
def test_separate_tied(live: Row) -> None:
    """A change that would separate tied aliases cannot be applied in place; the same change to both can."""
    if not live.checkpoint.tied:
        pytest.skip("the model is not tied")
    if live.aliases is None:
        _head_alone_is_refused(live)
    else:
        _one_alias_is_refused(live, *live.aliases)
    live.good_delta_succeeds()


def _head_alone_is_refused(live: Row) -> None:
    """lm_head.weight is not in the files: a change to it alone has no place."""
    embedding = next(name for name in live.base if name.endswith(checkpoints.EMBEDDING))
    tensor = live.current[embedding]
    head = oracle.delta_patch(checkpoints.HEAD, tensor, [5], tensor.reshape(-1)[6:7])
    live.refuses_delta(live.draft([head]), "alias_conflict", "unknown_tensor")


def _one_alias_is_refused(live: Row, embedding: str, head: str) -> None:
    """Both are in the files with equal bytes: one alone, or two different changes, would separate them."""
    tensor = live.current[embedding]
    one, two = (oracle.delta_patch(name, tensor, [5], tensor.reshape(-1)[6:7]) for name in (embedding, head))
    other = oracle.delta_patch(head, tensor, [5], tensor.reshape(-1)[7:8])
    elsewhere = oracle.delta_patch(head, tensor, [4], tensor.reshape(-1)[6:7])
    for patches in ([one], [two], [one, other], [one, elsewhere]):
        live.refuses_delta(live.draft(patches), "alias_conflict")
    live.accepts(oracle.expected_state(live.current, [one, two]))
    live.answers_as_truth()
