"""Where post-load steps put the elements of a weight: recovered from the step itself, or refused by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from refdelta.codec import bits
from refdelta.layout_map import Box, LayoutMap, Region, TensorInfo
from refdelta.spec import TensorPatch
from refdelta.vllm.proof.attest import attest
from refdelta.vllm.proof.forked import ChildFailed, in_child
from refdelta.vllm.proof.position_maps import PositionMap
from refdelta.vllm.proof.post_load import NotAPermutation, Verdict, permutations, verdicts
from refdelta.vllm.update.proven_layout import ProvenLayout
from tests.engine.test_position_map import blocks

BF16 = torch.bfloat16
W13, W2 = (2, 12, 6), (2, 6, 5)
LIKE = {"w13": torch.empty(W13, dtype=BF16, device="meta"), "w2": torch.empty(W2, dtype=BF16, device="meta")}
Step = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def _pad(weights: Mapping[str, Tensor], to: int = 8) -> dict[str, Tensor]:
    """Both halves of w13 padded with rows of zeros, w2 with columns."""
    gate, up = weights["w13"].chunk(2, dim=1)
    rows, columns = to - gate.shape[1], to - weights["w2"].shape[2]
    halves = [nn.functional.pad(half, (0, 0, 0, rows)) for half in (gate, up)]
    return {"w13": torch.cat(halves, 1), "w2": nn.functional.pad(weights["w2"], (0, columns))}


def _swap(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    gate, up = weights["w13"].chunk(2, dim=1)
    return {**weights, "w13": torch.cat([up, gate], 1)}


def _pack(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Blocks of rows transposed."""
    packed = torch.empty_like(weights["w13"])
    packed.view(-1)[blocks(*packed.shape).flatten()] = weights["w13"].flatten()
    return {**weights, "w13": packed}


@pytest.mark.parametrize(
    ("step", "cost"),
    [
        (dict, sum(W13)),
        (_swap, sum(W13)),
        (_pack, sum(W13)),
        (_pad, sum(W13)),
        (lambda w: _pack(_swap(_pad(w))), sum(W13)),
        (lambda w: _pad(_swap(_pack(w))), 2 + 12 * 6),  # halves that cut through blocks
    ],
)
def test_permutations_are_recovered(step: Step, cost: int) -> None:
    """The map reproduces the step on other values, bit for bit, padding included, and costs a few numbers an axis."""
    maps = permutations(step, LIKE)
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(like.shape, generator=generator).to(BF16) for name, like in LIKE.items()}
    for name, made in step(weights).items():
        rebuilt = torch.zeros(made.numel(), dtype=BF16)
        rebuilt[maps[name](torch.arange(weights[name].numel()))] = weights[name].flatten()
        assert bits.equal(rebuilt.view(made.shape), made)
        assert maps[name].fault(made) is None
    assert maps["w13"].table_elements == cost
    assert maps["w2"].is_identity == (step(weights)["w2"].shape == W2)


def _double(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "w13": weights["w13"] * 2}


def _scale(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "w13": weights["w13"] / 2}


def _sum(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "w2": weights["w2"] + weights["w2"].flip(0)}


def _repeat(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "w2": weights["w2"].repeat(1, 1, 2)}


def _cut(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "w13": weights["w13"][:, :, 1:]}


def _mix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "w2": weights["w13"].flatten()[:60].view(W2)}


def _fill(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "w2": nn.functional.pad(weights["w2"], (0, 2), value=0.5)}


@pytest.mark.parametrize(
    ("step", "name", "why"),
    [
        (_double, "w13", "none of its elements|another parameter|lost"),
        (_scale, "w13", "none of its elements"),
        (_sum, "w2", "another parameter|none of its elements|lost"),
        (_repeat, "w2", "lost 0 of its elements and repeats 60"),
        (_cut, "w13", "lost 24 of its elements and repeats 0"),
        (_mix, "w2", "another parameter"),
        (_fill, "w2", "none of its elements"),
    ],
)
def test_what_is_no_permutation_is_refused_by_name(step: Step, name: str, why: str) -> None:
    """Computed, combined, repeated, lost, taken from elsewhere."""
    with pytest.raises(NotAPermutation, match=f"{name} .*({why})"):
        permutations(step, LIKE)


