"""`trace_model` on small modules whose loaders are written here, so that the expected map is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import Tensor, nn

from refdelta.layout_map import Box
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.tracing.recorder import runtime_aliases, trace_model

BF16 = torch.bfloat16
Loader = Callable[["Toy", Mapping[str, Tensor]], None]


class Toy(nn.Module):
    """A fused (9, 4) parameter, a (7, 4) padded embedding, and a scalar buffer; the loader is given."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(9, 4).to(BF16), requires_grad=False)
        self.embed = nn.Parameter(torch.randn(7, 4).to(BF16), requires_grad=False)
        self.register_buffer("scalar", torch.ones(1, dtype=BF16))
        self._loader = loader

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self._loader(self, dict(weights))
        return set()


CHECKPOINT = {"q": ((10, 4), BF16), "k": ((4, 8), BF16), "embed": ((5, 4), BF16), "scalar": ((1,), BF16)}


def load(toy: Toy, weights: Mapping[str, Tensor]) -> None:
    """Second of two ranks: rows 5..9 of q, columns 4..7 of k, the whole embedding with padding."""
    toy.fused.data[:5].copy_(weights["q"].narrow(0, 5, 5))
    toy.fused.data.narrow(0, 5, 4).copy_(weights["k"][:, 4:])
    toy.embed[:5].data.copy_(weights["embed"])
    toy.embed[5:].data.fill_(0)
    scalar = toy.scalar
    assert isinstance(scalar, Tensor)
    scalar.copy_(weights["scalar"])


def test_boxes_are_read_off_the_copies() -> None:
    """Offsets, sizes and strides on both sides; padding recorded; every parameter covered."""
    layout = trace_model(Toy(load), CHECKPOINT)
    boxes = {r.source: (r.param, r.source_box, r.param_box) for r in layout.regions}
    assert boxes["q"] == ("fused", Box(20, (5, 4), (4, 1)), Box(0, (5, 4), (4, 1)))
    assert boxes["k"] == ("fused", Box(4, (4, 4), (8, 1)), Box(20, (4, 4), (4, 1)))
    assert boxes["scalar"] == ("scalar", Box(0, (1,), (1,)), Box(0, (1,), (1,)))
    assert layout.padding == {"embed": (Box(20, (2, 4), (4, 1)),)}
    assert layout.check().ok


def test_nothing_is_written() -> None:
    """Neither copies nor fills reach the live tensors."""
    toy = Toy(load)
    before = [tensor.clone() for tensor in (*toy.parameters(), *toy.buffers())]
    trace_model(toy, CHECKPOINT)
    for old, new in zip(before, (*toy.parameters(), *toy.buffers()), strict=True):
        assert torch.equal(old.view(torch.int16), new.view(torch.int16))


def test_a_tensor_that_the_loader_skips_is_unmapped() -> None:
    """Silence of the loader is a finding, not a success."""

    def skipping(toy: Toy, weights: Mapping[str, Tensor]) -> None:
        load(toy, {**weights, "k": weights["q"].view(8, 5)[:4].as_strided((4, 8), (8, 1))})

    layout = trace_model(Toy(skipping), CHECKPOINT)
    assert layout.check().unmapped == ("k",)


def _adds(toy: Toy, weights: Mapping[str, Tensor]) -> None:
    toy.fused.data.add_(1)


def _fills_with_one(toy: Toy, weights: Mapping[str, Tensor]) -> None:
    toy.embed.data.fill_(1)


def _temporary(toy: Toy, weights: Mapping[str, Tensor]) -> None:
    toy.fused.data[:4].copy_(weights["k"].t().contiguous()[:4, :4])


def _reads_values(toy: Toy, weights: Mapping[str, Tensor]) -> None:
    if weights["q"].sum().item() > 0:
        load(toy, weights)


def _converts(toy: Toy, weights: Mapping[str, Tensor]) -> None:
    toy.fused.data[:5].copy_(weights["q"][:5].float())


def _foreign(toy: Toy, weights: Mapping[str, Tensor]) -> None:
    toy.fused.data.copy_(torch.zeros(9, 4, dtype=BF16))


def _broadcasts(toy: Toy, weights: Mapping[str, Tensor]) -> None:
    toy.fused.data.copy_(weights["q"][0])


@pytest.mark.parametrize(
    "loader", [_adds, _fills_with_one, _temporary, _reads_values, _converts, _foreign, _broadcasts]
)
def test_loaders_that_do_more_than_copy_boxes_are_refused(loader: Loader) -> None:
    """What cannot be stated as boxes is refused, and the live weights stay as they were."""
    toy = Toy(loader)
    before = [parameter.clone() for parameter in toy.parameters()]
    with pytest.raises(DeltaError) as caught:
        trace_model(toy, CHECKPOINT)
    assert caught.value.reason is Reason.UNSUPPORTED_ENGINE
    assert all(torch.equal(a, b) for a, b in zip(before, toy.parameters(), strict=True))


class Tied(nn.Module):
    """An embedding and a head that share one parameter; the loader skips the head, as vLLM's does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, dtype=BF16)
        self.lm_head = nn.Linear(3, 5, bias=False, dtype=BF16)
        self.lm_head.weight = self.embed.weight

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.embed.weight.data.copy_(dict(weights)["embed.weight"])
        return set()


def test_tied_names() -> None:
    """The head is known as the embedding's other name, in the files or not."""
    assert runtime_aliases(Tied()) == {"lm_head.weight": "embed.weight"}
    embed = ((5, 3), BF16)
    for checkpoint in ({"embed.weight": embed}, {"embed.weight": embed, "lm_head.weight": embed}):
        layout = trace_model(Tied(), checkpoint)
        assert layout.aliases == {"lm_head.weight": "embed.weight"}
        assert layout.check().ok
