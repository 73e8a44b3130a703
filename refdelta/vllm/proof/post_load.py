"""What happened to every parameter after it was loaded, and where its elements went.

A kernel may want its weights in another order, padded, or combined. Which of these it was is not read from its code but
seen: the engine's own post-load step runs on numbers that say where each element came from (in a copy of the process,
`refdelta.vllm.proof.forked`). A permutation gives every number back exactly once; `attest` then holds its map against
every bit of the live parameter. Whatever is no permutation is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from refdelta.layout.map import LayoutMap
from refdelta.vllm.assumptions.experts import expert_layers, loaded, run_post_load
from refdelta.vllm.proof.attest import Attestation
from refdelta.vllm.proof.forked import ChildFailed, in_child
from refdelta.vllm.proof.position_maps import PositionMap
from refdelta.vllm.tracing.recorder import runtime_aliases, runtime_tensors

__all__ = ["NotAPermutation", "PostLoadVerdict", "Verdict", "permutations", "recover_permutations", "verdicts"]

Weights = Mapping[str, Tensor]

BASE = 256
"""Of the numbers' digits: 0 to 255 are exact in every floating dtype that weights have, bfloat16 included."""
PROBED_EXPERTS = 2
"""Experts that the step runs on; the distance between them continues the map, and the live bits confirm it."""


class NotAPermutation(Exception):
    """A post-load step does something else than move elements and pad with zeros; the text says what."""


def recover_permutations(model: nn.Module) -> dict[str, PositionMap | str]:
    """Expert parameter -> where its elements went after loading, or why that is unknown. The model stays as it is.

    The maps are not yet held against the live bits: `attest` does that.

    Equal bits would not do to call one plain: constant experts look alike in any order.
    """
    known: dict[object, dict[str, PositionMap] | str] = {}
    position_maps: dict[str, PositionMap | str] = {}
    for module, layer in expert_layers(model).items():
        weights = loaded(layer)
        # Layers of one kind and shape are rearranged alike; where one is not, its bits will tell.
        key = (type(layer.quant_method), *((name, tuple(w.shape), w.dtype) for name, w in weights.items()))
        if key not in known:
            known[key] = _of_layer(layer, weights)
        found = known[key]
        position_maps |= {f"{module}.{name}": found if isinstance(found, str) else found[name] for name in weights}
    return position_maps


def _of_layer(layer: nn.Module, weights: Weights) -> dict[str, PositionMap] | str:
    few = {name: w[:PROBED_EXPERTS] for name, w in weights.items()}
    try:
        maps = permutations(lambda numbers: run_post_load(layer, numbers), few)
        return {name: maps[name].repeated(len(w)) for name, w in weights.items()}
    except (NotAPermutation, ChildFailed, ValueError) as error:
        return f"where its elements went after loading cannot be told: {error}"


def permutations(step: Callable[[Weights], Weights], like: Weights) -> dict[str, PositionMap]:
    """Where ``step`` puts the elements of the tensors that it is given, by name; it runs in copies of this process.

    Args:
        step: makes tensors of the same names from tensors of the shapes and dtypes of ``like``.
        like: floating tensors on any device; only their shapes and dtypes count.

    Raises `NotAPermutation`, or `ChildFailed` where the step raised or ended its process.
    """
    first, following = dict[str, int](), 1
    for name, tensor in like.items():
        first[name] = following
        following += tensor.numel()

    def results() -> list[dict[str, Tensor]]:
        digits, power = [], 1
        while power < following:
            digits.append({name: _digit(first[name], tensor, power) for name, tensor in like.items()})
            power *= BASE
        return [{name: tensor.contiguous().cpu() for name, tensor in step(given).items()} for given in digits]

    outputs = in_child(results)
    return {
        name: PositionMap.fitted(_origins(name, [output[name] for output in outputs], first[name], tensor.shape))
        for name, tensor in like.items()
    }


def _digit(first: int, like: Tensor, power: int) -> Tensor:
    numbers = torch.arange(first, first + like.numel()) // power % BASE
    return numbers.to(like.dtype).view(like.shape)