# --- the copy of the process ----------------------------------------------------------------------------------------


def _abort() -> None:
    os.abort()


def _raise() -> None:
    raise RuntimeError("no kernel for 48 columns")


@pytest.mark.parametrize(
    ("step", "why"), [(_abort, "status -6"), (_raise, "RuntimeError: no kernel for 48 columns"), (time.sleep, "no end")]
)
def test_a_step_that_ends_its_process_ends_a_copy(step: Callable[..., object], why: str) -> None:
    """Native code aborts where a shape does not suit it; the engine must survive that."""
    with pytest.raises(ChildFailed, match=why):
        in_child(step if step is not time.sleep else lambda: time.sleep(60), limit_s=0.5 if why == "no end" else 30)


def test_a_pool_of_threads_in_this_process_does_not_hang_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads do not survive the fork; a worker has them by then, and vLLM's on CPU disarm torch's own switch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        big = torch.randn(1500, 1500)
        wanted = big @ big
        with monkeypatch.context() as patch:
            patch.setattr(torch, "set_num_threads", lambda _: None)
            assert torch.allclose(in_child(lambda: [big @ big], limit_s=60)[0], wanted, atol=1e-2)
    finally:
        torch.set_num_threads(threads)


def test_nothing_of_the_step_reaches_this_process() -> None:
    """Only its result does."""
    here = torch.zeros(3)

    def step() -> list[Tensor]:
        here.fill_(7)
        return [here]

    assert in_child(step)[0].tolist() == [7, 7, 7]
    assert here.tolist() == [0, 0, 0]


# --- attestation through a map, verdicts ----------------------------------------------------------------------------


class Model(nn.Module):
    """A packed expert weight of 2 x (3, 5), padded to 2 x (3, 8), a plain one, a tied name, and a computed buffer."""

    def __init__(self, experts: Tensor, plain: Tensor) -> None:
        super().__init__()
        self.experts = nn.Parameter(experts, requires_grad=False)
        self.plain = nn.Parameter(plain, requires_grad=False)
        self.tied = self.plain
        self.empty = nn.Parameter(torch.empty(0, dtype=BF16), requires_grad=False)
        self.register_buffer("table", torch.arange(4))


SHAPE = (2, 3, 5)
PLACES = PositionMap.fitted(torch.arange(48).view(2, 3, 8)[:, :, 2:7])


