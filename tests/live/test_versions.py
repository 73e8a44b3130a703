"""Versions, digests, parts, anchors and audits on a live Gemma 4 at TP=2, whose files have tensors that no rank holds.

Digests are checked against the suite's own definition (`conformance.oracle.digests`), weights against a fresh engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance import oracle
from conformance.inputs import checkpoints
from conformance.live import changes
from conformance.live.runner import HostError
from conformance.oracle import digests
from refdelta import Delta, DeltaEncoder
from tests.live.rig import Engine, running

TOWER = "model.vision_tower."
NORM = "model.layers.1.input_layernorm.weight"
"""As the engine names it."""
FILE_NORM = "model.language_model.layers.1.input_layernorm.weight"
"""As the files do."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for the module; every test leaves it at the encoder's state."""
    tmp = tmp_path_factory.mktemp("versions")
    with running(checkpoints.make("gemma4-multimodal", tmp / "base"), 2, tmp) as made:
        yield made


def test_a_fresh_engine_is_known_by_the_digest_of_its_checkpoint(engine: Engine) -> None:
    """Replicas counted once, dropped tensors from the files; run and version are not known yet."""
    status = engine.status()
    assert status["digest"] == digests.state_digest(engine.state)
    assert (status["run_id"], status["version"], status["verified"]) == (None, None, True)


def test_versions_follow_each_other(engine: Engine) -> None:
    """Every tensor, the towers' too; then an empty version; then only what no rank holds."""
    engine.accepts(engine.next("one"))
    engine.accepts(engine.state)
    assert engine.status()["version"] == 2
    engine.accepts(engine.next("towers", TOWER))
    assert engine.host.call("rpc", method="refdelta_status")[0]["last_update"]["dropped"]
    engine.holds(engine.state)


def test_another_base_is_refused_naming_both(engine: Engine) -> None:
    """A missed version, an earlier one, another run, and the right version with other weights before it."""
    one = engine.encoder.encode(engine.next("skipped"))
    assert one.lineage is not None
    skipped = replace(one.lineage, base_version=7, version=8)
    engine.refuses(engine.write(replace(one, lineage=skipped)), "base_mismatch", "version 7", "version 3")
    other = replace(one.lineage, run_id="other", base_digest=None)
    engine.refuses(engine.write(replace(one, lineage=other)), "base_mismatch", "other", "run run")
    weights = replace(one.lineage, base_digest="rd1:0123456789abcdef")
    engine.refuses(engine.write(replace(one, lineage=weights)), "base_mismatch", "rd1:0123456789abcdef")
    engine.accepts(engine.next("skipped"))


def test_another_run_may_start_from_the_same_weights(engine: Engine) -> None:
    """A resumed trainer has a new run id; that its base is the engine's, the digest says."""
    engine.encoder = DeltaEncoder(engine.state, run_id="resumed", version=40)
    engine.accepts(engine.next("resumed"))
    assert engine.status()["version"] == 41


def test_a_result_that_is_not_the_stated_one_is_refused_before_the_first_write(engine: Engine) -> None:
    """The whole state's digest, and one layer's."""
    delta = engine.encoder.encode(engine.next("result"))
    assert delta.lineage is not None
    assert delta.lineage.layer_digests is not None
    wrong = "rd1:0123456789abcdef"
    engine.refuses(engine.write(replace(delta, lineage=replace(delta.lineage, digest=wrong))), "digest_mismatch", wrong)
    layers = {**delta.lineage.layer_digests, FILE_NORM: wrong}
    lying = replace(delta.lineage, layer_digests=layers)
    engine.refuses(engine.write(replace(delta, lineage=lying)), "digest_mismatch", f"tensor={FILE_NORM}")


def test_a_repeated_version_does_nothing_or_the_same_again(engine: Engine) -> None:
    """By option; the same version with another digest is refused."""
    delta = engine.encoder.encode(engine.next("repeated"))
    engine.accepts(engine.next("repeated"), delta)
    for repeat, written in (("skip", False), ("write", True)):
        assert engine.sync(engine.write(delta), repeat=repeat) is None
        engine.is_current()
        last = engine.host.call("rpc", method="refdelta_status")[0]["last_update"]
        assert (last["written"] > 0) == written
    assert delta.lineage is not None
    wrong = replace(delta, lineage=replace(delta.lineage, digest="rd1:0123456789abcdef"))
    engine.refuses(engine.write(wrong), "base_mismatch", "rd1:0123456789abcdef")
    engine.holds(engine.state)


