"""`last_error` in the status of the backend, on one rank without an engine: the cause stays, no consequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refdelta import Delta, TensorPatch, write_delta
from refdelta.spec import DeltaError, Reason
from tests.engine.simulated import Simulated, backend_of, state_of
from tests.layout.models import QWEN3, Engine

pytest.importorskip("vllm", reason="the backend imports vLLM")


@pytest.fixture
def backend() -> Any:
    """The backend as it is after the start of an engine, on a simulated rank."""
    engine = Engine(QWEN3)
    return backend_of(Simulated.of(engine, state_of(engine.rules(0), 1)))


def good(tmp_path: Path) -> dict[str, str]:
    patch = TensorPatch("model.norm.weight", (40,), torch.tensor([3], dtype=torch.int32), torch.tensor([1.5]))
    total = sum(info.numel for info in Engine(QWEN3).rules(0).sources.values())
    return {"target_weights_path": str(write_delta(Delta((patch,), total), tmp_path / "good", overwrite=True))}


NONE = {"target_weights_path": "/nonexistent"}


def refused(call: Callable[..., object], *arguments: object) -> Reason:
    with pytest.raises(DeltaError) as caught:
        call(*arguments)
    return caught.value.reason


def last(backend: Any) -> str | None:
    error = backend.status()["last_error"]
    return None if error is None else str(error["reason"])


def test_no_session_does_not_hide_why_there_is_none(backend: Any, tmp_path: Path) -> None:
    backend.start_weight_update()
    assert refused(backend.update_from, NONE, 0) is Reason.NOT_A_DELTA
    for _ in range(2):
        assert refused(backend.update_from, good(tmp_path), 0) is Reason.NO_SESSION
        assert refused(backend.finish_weight_update) is Reason.NO_SESSION
        assert last(backend) == "not_a_delta"


def test_a_later_cause_takes_its_place(backend: Any) -> None:
    backend.start_weight_update()
    refused(backend.update_from, NONE, 0)
    backend.start_weight_update()
    assert refused(backend.update_from, {"target_weights_path": ""}, 0) is Reason.BAD_OPTION
    refused(backend.finish_weight_update)
    assert last(backend) == "bad_option"


@pytest.mark.parametrize("between", ["nothing", "an abort", "an update"])
def test_no_session_is_told_where_it_is_the_cause(backend: Any, between: str, tmp_path: Path) -> None:
    """Nobody has started; or what was wrong before is over."""
    if between != "nothing":
        backend.start_weight_update()
        refused(backend.update_from, NONE, 0)
        if between == "an abort":
            backend.abort_weight_update()
        else:
            backend.start_weight_update()
            backend.update_from(good(tmp_path), 0)
            backend.finish_weight_update()
            assert last(backend) is None
    assert refused(backend.finish_weight_update) is Reason.NO_SESSION
    assert last(backend) == "no_session"
