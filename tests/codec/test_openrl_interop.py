"""A writer and a reader of v2 as OpenRL has it, from the facts about its files alone, against refdelta both ways."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from conformance.inputs.strategies import changes_of, states
from refdelta import DeltaError, Reason, apply_delta, diff, read_delta, write_delta
from tests.codec.support import assert_same, bytes_of

State = dict[str, Tensor]
FLOATING = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
INT32_ELEMENTS = 2**31


def openrl_write(base: State, target: State, folder: Path) -> None:
    """Payload, then metadata; values compared as numbers, layers in the order of the state."""
    tensors: State = {}
    names: list[str] = []
    shapes: list[list[int]] = []
    changed = 0
    for name, new in target.items():
        flat = new.reshape(-1)
        at = (flat.float() != base[name].reshape(-1).float()).nonzero().view(-1)
        if len(at):
            tensors[f"{len(names)}.indices"] = at.to(torch.int32 if flat.numel() <= INT32_ELEMENTS else torch.int64)
            tensors[f"{len(names)}.values"] = flat.view(_carrier(flat))[at].view(flat.dtype)
            names.append(name)
            shapes.append(list(new.shape))
            changed += len(at)
    total = sum(t.numel() for t in target.values())
    folder.mkdir()
    save_file(tensors, folder / "delta.safetensors", metadata={"layer_names": json.dumps(names)})
    metadata = {
        "base_model": "org/base",
        "created_at": datetime.now(UTC).isoformat(),
        "format": "sparse_delta",
        "format_version": 2,
        "kind": "sampler",
        "model_id": "run",
        "changed_elements": changed,
        "total_elements": total,
        "layer_names": names,
        "layer_shapes": shapes,
        "density_pct": round(100.0 * changed / total, 3) if total else 0.0,
        "timestamp": time.time(),
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2))


def openrl_read(folder: Path, weights: State) -> None:
    """The checks that OpenRL's reader makes, then the writes."""
    metadata = json.loads((folder / "metadata.json").read_text())
    if metadata["format"] != "sparse_delta" or metadata["format_version"] != 2:
        raise ValueError("not sparse_delta v2")
    names, shapes = metadata["layer_names"], metadata["layer_shapes"]
    if len(names) != len(shapes) or len(set(names)) != len(names) or not all(isinstance(n, str) and n for n in names):
        raise ValueError("layer_names and layer_shapes")
    tensors = load_file(folder / "delta.safetensors")
    if tensors.keys() != {f"{i}.{part}" for i in range(len(names)) for part in ("indices", "values")}:
        raise ValueError("payload keys")
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        indices, values = tensors[f"{i}.indices"], tensors[f"{i}.values"]
        if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64) or (indices.diff() <= 0).any():
            raise ValueError("indices")
        if values.dim() != 1 or not values.is_floating_point() or len(values) != len(indices):
            raise ValueError("values")
        if list(weights[name].shape) != shape or any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError("shape")
        weights[name].view(-1).view(_carrier(values))[indices.long()] = values.view(_carrier(values))


def _carrier(t: Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]


@given(st.data())
def test_openrl_reads_what_refdelta_writes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    base = data.draw(states(FLOATING))
    target = data.draw(changes_of(base))
    folder = write_delta(diff(base, target), tmp_path_factory.mktemp("t") / "delta")
    weights = {name: t.clone() for name, t in base.items()}
    openrl_read(folder, weights)
    assert_same(weights, target)


@given(st.data())
def test_refdelta_reads_what_openrl_writes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Numbers that differ arrive; the sign of a zero does not, which is OpenRL's comparison and not the format's."""
    base = data.draw(states(FLOATING))
    target = data.draw(changes_of(base))
    folder = tmp_path_factory.mktemp("t") / "delta"
    openrl_write(base, target, folder)
    weights = {name: t.clone() for name, t in base.items()}
    delta = read_delta(folder)
    inverse = apply_delta(delta, weights)
    for name, t in target.items():
        same_number = base[name].reshape(-1).float() == t.reshape(-1).float()
        kept = torch.from_numpy((bytes_of(weights[name]) == bytes_of(base[name])).all(1))
        arrived = torch.from_numpy((bytes_of(weights[name]) == bytes_of(t)).all(1))
        assert bool(torch.where(same_number, kept, arrived).all()), name
    apply_delta(inverse, weights)
    assert_same(weights, base)
    assert (delta.lineage, delta.extra["kind"]) == (None, "sampler")
    assert delta.total_elements == sum(t.numel() for t in target.values())


def test_refdelta_rewrites_what_openrl_wrote_for_openrl(tmp_path: Path) -> None:
    """Read, then written again: OpenRL's metadata stays, and OpenRL reads it."""
    torch.manual_seed(1)
    base = {"z": torch.randn(3, 4).bfloat16(), "a": torch.randn(2, 5)}
    target = {name: t + 1 for name, t in base.items()}
    openrl_write(base, target, tmp_path / "theirs")
    write_delta(read_delta(tmp_path / "theirs"), tmp_path / "ours")
    weights = {name: t.clone() for name, t in base.items()}
    openrl_read(tmp_path / "ours", weights)
    assert_same(weights, target)
    theirs, ours = (json.loads((tmp_path / name / "metadata.json").read_text()) for name in ("theirs", "ours"))
    kept = theirs.keys() - {"layer_names", "layer_shapes"}
    assert {key: theirs[key] for key in kept} == {key: ours[key] for key in kept}


def test_the_empty_delta_before_the_first_step(tmp_path: Path) -> None:
    base = {"w": torch.zeros(2, 3)}
    openrl_write(base, base, tmp_path / "theirs")
    delta = read_delta(tmp_path / "theirs")
    assert (delta.patches, delta.total_elements) == ((), 6)
    openrl_read(write_delta(delta, tmp_path / "ours"), base)
    assert_same(base, {"w": torch.zeros(2, 3)})


def test_values_that_openrl_refuses_are_declared(tmp_path: Path) -> None:
    """Integers need an extension: OpenRL refuses them, and so does refdelta where they are not declared."""
    folder = write_delta(
        diff({"n": torch.zeros(3, dtype=torch.int64)}, {"n": torch.ones(3, dtype=torch.int64)}), tmp_path / "d"
    )
    with pytest.raises(ValueError, match="values"):
        openrl_read(folder, {"n": torch.zeros(3, dtype=torch.int64)})
    openrl_write({"n": torch.zeros(3, dtype=torch.int64)}, {"n": torch.ones(3, dtype=torch.int64)}, tmp_path / "theirs")
    with pytest.raises(DeltaError) as caught:
        read_delta(tmp_path / "theirs")
    assert caught.value.reason is Reason.UNSUPPORTED_DTYPE
