"""compose and join: several deltas in one, and what is refused instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from conformance import oracle
from conformance.inputs import strategies
from refdelta import (
    Delta,
    DeltaEncoder,
    DeltaError,
    Lineage,
    Reason,
    TensorPatch,
    apply_delta,
    diff,
    read_delta,
    write_delta,
)
from refdelta.apply import compose, join
from refdelta.codec import composition
from refdelta.digest import state_digest
from refdelta.spec import INVARIANTS, copy_state
from tests.codec.support import assert_same, bf16, patterns

State = dict[str, Tensor]
ALL = tuple(strategies.ALL)


def patch(indices: list[int], *values: int, name: str = "w", shape: tuple[int, ...] = (2, 3)) -> TensorPatch:
    return TensorPatch(name, shape, torch.tensor(indices, dtype=torch.int32), bf16(*values))


def delta(
    *patches: TensorPatch, lineage: Lineage | None = None, total: int = 20, extra: Mapping[str, object] | None = None
) -> Delta:
    return Delta(patches, total, lineage, extra or {})


def refused(reason: Reason, attempt: Callable[[], object]) -> DeltaError:
    with pytest.raises(DeltaError) as caught:
        attempt()
    assert caught.value.reason is reason, caught.value
    return caught.value


def content(found: Delta) -> list[tuple[str, list[int], list[int]]]:
    return [(p.name, p.indices.tolist(), patterns(p.values)) for p in found.patches]


# What it gives


def test_later_wins_and_positions_are_merged_in_order() -> None:
    first = delta(patch([1, 3, 5], 11, 13, 15), patch([0], 20, name="a"))
    second = delta(patch([0, 3, 4], 30, 33, 34), patch([5], 45, name="z"))
    third = delta(patch([4], 54))
    assert content(compose([first, second, third])) == [
        ("a", [0], [20]),
        ("w", [0, 1, 3, 4, 5], [30, 11, 33, 54, 15]),
        ("z", [5], [45]),
    ]


def test_there_and_back_keeps_its_positions() -> None:
    """Applied to a state that is not the first one, the composition still sets what it touched."""
    a, b = {"w": bf16(1, 2, 3, 4)}, {"w": bf16(1, 9, 3, 8)}
    assert content(compose([diff(a, b), diff(b, a)])) == [("w", [1, 3], [2, 4])]


def test_with_its_inverse_a_delta_gives_the_state_before() -> None:
    a, b = {"w": bf16(1, 2, 3, 4)}, {"w": bf16(1, 9, 3, 8)}
    lineage = Lineage("run", 1, 0, state_digest(a), state_digest(b))
    forth = replace(diff(a, b), lineage=lineage)
    back = apply_delta(forth, copy_state(b))
    both = compose([forth, replace(back, patches=diff(b, a).patches)])
    assert both.lineage == Lineage("run", 0, 0, state_digest(a), state_digest(a))
    receiver = copy_state(a)
    apply_delta(both, receiver, digest=state_digest(a))
    assert_same(receiver, a)


@given(strategies.chains(ALL, 5))
def test_one_application_equals_all_in_order(chain: list[State]) -> None:
    deltas = [diff(old, new) for old, new in pairwise(chain)]
    composed = compose(deltas)
    INVARIANTS["composes"].check(deltas, composed, chain[0], apply_delta)
    event(f"{min(3, sum(len(d.patches) > 0 for d in deltas))} deltas with changes")
    touched = {(p.name, at) for d in deltas for p in d.patches for at in p.indices.tolist()}
    assert {(p.name, at) for p in composed.patches for at in p.indices.tolist()} == touched
    for made in composed.patches:
        made.check_indices()
        assert made.indices.dtype == torch.int32


@given(strategies.chains(ALL, 4), st.integers(1, 5))
def test_windows_make_no_difference(chain: list[State], window: int) -> None:
    deltas = [diff(old, new) for old, new in pairwise(chain)]
    whole = compose(deltas)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(composition, "_WINDOW", window)
        assert content(compose(deltas)) == content(whole)


def test_windows_of_positions_of_both_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut that I32 cannot hold lies behind all I32 positions, the last of which is 2^31 - 1."""
    monkeypatch.setattr(composition, "_WINDOW", 1)
    far, shape = 2**31 - 1, (2, 2**31)
    narrow = TensorPatch("w", shape, torch.tensor([0, far], dtype=torch.int32), bf16(1, 2))
    wide = TensorPatch("w", shape, torch.tensor([far, far + 1, far + 2]), bf16(3, 4, 5))
    for patches, last in (((narrow, wide), 3), ((wide, narrow), 2)):
        found = compose([delta(patch, total=2**32) for patch in patches])
        assert content(found) == [("w", [0, far, far + 1, far + 2], [1, last, 4, 5])]


