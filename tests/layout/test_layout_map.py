"""`LayoutMap` against layouts built densely in numpy: routing a change equals laying the changed tensor out again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refdelta.layout.boxes import coverage, extent
from refdelta.layout_map import Box, LayoutMap, Region, TensorInfo, uncovered_elements
from refdelta.spec import DeltaError, Reason, TensorPatch

BF16 = torch.bfloat16


def box(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> Box:
    """The box [start, start + size) per axis of a row-major tensor."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return Box(sum(a * s for a, s in zip(starts, strides, strict=True)), tuple(sizes), tuple(strides))


def patch(name: str, shape: Sequence[int], positions: Sequence[int]) -> TensorPatch:
    """A patch whose value at position p is p + 1000."""
    indices = torch.tensor(positions, dtype=torch.int32)
    return TensorPatch(name, tuple(shape), indices, (indices + 1000).to(torch.float32))


def one(source: tuple[int, ...], param: tuple[int, ...], *pairs: tuple[Box, Box]) -> LayoutMap:
    """A map of one float32 tensor ``s`` into one parameter ``p``."""
    return LayoutMap(
        {"s": TensorInfo(source, torch.float32)},
        {"p": TensorInfo(param, torch.float32)},
        tuple(Region("s", a, "p", b) for a, b in pairs),
    )


def routed(layout: LayoutMap, change: TensorPatch) -> dict[tuple[str, int], float]:
    """(parameter, position) -> value, failing where one is written twice."""
    found: dict[tuple[str, int], float] = {}
    for piece in layout.route(change):
        assert piece.indices.dtype == torch.int64
        for position, value in zip(piece.indices.tolist(), piece.values.tolist(), strict=True):
            assert (piece.param, position) not in found
            found[piece.param, position] = value
    return found


def test_rows_of_a_fused_parameter() -> None:
    """k of a fused qkv: rows 6..9 of a (10, 3) parameter, second rank of two holds rows 4..7 of the (8, 3) source."""
    layout = one((8, 3), (10, 3), (box((8, 3), (4, 0), (4, 3)), box((10, 3), (6, 0), (4, 3))))
    found = routed(layout, patch("s", (8, 3), [0, 11, 12, 14, 23]))
    assert found == {("p", 18): 1012.0, ("p", 20): 1014.0, ("p", 29): 1023.0}


def test_columns_of_a_row_parallel_parameter() -> None:
    """Columns 5..9 of a (3, 10) source into a (3, 5) parameter; column 4 and the next row's column 0 stay out."""
    layout = one((3, 10), (3, 5), (box((3, 10), (0, 5), (3, 5)), box((3, 5), (0, 0), (3, 5))))
    found = routed(layout, patch("s", (3, 10), [4, 5, 9, 10, 15, 29]))
    assert found == {("p", 0): 1005.0, ("p", 4): 1009.0, ("p", 5): 1015.0, ("p", 14): 1029.0}


def test_transposed_destination() -> None:
    """A (2, 5) source stored as (5, 2): element (r, c) at c * 2 + r."""
    layout = one((2, 5), (5, 2), (Box(0, (2, 5), (5, 1)), Box(0, (2, 5), (1, 2))))
    assert routed(layout, patch("s", (2, 5), [1, 5, 9])) == {("p", 2): 1001.0, ("p", 1): 1005.0, ("p", 9): 1009.0}
    assert layout.check().ok


def test_one_element_to_two_places() -> None:
    """Gemma 4's k that is also v: both halves of the parameter are written."""
    layout = one(
        (2, 3), (4, 3), (box((2, 3), (0, 0), (2, 3)), box((4, 3), (0, 0), (2, 3))),
        (box((2, 3), (0, 0), (2, 3)), box((4, 3), (2, 0), (2, 3))),
    )  # fmt: skip
    assert routed(layout, patch("s", (2, 3), [4])) == {("p", 4): 1004.0, ("p", 10): 1004.0}
    assert layout.check().ok


def test_scalar_and_empty_patch() -> None:
    """Shape () maps to a parameter of one element; a patch without elements routes to nothing."""
    layout = one((), (1,), (Box(0, (1,), (1,)), Box(0, (1,), (1,))))
    assert routed(layout, patch("s", (), [0])) == {("p", 0): 1000.0}
    assert routed(layout, patch("s", (), [])) == {}
    assert layout.check().ok


