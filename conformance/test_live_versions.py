"""Versions in a live engine: what a delta's lineage states is held against what the engine holds.

For backends with the capability `lineage`. Deltas are the oracle's, digests those of `conformance.oracle.digests`; each
check begins from the state that the last one left. Anchors are refdelta's own way to load a whole checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from . import oracle
from .driving.options import Options, asked_for, options_of
from .findings import require
from .inputs import checkpoints
from .live.backends import backend_of
from .live.refusals import words
from .live.row import Row
from .live.truth import Truths
from .live.versions import ELSEWHERE, Trainer

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.check("versions"),
    pytest.mark.needs("lineage"),
]
MODEL = "qwen3-untied"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sizes = asked_for((1, 2), options_of(metafunc.config))
    params = [pytest.param(tp, marks=pytest.mark.row(f"{MODEL} tp={tp}"), id=f"{MODEL}-tp{tp}") for tp in sizes]
    metafunc.parametrize("row", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def row(
    request: pytest.FixtureRequest,
    options: Options,
    offered: frozenset[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Row]:
    """The engine under test and its fresh ones."""
    tp, scratch = request.param, tmp_path_factory.mktemp("versions")
    if options.checkpoint or tp not in options.tp:
        pytest.skip("versions are judged on the suite's own checkpoint, at the sizes of --tp")
    truths = Truths(tmp_path_factory.mktemp("truth"))
    made = Row(checkpoints.make(MODEL, scratch / "base"), tp, backend_of(options, offered), truths, scratch)
    yield made
    made.close()
    truths.close()


@pytest.fixture
def live(row: Row) -> Row:
    """The row with an engine that holds its current state."""
    row.ready()
    return row


def test_versions_follow_each_other(live: Row) -> None:
    """Two versions, an empty one, and the one after it."""
    trainer = Trainer(live)
    trainer.publishes("one")
    trainer.publishes("two")
    live.accepts(live.current, live.write(trainer.draft(live.current)))
    trainer.version += 1
    trainer.publishes("three")


def test_another_base_is_refused(live: Row) -> None:
    """A version missed or repeated from the past, other weights, another run that states no weights."""
    trainer = Trainer(live)
    trainer.publishes("base one")
    trainer.publishes("base two")
    target = trainer.next("base three")
    for fields in (
        {"base_version": 7, "version": 8, "base_digest": None},
        {"base_version": 1, "base_digest": None},
        {"base_digest": ELSEWHERE},
        {"run_id": "another run", "base_digest": None},
    ):
        live.refuses_delta(trainer.draft(target, **fields), "base_mismatch")
    trainer.publishes("base three")


def test_another_result_is_refused(live: Row) -> None:
    """The digest that is stated is not that of the change."""
    trainer = Trainer(live)
    trainer.publishes("result one")
    target = trainer.next("result two")
    live.refuses_delta(trainer.draft(target, digest=ELSEWHERE), "digest_mismatch")
    trainer.publishes("result two")


def test_a_failed_update_keeps_the_version(live: Row) -> None:
    """After a refusal the same version is taken again, and the one after it."""
    trainer = Trainer(live)
    trainer.publishes("kept one")
    target = trainer.next("kept two")
    good = live.patches(target)
    spoilt = trainer.draft(target)
    spoilt.replace(f"{len(good) - 1}.indices", lambda entry: oracle.Entry(entry.key, "F32", entry.shape, entry.data))
    live.refuses_delta(spoilt, "bad_indices")
    trainer.publishes("kept two")
    trainer.publishes("kept three")


def test_a_repeated_version_changes_nothing(live: Row) -> None:
    """A sender that heard no answer sends again; the same version with other weights is refused."""
    trainer = Trainer(live)
    target = trainer.next("repeated")
    delta, other = trainer.draft(target), trainer.draft(target, digest=ELSEWHERE)
    live.accepts(target, live.write(delta))
    live.accepts(target, live.write(delta))
    live.refuses_delta(other, "base_mismatch", "digest_mismatch")
    trainer.version += 1
    trainer.publishes("after the repetition")


def test_parts_are_one_update(live: Row) -> None:
    """One part of two is refused, and one part twice; both are taken in either order."""
    trainer = Trainer(live)
    trainer.publishes("parts one")
    for order in ((0, 1), (1, 0)):
        target = trainer.next(f"parts {order}")
        patches = live.patches(target)
        parts = [live.write(trainer.draft(target, patches[i::2], part=[i, 2])) for i in range(2)]
        for incomplete in ([parts[0]], [parts[1]], [parts[0], parts[0]]):
            live.ready()
            _is_incomplete(live, live.session(*map(live.backend.info, incomplete)))
        live.ready()
        found = live.session(*(live.backend.info(parts[i]) for i in order))
        require(found is None, "update", expected="taken", found=found, context=f"{live.name}: both parts")
        live.is_at(target)
        trainer.version += 1
    trainer.publishes("parts three")


def _is_incomplete(live: Row, found: str | None) -> None:
    require(found is not None, "refusal", expected="a refusal (incomplete)", found="taken", context=live.name)
    said = words(str(found))
    require(said, "refusal", expected="a refusal (incomplete)", found="a refusal without text", context=live.name)
    if live.backend.offers("reasons"):
        require("[incomplete]" in str(found), "reason", expected="incomplete", found=found, context=live.name)
    live.is_at(live.current)


def test_an_anchor_replaces_everything(live: Row) -> None:
    """A whole checkpoint as version 12, by refdelta's backend alone; what follows is based on that version alone."""
    if not live.backend.ours:
        pytest.skip("anchors are refdelta's own")
    trainer = Trainer(live)
    trainer.publishes("before the anchor")
    before, target, trainer.version = trainer.version, trainer.next("anchor"), 12
    place = live.checkpoint.directory.with_name(f"anchor-{uuid.uuid4().hex}")
    directory = checkpoints.with_state(live.checkpoint.directory, target, place)
    found = live.sync({"target_weights_path": str(directory), "run_id": trainer.run, "version": trainer.version})
    require(found is None, "update", expected="taken", found=found, context=f"{live.name}: an anchor")
    live.current = target
    live.holds_current()
    for version in (before, 11):
        stale = trainer.draft(trainer.next("stale"), base_version=version, base_digest=None)
        live.refuses(live.backend.info(live.write(stale)), frozenset({"base_mismatch"}))
    trainer.publishes("after the anchor")
