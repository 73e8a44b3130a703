"""Models in PEFT's adapters: what is sent under which name, and what is refused.

Layers are built as PEFT 0.21 builds them. The same was seen with PEFT itself (LoRA, DoRA, IA3, trained tokens, tied
embeddings), which the tests do not install.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from refdelta import DeltaEncoder, DeltaError, Reason, apply_delta, diff, state_digest
from refdelta.codec.state import named_tensors
from tests.codec.support import assert_same

LORA = "model.q_proj.lora_A.default.weight"


def weight(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


class Tuned(nn.Module):
    """A layer in LoRA's: `merge` adds the adapter's product to the base layer's weight."""

    def __init__(self, base: nn.Module, rows: int, columns: int, adapter: str = "default") -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({adapter: weight(2, columns)})
        self.lora_B = nn.ModuleDict({adapter: weight(rows, 2)})
        self.lora_magnitude_vector = nn.ParameterDict({adapter: torch.ones(rows)})
        self.merged_adapters: list[str] = []
        self.active_adapter: str | list[str] = [adapter]
        self.disable_adapters = False

    def merge(self, *adapters: str) -> None:
        held = self.base_layer.get_parameter("weight")
        for adapter in adapters:
            a, b = (self.get_parameter(f"lora_{part}.{adapter}.weight") for part in "AB")
            with torch.no_grad():
                held.add_(b @ a)
            self.merged_adapters.append(adapter)


class Saved(nn.Module):
    """A module that is trained as a whole: the frozen original beside a copy for each adapter."""

    def __init__(self, original: nn.Linear, *adapters: str) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({adapter: weight(*original.weight.shape) for adapter in adapters})
        for copy in self.modules_to_save.values():
            copy.load_state_dict(original.state_dict())
        self.active_adapter: str | list[str] = list(adapters[:1])
        self.disable_adapters = False


class Model(nn.Module):
    """q_proj [4, 3] in LoRA's layers, an untouched norm, and a head [5, 4] that is trained as a whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = nn.ModuleDict({"q_proj": Tuned(weight(4, 3), 4, 3), "norm": nn.LayerNorm(3)})
        self.lm_head = Saved(weight(5, 4), "default")

    @property
    def tuned(self) -> Tuned:
        return cast(Tuned, self.model["q_proj"])


def as_peft(model: nn.Module) -> nn.Module:
    """As PeftModel holds it: below ``base_model.model``."""
    outer, tuner = nn.Module(), nn.Module()
    tuner.model, outer.base_model = model, tuner
    return outer


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "base model": lambda model: model,
    "PeftModel": as_peft,
    "compiled": lambda model: as_peft(torch.compile(model)),  # type: ignore[arg-type]
    "in parallel": lambda model: nn.DataParallel(as_peft(model)),
}
ENTRIES: dict[str, Callable[[nn.Module], object]] = {
    "encoder": DeltaEncoder,
    "encode": lambda model: DeltaEncoder(checkpoint(Model())).encode(model),
    "diff": lambda model: diff(model, model),
    "digest": state_digest,
    "apply": lambda model: apply_delta(diff({}, {}), model),
}


def checkpoint(model: Model) -> dict[str, Tensor]:
    """What the model's checkpoint holds, picked by hand."""
    held = {
        "model.q_proj.weight": model.tuned.base_layer.get_parameter("weight"),
        "lm_head.weight": model.lm_head.modules_to_save["default"].get_parameter("weight"),
        "model.norm.weight": model.model["norm"].get_parameter("weight"),
        "model.norm.bias": model.model["norm"].get_parameter("bias"),
    }
    return {name: t.detach().clone() for name, t in held.items()}


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_adapter_that_is_not_merged_is_refused_by_name(entry: str, wrapped: str) -> None:
    with pytest.raises(DeltaError, match=r"not merged.*merge_adapter") as caught:
        ENTRIES[entry](WRAPPED[wrapped](Model()))
    assert (caught.value.reason, caught.value.tensor) == (Reason.UNKNOWN_TENSOR, LORA)


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_merged_weights_and_trained_copies_go_under_the_names_of_the_checkpoint(wrapped: str) -> None:
    model = Model()
    model.tuned.merge("default")
    receiver, trainer = checkpoint(model), WRAPPED[wrapped](model)
    encoder = DeltaEncoder(trainer)
    assert encoder.encode(trainer).total_elements == 12 + 3 + 3 + 20
    with torch.no_grad():
        model.tuned.base_layer.get_parameter("weight")[3, 1] += 1
        model.lm_head.modules_to_save["default"].get_parameter("weight")[4, 2] += 1
        model.lm_head.original_module.weight[0, 0] += 1  # frozen: nobody computes with it
    delta = encoder.encode(trainer)
    found = [(patch.name, patch.indices.tolist()) for patch in delta.patches]
    assert found == [("lm_head.weight", [18]), ("model.q_proj.weight", [10])]
    apply_delta(delta, receiver)
    assert_same(receiver, checkpoint(model))
    back = WRAPPED[wrapped](fresh := Model())
    fresh.tuned.merge("default")
    apply_delta(delta, back)
    written = checkpoint(fresh)
    for patch in delta.patches:
        at = patch.indices.long()
        assert torch.equal(written[patch.name].flatten()[at], patch.values), "apply writes what the encoder reads"