def test_values_keep_their_bits() -> None:
    """A NaN payload and a negative zero arrive as they left."""
    words = torch.tensor([0x7FA1, -0x8000], dtype=torch.int16)
    layout = LayoutMap(
        {"s": TensorInfo((2, 3), BF16)},
        {"p": TensorInfo((2, 3), BF16)},
        (Region("s", Box(0, (2, 3), (3, 1)), "p", Box(0, (2, 3), (3, 1))),),
    )
    change = TensorPatch("s", (2, 3), torch.tensor([1, 5], dtype=torch.int32), words.view(BF16))
    (piece,) = layout.route(change)
    assert torch.equal(piece.values.view(torch.int16), words)


def test_positions_beyond_2_31() -> None:
    """A per-layer embedding of more than 2^31 elements: the second rank's rows, without 32-bit arithmetic."""
    rows, columns = 300_000, 10_752
    assert rows * columns > 2**31
    layout = one(
        (rows, columns),
        (rows // 2, columns),
        (
            box((rows, columns), (rows // 2, 0), (rows // 2, columns)),
            box((rows // 2, columns), (0, 0), (rows // 2, columns)),
        ),
    )
    last = rows * columns - 1
    change = TensorPatch("s", (rows, columns), torch.tensor([7, last]), torch.tensor([1.0, 2.0]))
    (piece,) = layout.route(change)
    assert piece.indices.tolist() == [rows // 2 * columns - 1]
    assert layout.check().ok


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (patch("other", (2, 3), [0]), Reason.UNKNOWN_TENSOR),
        (patch("s", (3, 2), [0]), Reason.SHAPE_MISMATCH),
        (TensorPatch("s", (2, 3), torch.tensor([0]), torch.tensor([1.0], dtype=BF16)), Reason.DTYPE_MISMATCH),
    ],
)
def test_refused(change: TensorPatch, reason: Reason) -> None:
    """A patch that does not fit the checkpoint tensor is refused with its reason."""
    layout = one((2, 3), (2, 3), (Box(0, (2, 3), (3, 1)), Box(0, (2, 3), (3, 1))))
    with pytest.raises(DeltaError) as caught:
        layout.route(change)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(-1, (2, 3), (3, 1)), (0, (2, 3), (1,)), (0, (2,), (3, 1)), (0, (-1, 3), (3, 1)), (0, (2, 3), (0, 1)),
     (0, (2, 3), (3, -1))],
)  # fmt: skip
def test_what_is_no_box(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with pytest.raises(DeltaError) as caught:
        Box(offset, shape, strides)
    assert caught.value.reason is Reason.BAD_SHAPE


def test_boxes_of_one_element_or_none_need_no_strides() -> None:
    assert Box(5, (1, 1), (0, -7)).last == 5
    assert Box(0, (0, 3), (3, 1)).numel == Box(0, (0, 1), (0, 0)).numel == 0


def test_positions_around_a_box_are_not_in_it() -> None:
    """`Region.translate` alone, which is given positions on both sides."""
    region = Region("s", Box(5, (3,), (1,)), "p", Box(1, (3,), (2,)))
    chosen, target = region.translate(torch.arange(12))
    assert (chosen.tolist(), target.tolist()) == ([5, 6, 7], [1, 3, 5])
    rows = Region("s", Box(4, (2, 2), (6, 1)), "p", Box(0, (2, 2), (2, 1)))
    chosen, target = rows.translate(torch.arange(18))
    assert (chosen.tolist(), target.tolist()) == ([4, 5, 10, 11], [0, 1, 2, 3])


def test_regions_without_elements_route_nothing() -> None:
    empty = (Box(0, (0, 3), (3, 1)), Box(0, (0, 3), (3, 1)))
    layout = one((2, 3), (2, 3), empty, (Box(0, (2, 3), (3, 1)), Box(0, (2, 3), (3, 1))))
    assert routed(layout, patch("s", (2, 3), [0, 5])) == {("p", 0): 1000.0, ("p", 5): 1005.0}
    assert layout.route(patch("s", (2, 3), [])) == []
    assert layout.check().ok


@pytest.mark.parametrize(
    ("found", "shape", "expected"),
    [
        (Box(4, (2, 2), (3, 1)), (3, 3), ((1, 3), (1, 3))),
        (Box(4, (2, 1, 2), (3, 9, 1)), (3, 3), ((1, 3), (1, 3))),
        (Box(1, (2,), (2,)), (2, 1, 2), ((0, 2), (0, 1), (1, 2))),
        (Box(0, (2, 2), (1, 1)), (2, 3), None),
        (Box(0, (2,), (2,)), (2, 3), None),
        (Box(2, (2,), (1,)), (2, 3), None),
    ],
    ids=["rows and columns", "an axis of one", "a size of one", "two axes in one", "no axis", "over the end of a row"],
)
def test_boxes_along_the_axes(found: Box, shape: tuple[int, ...], expected: object) -> None:
    assert extent(found, shape) == expected


@pytest.mark.parametrize(
    ("shape", "boxes", "missing", "clashes"),
    [
        ((), {"a": Box(0, (), ())}, 0, []),
        ((), {"a": Box(0, (), ()), "b": Box(0, (), ())}, 0, [("a", "b")]),
        ((2, 3), {"a": Box(0, (3,), (2,)), "b": Box(1, (3,), (2,))}, 0, []),
        ((2, 3), {"a": Box(0, (3,), (2,)), "b": Box(2, (2,), (2,)), "c": Box(5, (1,), (1,))}, 2, [("a", "b")]),
    ],
    ids=["scalar", "scalar twice", "every second", "every second twice"],
)  # fmt: skip
def test_coverage_off_the_axes(
    shape: tuple[int, ...], boxes: dict[str, Box], missing: int, clashes: list[tuple[str, str]]
) -> None:
    assert coverage(TensorInfo(shape, BF16), list(boxes.items())) == (missing, clashes)


def test_unmapped_is_refused_and_dropped_is_not() -> None:
    """A tensor without a region is an error unless a reason was declared for it."""
    info = {"s": TensorInfo((2, 3), torch.float32)}
    with pytest.raises(DeltaError) as caught:
        LayoutMap(info, {}, ()).route(patch("s", (2, 3), [1]))
    assert caught.value.reason is Reason.UNMAPPED
    assert LayoutMap(info, {}, ()).check().unmapped == ("s",)
    dropped = LayoutMap(info, {}, (), dropped={"s": "tower switched off"})
    assert dropped.route(patch("s", (2, 3), [1])) == []
    assert dropped.check().ok


def test_check_finds_what_is_not_covered() -> None:
    """Half a parameter without a source is reported; declared padding covers it."""
    pair = (box((2, 3), (0, 0), (2, 3)), box((4, 3), (0, 0), (2, 3)))
    bare = one((2, 3), (4, 3), pair)
    assert bare.check().uncovered == {"p": 6}
    padded = LayoutMap(bare.sources, bare.params, bare.regions, padding={"p": (box((4, 3), (2, 0), (2, 3)),)})
    assert padded.check().ok
    assert padded.check().padding == {"p": 6}


def test_check_finds_overlaps() -> None:
    """Two regions that share one element are named; equal volume does not hide a gap."""
    layout = one(
        (4, 3), (4, 3), (box((4, 3), (0, 0), (2, 3)), box((4, 3), (0, 0), (2, 3))),
        (box((4, 3), (2, 0), (2, 3)), box((4, 3), (1, 0), (2, 3))),
    )  # fmt: skip
    report = layout.check()
    assert report.overlapping == (("p", "s", "s"),)
    assert report.uncovered == {"p": 3}
    assert not report.ok
    assert any("write the same elements" in line for line in report.findings())


def test_check_finds_overlap_with_padding() -> None:
    """Padding over a mapped row is a clash."""
    pair = (box((2, 3), (0, 0), (2, 3)), box((2, 3), (0, 0), (2, 3)))
    bare = one((2, 3), (2, 3), pair)
    clash = LayoutMap(bare.sources, bare.params, bare.regions, padding={"p": (box((2, 3), (1, 0), (1, 3)),)})
    assert clash.check().overlapping == (("p", "s", "<padding>"),)


def test_check_finds_regions_that_leave_the_tensor() -> None:
    """A box that ends one row too late on either side is named."""
    layout = one((3, 3), (2, 3), (Box(3, (3, 3), (3, 1)), Box(0, (3, 3), (3, 1))))
    assert layout.check().out_of_bounds == (("s", "p"),)


def test_check_finds_dtype_conversion() -> None:
    """A float32 parameter filled from bfloat16 is not a copy of bits."""
    layout = LayoutMap(
        {"s": TensorInfo((2, 3), BF16)},
        {"p": TensorInfo((2, 3), torch.float32)},
        (Region("s", Box(0, (2, 3), (3, 1)), "p", Box(0, (2, 3), (3, 1))),),
    )
    assert layout.check().dtype_differs == (("s", "p"),)
    assert not layout.check().ok


WHOLE = Box(0, (2, 3), (3, 1))
LATE = Box(1, (2, 3), (3, 1))
"""One element too far in a tensor of (2, 3)."""


@pytest.mark.parametrize("side", ["source", "param"])
def test_check_finds_regions_that_end_one_element_late_on_one_side(side: str) -> None:
    """An element that is beyond the parameter does not cover the one that is missing."""
    boxes = (LATE, WHOLE) if side == "source" else (WHOLE, LATE)
    report = one((2, 3), (2, 3), boxes).check()
    assert report.out_of_bounds == (("s", "p"),)
    assert report.uncovered == ({} if side == "source" else {"p": 6})
    assert not report.ok
    assert not one((2, 3), (2, 3), (WHOLE, WHOLE), (Box(9, (0, 3), (3, 1)), Box(9, (0, 3), (3, 1)))).check().findings()


@pytest.mark.parametrize("fault", ["unmapped", "uncovered", "overlapping", "out_of_bounds", "dtype_differs"])
def test_every_fault_alone_is_one(fault: str) -> None:
    info, half = TensorInfo((2, 3), torch.float32), TensorInfo((2, 3), BF16)
    good = Region("s", WHOLE, "p", WHOLE)
    sources = {"s": half if fault == "dtype_differs" else info} | ({"t": info} if fault == "unmapped" else {})
    params = {"p": info} | ({"q": info} if fault == "uncovered" else {})
    regions = {"overlapping": (good, good), "out_of_bounds": (Region("s", LATE, "p", WHOLE),)}.get(fault, (good,))
    report = LayoutMap(sources, params, regions).check()
    names = ("unmapped", "uncovered", "overlapping", "out_of_bounds", "dtype_differs")
    assert [name for name in names if getattr(report, name)] == [fault]
    assert not report.ok
    assert len(report.findings()) == 1


def test_regions_that_cannot_be() -> None:
    """Boxes of two shapes, and tensors that the map does not know, on either side."""
    with pytest.raises(DeltaError) as caught:
        Region("s", Box(0, (2, 3), (3, 1)), "p", Box(0, (3, 2), (2, 1)))
    assert (caught.value.reason, caught.value.tensor) == (Reason.SHAPE_MISMATCH, "s")
    info = {"s": TensorInfo((2, 3), torch.float32)}
    for sources, params in (({}, {"p": info["s"]}), (info, {})):
        with pytest.raises(DeltaError) as caught:
            LayoutMap(sources, params, (Region("s", WHOLE, "p", WHOLE),))
        assert (caught.value.reason, caught.value.tensor) == (Reason.UNMAPPED, "s")


def test_tied_names_must_change_alike() -> None:
    """Both names of one parameter: the same change to both is fine, to one alone is not, unless the files lack it."""
    info = TensorInfo((2, 3), torch.float32)
    region = Region("embed", Box(0, (2, 3), (3, 1)), "p", Box(0, (2, 3), (3, 1)))
    both = LayoutMap({"embed": info, "head": info}, {"p": info}, (region,), aliases={"head": "embed"})
    once = LayoutMap({"embed": info}, {"p": info}, (region,), aliases={"head": "embed"})
    embed, head = patch("embed", (2, 3), [1, 4]), patch("head", (2, 3), [1, 4])
    for layout in (both, once):
        layout.check_aliases([embed, head])
        layout.check_aliases([])
        elsewhere = TensorPatch("head", (2, 3), torch.tensor([2, 4]), embed.values)
        cases = (
            ([head], "found 2 and 0"),
            ([embed, patch("head", (2, 3), [5])], "found 1 and 2"),
            ([embed, elsewhere], "found 2 and 2"),
        )
        for wrong, counts in cases:
            with pytest.raises(DeltaError) as caught:
                layout.check_aliases(wrong)
            assert (caught.value.reason, caught.value.tensor) == (Reason.ALIAS_CONFLICT, "head")
            assert counts in caught.value.detail
    once.check_aliases([embed])
    with pytest.raises(DeltaError) as caught:
        both.check_aliases([embed])
    assert (caught.value.reason, caught.value.tensor) == (Reason.ALIAS_CONFLICT, "embed")
    assert routed(both, head) == {}
    assert routed(once, head) == {}


def test_tied_names_differing_in_sign_of_zero() -> None:
    """Equal numbers are not equal bits."""
    info = TensorInfo((2, 3), torch.float32)
    region = Region("embed", Box(0, (2, 3), (3, 1)), "p", Box(0, (2, 3), (3, 1)))
    layout = LayoutMap({"embed": info, "head": info}, {"p": info}, (region,), aliases={"head": "embed"})
    at = torch.tensor([2])
    changes = [
        TensorPatch("embed", (2, 3), at, torch.tensor([0.0])),
        TensorPatch("head", (2, 3), at, torch.tensor([-0.0])),
    ]
    with pytest.raises(DeltaError):
        layout.check_aliases(changes)


NO_BOXES = (
    "[6.0, [3], [1]]",
    '["6", [3], [1]]',
    "[6, 3, [1]]",
    "[6, [3], 1]",
    '[6, "3", [1]]',
    "[6, [3.5], [1]]",
    "[6, []]",
)


def test_json_round_trip() -> None:
    """The whole map survives; other text is refused as bad metadata."""
    info = TensorInfo((2, 3), BF16)
    layout = LayoutMap(
        {"s": info, "t": info, "u": info},
        {"p": TensorInfo((3, 3), BF16)},
        (Region("s", Box(0, (2, 3), (3, 1)), "p", Box(0, (2, 3), (3, 1))),),
        padding={"p": (Box(6, (3,), (1,)),)},
        aliases={"t": "s"},
        dropped={"u": "tower switched off"},
    )
    assert LayoutMap.from_json(layout.to_json()) == layout
    for text in (
        "",
        "[]",
        "{}",
        layout.to_json().replace("refdelta_layout", "x"),
        layout.to_json().replace("bfloat16", "x"),
        layout.to_json().replace('"version": 1', '"version": 2'),
        '{"format": ' + "[" * 100_000,
        *(layout.to_json().replace("[6, [3], [1]]", no_box) for no_box in NO_BOXES),
        *(
            layout.to_json().replace('"p": [[3, 3]', f'"p": [{no_shape}')
            for no_shape in ('"33"', "[3, 3.0]", "[3, true]")
        ),
    ):
        assert text != layout.to_json()
        with pytest.raises(DeltaError) as caught:
            LayoutMap.from_json(text)
        assert caught.value.reason is Reason.BAD_METADATA
    for text, reason in (
        (layout.to_json().replace("[6, [3], [1]]", "[-6, [3], [1]]"), Reason.BAD_SHAPE),
        (layout.to_json().replace('["s", [0', '["x", [0'), Reason.UNMAPPED),
    ):
        with pytest.raises(DeltaError) as caught:
            LayoutMap.from_json(text)
        assert caught.value.reason is reason, "what is wrong with the map itself keeps its reason"


def test_uncovered_elements_counts_a_union() -> None:
    """Replicated boxes count once; the gap between them is exact."""
    info = TensorInfo((6, 5), torch.float32)
    boxes = [box((6, 5), (0, 0), (2, 5)), box((6, 5), (1, 0), (2, 5)), box((6, 5), (4, 1), (2, 4))]
    assert uncovered_elements(info, boxes) == 30 - 15 - 8


def test_edges_are_taken_in_order() -> None:
    """Python's set gives these edges as 40, 3, 36, 5."""
    boxes = [box((50,), (3,), (33,)), box((50,), (5,), (35,))]
    assert uncovered_elements(TensorInfo((50,), torch.float32), boxes) == 50 - 37


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, int], list[tuple[int, int, int, int]], list[int]]:
    """A (rows, columns) source, cut into boxes by row and column cuts, and some changed positions."""
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    row_cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    column_cuts = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=3))})
    cells = [(a, b, c, d) for a, b in pairwise(row_cuts) for c, d in pairwise(column_cuts)]
    order = draw(st.permutations(cells))
    return (rows, columns), list(order), sorted(draw(st.sets(st.integers(0, rows * columns - 1))))


@given(tilings())
def test_routing_equals_laying_out_again(
    case: tuple[tuple[int, int], list[tuple[int, int, int, int]], list[int]],
) -> None:
    """Write then lay out densely, in numpy, equals route then write, for any tiling in any order."""
    shape, cells, positions = case
    old = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    new = old.copy()
    new.reshape(-1)[positions] += 1000

    def dense(
        state: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.concatenate([state[a:b, c:d].reshape(-1) for a, b, c, d in cells])

    pairs, offset = [], 0
    for a, b, c, d in cells:
        sizes = (b - a, d - c)
        pairs.append((box(shape, (a, c), sizes), Box(offset, sizes, (d - c, 1))))
        offset += sizes[0] * sizes[1]
    layout = one(shape, (offset,), *pairs)
    written = dense(old)
    for (_, position), value in routed(layout, patch("s", shape, positions)).items():
        written[position] = value
    assert written.tobytes() == dense(new).tobytes()
    assert layout.check().ok
