"""Expert layers as vLLM has them, on a stand-in: as loaded, after loading, and what the kernel multiplies by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refdelta.vllm.assumptions.experts import as_loaded, loaded, reads_live_weights
from refdelta.vllm.proof.post_load import recover_permutations
from tests.engine.test_position_map import blocks

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INTERMEDIATE, PADDED = 3, 6, 5, 8


class Kernel:
    """Computes one token through one expert, from the weights given or from copies."""

    def __init__(self, w13: Tensor | None = None, w2: Tensor | None = None) -> None:
        self.copies = w13, w2

    def apply(self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, **_: Any) -> None:
        w1, w2 = (w if copy is None else copy for w, copy in zip((w1, w2), self.copies, strict=True))
        gate, up = (hidden_states @ w1[0].T).chunk(2, dim=1)
        output.copy_(gate * up @ w2[0].T)


class Method:
    """vLLM's method of a layer: makes the weights, and pads and packs them after loading."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.moe_kernel: SimpleNamespace | None = SimpleNamespace(fused_experts=Kernel())
        self.fails_at = fails_at

    def create_weights(
        self, layer: nn.Module, num_experts: int, hidden_size: int, intermediate_size_per_partition: int, **more: Any
    ) -> None:
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=more["params_dtype"]), requires_grad=False)
            setattr(parameter, "weight_loader", more["weight_loader"])  # noqa: B010  # as vLLM does
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        assert self.moe_kernel is None
        if layer.w13_weight.shape[1] == self.fails_at:
            raise RuntimeError("no kernel")
        halves = [nn.functional.pad(h, (0, 0, 0, PADDED - INTERMEDIATE)) for h in layer.w13_weight.chunk(2, dim=1)]
        padded = torch.cat(halves, dim=1)
        packed = torch.empty_like(padded)
        packed.view(-1)[blocks(*padded.shape).flatten()] = padded.flatten()
        layer.w13_weight = nn.Parameter(packed, requires_grad=False)
        w2 = nn.functional.pad(layer.w2_weight, (0, PADDED - INTERMEDIATE))
        layer.w2_weight = nn.Parameter(w2, requires_grad=False)


class RoutedExperts(nn.Module):
    """An expert layer after loading."""

    def __init__(self, method: Method | None = None) -> None:
        super().__init__()
        self.quant_method: Any = method or Method()
        self.moe_config = SimpleNamespace(
            hidden_dim=HIDDEN, hidden_dim_unpadded=HIDDEN, intermediate_size_per_partition=INTERMEDIATE
        )
        self.local_num_experts = self.global_num_experts = EXPERTS
        self.params_dtype = BF16
        self.activation = "silu"
        self.w13_weight = nn.Parameter(torch.zeros(EXPERTS, 2 * PADDED, HIDDEN, dtype=BF16), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, PADDED, dtype=BF16), requires_grad=False)

    def weight_loader(self) -> None:
        """Only its identity counts."""


def test_the_loader_sees_the_layer_as_it_was() -> None:
    """Unpadded shapes, the layer's own loader, no memory; afterwards everything is back."""
    model = nn.ModuleDict({"experts": RoutedExperts()})
    before = dict(model.named_parameters())
    with as_loaded(model):
        inside = dict(model.named_parameters())
        assert {name: tuple(p.shape) for name, p in inside.items()} == {
            "experts.w13_weight": (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            "experts.w2_weight": (EXPERTS, HIDDEN, INTERMEDIATE),
        }
        loaders: set[Any] = {getattr(parameter, "weight_loader", None) for parameter in inside.values()}
        assert loaders == {model["experts"].weight_loader}
        assert all(parameter.is_meta for parameter in inside.values())
        with pytest.raises(KeyError), as_loaded(model):
            raise KeyError
        assert dict(model.named_parameters()).keys() == inside.keys()
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())


def test_places_are_recovered_for_every_expert_and_the_layer_stays_as_it_is() -> None:
    """From two experts, continued to three; layers that differ in what they do are told apart."""
    layer = RoutedExperts()
    model = nn.ModuleDict({"a": layer, "b": RoutedExperts()})
    places = recover_permutations(model)
    assert sorted(places) == ["a.w13_weight", "a.w2_weight", "b.w13_weight", "b.w2_weight"]
    assert layer.quant_method.moe_kernel is not None
    assert not layer.w13_weight.any()
    weights = {name: torch.randn(parameter.shape).to(BF16) for name, parameter in loaded(layer).items()}
    worked = RoutedExperts()
    worked.quant_method.moe_kernel = None
    for name, tensor in weights.items():
        setattr(worked, name, nn.Parameter(tensor, requires_grad=False))
    worked.quant_method.process_weights_after_loading(worked)
    for name, tensor in weights.items():
        place, held = places[f"b.{name}"], getattr(worked, name).detach()
        assert not isinstance(place, str)
        assert torch.equal(held.flatten()[place(torch.arange(tensor.numel()))], tensor.flatten())
        assert place.fault(held) is None


def test_a_layer_whose_step_fails_is_refused_by_name() -> None:
    """With the step's own words."""
    places = recover_permutations(nn.ModuleDict({"experts": RoutedExperts(Method(fails_at=2 * INTERMEDIATE))}))
    assert places["experts.w2_weight"] == (
        "where its elements went after loading cannot be told: RuntimeError: no kernel"
    )


@pytest.mark.parametrize(
    ("kernel", "live"),
    [
        (Kernel(), True),
        (Kernel(w13=torch.ones(1, 2 * PADDED, HIDDEN, dtype=BF16)), False),
        (Kernel(w2=torch.ones(1, HIDDEN, PADDED, dtype=BF16)), False),
        (Kernel(w2=torch.zeros(1, HIDDEN, PADDED, dtype=BF16)), False),
    ],
)
def test_a_kernel_that_reads_copies_is_told_by_what_it_computes(kernel: Kernel, live: bool) -> None:
    """Of either weight; the layer's own weights do not matter, and zeros alone would prove nothing."""
    layer = RoutedExperts()
    layer.quant_method.moe_kernel.fused_experts = kernel
    assert reads_live_weights(layer) is live