def test_a_trainer_that_unmerges_is_refused_until_it_merges_again() -> None:
    model = Model()
    model.tuned.merge("default")
    encoder = DeltaEncoder(model)
    model.tuned.merged_adapters.clear()
    with pytest.raises(DeltaError, match="not merged"):
        encoder.encode(model)
    model.tuned.merged_adapters.append("default")
    assert encoder.encode(model).patches == ()


def set_up(model: Model, **of_tuned: object) -> Model:
    for name, value in of_tuned.items():
        setattr(model.tuned, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: set_up(Model(), merged_adapters=["other"]), "not merged"),
        (lambda: set_up(Model(), merged_adapters=["default"], active_adapter=["default", "other"]), "not merged"),
        (lambda: set_up(Model(), merged_adapters=["default"], active_adapter="other"), "not merged"),
        (lambda: set_up(Model(), active_adapter=[]), "not merged"),
        (lambda: set_up(Model(), merged_adapters=["default"], disable_adapters=True), "switched off"),
    ],
    ids=["another", "one of two", "not the active one", "none active", "switched off"],
)
def test_what_the_model_computes_is_not_in_the_base_layer(model: Callable[[], Model], text: str) -> None:
    with pytest.raises(DeltaError, match=text) as caught:
        DeltaEncoder(model())
    assert caught.value.tensor == LORA


def head(*copies: str, active: str | list[str] | None = None, disabled: bool = False) -> nn.Module:
    model = nn.Module()
    model.lm_head = saved = Saved(weight(5, 4), *copies)
    for number, copy in enumerate(saved.modules_to_save.values(), 1):
        nn.init.constant_(copy.get_parameter("weight"), number)
    nn.init.constant_(saved.original_module.weight, 0)
    saved.disable_adapters = disabled
    if active is None:
        del saved.active_adapter
    else:
        saved.active_adapter = active
    return model