@given(strategies.chains(ALL, 4), st.randoms(use_true_random=False))
def test_grouping_does_not_matter(chain: list[State], random: Any) -> None:
    a, b, c = (diff(old, new) for old, new in pairwise(chain))
    ways = [compose([a, b, c]), compose([compose([a, b]), c]), compose([a, compose([b, c])])]
    assert content(ways[0]) == content(ways[1]) == content(ways[2])
    # Positions that no delta of the chain touched before, in a state that it does not start from.
    elsewhere = {
        name: oracle.from_bits(oracle.bits(t)[::-1].copy(), oracle.CODES[t.dtype], t.shape)
        for name, t in chain[0].items()
    }
    found = []
    for way in ways:
        receiver = copy_state(elsewhere)
        apply_delta(way, receiver)
        found.append(receiver)
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_run_in_one_delta_is_followed_by_digest(tmp_path: Path, count: int) -> None:
    rng = np.random.default_rng(count)
    weights = {"w": torch.zeros(5, 7, dtype=torch.float16), "v": torch.ones(3)}
    first = copy_state(weights)
    encoder, paths = DeltaEncoder(weights, run_id="run", version=10), []
    for number in range(count):
        weights["w"].view(torch.int16).view(-1)[torch.from_numpy(rng.integers(0, 35, 4))] += number + 1
        paths.append(write_delta(encoder.encode(weights), tmp_path / str(number)))
        encoder.commit(read_delta(paths[-1]))
    written = write_delta(compose([read_delta(path) for path in paths]), tmp_path / "all")
    composed = read_delta(written)
    assert composed.lineage is not None
    assert composed.lineage.layer_digests == {"w": state_digest({"w": weights["w"]})}
    assert replace(composed.lineage, payload_sha256=None, layer_digests=None) == Lineage(
        "run", 10 + count, 10, state_digest(first), state_digest(weights)
    )
    receiver = copy_state(first)
    apply_delta(composed, receiver, digest=state_digest(first))
    assert_same(receiver, weights)


def test_positions_beyond_2_to_31_keep_their_width() -> None:
    shape = (3, 2**30)
    made = [
        TensorPatch("w", shape, torch.tensor(at), bf16(*values))
        for at, values in (([5, 2**31 + 1], (1, 2)), ([2**31, 2**31 + 1], (3, 4)))
    ]
    composed = compose([Delta((one,), 2**32) for one in made])
    assert content(composed) == [("w", [5, 2**31, 2**31 + 1], [1, 3, 4])]
    assert composed.patches[0].indices.dtype == torch.int64


def test_positions_of_both_widths_and_strided_values() -> None:
    strided = torch.zeros(6, dtype=torch.bfloat16)[::2]
    first = Delta((TensorPatch("w", (2, 3), torch.tensor([0, 2, 4]), strided),), 20)
    composed = compose([first, delta(patch([2, 3], 7, 8))])
    assert content(composed) == [("w", [0, 2, 3, 4], [0, 7, 8, 0])]
    assert composed.patches[0].indices.dtype == torch.int32


def test_layers_without_positions_are_left_out() -> None:
    assert compose([delta(patch([])), delta(patch([], name="v"))]).patches == ()


def test_neither_the_inputs_nor_their_memory_are_shared() -> None:
    only = delta(patch([1], 5))
    composed = compose([only])
    composed.patches[0].values.fill_(0)
    assert content(only) == [("w", [1], [5])]