@pytest.mark.parametrize("point", ["write", "after_write", "audit"])
def test_a_version_whose_write_fails_is_not_taken(engine: Engine, point: str) -> None:
    """On one rank, after the other has written: no rank says the new version, and the next attempt is no repetition."""
    before, target = engine.dump(), engine.next(point)
    delta = engine.encoder.encode(target)
    engine.fault.write_text(json.dumps({"point": point, "ranks": [1], "call": 5 if point == "write" else 1}))
    error = engine.sync(engine.write(delta))
    engine.fault.write_text("")
    assert error is not None
    assert f"injected at {point}" in error
    engine.is_current()
    assert engine.dump() == before
    engine.accepts(target, delta)
    assert engine.host.call("rpc", method="refdelta_status")[0]["last_update"]["written"] > 0
    assert engine.dump() != before


def halves(delta: Delta) -> list[Delta]:
    """Two parts: the even patches and the odd ones."""
    assert delta.lineage is not None
    return [
        replace(delta, patches=delta.patches[i::2], lineage=replace(delta.lineage, part=(i, 2), payload_sha256=None))
        for i in range(2)
    ]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parts_in_any_order(engine: Engine, order: tuple[int, int]) -> None:
    """Halves of fused parameters and tied names fall into different parts."""
    target = engine.next(f"parts {order}")
    delta = engine.encoder.encode(target)
    paths = [engine.write(part) for part in halves(delta)]
    assert engine.several([paths[i] for i in order]) is None
    engine.encoder.commit(delta)
    engine.state = target
    engine.is_current()
    engine.holds(target)


def test_a_set_of_parts_that_is_not_whole_is_refused(engine: Engine) -> None:
    """One alone, one twice, and the parts of two updates."""
    delta = engine.encoder.encode(engine.next("not whole"))
    one, two = (engine.write(part) for part in halves(delta))
    foreign = engine.write(halves(engine.encoder.encode(engine.next("foreign")))[1])
    before = engine.dump()
    for paths in ([one], [two], [one, one], [one, foreign]):
        error = engine.several(paths)
        assert error is not None
        assert "refdelta[incomplete]" in error
        assert engine.dump() == before
    engine.accepts(engine.next("whole again"))


def test_two_deltas_in_one_session_are_both_written(engine: Engine) -> None:
    """The second starts from the first; a session whose second does not is refused whole."""
    first_state = engine.next("first")
    first = engine.encoder.encode(first_state)
    trainer = DeltaEncoder(engine.state, run_id=str(engine.encoder.run_id), version=int(engine.encoder.version or 0))
    trainer.commit(first)
    engine_before = engine.dump()
    second_state = changes.every_tensor(first_state, "second")
    second = trainer.encode(second_state)
    error = engine.several([engine.write(second), engine.write(first)])
    assert error is not None
    assert "refdelta[base_mismatch]" in error
    assert engine.dump() == engine_before
    assert engine.several([engine.write(first), engine.write(second)]) is None
    trainer.commit(second)
    engine.encoder, engine.state = trainer, second_state
    engine.is_current()
    engine.holds(second_state)


def test_without_lineage_the_state_is_unverified_but_known(engine: Engine) -> None:
    """As OpenRL writes: applied, or refused where lineage is required; then a delta that states its base."""
    target = engine.next("unversioned", "model.language_model")
    plain = engine.path("plain")
    oracle.write_delta(plain, oracle.expected_patches(engine.state, target), oracle.total_elements(target))
    engine.refuses(plain, "base_mismatch", "requires", lineage="required")
    assert engine.sync(plain) is None
    status = engine.status()
    assert (status["run_id"], status["version"], status["verified"]) == (None, None, False)
    assert status["digest"] == digests.state_digest(target)
    engine.state, engine.encoder = target, DeltaEncoder(target, run_id="after", version=3)
    engine.accepts(engine.next("verified again"))


