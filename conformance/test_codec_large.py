"""bit_exact and density_bound beyond 2^31 elements: positions that no 32-bit integer holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from . import oracle
from .driving.codec import Scratch
from .engines.codecs import FullCodec
from .findings import require

pytestmark = pytest.mark.needs("large")

WIDTH = 2**16
CHANGED = [0, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 7, 2**31 + WIDTH - 1]
"""The first, the last that I32 holds, the first that it does not, two more, and the last."""


def _zeros(rows: int) -> Tensor:
    """(rows, 2^16) float8 zeros: memory that is never written costs nothing, so 2 GiB are cheap."""
    return torch.zeros(rows, WIDTH, dtype=torch.uint8).view(torch.float8_e5m2)


def _marked(rows: int, positions: list[int]) -> Tensor:
    tensor = _zeros(rows)
    for number, position in enumerate(positions):
        tensor.view(torch.uint8)[position // WIDTH, position % WIDTH] = number + 1
    return tensor


def _assert_marked(tensor: Tensor, positions: list[int]) -> None:
    raw = tensor.view(torch.uint8).reshape(-1)
    found = [int(raw[position]) for position in positions]
    expected = list(range(1, len(positions) + 1))
    require(found == expected, f"bits at {positions}", expected=expected, found=found)
    written = sum(int(torch.count_nonzero(part)) for part in raw.split(2**26))
    require(written == len(positions), "changed elements in all", expected=len(positions), found=written)


@pytest.mark.level("applier")
@pytest.mark.check("bit_exact")
def test_apply_beyond_32_bits(engine: FullCodec, scratch: Scratch) -> None:
    weights = {"w": _zeros(2**15 + 1)}
    values = np.arange(1, len(CHANGED) + 1, dtype=np.uint8)
    patch = oracle.Patch("w", tuple(weights["w"].shape), "F8_E5M2", np.array(CHANGED), values)
    with scratch() as tmp:
        engine.apply(oracle.write_delta(tmp / "delta", [patch], patch.numel), weights)
    _assert_marked(weights["w"], CHANGED)


@pytest.mark.level("writer")
@pytest.mark.check("bit_exact")
def test_encode_beyond_32_bits(engine: FullCodec, scratch: Scratch) -> None:
    rows = 2**15 + 1
    with scratch() as tmp:
        engine.encode({"w": _zeros(rows)}, {"w": _marked(rows, CHANGED)}, tmp / "delta")
        written = oracle.read_delta(tmp / "delta")
    assert written.index_codes == ("I64",), f"more than 2^31 elements need I64, found {written.index_codes}"
    assert [patch.indices.tolist() for patch in written.patches] == [CHANGED]
    assert written.patches[0].bits.tolist() == list(range(1, len(CHANGED) + 1))


@pytest.mark.check("density_bound")
def test_exactly_2_to_31_elements_have_I32_positions(engine: FullCodec, scratch: Scratch) -> None:
    last = [0, 2**31 - 1]
    with scratch() as tmp:
        engine.encode({"w": _zeros(2**15)}, {"w": _marked(2**15, last)}, tmp / "delta")
        written = oracle.read_delta(tmp / "delta")
    assert written.index_codes == ("I32",), f"2^31 elements fit I32, found {written.index_codes}"
    assert written.patches[0].indices.tolist() == last
    assert written.data_bytes == 2 * (4 + 1), f"5 bytes a change, found {written.data_bytes} for 2"