def test_metadata_that_all_state_is_kept() -> None:
    extra = {"base_model": "m", "kind": "sampler", "created_at": "now", "timestamp": 1.5, "odd": [1]}
    other = {"base_model": "m", "kind": "trainer", "created_at": "now", "timestamp": 1.5, "odd": [1], "more": 1}
    assert compose([delta(extra=extra), delta(extra=other)]).extra == {"base_model": "m", "odd": [1]}
    less = {"base_model": "m", "kind": "sampler"}
    assert compose([delta(extra=extra), delta(extra=less), delta(extra=other)]).extra == {"base_model": "m"}


# What does not follow

AT = Lineage("run", 5, 4, "rd1:4", "rd1:5")


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        pytest.param(None, Reason.BASE_MISMATCH, id="no lineage"),
        pytest.param(Lineage("another", 6, 5, "rd1:5"), Reason.BASE_MISMATCH, id="another run"),
        pytest.param(Lineage("run", 7, 6, "rd1:5"), Reason.BASE_MISMATCH, id="a version missed"),
        pytest.param(Lineage("run", 5, 4, "rd1:4", "rd1:5"), Reason.BASE_MISMATCH, id="repeated"),
        pytest.param(Lineage("run", 4, 3, "rd1:3", "rd1:4"), Reason.BASE_MISMATCH, id="reordered"),
        pytest.param(Lineage("run", 6, 5, "rd1:6"), Reason.BASE_MISMATCH, id="another base digest"),
        pytest.param(Lineage("run", 6, None, "rd1:6"), Reason.BASE_MISMATCH, id="another digest and no version"),
        pytest.param(Lineage("run", 6), Reason.BASE_MISMATCH, id="no base"),
        pytest.param(Lineage("run", 6, 5, "rd1:5", part=(0, 2)), Reason.INCOMPLETE, id="a part"),
    ],
)
def test_deltas_that_do_not_follow(after: Lineage | None, reason: Reason) -> None:
    before = delta(patch([1], 5), lineage=AT)
    refused(reason, lambda: compose([before, delta(patch([2], 6), lineage=after)]))
    if reason is Reason.BASE_MISMATCH and after is None:
        refused(reason, lambda: compose([delta(patch([2], 6)), before]))


def test_the_link_that_does_not_fit_is_named() -> None:
    """Which of version and digest, with both sides."""
    for after, said in (
        (Lineage("run", 7, 6, "rd1:5"), "based on version 6, the state before is 5"),
        (Lineage("run", 6, 5, "rd1:6"), "based on digest rd1:6, the state before is rd1:5"),
    ):
        error = refused(Reason.BASE_MISMATCH, partial(compose, [delta(lineage=AT), delta(lineage=after)]))
        assert said in error.detail


@pytest.mark.parametrize(
    "after", [Lineage("run", 6, 5), Lineage("run", 6, None, "rd1:5"), Lineage("run", 6, 5, "rd1:5", part=(0, 1))]
)
def test_one_known_link_is_enough(after: Lineage) -> None:
    composed = compose([delta(lineage=AT), delta(lineage=after)])
    assert composed.lineage == Lineage("run", 6, 4, "rd1:4", None)


def test_states_that_differ() -> None:
    first = delta(patch([1], 5))
    refused(Reason.COUNT_MISMATCH, lambda: compose([first, delta(total=21)]))
    refused(Reason.SHAPE_MISMATCH, lambda: compose([first, delta(), delta(patch([1], 5, shape=(3, 2)))]))
    wider = TensorPatch("w", (2, 3), torch.tensor([1]), torch.ones(1))
    refused(Reason.DTYPE_MISMATCH, lambda: compose([first, delta(wider)]))
    refused(Reason.INDEX_ORDER, lambda: compose([first, delta(patch([2, 1], 5, 6))]))
    refused(Reason.INDEX_RANGE, lambda: compose([first, delta(patch([6], 5))]))
    refused(Reason.BAD_OPTION, lambda: compose([]))