def words(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(BF16)


def layout() -> LayoutMap:
    """``experts`` comes from two checkpoint tensors, one an expert; ``gone`` is dropped."""
    infos = {name: TensorInfo(shape, BF16) for name, shape in {"e0": SHAPE[1:], "e1": SHAPE[1:], "p": (4, 3)}.items()}
    params = {"experts": TensorInfo(SHAPE, BF16), "plain": infos["p"], "empty": TensorInfo((2, 2), BF16)}
    whole = Box(0, (3, 5), (5, 1))
    regions = [Region(f"e{e}", whole, "experts", Box(15 * e, (3, 5), (5, 1))) for e in (0, 1)]
    regions.append(Region("p", Box(0, (4, 3), (3, 1)), "plain", Box(0, (4, 3), (3, 1))))
    infos["lost"] = TensorInfo((2, 2), BF16)
    regions.append(Region("lost", Box(0, (2, 2), (2, 1)), "empty", Box(0, (2, 2), (2, 1))))
    return LayoutMap(infos | {"gone": infos["lost"]}, params, tuple(regions), dropped={"gone": "shared"})


def packed(checkpoint: Mapping[str, Tensor]) -> Tensor:
    """[2, 3, 8] what the engine holds."""
    held = torch.zeros(2, 3, 8, dtype=BF16)
    held[:, :, 2:7] = torch.stack([checkpoint["e0"], checkpoint["e1"]])
    return held


CHECKPOINT = {
    "e0": words(1, (3, 5)),
    "e1": words(2, (3, 5)),
    "p": words(3, (4, 3)),
    "lost": words(4, (2, 2)),
    "gone": words(5, (2, 2)),
}


def test_a_rearranged_parameter_is_attested_through_its_map() -> None:
    """All bits where the map puts them; one wrong bit, or one in the padding, fails it."""
    model = Model(packed(CHECKPOINT), CHECKPOINT["p"].clone())
    assert "its shape is [2, 3, 8]" in attest(model, layout(), CHECKPOINT).failed["experts"]
    found = attest(model, layout(), CHECKPOINT, {"experts": PLACES})
    assert sorted(found.proved) == ["experts", "plain"]
    for position, why in ((PLACES(torch.tensor([17])), "e1"), (torch.tensor([8]), "padding")):
        model.experts.data.view(torch.int16).view(-1)[position] ^= 1
        assert why in attest(model, layout(), CHECKPOINT, {"experts": PLACES}).failed["experts"]
        model.experts.data.view(torch.int16).view(-1)[position] ^= 1
    swapped = PositionMap.fitted(PLACES(torch.arange(30)).view(SHAPE).flip(0))
    assert "e0" in attest(model, layout(), CHECKPOINT, {"experts": swapped}).failed["experts"]


def test_without_a_map_a_parameter_is_refused_even_where_its_bits_agree() -> None:
    """Constant experts look alike in any order, so bits alone must not prove them."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in CHECKPOINT.items()}
    model = Model(torch.zeros(SHAPE, dtype=BF16), zeros["p"])
    assert "experts" in attest(model, layout(), zeros).proved
    assert attest(model, layout(), zeros, {"experts": "mixed"}).failed["experts"] == "mixed"


def test_verdicts() -> None:
    """One for every name, with its evidence."""
    model = Model(packed(CHECKPOINT), CHECKPOINT["p"].clone())
    position_maps: dict[str, PositionMap | str] = {"experts": PLACES}
    attestation = attest(model, layout(), CHECKPOINT, position_maps)
    found = verdicts(model, layout(), attestation, position_maps, packed=())
    assert {name: standing.verdict for name, standing in found.items()} == {
        "experts": Verdict.PERMUTED,
        "plain": Verdict.PLAIN,
        "tied": Verdict.ALIASED,
        "empty": Verdict.PACKED,
        "table": Verdict.DERIVED,
        "gone": Verdict.DROPPED,
    }
    assert "10 numbers" in found["experts"].evidence
    refused: dict[str, PositionMap | str] = {"experts": "sums of its elements"}
    attestation = attest(model, layout(), CHECKPOINT, refused)
    standing = verdicts(model, layout(), attestation, refused, packed=())["experts"]
    assert (standing.verdict, standing.evidence) == (Verdict.DERIVED, "sums of its elements")
    identity: dict[str, PositionMap | str] = {"plain": PositionMap.fitted(torch.arange(12).view(4, 3))}
    attestation = attest(model, layout(), CHECKPOINT, identity)
    assert verdicts(model, layout(), attestation, identity, packed=())["plain"].verdict is Verdict.PLAIN


def test_routing_through_places_equals_laying_out_and_packing() -> None:
    """A patch written at routed positions, against the changed tensor packed whole; O(changed) positions."""
    model = Model(packed(CHECKPOINT), CHECKPOINT["p"].clone())
    attestation = attest(model, layout(), CHECKPOINT, {"experts": PLACES})
    target = ProvenLayout(layout(), attestation, {}, {"experts": PLACES})
    after = dict(CHECKPOINT)
    after["e1"] = CHECKPOINT["e1"].clone()
    indices = torch.tensor([0, 4, 7, 14], dtype=torch.int32)
    values = words(9, (4,))
    after["e1"].view(-1)[indices.long()] = values
    held = packed(CHECKPOINT)
    (piece,) = target.route(TensorPatch("e1", (3, 5), indices, values), [7], layout().regions_of("e1"))
    assert piece.region == 7
    assert piece.positions.tolist() == indices.tolist()
    assert piece.param == "experts"
    bits.scatter_(held, piece.indices, piece.values)
    assert bits.equal(held, packed(after))
    (plain,) = target.route(TensorPatch("p", (4, 3), indices[:2], values[:2]), [0], layout().regions_of("p"))
    assert plain.indices.tolist() == [0, 4]