@pytest.mark.parametrize(
    ("model", "value"),
    [
        (lambda: head("a", active=["a"]), 1),
        (lambda: head("a", active="a"), 1),
        (lambda: head("a"), 1),
        (lambda: head("a", "b", active=["b"]), 2),
        (lambda: head("a", active=["c"]), 0),
        (lambda: head("a", active=[]), 0),
        (lambda: head(active=[]), 0),
    ],
    ids=["list", "text", "unstated", "second", "another one's", "none", "no copies"],
)
def test_of_several_copies_the_active_one_is_sent(model: Callable[[], nn.Module], value: int) -> None:
    found = named_tensors(model())
    assert found.keys() == {"lm_head.weight"}
    assert found["lm_head.weight"].unique().tolist() == [value]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: head("a", "b", active=["a", "b"]), "activate one"),
        (lambda: head("a", "b", active=["a", "c"]), "activate one"),
        (lambda: head("a", "b"), "activate one"),
        (lambda: head("a", active=["a"], disabled=True), "switched off"),
    ],
    ids=["two", "one and another one's", "two, unstated", "switched off"],
)
def test_no_copy_is_guessed(model: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(DeltaError, match=text) as caught:
        DeltaEncoder(model())
    assert caught.value.reason is Reason.UNKNOWN_TENSOR
    assert caught.value.tensor is not None
    assert caught.value.tensor.startswith("lm_head.")


def test_layers_in_layers() -> None:
    """An adapter on an adapter's layer, and one of chosen tokens, which has a layer more."""
    model = nn.Module()
    model.up = Tuned(Tuned(weight(4, 3), 4, 3, "a"), 4, 3, "b")
    model.embed = nn.Module()
    model.embed.token_adapter = Tuned(weight(7, 2), 7, 2)
    for layer, adapter in ((model.up, "b"), (model.up.base_layer, "a"), (model.embed.token_adapter, "default")):
        cast(Tuned, layer).merged_adapters = [adapter]
    assert {name: list(t.shape) for name, t in named_tensors(model).items()} == {
        "up.weight": [4, 3],
        "embed.weight": [7, 2],
    }


def test_a_layer_that_stands_in_two_places() -> None:
    """Tied layers, not tensors alone: each of its names is the checkpoint's."""
    model, shared = nn.Module(), Tuned(weight(4, 3), 4, 3)
    shared.merged_adapters = ["default"]
    model.one, model.two = shared, shared
    assert named_tensors(model).keys() == {"one.weight", "two.weight"}
    assert DeltaEncoder(model).encode(model).total_elements == 12


@pytest.mark.parametrize("trained", [False, True])
def test_a_tie_that_the_adapter_broke_is_refused(trained: bool) -> None:
    """The checkpoint ties head and embedding; the model computes with a trained embedding and the head from before."""
    model = nn.Module()
    model.embed = Saved(weight(5, 4), "default")
    model.lm_head = Saved(model.embed.original_module, "default") if trained else model.embed.original_module
    if trained:
        model.lm_head.modules_to_save = model.embed.modules_to_save
        assert named_tensors(model).keys() == {"embed.weight", "lm_head.weight"}
        assert DeltaEncoder(model).encode(model).total_elements == 20, "tied as in the checkpoint"
        return
    with pytest.raises(DeltaError, match=r"tied to embed\.original_module\.weight") as caught:
        DeltaEncoder(model)
    assert (caught.value.reason, caught.value.tensor) == (Reason.ALIAS_CONFLICT, "lm_head.weight")


def test_layers_that_only_share_a_name_keep_it() -> None:
    """Some models have a ``base_layer`` of their own, and so has their checkpoint."""
    model = nn.Module()
    model.base_layer, model.original_module, model.modules_to_save_later = weight(4, 3), weight(2, 3), weight(1, 2)
    assert named_tensors(model).keys() == {
        "base_layer.weight",
        "original_module.weight",
        "modules_to_save_later.weight",
    }


def test_a_copy_that_would_take_the_name_of_another_tensor_is_refused() -> None:
    model = head("a", active=["a"])
    model.get_submodule("lm_head").weight = nn.Parameter(torch.zeros(5, 4))
    with pytest.raises(DeltaError) as caught:
        DeltaEncoder(model)
    assert (caught.value.reason, caught.value.tensor) == (Reason.DUPLICATE_NAME, "lm_head.weight")


# Mappings: names alone


PEFT = "base_model.model."


@pytest.mark.parametrize(
    "names",
    [
        [f"{PEFT}a.base_layer.weight", f"{PEFT}a.lora_A.mine.weight"],
        [f"{PEFT}a.lora_A.mine.weight"],
        [f"{PEFT}a.lora_embedding_A.mine"],
        [f"module.{PEFT}a.base_layer.weight"],
        [f"{PEFT}a.base_layer.weight"],
        ["a.lora_A.default.weight"],
        ["a.lora_magnitude_vector.default.weight"],
        ["a.base_layer.weight"],
        ["a.base_layer.bias"],
        ["a.modules_to_save.default.weight", "a.original_module.weight"],
        ["a.original_module.weight"],
    ],
)
def test_a_mapping_under_the_names_of_peft_is_refused(names: list[str]) -> None:
    for run_id in (None, "run"):
        with pytest.raises(DeltaError, match="give the model itself") as caught:
            DeltaEncoder({"w": torch.zeros(2), **{name: torch.zeros(2, 3) for name in names}}, run_id=run_id)
        assert (caught.value.reason, caught.value.tensor) == (Reason.UNKNOWN_TENSOR, names[0])


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["a.base_layer.weight", "a.lora_A.speech.weight"], id="a checkpoint that holds adapters"),
        pytest.param([f"{PEFT}a.lora_A.weight", f"{PEFT}a.lora_B.weight"], id="an adapter's own file"),
        pytest.param([f"{PEFT}a.weight"], id="a wrapper"),
        pytest.param(["base_layer", "lora_A", "original_module", "a.modules_to_save"], id="last parts"),
        pytest.param(["a.my_base_layer.weight", "a.lora_A.b", "a.not_lora_A.default.weight"], id="nearly"),
    ],
)
def test_other_mappings_name_their_tensors_themselves(names: list[str]) -> None:
    state = {name: torch.zeros(2, 3) for name in names}
    assert DeltaEncoder(state).encode({name: t + 1 for name, t in state.items()}).changed_elements == 6 * len(names)


@pytest.mark.parametrize("name", [1, None, ("a",)])
def test_a_name_that_is_no_string_is_refused_as_such(name: Any) -> None:
    """By the encoder as by `diff`: looking for PEFT's names must not trip over it."""
    for attempt in (DeltaEncoder, lambda state: diff(state, state)):
        with pytest.raises(DeltaError) as caught:
            attempt({name: torch.zeros(3)})
        assert caught.value.reason is Reason.BAD_NAME
