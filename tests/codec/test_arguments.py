"""Arguments of the wrong type: one DeltaError that says what was expected and found, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refdelta import (
    Delta,
    DeltaEncoder,
    DeltaError,
    Reason,
    TensorPatch,
    apply_delta,
    apply_to_checkpoint,
    compose,
    diff,
    join,
    read_delta,
    roll_digest,
    state_digest,
    write_delta,
)
from tests.codec.support import bf16


def patch() -> TensorPatch:
    return TensorPatch("w", (2, 3), torch.tensor([4], dtype=torch.int32), bf16(1))


def text(path: Path) -> Any:
    """The path as users write it, where a type checker would object."""
    return str(path)


DELTA: Any = Delta((patch(),), 6)
NONE: Any = None
FIVE: Any = 5
MODEL: Any = "model"
LIST: Any = ["x"]
DICT: Any = {"run_id": "r"}
WEIGHTS = "weights: expected a module, or a mapping of names to tensors, found "
A_DELTA = "expected a Delta, as read_delta and diff give one, found "
CALLS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "apply a path": (lambda state, path: apply_delta(text(path), state), "delta: " + A_DELTA + "str "),
    "apply swapped": (lambda state, path: apply_delta(state, DELTA), "delta: " + A_DELTA + "dict"),
    "apply to none": (lambda state, path: apply_delta(DELTA, NONE), WEIGHTS + "NoneType"),
    "apply to a list": (lambda state, path: apply_delta(DELTA, LIST), WEIGHTS + "list"),
    "digest": (
        lambda state, path: apply_delta(DELTA, state, digest=FIVE),
        "digest: expected rd1:<16 lower-case hex digits>, found int 5",
    ),
    "write swapped": (lambda state, path: write_delta(text(path), DELTA), "delta: " + A_DELTA + "str "),
    "write a state": (lambda state, path: write_delta(state, path), "delta: " + A_DELTA + "dict"),
    "write nowhere": (lambda state, path: write_delta(DELTA, NONE), "path: expected a path, found NoneType"),
    "read a delta": (lambda state, path: read_delta(DELTA), "path: expected a path, found Delta"),
    "read a number": (lambda state, path: read_delta(FIVE), "path: expected a path, found int 5"),
    "encode none": (lambda state, path: DeltaEncoder(NONE), WEIGHTS + "NoneType"),
    "encode a path": (lambda state, path: DeltaEncoder(state).encode(MODEL), WEIGHTS + "str 'model'"),
    "commit a path": (lambda state, path: DeltaEncoder(state).commit(text(path)), "delta: " + A_DELTA + "str "),
    "diff": (lambda state, path: diff(state, NONE), WEIGHTS + "NoneType"),
    "compose one": (lambda state, path: compose(DELTA), "deltas: expected several Deltas, found Delta"),
    "compose a path": (lambda state, path: compose(text(path)), "deltas: expected several Deltas, found str "),
    "compose paths": (lambda state, path: compose([path]), "deltas: " + A_DELTA + type(Path()).__name__),
    "join": (lambda state, path: join([DELTA, NONE]), "deltas: " + A_DELTA + "NoneType"),
    "state digest": (lambda state, path: state_digest(DELTA), WEIGHTS + "Delta"),
    "roll a delta": (
        lambda state, path: roll_digest(state_digest(state), DELTA, bf16(0)),
        "patch: expected a TensorPatch, found Delta",
    ),
    "roll a list": (
        lambda state, path: roll_digest(state_digest(state), patch(), LIST),
        "old_values: expected a torch tensor, found list",
    ),
    "to a checkpoint": (
        lambda state, path: apply_to_checkpoint(DELTA, path, path),
        "delta_path: expected a path, found Delta",
    ),
    "patches": (lambda state, path: Delta((DELTA,), 6), "patches: expected TensorPatches, found Delta"),
    "no patches": (lambda state, path: Delta(NONE, 6), "patches: expected TensorPatches, found NoneType"),
    "lineage": (lambda state, path: Delta((), 6, DICT), "lineage: expected a Lineage or None, found dict"),
    "extra": (lambda state, path: Delta((), 6, None, LIST), "extra: expected a mapping, found list"),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_a_wrong_type_is_refused_by_name_and_nothing_is_written(call: str, tmp_path: Path) -> None:
    state = {"w": bf16(*range(6)).reshape(2, 3)}
    before = state["w"].clone()
    function, detail = CALLS[call]
    with pytest.raises(DeltaError) as caught:
        function(state, tmp_path / "delta")
    assert caught.value.reason is Reason.BAD_OPTION
    assert caught.value.detail.startswith(detail)
    assert torch.equal(state["w"], before)
    assert list(tmp_path.iterdir()) == []


def test_a_patch_of_lists_is_refused() -> None:
    indices, values = torch.tensor([4]), bf16(1)
    for part, reason in (((LIST, values), Reason.BAD_INDICES), ((indices, LIST), Reason.BAD_VALUES)):
        with pytest.raises(DeltaError, match="expected a torch tensor, found list") as caught:
            TensorPatch("w", (2, 3), *part)
        assert (caught.value.reason, caught.value.tensor) == (reason, "w")
