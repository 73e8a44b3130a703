"""The proofs themselves: equal maps are equal however they are cut, and each fault of a set of ranks is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refdelta.layout.proofs import AcrossRanks, difference, lost
from refdelta.layout.reasons import OTHER_RANKS, TOWER
from refdelta.layout_map import Box, LayoutMap, Region, TensorInfo, coverage
from tests.layout.models import GEMMA4, SMALL, Engine, engines

INFO = TensorInfo((6, 10), torch.float32)


def cut(region: Region, axis: int, at: int) -> list[Region]:
    """One region as two."""
    parts = []
    for first, size in ((0, at), (at, region.source_box.shape[axis] - at)):
        boxes = [
            Box(
                box.offset + first * box.strides[axis],
                tuple(size if i == axis else n for i, n in enumerate(box.shape)),
                box.strides,
            )
            for box in (region.source_box, region.param_box)
        ]
        parts.append(replace(region, source_box=boxes[0], param_box=boxes[1]))
    return parts


def recut(layout: LayoutMap, draw: st.DataObject) -> LayoutMap:
    """The same map in smaller regions and another order, some axes with a further one of size 1."""
    regions: list[Region] = []
    for region in layout.regions:
        parts = [region]
        for _ in range(draw.draw(st.integers(0, 2))):
            last = parts.pop()
            axis = draw.draw(st.integers(0, len(last.source_box.shape) - 1))
            parts += cut(last, axis, draw.draw(st.integers(0, last.source_box.shape[axis])))
        if draw.draw(st.booleans()):
            parts = [
                replace(part, source_box=_lifted(part.source_box), param_box=_lifted(part.param_box)) for part in parts
            ]
        regions += parts
    return replace(layout, regions=tuple(draw.draw(st.permutations(regions))))


def _lifted(box: Box) -> Box:
    return Box(box.offset, (1, *box.shape), (1, *box.strides))


@given(engines(), st.data())
def test_equal_however_cut(engine: Engine, data: st.DataObject) -> None:
    """No difference to a map of the same moves; one to a map with a single element elsewhere."""
    layout = engine.rules(data.draw(st.integers(0, engine.tp_size - 1)))
    again = recut(layout, data)
    assert difference(layout, again) == []
    moved = _one_element_moved(again, data)
    found = difference(layout, moved)
    assert [d.kind for d in found] == ["regions"]
    assert found[0].name in str(found[0])


def _one_element_moved(layout: LayoutMap, data: st.DataObject) -> LayoutMap:
    regions = [region for region in layout.regions if region.numel > 1]
    region = data.draw(st.sampled_from(regions))
    first = Region(
        region.source, Box(region.source_box.offset, (), ()), region.param, Box(region.param_box.last, (), ())
    )
    return replace(layout, regions=(*(r for r in layout.regions if r is not region), *_but_first(region), first))


def _but_first(region: Region) -> list[Region]:
    """The region without its first element."""
    kept: list[Region] = []
    for axis in range(len(region.source_box.shape)):
        first, rest = cut(region, axis, 1)
        kept.append(rest)
        region = first
    return kept


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("sources", lambda m: {"sources": {**m.sources, "x": INFO}}),
        ("params", lambda m: {"params": {**m.params, "model.norm.weight": INFO}}),
        ("aliases", lambda m: {"aliases": {}}),
        ("dropped", lambda m: {"dropped": {"model.norm.weight": TOWER}}),
        ("padding", lambda m: {"padding": {}}),
        (
            "padding",
            lambda m: {"padding": {name: (replace(b, offset=b.offset - 1),) for name, (b,) in m.padding.items()}},
        ),
        ("regions", lambda m: {"regions": m.regions[1:]}),
    ],
)
def test_each_part_is_compared(kind: str, change: Callable[[LayoutMap], dict[str, Any]]) -> None:
    """Every field of a map counts."""
    layout = Engine(GEMMA4, 2).rules(1)
    assert {found.kind for found in difference(layout, replace(layout, **change(layout)))} == {kind}


def test_lost_tensors() -> None:
    """What the architecture places and the loader leaves out, unless a reason stands for it."""
    rules = Engine(GEMMA4, 2).rules(0)
    name = "model.layers.1.layer_scalar"
    traced = replace(rules, regions=tuple(r for r in rules.regions if r.source != name))
    assert lost(rules, rules) == []
    assert lost(rules, traced) == [name]
    assert lost(rules, replace(traced, dropped={name: TOWER})) == []


# --- all ranks --------------------------------------------------------------------------------------------------------


def rank(*rows: tuple[int, int], dropped: str | None = None) -> LayoutMap:
    """A rank that holds these runs of rows of a (6, 10) tensor."""
    regions, top = [], 0
    for first, stop in rows:
        shape = (stop - first, 10)
        regions.append(Region("t", Box(first * 10, shape, (10, 1)), "p", Box(top * 10, shape, (10, 1))))
        top += stop - first
    params = {"p": TensorInfo((top, 10), torch.float32)} if rows else {}
    return LayoutMap({"t": INFO}, params, tuple(regions), dropped={"t": dropped} if dropped else {})


def together(*ranks: LayoutMap) -> list[str]:
    """What is wrong with these ranks."""
    found = AcrossRanks()
    for layout in ranks:
        found.add(layout)
    return found.findings()


@pytest.mark.parametrize(
    "ranks",
    [
        [rank((0, 6))],
        [rank((0, 6)), rank((0, 6))],
        [rank((0, 3)), rank((3, 6))],
        [rank((0, 3)), rank((0, 1), (1, 3)), rank((3, 6)), rank((3, 5), (5, 6))],
        [rank((0, 6)), rank(dropped=OTHER_RANKS)],
        [rank(dropped=TOWER), rank(dropped=TOWER)],
    ],
)
def test_whole_sets_of_ranks(ranks: list[LayoutMap]) -> None:
    """Alone, replicated, in halves, in halves twice and cut differently, on one rank only, on none for a reason."""
    assert together(*ranks) == []


@pytest.mark.parametrize(
    ("ranks", "finding"),
    [
        ([rank((0, 3)), rank((3, 5))], "10 of 60 elements are on no rank"),
        ([rank((0, 4)), rank((3, 6))], "share elements"),
        ([rank((0, 3)), rank((3, 6)), rank((3, 6))], "not equally many"),
        ([rank((0, 3)), rank()], "reaches no parameter"),
        ([rank(dropped=OTHER_RANKS), rank(dropped=OTHER_RANKS)], "every rank says that others"),
        ([rank((0, 6)), rank(dropped=TOWER)], "some ranks hold it"),
        ([rank(dropped=TOWER), rank(dropped=OTHER_RANKS)], "different reasons"),
        ([rank((0, 6)), replace(rank((0, 6)), sources={"t": TensorInfo((6, 11), torch.float32)})], "other checkpoint"),
        ([rank((0, 7))], "leaves"),
    ],
)
def test_faults_of_sets_of_ranks(ranks: list[LayoutMap], finding: str) -> None:
    """Each fault is named."""
    assert any(finding in line for line in together(*ranks)), together(*ranks)


@pytest.mark.parametrize("engine", SMALL.values(), ids=SMALL)
def test_a_missing_rank_is_noticed(engine: Engine) -> None:
    """All ranks are whole together, and all but the last one are not."""
    ranks = [engine.rules(number) for number in range(engine.tp_size)]
    assert together(*ranks) == []
    assert together(*ranks[:-1])


def test_huge_tensors_are_proven_by_arithmetic() -> None:
    """2.8e9 elements with an overlap and a gap: exact numbers, without an array of that size."""
    rows, columns = 262144, 10752
    info = TensorInfo((rows, columns), torch.bfloat16)
    halves = [
        ("a", Box(0, (rows // 2 + 1, columns), (columns, 1))),
        ("b", Box(rows // 2 * columns, (7, 9), (columns, 1))),
    ]
    missing, clashes = coverage(info, halves)
    assert clashes == [("a", "b")]
    assert missing == (rows // 2 - 1) * columns - 6 * 9