def test_a_dropped_tensor_without_its_digest_leaves_the_digest_unknown(engine: Engine) -> None:
    """No rank holds it, and the delta does not say what became of it; an anchor ends that."""
    target = engine.next("blind", TOWER)
    plain = engine.path("plain")
    oracle.write_delta(plain, oracle.expected_patches(engine.state, target), oracle.total_elements(target))
    assert engine.sync(plain) is None
    assert engine.status()["digest"] is None
    assert engine.status()["verified"] is False
    engine.encoder = DeltaEncoder(target, run_id="run", version=9)
    required = engine.write(engine.encoder.encode(engine.next("required")))
    engine.refuses(required, "base_mismatch", lineage="required")
    engine.state = target
    assert engine.sync(engine.anchor(target), run_id="run", version=9, digest=engine.encoder.digest) is None
    engine.is_current()


def test_an_anchor_replaces_everything(engine: Engine) -> None:
    """To a state that differs in every tensor, with and without a version; the next delta follows it."""
    target = engine.next("anchor")
    assert engine.sync(engine.anchor(target)) is None
    assert engine.status()["version"] is None
    assert engine.status()["digest"] == digests.state_digest(target)
    engine.holds(target)
    engine.state, engine.encoder = target, DeltaEncoder(target, run_id="anchored", version=12)
    assert engine.sync(engine.anchor(target), run_id="anchored", version=12) is None
    engine.accepts(engine.next("after the anchor"))


def test_an_anchor_that_does_not_fit_is_refused(engine: Engine) -> None:
    """Another digest, a tensor less, another shape, separated aliases, other bytes on one rank, beside a delta."""
    target = engine.next("misfit")
    good = engine.anchor(target)
    engine.refuses(good, "digest_mismatch", digest="rd1:0123456789abcdef")
    engine.refuses(good, "bad_option", run_id="run")
    lacking = engine.path("lacking")
    checkpoints.save({name: t for name, t in target.items() if name != FILE_NORM}, lacking)
    engine.refuses(lacking, "unknown_tensor", "only in base")
    other = engine.anchor(engine.next("other"))
    before = engine.dump()
    error = engine.host.call("sync", info=[{"target_weights_path": str(path)} for path in (good, other)])
    assert "refdelta[rank_disagreement]" in error
    assert engine.dump() == before
    delta = engine.write(engine.encoder.encode(target))
    for paths in ([delta, good], [good, delta], [good, good]):
        found = engine.several(paths)
        assert found is not None
        assert "refdelta[bad_option]" in found
    engine.is_current()


def test_what_the_file_system_refuses(engine: Engine) -> None:
    """With the reason of what it is: a path that nothing can have, links in a circle."""
    engine.refuses(Path("/" + "n" * 5000), "not_a_delta", "rank 0: no directory", "File name too long")
    loop = engine.path("loop")
    loop.symlink_to(loop.name)
    engine.refuses(loop, "unreadable", "Too many levels of symbolic links")
    engine.accepts(engine.next("after what cannot be read"))


def test_an_anchor_that_fails_in_the_middle_is_undone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank after many boxes were written; all ranks have the old weights again."""
    before = engine.dump()
    engine.fault.write_text(json.dumps({"point": "anchor", "ranks": [1], "call": 9}))
    error = engine.sync(engine.anchor(engine.next("interrupted")), run_id=engine.encoder.run_id, version=99)
    engine.fault.write_text("")
    assert error is not None
    assert "injected at anchor" in error
    assert engine.dump() == before
    engine.is_current()


@pytest.mark.parametrize("mode", ["native", "dense"])
def test_other_modes_write_the_same(engine: Engine, mode: str) -> None:
    """Through vLLM's loaders; what they cannot carry is refused before the first write."""
    target = engine.next(mode)
    delta = engine.encoder.encode(target)
    assert engine.sync(engine.write(delta), mode=mode) is None
    engine.encoder.commit(delta)
    engine.state = target
    engine.is_current()
    engine.holds(target)
    nan = checkpoints.clone(target)
    name = next(name for name in target if name.endswith("q_proj.weight") and "language_model" in name)
    nan[name].view(torch.int16).view(-1)[7] = 0x7FC1
    path = engine.write(engine.encoder.encode(nan))
    if mode == "native":
        engine.refuses(path, "bad_option", "NaN", mode=mode)
    else:
        assert engine.sync(path, mode=mode) is None
        engine.encoder.commit(engine.encoder.encode(nan))
        engine.state = nan
        engine.is_current()
        engine.accepts(target)
    engine.refuses(path, "bad_option", "in_place", mode="magic")


