"""Trainer-side names, tied tensors, frozen ones and buffers: what a delta calls them, and what it counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from refdelta import DeltaEncoder, DeltaError, Reason, apply_delta, diff
from refdelta.codec.names import WRAPPERS, checkpoint_name, checkpoint_names
from tests.codec.support import assert_same

NAME = "model.layers.3.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "trainers",
    [
        NAME,
        f"_orig_mod.{NAME}",
        f"module.{NAME}",
        f"_fsdp_wrapped_module.{NAME}",
        f"base_model.model.{NAME}",
        f"module.module._orig_mod.{NAME}",
        f"_orig_mod.module.base_model.model.{NAME}",
        f"base_model.model._orig_mod.{NAME}",
        f"base_model._orig_mod.model.{NAME}",
        f"base_model.model.base_model.model.{NAME}",
        f"base_model.base_model.model.model.{NAME}",
        "_fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module.self_attn.q_proj.weight",
        "model._orig_mod.layers.3._checkpoint_wrapped_module.self_attn._orig_mod.q_proj._orig_mod.weight",
        "model.layers.3.module.self_attn.q_proj.weight",
    ],
)
def test_fault_30_wrappers_are_stripped_wherever_they_stand(trainers: str) -> None:
    assert checkpoint_name(trainers) == NAME


@pytest.mark.parametrize(
    "name",
    [
        *("w", "", "module", "_orig_mod", "model", "base_model.model", "modules.w", "submodule.w", "my_module.w", ".w"),
        *("x_orig_mod.w", "model.base_model.w", "base_model.models.w", "model.w", "base_model.w", "Module.w", "a..b"),
        "model._orig_mods.w",
    ],
)
def test_names_without_wrappers_stay(name: str) -> None:
    assert checkpoint_name(name) == name


def test_stripping_ends() -> None:
    """What is left holds no wrapper, whatever stood beside what."""
    torch.manual_seed(3)
    parts = ["module", "_orig_mod", "base_model", "model", "layers", "_fsdp_wrapped_module"]
    for _ in range(500):
        name = ".".join([*(parts[i] for i in torch.randint(len(parts), (6,)).tolist()), "w"])
        once = checkpoint_name(name)
        assert checkpoint_name(once) == once, name
        assert not any(f".{'.'.join(wrapper)}." in f".{once}" for wrapper in WRAPPERS), f"{name} -> {once}"


def test_fault_30_two_names_that_become_one_are_refused() -> None:
    assert checkpoint_names(["module.a", "b"]) == {"module.a": "a", "b": "b"}
    with pytest.raises(DeltaError) as caught:
        checkpoint_names(["model.w", "x", "_orig_mod.model.w"])
    assert (caught.value.reason, caught.value.tensor) == (Reason.DUPLICATE_NAME, "model.w")
    assert "model.w and _orig_mod.model.w" in caught.value.detail


class Net(nn.Module):
    """An embedding tied to the head, a frozen layer, a buffer in the state and one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.frozen = nn.Linear(3, 2, bias=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("cache", torch.ones(4), persistent=False)


class Wrapped(nn.Module):
    """As `DistributedDataParallel` holds a model, which needs a process group to be made."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def state_of(net: Net) -> dict[str, Tensor]:
    return {"embed.weight": net.embed.weight, "frozen.weight": net.frozen.weight, "scale": net.get_buffer("scale")}


def wrapped_in_everything(net: Net) -> nn.Module:
    """Compiled inside, then compiled and wrapped twice."""
    net.frozen = torch.compile(net.frozen)  # type: ignore[assignment]
    return Wrapped(Wrapped(torch.compile(net)))  # type: ignore[arg-type]


def test_a_wrapped_module_gives_the_names_of_the_checkpoint() -> None:
    torch.manual_seed(1)
    net = Net()
    plain = {name: t.detach().clone() for name, t in state_of(net).items()}
    encoder = DeltaEncoder(wrapped_in_everything(net))
    with torch.no_grad():
        net.embed.weight[4, 2] += 1
        net.get_parameter("frozen._orig_mod.weight")[1, 0] += 1
        net.get_buffer("scale").add_(1)
    delta = encoder.encode(Wrapped(net))
    assert [patch.name for patch in delta.patches] == ["embed.weight", "frozen.weight", "scale"]
    apply_delta(delta, plain)
    assert_same(
        plain,
        {
            name: t.detach()
            for name, t in zip(
                plain,
                (net.embed.weight, net.get_parameter("frozen._orig_mod.weight"), net.get_buffer("scale")),
                strict=True,
            )
        },
    )


def test_a_delta_is_written_into_a_wrapped_module() -> None:
    torch.manual_seed(2)
    net = Net()
    base = {name: t.detach().clone() for name, t in state_of(net).items()}
    target = {name: t + 1 for name, t in base.items()}
    live = [net.embed.weight, net.frozen.weight, net.get_buffer("scale")]
    inverse = apply_delta(diff(base, target), wrapped_in_everything(net))
    assert_same(dict(zip(base, (t.detach() for t in live), strict=True)), target)
    apply_delta(inverse, Wrapped(net))
    assert_same(dict(zip(base, (t.detach() for t in live), strict=True)), base)


def test_a_module_whose_names_collide_is_refused() -> None:
    net = nn.Module()
    net.module = nn.Linear(2, 3, bias=False)
    net.weight = nn.Parameter(torch.zeros(2))
    for attempt in (lambda: DeltaEncoder(net), lambda: diff(net, net), lambda: apply_delta(diff({}, {}), net)):
        with pytest.raises(DeltaError) as caught:
            attempt()
        assert (caught.value.reason, caught.value.tensor) == (Reason.DUPLICATE_NAME, "weight")


def test_a_mapping_names_its_tensors_itself() -> None:
    base, target = {"module.w": torch.zeros(2, 3)}, {"module.w": torch.ones(2, 3)}
    assert diff(base, target).patches[0].name == "module.w"


def test_what_counts_is_what_the_checkpoint_holds() -> None:
    """Frozen tensors and buffers of the state, tied tensors once; no buffer that is never saved."""
    net = Net()
    assert diff(net, net).total_elements == 5 * 3 + 2 * 3 + 1
    assert DeltaEncoder(net).encode(net).total_elements == 22


def test_tied_tensors_are_sent_once_and_arrive_under_any_name() -> None:
    torch.manual_seed(4)
    net, receiver = Net(), Net()
    receiver.load_state_dict(net.state_dict())
    encoder = DeltaEncoder(net)
    with torch.no_grad():
        net.head.weight[0, 1] = -0.0
    delta = encoder.encode(net)
    assert [(patch.name, patch.changed) for patch in delta.patches] == [("embed.weight", 1)]
    apply_delta(delta, receiver)
    assert_same({"w": receiver.head.weight.detach()}, {"w": net.head.weight.detach()})


def test_aliases_that_do_not_agree_are_refused() -> None:
    """In a mapping every name of shared memory must state the change, and the same one."""
    w = torch.zeros(2, 3)
    state = {"a": w, "b": w.view(2, 3)}
    both = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    one = {"a": torch.ones(2, 3), "b": torch.zeros(2, 3)}
    other = {"a": torch.ones(2, 3), "b": torch.full((2, 3), 2.0)}
    separate = {name: t.clone() for name, t in state.items()}
    for target in (one, other):
        with pytest.raises(DeltaError) as caught:
            apply_delta(diff(separate, target), state)
        assert caught.value.reason is Reason.ALIAS_CONFLICT
        assert_same(state, separate)
    apply_delta(diff(separate, both), state)
    assert_same(state, both)