def test_layer_digests_are_those_after_the_last_change() -> None:
    def at(version: int, *names: str, **layer_digests: str) -> Delta:
        patches = [patch([version], version, name=name) for name in names]
        said = layer_digests or None
        return delta(*patches, lineage=Lineage("run", version, version - 1, layer_digests=said))

    one = at(1, "a", "b", "c", a="rd1:a1", b="rd1:b1", c="rd1:c1")
    two = at(2, "b", "c", b="rd1:b2")
    composed = compose([one, two])
    assert composed.lineage is not None
    assert composed.lineage.layer_digests == {"a": "rd1:a1", "b": "rd1:b2"}
    silent = compose([at(1, "a"), at(2, "b")]).lineage
    assert silent is not None
    assert silent.layer_digests is None
    partly = compose([one, at(2, "b")]).lineage
    assert partly is not None
    assert partly.layer_digests == {"a": "rd1:a1", "c": "rd1:c1"}


# Parts of one update

WHOLE = Lineage("run", 5, 4, "rd1:4", "rd1:5")


def part(number: int, of: int, *patches: TensorPatch, **layer_digests: str) -> Delta:
    return delta(
        *patches,
        lineage=replace(WHOLE, part=(number, of), layer_digests=layer_digests or None, payload_sha256=f"{number:064x}"),
    )


@given(strategies.pairs(ALL, min_tensors=1), st.integers(1, 4), st.randoms(use_true_random=False))
def test_parts_make_the_whole(pair: tuple[State, State], count: int, random: Any) -> None:
    base, target = pair
    whole = replace(
        diff(base, target), lineage=replace(WHOLE, base_digest=state_digest(base), digest=state_digest(target))
    )
    parts = [_share(whole, number, count) for number in range(count)]
    random.shuffle(parts)
    joined = join(parts)
    assert joined.lineage == whole.lineage
    receiver = copy_state(base)
    apply_delta(joined, receiver, digest=state_digest(base))
    assert_same(receiver, target)
    assert content(joined) == content(whole)


def _share(whole: Delta, number: int, count: int) -> Delta:
    assert whole.lineage is not None
    patches = [replace(p, indices=p.indices[number::count], values=p.values[number::count]) for p in whole.patches]
    return replace(whole, patches=tuple(patches), lineage=replace(whole.lineage, part=(number, count)))


def test_layer_digests_of_parts_are_gathered() -> None:
    joined = join([part(1, 2, patch([1], 5), w="rd1:w"), part(0, 2, patch([0], 5, name="v"), v="rd1:v", w="rd1:w")])
    assert joined.lineage == replace(WHOLE, layer_digests={"v": "rd1:v", "w": "rd1:w"})
    assert [p.name for p in joined.patches] == ["v", "w"]


def test_parts_that_are_not_a_whole() -> None:
    zero, one = part(0, 2, patch([1], 5)), part(1, 2, patch([2], 6))
    assert one.lineage is not None
    others = [
        [zero],
        [zero, zero],
        [zero, one, one],
        [zero, delta(patch([2], 6))],
        [zero, part(1, 3)],
        [zero, replace(one, lineage=replace(one.lineage, version=6))],
        [zero, replace(one, lineage=replace(one.lineage, run_id="another"))],
        [zero, replace(one, lineage=replace(one.lineage, digest="rd1:6"))],
        [zero, part(1, 2, patch([1], 5))],
        [part(0, 2, w="rd1:1"), part(1, 2, w="rd1:2")],
        [delta(patch([1], 5))],
    ]
    for parts in others:
        refused(Reason.INCOMPLETE, partial(join, parts))
    refused(Reason.COUNT_MISMATCH, lambda: join([zero, replace(one, total_elements=21)]))
    refused(Reason.SHAPE_MISMATCH, lambda: join([zero, part(1, 2, patch([2], 6, shape=(3, 2)))]))
    refused(Reason.BAD_OPTION, lambda: join([]))
    assert content(join([one, zero])) == [("w", [1, 2], [5, 6])]


def test_the_first_position_in_two_parts_is_named() -> None:
    zero, one = part(0, 2, patch([1, 2, 4], 5, 6, 7)), part(1, 2, patch([2, 3, 4], 6, 7, 8))
    error = refused(Reason.INCOMPLETE, lambda: join([zero, one]))
    assert error.detail.startswith("position 2 is ")


def test_a_whole_delta_is_its_own_only_part() -> None:
    assert content(join([delta(patch([1], 5), lineage=WHOLE)])) == [("w", [1], [5])]
