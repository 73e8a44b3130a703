"""A Qwen3 with attention biases on live engines: vLLM has no o_proj.bias and skips it in silence; refdelta does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.inputs.checkpoints import State
from conformance.live import changes
from conformance.oracle import digests
from refdelta import DeltaEncoder, compose
from refdelta.vllm.auditing.report import METHOD, AuditReport, Outcome
from tests.live.rig import Engine, running
from tests.live.test_fused import grouped_with_biases

BIAS = "model.layers.0.self_attn.o_proj.bias"
BIASES = {f"model.layers.{i}.self_attn.o_proj.bias" for i in range(2)}


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for all tests; each leaves it at the encoder's state."""
    tmp = tmp_path_factory.mktemp("unmapped")
    checkpoint = grouped_with_biases(tmp / "base", without="")
    with running(checkpoint, request.param, tmp, worker_extension_cls="tests.live.audited.Audited") as made:
        yield made


def held(engine: Engine, seed: str) -> State:
    """Every tensor changed but those that the engine leaves out."""
    after = engine.next(seed)
    return {name: engine.state[name] if name in BIASES else tensor for name, tensor in after.items()}


def with_bias(engine: Engine, state: State) -> State:
    """``state`` with another bias."""
    return {**state, BIAS: changes.every_tensor(engine.state, "bias")[BIAS]}


def is_audited(engine: Engine, directory: Path) -> None:
    """Everything equals the checkpoint ``directory``, bit for bit, but what nobody can compare."""
    answers = engine.host.call("rpc", method=METHOD, arguments=[str(directory), []])
    report = AuditReport.from_plain(answers)
    assert set(report.named(Outcome.NOT_COMPARABLE)) == BIASES
    assert set(report.named(Outcome.EQUAL)) == set(engine.state) - BIASES
    assert report.outcome is Outcome.NOT_COMPARABLE


def test_start_names_it(engine: Engine) -> None:
    """In status and log; the digest counts it as the files have it."""
    status = engine.status()
    assert set(status["unmapped"]) == BIASES
    assert status["digest"] == digests.state_digest(engine.state)
    log = (engine.scratch / "engine.log").read_text()
    assert all(f"refdelta: unmapped: {name}: " in log for name in BIASES)
    is_audited(engine, engine.checkpoint.directory)


def test_anchors(engine: Engine) -> None:
    """One that changes it is refused, alone and beside all others, with the old weights in place; one that does not is
    taken."""
    engine.refuses(engine.anchor(with_bias(engine, engine.state)), "unmapped", f"tensor={BIAS}")
    after = held(engine, "anchor")
    engine.refuses(engine.anchor(with_bias(engine, after)), "unmapped", f"tensor={BIAS}")
    directory = engine.anchor(after)
    assert engine.sync(directory, run_id="run", version=7, digest=digests.state_digest(after)) is None
    engine.state, engine.encoder = after, DeltaEncoder(after, run_id="run", version=7)
    engine.is_current()
    assert set(engine.status()["unmapped"]) == BIASES
    (first, *_) = engine.host.call("rpc", method="refdelta_status")
    assert set(first["last_update"]["dropped"]) == BIASES
    is_audited(engine, directory)


def test_deltas(engine: Engine) -> None:
    """The same two cases, with a lineage required; and one that changes it there and back."""
    after = held(engine, "delta")
    changing = engine.encoder.encode(with_bias(engine, after))
    engine.refuses(engine.write(changing), "unmapped", f"tensor={BIAS}", lineage="required")
    delta = engine.encoder.encode(after)
    assert engine.sync(engine.write(delta), lineage="required") is None
    engine.encoder.commit(delta)
    engine.state = after
    engine.is_current()

    there = engine.encoder.encode(with_bias(engine, engine.state))
    engine.encoder.commit(there)
    last = held(engine, "there and back")
    back = engine.encoder.encode(last)
    both = compose([there, back])
    assert BIAS in {patch.name for patch in both.patches}
    assert engine.sync(engine.write(both), lineage="required") is None
    engine.encoder.commit(back)
    engine.state = last
    engine.is_current()
    is_audited(engine, engine.anchor(last))


def test_audits_name_it(engine: Engine) -> None:
    """The engine's own looks at everything else, on every rank."""
    for answer in engine.host.call("rpc", method="refdelta_audit"):
        assert answer["mismatched"] == {}
        assert set(answer["unmapped"]) == BIASES