def _origins(name: str, digits: list[Tensor], first: int, shape: torch.Size) -> Tensor:
    """[shape] where each element of the tensor whose numbers begin at ``first`` stands in what the step made of it."""
    numbers = torch.zeros(digits[0].numel(), dtype=torch.int64)
    for place, tensor in enumerate(digits):
        values = tensor.flatten().double()
        if not bool(((values >= 0) & (values < BASE) & (values == values.floor())).all()):
            raise NotAPermutation(f"{name} holds values that are none of its elements")
        numbers += values.to(torch.int64) * BASE**place
    held = numbers.nonzero().flatten()
    elements = numbers[held] - first
    if bool(((elements < 0) | (elements >= shape.numel())).any()):
        raise NotAPermutation(f"{name} holds elements of another parameter, or mixtures of its own")
    positions = torch.full((shape.numel(),), -1, dtype=torch.int64)
    positions[elements] = held
    lost = int((positions < 0).sum())
    if lost or len(held) != shape.numel():
        raise NotAPermutation(f"{name} lost {lost} of its elements and repeats {len(held) - shape.numel() + lost}")
    return positions.view(shape)


# --- verdicts -------------------------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """What the engine holds under a name, after loading."""

    PLAIN = "plain"
    """The loaded elements, in the order in which they were loaded."""
    PERMUTED = "permuted"
    """The loaded elements in another order, perhaps padded with zeros, by a map that was recovered and verified."""
    ALIASED = "aliased"
    """Another name of a parameter, which is judged under its first name."""
    PACKED = "packed"
    """Nothing, or something that products do not read: they read a copy out of reach. Refused."""
    DERIVED = "derived"
    """Something computed, from the config or from loaded elements. Refused where a checkpoint tensor goes into it."""
    DROPPED = "dropped"
    """A checkpoint tensor that this rank does not hold, for a reason."""


@dataclass(frozen=True, slots=True)
class PostLoadVerdict:
    """A verdict and what it rests on."""

    verdict: Verdict
    evidence: str


def verdicts(
    model: nn.Module,
    layout: LayoutMap,
    attestation: Attestation,
    position_maps: Mapping[str, PositionMap | str],
    packed: Collection[str],
) -> dict[str, PostLoadVerdict]:
    """A verdict for every parameter and buffer of the model, under every name, and every dropped checkpoint tensor.

    Args:
        position_maps: what `recover_permutations` found.
        packed: modules whose products do not read their live weight (`attest.packed_layers`).
    """
    judged = {
        name: _post_load_verdict(name, tensor, layout, attestation, position_maps)
        for name, tensor in runtime_tensors(model).items()
    }
    unread = PostLoadVerdict(Verdict.PACKED, "its product gives other than zeros for a zero weight")
    return (
        {name: unread if name.rpartition(".")[0] in packed else standing for name, standing in judged.items()}
        | {name: PostLoadVerdict(Verdict.ALIASED, f"of {first}") for name, first in runtime_aliases(model).items()}
        | {name: PostLoadVerdict(Verdict.DROPPED, why) for name, why in layout.dropped.items()}
    )


def _post_load_verdict(
    name: str, held: Tensor, layout: LayoutMap, attestation: Attestation, position_maps: Mapping[str, PositionMap | str]
) -> PostLoadVerdict:
    if (failure := attestation.failed.get(name)) is not None:
        return PostLoadVerdict(Verdict.DERIVED if held.numel() else Verdict.PACKED, failure)
    if name not in layout.params:
        return PostLoadVerdict(Verdict.DERIVED, "no checkpoint tensor is loaded into it")
    place = position_maps.get(name)
    if isinstance(place, PositionMap) and not place.is_identity:
        cost = place.table_elements
        return PostLoadVerdict(
            Verdict.PERMUTED, f"all bits equal the checkpoint's at recovered positions ({cost} numbers)"
        )
    return PostLoadVerdict(Verdict.PLAIN, "all bits equal the checkpoint's")
