"""What the proof of an engine says of files in another dtype than the engine's, with toy models and without vLLM's
engine: such tensors cannot be patched bit for bit, and an engine that could take nothing does not start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from refdelta import Delta, TensorPatch, diff, write_delta
from refdelta.checkpoints.reading import Checkpoint
from refdelta.digest import state_digest
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.update.ranks import RankGroup
from tests.engine.test_last_error import backend

pytest.importorskip("vllm", reason="the proof imports vLLM")

__all__ = ["backend"]

SHAPES = {"q": (6, 4), "k": (3, 4), "norm": (4,), "embed": (7, 4), "lm_head.weight": (7, 4)}
State = dict[str, Tensor]


class Toy(nn.Module):
    """q and k fused, a norm, an embedding and its tied head, as vLLM's loaders fill them: by `copy_`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(9, 4, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        self.embed = nn.Parameter(torch.zeros(7, 4, dtype=dtype), requires_grad=False)
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(weights)
        self.fused.data[:6].copy_(given["q"])
        self.fused.data[6:].copy_(given["k"])
        self.norm.data.copy_(given["norm"])
        self.embed.data.copy_(given["embed"])


class Files:
    """A checkpoint of ``state``, as `LoadedFiles` opens it."""

    def __init__(self, state: State, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        save_file(state, directory / "model.safetensors")

    def served(self) -> Checkpoint:
        return Checkpoint(self.directory)

    at = Checkpoint


def state_of(dtypes: dict[str, torch.dtype]) -> State:
    """Random; the tied names alike."""
    draw = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=draw).to(dtypes.get(name)) for name, shape in SHAPES.items()}
    return state | {"lm_head.weight": state["embed"].clone()}


def proved(state: State, engine: torch.dtype, directory: Path) -> Any:
    from refdelta.vllm.startup import prove

    toy, files = Toy(engine), Files(state, directory)
    toy.load_weights(state.items())
    return prove(toy, files, RankGroup())  # type: ignore[arg-type]  # all that it asks of them


@pytest.mark.parametrize(
    ("files", "engine", "says"),
    [
        (torch.float32, torch.bfloat16, "start the engine with --dtype float32, or save the checkpoint in bfloat16"),
        (torch.float16, torch.bfloat16, "start the engine with --dtype float16, or save the checkpoint in bfloat16"),
        (torch.bfloat16, torch.float32, "start the engine with --dtype bfloat16, or save the checkpoint in float32"),
        (torch.float64, torch.float32, "tensors); save the checkpoint in float32"),
    ],
)
def test_files_of_another_dtype(tmp_path: Path, files: torch.dtype, engine: torch.dtype, says: str) -> None:
    with pytest.raises(DeltaError) as caught:
        proved(state_of(dict.fromkeys(SHAPES, files)), engine, tmp_path / "a")
    assert caught.value.reason is Reason.UNSUPPORTED_ENGINE
    here, there = (str(dtype).removeprefix("torch.") for dtype in (engine, files))
    assert caught.value.detail.startswith(f"dtype={here}: the engine holds {here}, the checkpoint's files {there}, ")
    assert says in caught.value.detail
    assert "(embed and 4 more tensors)" in caught.value.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_files_of_the_engines_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    state = state_of(dict.fromkeys(SHAPES, dtype))
    found = proved(state, dtype, tmp_path / "a")
    assert found.proven.refused == {}
    assert found.ledger.digest == state_digest(state)


def test_an_engine_that_can_take_nothing_for_other_reasons(tmp_path: Path) -> None:
    """Something has changed every weight after loading."""
    from refdelta.vllm.startup import prove

    state = state_of(dict.fromkeys(SHAPES, torch.bfloat16))
    toy, files = Toy(torch.bfloat16), Files(state, tmp_path / "a")
    with pytest.raises(DeltaError) as caught:
        prove(toy, files, RankGroup())  # type: ignore[arg-type]
    assert caught.value.reason is Reason.UNSUPPORTED_ENGINE
    assert caught.value.detail.startswith("updatable_tensors=0 of 5: embed: rank 0: embed: its bits differ from ")


def test_some_tensors_of_another_dtype(tmp_path: Path, backend: Any) -> None:
    """They are refused by name, with both dtypes, and listed in the status; the others are updated."""
    other = {"k": torch.float32, "embed": torch.float32, "lm_head.weight": torch.float32}
    state = state_of(dict.fromkeys(SHAPES, torch.bfloat16) | other)
    found = proved(state, torch.bfloat16, tmp_path / "a")
    assert found.ledger.digest == state_digest(state)
    backend.state = found
    backend.serves(found.proven.model)
    refused = backend.status()["refused"]
    assert sorted(refused) == ["embed", "k", "lm_head.weight", "q"]
    assert refused["q"] == (
        "rank 0: fused: the engine holds bfloat16, the checkpoint's files float32, so no element can be patched "
        "bit for bit (k)"
    )
    total = sum(tensor.numel() for tensor in state.values())
    for name in ("q", "k", "embed"):
        patch = TensorPatch(name, SHAPES[name], torch.tensor([1]), torch.ones(1, dtype=state[name].dtype))
        tied = (patch, TensorPatch("lm_head.weight", *_rest(patch))) if name == "embed" else (patch,)
        path = write_delta(Delta(tied, total), tmp_path / name)
        backend.start_weight_update()
        with pytest.raises(DeltaError) as caught:
            backend.update_from({"target_weights_path": str(path)}, 0)
        assert (caught.value.reason, caught.value.tensor) == (Reason.UNATTESTED, name)
        assert "the engine holds bfloat16, the checkpoint's files float32" in caught.value.detail
    changed = state | {"norm": -state["norm"]}
    backend.start_weight_update()
    backend.update_from({"target_weights_path": str(write_delta(diff(state, changed), tmp_path / "good"))}, 0)
    backend.finish_weight_update()
    assert backend.status()["digest"] == state_digest(changed)


def _rest(patch: TensorPatch) -> tuple[tuple[int, ...], Tensor, Tensor]:
    return patch.shape, patch.indices, patch.values
