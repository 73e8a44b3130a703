"""`conformance.live.position_code` on engines made of a few lines: what it reads, and what it does not let pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.inputs import checkpoints
from conformance.inputs.checkpoints import State
from conformance.live.judge import RankDump
from conformance.live.position_code import BASE, Code, Reading, read
from conformance.live.probe import raw_bytes

Load = Callable[[State], dict[str, Tensor]]
SHAPES = {"a": (37, 11), "b": (5, 9), "s": (1,), "t": (5, 9)}


def state() -> State:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}


def dump(held: dict[str, Tensor]) -> RankDump:
    """What the probe of one rank writes."""
    entries = {
        name: {"kind": "parameter", "dtype": str(t.dtype)[6:], "shape": list(t.shape), "alias_of": name}
        for name, t in held.items()
    }
    return RankDump(0, entries, {name: raw_bytes(t).numpy() for name, t in held.items()})


def reading(load: Load, tmp_path: Path, code: Code | None = None) -> Reading:
    """Write the code's checkpoints, load each, read."""
    code = code or Code.of(state())
    base = tmp_path / "base"
    checkpoints.save(state(), base)
    (base / "config.json").write_text("{}")
    directories = code.checkpoints(base, tmp_path)
    (found,) = read([[dump(load(checkpoints.load(directory)))] for directory in directories])
    return found


def plain(weights: State) -> dict[str, Tensor]:
    """Half of a on top of b's rows, padded; the scalar; a table that the engine makes itself."""
    fused = torch.zeros(24, 11, dtype=torch.bfloat16)
    fused[:18] = weights["a"][19:]
    fused[18:23, :9] = weights["b"]
    return {"fused": fused, "scalar": weights["s"].clone(), "table": torch.arange(5) / 7, "wide": weights["t"].float()}


def test_every_place_says_where_its_element_comes_from(tmp_path: Path) -> None:
    """Slices, padding, another dtype; what the checkpoint does not reach is untouched."""
    code = Code.of(state())
    assert code.digits == 2
    found = reading(plain, tmp_path)
    fused = np.zeros((24, 11), np.int64)
    fused[:18] = code.numbers("a").reshape(37, 11)[19:]
    fused[18:23, :9] = code.numbers("b").reshape(5, 9)
    expected = {"fused": fused.reshape(-1), "scalar": code.numbers("s"), "wide": code.numbers("t")}
    assert found.difference(expected, code) == []
    assert (found.untouched, found.unread) == (("table",), ())
    assert code.source(int(fused[0, 3])) == "a[212]"
    assert code.source(0) == "nothing"


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda e, c: e | {"scalar": np.zeros(1, np.int64)}, "scalar[0]: the map says nothing, the engine holds s[0]"),
        (lambda e, c: e | {"wide": c.numbers("b")}, "wide[0]: the map says b[0], the engine holds t[0] (45 elements"),
        (lambda e, c: e | {"wide": c.numbers("t")[:-1]}, "wide: the map gives 44 elements, 45 found"),
        (lambda e, c: e | {"table": c.numbers("b")[:5]}, "table: the map gives 5 elements, untouched found"),
        (lambda e, c: e | {"more": c.numbers("b")}, "more: the map gives 45 elements, absent found"),
        (lambda e, c: {k: v for k, v in e.items() if k != "fused"}, "fused: the map does not know it"),
    ],
)
def test_a_wrong_map_is_named(change: Callable[..., dict[str, np.ndarray]], finding: str, tmp_path: Path) -> None:
    """The parameter, the place, what the map says and what the engine holds."""
    code, found = Code.of(state()), reading(plain, tmp_path)
    expected = dict(found.numbers)
    (line,) = found.difference(change(expected, code), code)
    assert line.startswith(finding)


def test_what_is_computed_from_the_checkpoint_is_unread(tmp_path: Path) -> None:
    """Scaled and mixed elements are no positions; neither may count as untouched."""
    found = reading(lambda w: {"half": w["b"] / 2, "sum": w["b"] + BASE, "b": w["b"]}, tmp_path)
    assert (set(found.numbers), found.untouched, found.unread) == ({"b"}, (), ("half", "sum"))
    assert found.difference({"b": found.numbers["b"]}, Code.of(state())) == [
        "half: the map does not know it, the checkpoint reaches it",
        "sum: the map does not know it, the checkpoint reaches it",
    ]


def test_an_engine_that_decides_by_values_is_refused(tmp_path: Path) -> None:
    """One code's engine holds other tensors than another's: nothing can be read off."""

    def deciding(weights: State) -> dict[str, Tensor]:
        return plain(weights) | ({"extra": torch.ones(2)} if weights["s"].item() > 1 else {})

    with pytest.raises(AssertionError, match="more than values"):
        reading(deciding, tmp_path)


def test_tied_names_get_equal_bytes_in_every_digit(tmp_path: Path) -> None:
    """vLLM ties two tensors of equal bytes only."""
    code = Code.of(state(), ("b", "t"))
    found = reading(lambda w: {"b": w["b"], "t": w["t"]}, tmp_path, code)
    assert np.array_equal(found.numbers["b"], found.numbers["t"])
    assert np.array_equal(code.numbers("t"), code.numbers("b"))


def test_no_tensor_reads_like_a_constant() -> None:
    """A number of equal digits, 257 say, would look the same in every checkpoint."""
    for size, rest in ((255, 900), (256, 900), (257, 900), (65792, 70000)):
        code = Code.of({"x": torch.zeros(size), "y": torch.zeros(1), "z": torch.zeros(rest)})
        first = code.first["y"]
        assert len({first // BASE**digit % BASE for digit in range(code.digits)}) > 1
        numbers = np.concatenate([code.numbers(name) for name in "xyz"])
        assert len(np.unique(numbers)) == len(numbers) == size + 1 + rest
        assert code.digits == math.ceil(math.log(int(numbers.max()) + 1, BASE))
