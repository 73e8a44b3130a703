"""`PositionMap`: small tables that equal a map element by element, whatever its axes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from refdelta.vllm.proof.position_maps import PositionMap

BF16 = torch.bfloat16


def blocks(experts: int, rows: int, columns: int, block: int = 4) -> Tensor:
    """[experts, rows, columns] positions after every ``block`` rows were transposed, as a vector kernel wants them."""
    packed = torch.arange(experts * rows * columns).view(experts, rows // block, columns, block)
    return packed.transpose(2, 3).reshape(experts, rows, columns)


def swizzled(rows: int, columns: int) -> Tensor:
    """[rows, columns] positions with the column XORed by the row: no sum of a row's and a column's table."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    return row * columns + (column ^ (row % columns))


def everywhere(places: PositionMap) -> Tensor:
    return places(torch.arange(places.numel))


@pytest.mark.parametrize(
    ("positions", "cost"),
    [
        (blocks(3, 12, 5), 3 + 12 + 5),
        (torch.arange(3 * 7 * 5).view(3, 7, 5), 3 + 7 + 5),
        (torch.arange(35).view(5, 7).t() + 2, 7 + 5),
        (swizzled(6, 8), 6 * 8),
        (torch.stack([swizzled(6, 8), swizzled(6, 8) + 48]), 2 + 6 * 8),
        (torch.tensor([4, 0, 3]), 3),
        (torch.tensor(2), 1),
    ],
)
def test_fitted_equals_the_positions_with_as_little_as_possible(positions: Tensor, cost: int) -> None:
    """One table an axis where the map is a sum of such; axes that are not share one."""
    places = PositionMap.fitted(positions)
    assert torch.equal(everywhere(places), positions.flatten())
    assert places.table_elements == cost


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_positions_are_fitted(shape: list[int], random: object) -> None:
    """Also those without structure; indices come in any order, repeated."""
    numel = int(torch.tensor(shape).prod())
    order = list(range(numel))
    random.shuffle(order)  # type: ignore[attr-defined]  # Hypothesis types it as object
    places = PositionMap.fitted(torch.tensor(order).view(shape))
    indices = torch.tensor([numel - 1, 0, *range(numel)], dtype=torch.int32)
    assert places(indices).tolist() == [order[i] for i in indices.tolist()]
    assert places.is_identity == (order == sorted(order))


def test_the_first_axis_is_continued() -> None:
    """Two experts show the distance of the others."""
    assert torch.equal(
        everywhere(PositionMap.fitted(blocks(2, 8, 3)).repeated(5)), everywhere(PositionMap.fitted(blocks(5, 8, 3)))
    )
    assert PositionMap.fitted(blocks(1, 8, 3)).repeated(1).numel == 24
    far = PositionMap((torch.tensor([7, 19]), torch.tensor([0, 2])))
    assert far.repeated(3)(torch.arange(6)).tolist() == [7, 9, 19, 21, 31, 33]
    mixed = torch.arange(2 * 6).view(2, 6) ^ 3  # what lies between the two is not one distance
    mixed[1] = mixed[1].flip(0)
    for positions, count in ((mixed, 3), (blocks(3, 8, 3), 4)):
        with pytest.raises(ValueError, match="cannot be continued"):
            PositionMap.fitted(positions).repeated(count)


def test_positions_beyond_32_bits() -> None:
    """A table holds what its positions need."""
    far = PositionMap.fitted(torch.tensor([[0, 1], [2**33, 2**33 + 1]]))
    assert far(torch.tensor([3])).tolist() == [2**33 + 1]
    assert [table.dtype for table in far.tables] == [torch.int64, torch.int32]


def test_faults() -> None:
    """Padding must be zero in its bits; positions distinct and inside."""
    places = PositionMap.fitted(torch.tensor([[0, 1, 2], [4, 5, 6]]))
    held = torch.tensor([1, 2, 3, 0, 4, 5, 6, 0]).to(BF16)
    assert places.fault(held) is None
    held[3] = -0.0
    assert "padding" in str(places.fault(held))
    assert "outside" in str(places.fault(held[:6]))
    assert "one position" in str(PositionMap.fitted(torch.tensor([0, 1, 1])).fault(held))
