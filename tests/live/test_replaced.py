"""A live engine that holds other memory than was proved takes no update and says so; what it held stays as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.inputs import checkpoints
from tests.live.rig import Engine, running

DOWN = "model.layers.0.mlp.down_proj.weight"
REPLACED = [
    ("data", DOWN),
    ("parameter", DOWN),
    ("submodule", DOWN),
    ("attribute", DOWN),
    ("gone", DOWN),
    ("shape", DOWN),
    ("buffer", "model.layers.1.layer_scalar"),
    ("tied", "model.layers.1.input_layernorm.weight"),
    ("submodule", "lm_head.weight"),
    ("model", ""),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A Gemma 4: tied embeddings, and buffers that the checkpoint fills."""
    tmp = tmp_path_factory.mktemp("replaced")
    with running(checkpoints.make("gemma4-text", tmp / "base"), 1, tmp, modules=("tests.live.replaced",)) as made:
        engine = made
        engine.accepts(engine.next("first"))
        yield engine


@pytest.mark.parametrize(("kind", "name"), REPLACED, ids=lambda value: str(value).rpartition(".")[0] or str(value))
def test_other_memory_than_was_proved_is_refused(engine: Engine, kind: str, name: str) -> None:
    """Of equal bits: only where the memory is tells it. The delta changes every tensor."""
    before, delta = engine.dump(), engine.write(engine.encoder.encode(engine.next(kind)))
    engine.host.call("rpc", method="test_replace", arguments=[kind, name])
    try:
        known = engine.dump()
        error = engine.sync(delta)
        assert error is not None
        assert "refdelta[unattested]" in error, error
        assert engine.dump() == known
        fence = engine.status()["fence"]
        assert "rank 0" in fence
        assert "restart the engine" in fence
        (found,) = engine.host.call("rpc", method="refdelta_audit")
        assert found["mismatched"]
        for path in (delta, engine.anchor(engine.state)):
            error = engine.sync(path)
            assert error is not None
            assert "refdelta[unattested]" in error
        assert engine.dump() == known
    finally:
        engine.host.call("rpc", method="test_restore")
    assert engine.dump() == before
    version = {"run_id": engine.encoder.run_id, "version": engine.encoder.version}
    assert engine.sync(engine.anchor(engine.state), digest=engine.encoder.digest, **version) is None
    engine.is_current()
    engine.accepts(engine.next(f"{kind} after"))