def test_an_audit_finds_what_changed_without_an_update(engine: Engine) -> None:
    """One bit on one rank: the engine is fenced for deltas, and an anchor mends it."""
    found = engine.host.call("rpc", method="refdelta_audit")
    assert [answer["mismatched"] for answer in found] == [{}, {}]
    assert all(answer["elements"] > 0 for answer in found)
    engine.host.call("rpc", method="test_flip", arguments=[1, NORM, 3])
    found = engine.host.call("rpc", method="refdelta_audit")
    assert found[0]["mismatched"] == {}
    assert list(found[1]["mismatched"]) == [FILE_NORM]
    assert "rank 1" in engine.status()["fence"]
    error = engine.sync(engine.write(engine.encoder.encode(engine.next("fenced"))))
    assert error is not None
    assert "refdelta[fenced]" in error
    assert "only an anchor" in error
    anchor = engine.anchor(engine.state)
    version = {"run_id": engine.encoder.run_id, "version": engine.encoder.version}
    assert engine.sync(anchor, digest=engine.encoder.digest, **version) is None
    engine.is_current()
    engine.holds(engine.state)


def test_an_update_audits_what_it_did_not_touch(engine: Engine) -> None:
    """The rotation comes to a flipped bit in another tensor; the update is undone, and the engine fenced."""
    engine.host.call("rpc", method="test_flip", arguments=[0, NORM, 5])
    error = engine.sync(engine.write(engine.encoder.encode(engine.next("elsewhere", "q_proj"))))
    assert error is not None
    assert "refdelta[digest_mismatch]" in error
    assert "rank 0" in engine.status()["fence"]
    version = {"run_id": engine.encoder.run_id, "version": engine.encoder.version}
    assert engine.sync(engine.anchor(engine.state), **version) is None
    engine.is_current()


def test_an_abandoned_session_can_be_aborted(engine: Engine) -> None:
    """`refdelta_abort` drops it; status says when one is open."""
    path = engine.write(engine.encoder.encode(engine.next("abandoned")))
    engine.host.call("start_update")
    engine.host.call("update", info={"target_weights_path": str(path)})
    status = engine.status()
    assert status["session"] is not None
    assert status["staged"] == 1
    engine.host.call("rpc", method="refdelta_abort")
    assert engine.status()["session"] is None
    engine.host.call("rpc", method="refdelta_abort")
    engine.is_current()


def test_after_vllms_own_reload_only_an_anchor_is_taken(engine: Engine) -> None:
    """What a reload left in memory is not proved; a checkpoint through the map is, to the bits of a fresh engine.

    Where it fails on one rank the answers stay in step.
    """
    engine.host.call("rpc", method="reload_weights")
    assert "reload_weights" in engine.status()["fence"]
    error = engine.sync(engine.write(engine.encoder.encode(engine.next("reloaded"))))
    assert error is not None
    assert "refdelta[fenced]" in error
    with pytest.raises(HostError, match=r"refdelta\[rank_failed\]"):
        engine.host.call("rpc", method="reload_weights", arguments=["no such argument", 1, 2, 3, 4, 5, 6])
    for nonce in ("one", "two"):
        assert engine.host.call("echo", nonce=nonce) == [[0, nonce], [1, nonce]]
    version = {"run_id": engine.encoder.run_id, "version": engine.encoder.version}
    assert engine.sync(engine.anchor(engine.state), digest=engine.encoder.digest, **version) is None
    engine.is_current()
    engine.holds(engine.state)
