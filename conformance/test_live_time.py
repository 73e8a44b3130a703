"""What outlasts one call to a live engine: paths used again, sessions, writes that fail, and what it says of itself.

One small engine, each check from the state that the last one left. Where the ranks matter there are two of them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from . import oracle
from .driving.options import Options, asked_for, options_of
from .findings import require
from .inputs import checkpoints
from .inputs.checkpoints import State
from .live import changes
from .live.backends import backend_of
from .live.row import Row
from .live.truth import Truths
from .live.versions import ELSEWHERE, Trainer
from .oracle import digests

pytestmark = pytest.mark.timeout(600)
MODELS = {1: "qwen3-tied", 2: "qwen3-untied"}
"""tp -> checkpoint."""
BOTH_SIZES = (
    "test_a_delta_that_fails_is_undone",
    "test_an_anchor_that_fails_is_undone",
    "test_a_flipped_bit_is_found",
)
"""Tests in which it matters which rank it is; the others run on one."""
NORM = "model.layers.1.input_layernorm.weight"
"""A parameter that has one name in the checkpoint and in the engine, whole on every rank."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sizes = (1, 2) if metafunc.function.__name__ in BOTH_SIZES else (1,)
    rows = [(MODELS[tp], tp) for tp in asked_for(sizes, options_of(metafunc.config))]
    params = [pytest.param(r, marks=pytest.mark.row(f"{r[0]} tp={r[1]}"), id=f"{r[0]}-tp{r[1]}") for r in rows]
    metafunc.parametrize("row", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def row(
    request: pytest.FixtureRequest,
    options: Options,
    offered: frozenset[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Row]:
    """The engine under test and its fresh ones."""
    (model, tp), scratch = request.param, tmp_path_factory.mktemp("time")
    if options.checkpoint or tp not in options.tp:
        pytest.skip("what outlasts a call is judged on the suite's own checkpoint, at the sizes of --tp")
    truths = Truths(tmp_path_factory.mktemp("truth"))
    made = Row(checkpoints.make(model, scratch / "base"), tp, backend_of(options, offered), truths, scratch)
    yield made
    made.close()
    truths.close()


@pytest.fixture
def live(row: Row) -> Row:
    """The row with an engine that holds its current state; skipped where the backend does not offer what it needs."""
    row.skip_unless_offered()
    row.ready()
    return row


def _only_ours(live: Row) -> None:
    if not live.backend.ours:
        pytest.skip("anchors, status and audit are refdelta's own")


# --- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.check("sessions")
def test_a_path_is_used_again(live: Row) -> None:
    """Another delta of the same size, with the same times, in the place of the last one."""
    place = live.write(live.draft([])).with_name(f"again-{uuid.uuid4().hex}")
    times: tuple[int, int] | None = None
    for turn in ("once", "again"):
        target = changes.every_tensor(live.base, "a path")
        target = {name: _other_values(live.current[name], target[name], live.base[name], turn) for name in target}
        if place.exists():
            place.rename(place.with_name(f"{place.name}-{turn}"))
        live.draft(live.patches(target)).write(place)
        stats = [path.stat() for path in sorted(place.iterdir())]
        times = times or (stats[0].st_atime_ns, stats[0].st_mtime_ns)
        for path in (*place.iterdir(), place):
            os.utime(path, ns=times)
        live.accepts(target, place)


def _other_values(current: Any, target: Any, base: Any, turn: str) -> Any:
    """``current`` with other bits in the elements in which ``target`` and ``base`` differ: the same ones each turn."""
    at = oracle.bits(base) != oracle.bits(target)
    patterns = oracle.bits(current)
    patterns[at] ^= 1 if turn == "once" else 2
    return oracle.from_bits(patterns, oracle.CODES[current.dtype], tuple(current.shape))


@pytest.mark.check("sessions")
@pytest.mark.level("transactional")
@pytest.mark.needs("rollback")
def test_an_abandoned_session_is_not_written(live: Row) -> None:
    """Start, update, and then a session of its own: an empty one, then one with another delta."""
    abandoned = live.backend.info(live.delta(changes.one_element(live.current, 0, live.aliases)))
    target = changes.one_element(live.current, -1, live.aliases)
    another = live.backend.info(live.delta(target))
    for infos, after in (([], live.current), ([another], target)):
        live.session(abandoned, finish=False)
        found = live.session(*infos)  # it may be refused, because a session is open
        live.is_at(after if found is None else live.current)
    live.good_delta_succeeds()


@pytest.mark.check("sessions")
def test_two_deltas_in_one_session(live: Row) -> None:
    """The second one is based on the first; both are there in the end."""
    first = changes.one_element(live.current, 0, live.aliases)
    one, before = live.delta(first), live.current
    live.current = first
    second = changes.every_tensor(first, "second of two", live.aliases)
    two = live.delta(second)
    live.current = before
    found = live.session(live.backend.info(one), live.backend.info(two))
    require(found is None, "update", expected="taken", found=found, context=f"{live.name}: two deltas in one session")
    live.is_at(second)
    live.answers_as_truth()


@pytest.mark.check("in_place")
@pytest.mark.needs("in_place")
def test_weights_stay_where_they_are(live: Row) -> None:
    """No parameter gets other memory; torch writes as many elements as change, not a whole model."""
    before = live.call("rpc", method="probe_addresses")
    target = changes.one_element(live.current, 0, live.aliases)
    delta = live.delta(target)
    live.call("rpc", method="probe_count_writes")
    found = live.sync(live.backend.info(delta))
    written = live.call("rpc", method="probe_written")
    require(found is None, "update", expected="taken", found=found, context=live.name)
    moved = sorted(
        {name for old, new in zip(before, _addresses(live), strict=True) for name in old if new[name] != old[name]}
    )
    require(not moved, "addresses", expected="as before", found=f"{len(moved)} moved, the first {moved[:1]}")
    changed = sum(len(patch.indices) for patch in live.patches(target))
    require(
        max(written) <= 2 * changed,
        "elements written",
        expected=f"at most {2 * changed}, {changed} change",
        found=written,
        context=live.name,
    )
    live.is_at(target)


def _addresses(live: Row) -> list[dict[str, int]]:
    found: list[dict[str, int]] = live.call("rpc", method="probe_addresses")
    return found


# --- writes that fail -------------------------------------------------------------------------------------------------


@pytest.mark.check("failed_write")
@pytest.mark.needs("fail_at")
@pytest.mark.needs("rollback")
def test_a_delta_that_fails_is_undone(live: Row) -> None:
    """On each rank in turn, after all have agreed; the others have written by then. The version stays, too."""
    _fails_and_is_undone(live, lambda target: live.backend.info(live.delta(target)))


@pytest.mark.check("failed_write")
@pytest.mark.needs("fail_at")
@pytest.mark.needs("rollback")
def test_an_anchor_that_fails_is_undone(live: Row) -> None:
    """The same of a whole checkpoint."""
    _only_ours(live)
    _fails_and_is_undone(live, lambda target: _anchor(live, target))


def _fails_and_is_undone(live: Row, made: Callable[[State], dict[str, Any]]) -> None:
    trainer = Trainer(live) if live.backend.offers("lineage") else None
    if trainer:
        trainer.publishes("before a failed write")
    for rank in range(live.tp):
        info = made(changes.every_tensor(live.current, f"fails on {rank}", live.aliases))
        known = _status(live) if live.backend.ours else {}
        live.call("rpc", method="probe_call", arguments=[live.backend.fail_at, [rank]])
        live.refuses(info, frozenset({"write_failed", "rank_failed"}))
        live.call("rpc", method="probe_call", arguments=[live.backend.fail_at, [None]])
        _says(live, {key: known[key] for key in ("run_id", "version", "digest", "fence") if known})
    if trainer:
        trainer.publishes("after a failed write")


def _anchor(live: Row, target: State) -> dict[str, Any]:
    place = live.checkpoint.directory.with_name(f"anchor-{uuid.uuid4().hex}")
    return {"target_weights_path": str(checkpoints.with_state(live.checkpoint.directory, target, place))}


# --- what the engine says of itself -----------------------------------------------------------------------------------


def _status(live: Row) -> dict[str, Any]:
    """What every rank says alike."""
    answers: list[dict[str, Any]] = live.call("rpc", method="refdelta_status")
    for key in ("run_id", "version", "digest", "verified", "fence", "session", "staged"):
        require(
            len({str(answer[key]) for answer in answers}) == 1,
            f"status {key}",
            expected="alike on all ranks",
            found=answers,
        )
    return answers[0]


def _says(live: Row, expected: Mapping[str, Any]) -> None:
    status = _status(live) if expected else {}
    for key, value in expected.items():
        require(status[key] == value, f"status {key}", expected=value, found=status[key], context=live.name)


def _audit_is_clean(live: Row) -> None:
    for answer in live.call("rpc", method="refdelta_audit"):
        require(
            not answer["mismatched"], "audit", expected="nothing differs", found=answer["mismatched"], context=live.name
        )
        require(
            answer["elements"] > 0, "audit", expected="weights were read", found=answer["elements"], context=live.name
        )


@pytest.mark.check("account")
def test_status_follows_every_step(live: Row) -> None:
    """Versions with and without a stated result, a refusal, an anchor; the digests are the suite's own."""
    _only_ours(live)
    trainer = Trainer(live)
    for stated in ({}, {"digest": None}):
        target = trainer.next(f"stated {stated}")
        count = sum(len(patch.indices) for patch in live.patches(target))
        live.accepts(target, live.write(trainer.draft(target, **stated)))
        trainer.version += 1
        _holds(live, trainer, verified=not stated)
        changed = _status(live)["last_update"]["changed"]
        require(changed == count, "status changed", expected=count, found=changed)
    live.refuses_delta(trainer.draft(trainer.next("refused"), digest=ELSEWHERE), "digest_mismatch")
    _holds(live, trainer, verified=False)
    target = trainer.next("an anchor")
    found = live.sync(_anchor(live, target) | {"run_id": trainer.run, "version": 40})
    require(found is None, "update", expected="taken", found=found, context=f"{live.name}: an anchor")
    live.is_at(target)
    trainer.version = 40
    _holds(live, trainer, verified=True)


def _holds(live: Row, trainer: Trainer, *, verified: bool) -> None:
    known = {"run_id": trainer.run, "version": trainer.version, "digest": digests.state_digest(live.current)}
    _says(live, known | {"verified": verified, "fence": None, "session": None, "staged": 0})
    _audit_is_clean(live)


@pytest.mark.check("versions")
@pytest.mark.needs("lineage")
def test_an_unversioned_delta_ends_the_version(live: Row) -> None:
    """The version that the engine had is not that of its weights any more; their digest is."""
    trainer = Trainer(live)
    trainer.publishes("before an unversioned delta")
    before, unversioned = trainer.version, changes.every_tensor(live.current, "unversioned", live.aliases)
    live.accepts(unversioned)
    if live.backend.ours:
        _says(live, {"run_id": None, "version": None, "digest": digests.state_digest(unversioned)})
    target = trainer.next("on the old version")
    stale = trainer.draft(target, base_version=before, base_digest=digests.state_digest(live.base))
    live.refuses_delta(stale, "base_mismatch")
    live.accepts(target, live.write(trainer.draft(target)))


@pytest.mark.check("versions")
@pytest.mark.needs("lineage")
def test_digests_of_layers_are_compared(live: Row) -> None:
    """One layer's digest is another than the change leads to; the whole state's is right."""
    trainer = Trainer(live)
    target = trainer.next("layer digests")
    stated = {
        patch.name: digests.text(digests.tensor_digest(patch.name, target[patch.name]))
        for patch in live.patches(target)
    }
    wrong = {**stated, NORM: ELSEWHERE}
    live.refuses_delta(trainer.draft(target, layer_digests=wrong), "digest_mismatch")
    live.accepts(target, live.write(trainer.draft(target, layer_digests=stated)))


@pytest.mark.check("account")
def test_a_flipped_bit_is_found(live: Row) -> None:
    """On each rank: the audit names the tensor, then nothing is taken but an anchor, which mends it."""
    _only_ours(live)
    for rank in range(live.tp):
        target = changes.every_tensor(live.current, f"flipped on {rank}", live.aliases)
        delta, mended = live.delta(target), _anchor(live, live.current)
        live.call("rpc", method="probe_flip", arguments=[rank, NORM, 5])
        answers = live.call("rpc", method="refdelta_audit")
        found = [sorted(answer["mismatched"]) for answer in answers]
        wanted = [[NORM] if each == rank else [] for each in range(live.tp)]
        require(found == wanted, "audit", expected=wanted, found=found, context=f"{live.name}: a bit flipped on {rank}")
        _is_fenced(live, delta)
        _is_mended(live, mended)


def _is_fenced(live: Row, delta: Path) -> None:
    """A delta is refused, by all ranks, and it says why."""
    require(_status(live)["fence"], "status fence", expected="a reason", found=None, context=live.name)
    found = live.sync(live.backend.info(delta))
    require(found is not None and "[fenced]" in found, "reason", expected="fenced", found=found, context=live.name)
    live.every_rank_answers()


def _is_mended(live: Row, anchor: Mapping[str, Any]) -> None:
    found = live.sync(anchor)
    require(found is None, "update", expected="taken", found=found, context=f"{live.name}: an anchor")
    live.is_at(live.current)
    _says(live, {"fence": None})
    live.good_delta_succeeds()


@pytest.mark.check("account")
def test_sleep_and_reload_leave_a_mark(live: Row) -> None:
    """After a sleep all weights are audited before the next update; after a reload only an anchor is taken."""
    _only_ours(live)
    delta, mended = (
        live.delta(changes.every_tensor(live.current, "after a sleep", live.aliases)),
        _anchor(live, live.current),
    )
    live.call("sleep", level=1)
    live.call("rpc", method="probe_flip", arguments=[0, NORM, 7])
    found = live.sync(live.backend.info(delta))
    require(found is not None and NORM in found, "refusal", expected=f"{NORM} differs", found=found, context=live.name)
    _is_mended(live, mended)
    delta, mended = (
        live.delta(changes.every_tensor(live.current, "after a reload", live.aliases)),
        _anchor(live, live.current),
    )
    live.call("rpc", method="reload_weights")
    _is_fenced(live, delta)
    _is_mended(live, mended)


@pytest.mark.check("account")
def test_other_memory_takes_no_update(live: Row) -> None:
    """A parameter with other memory of equal bits: nothing is known of what reads it, so a delta is refused."""
    _only_ours(live)
    target = changes.every_tensor(live.current, "other memory", live.aliases)
    delta = live.delta(target)
    live.call("rpc", method="probe_replace_storage", arguments=[NORM])
    found = live.sync(live.backend.info(delta))
    require(
        found is not None and NORM in found, "refusal", expected=f"{NORM} was moved", found=found, context=live.name
    )
    live.every_rank_answers()
    live.holds_current()
    live.close()
