"""`attest`: only parameters whose mapped bits equal the checkpoint's are ever written in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from refdelta.codec import bits
from refdelta.layout_map import Box, LayoutMap, Region, TensorInfo
from refdelta.spec import DeltaError
from refdelta.vllm.proof.attest import Attestation, attest, packed_layers
from tests.engine.modules import module_of

BF16 = torch.bfloat16
INFO = TensorInfo((4, 6), BF16)
WHOLE = Box(0, (4, 6), (6, 1))


def words(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (4, 6), generator=generator, dtype=torch.int16).view(BF16)


def layout(*names: str) -> LayoutMap:
    """Every named checkpoint tensor in a parameter of the same name."""
    infos = dict.fromkeys(names, INFO)
    return LayoutMap(infos, infos, tuple(Region(name, WHOLE, name, WHOLE) for name in names))


def test_equal_bits_are_attested_nan_payloads_included() -> None:
    """Random bit patterns hold NaNs: comparing values would fail here."""
    found = attest(module_of({"a": words(1).clone()}), layout("a"), {"a": words(1)})
    assert list(found.proved) == ["a"]
    assert not found.failed
    assert found.unproven == ()
    assert found.moved() == {}


def test_one_bit_is_enough_to_fail() -> None:
    """A flipped sign in the last element."""
    live = words(1).clone()
    live.view(torch.int16)[-1, -1] ^= -0x8000
    found = attest(module_of({"a": live, "b": words(2).clone()}), layout("a", "b"), {"a": words(1), "b": words(2)})
    assert list(found.proved) == ["b"]
    assert "bits differ" in found.failed["a"]


@pytest.mark.parametrize(
    ("live", "why"),
    [
        (words(1).flip(0), "bits differ"),
        (torch.empty(0, dtype=BF16), "empty"),
        (words(1).float(), "dtype"),
        (words(1).t().contiguous().t(), "contiguous"),
    ],
)
def test_repacked_parameters_fail(live: Tensor, why: str) -> None:
    """Permuted, emptied, converted, transposed."""
    found = attest(module_of({"a": live}), layout("a"), {"a": words(1)})
    assert not found.proved
    assert why in found.failed["a"]


def test_uncovered_parameters_fail() -> None:
    """A parameter that no checkpoint tensor fills must not be patched."""
    infos = {"a": INFO}
    half = LayoutMap(infos, infos, (Region("a", Box(0, (2, 6), (6, 1)), "a", Box(0, (2, 6), (6, 1))),))
    found = attest(module_of({"a": words(1).clone()}), half, {"a": words(1)})
    assert "12 elements" in found.failed["a"]


def test_look_alikes_are_reported() -> None:
    """Equal tensors and constant ones match whatever their places: reported, not hidden."""
    ones = torch.ones(4, 6, dtype=BF16)
    weights = {"a": words(1), "b": words(1), "c": ones, "d": words(4)}
    found = attest(module_of({name: tensor.clone() for name, tensor in weights.items()}), layout(*weights), weights)
    assert found.unproven == ("a", "b", "c")
    assert sorted(found.proved) == ["a", "b", "c", "d"]


# --- every bit of a box counts ----------------------------------------------------------------------------------------

ROWS, COLUMNS = 130, 97
"""12,610 elements; a head of 4,096 of them ends in the middle of a row."""
PLACES = {
    "first": (0, 0),
    "end of the first row": (0, COLUMNS - 1),
    "second row": (1, 0),
    "last of 4,096": (4095 // COLUMNS, 4095 % COLUMNS),
    "after 4,096": (4096 // COLUMNS, 4096 % COLUMNS),
    "after 8,192": (8192 // COLUMNS, 8192 % COLUMNS),
    "middle": (ROWS // 2, COLUMNS // 2),
    "last row": (ROWS - 1, 0),
    "before the last": (ROWS - 1, COLUMNS - 2),
    "last": (ROWS - 1, COLUMNS - 1),
}
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def raw(dtype: torch.dtype, seed: int) -> Tensor:
    """[ROWS, COLUMNS] of random bits."""
    generator = torch.Generator().manual_seed(seed)
    size = (ROWS, COLUMNS * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


WIDE = COLUMNS + 11
ALL = Box(0, (ROWS, COLUMNS), (COLUMNS, 1))
BOXES: dict[str, tuple[Box, Box, tuple[int, int], tuple[Box, ...]]] = {
    "whole": (ALL, ALL, (ROWS, COLUMNS), ()),
    "columns": (
        ALL,
        Box(5, (ROWS, COLUMNS), (WIDE, 1)),
        (ROWS, WIDE),
        (Box(0, (ROWS, 5), (WIDE, 1)), Box(5 + COLUMNS, (ROWS, 6), (WIDE, 1))),
    ),
    "turned": (Box(0, (COLUMNS, ROWS), (1, COLUMNS)), Box(0, (COLUMNS, ROWS), (ROWS, 1)), (COLUMNS, ROWS), ()),
}
"""Box of the checkpoint tensor, box of the parameter, the parameter's shape, its padding."""


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_anywhere_in_a_box_fails_it(dtype: torch.dtype, box: str) -> None:
    """The first and the last bit of an element, at every place of `PLACES`, and nothing is missed or made up."""
    source_box, param_box, shape, padding = BOXES[box]
    source, info = raw(dtype, 1), TensorInfo(shape, dtype)
    live = torch.zeros(shape, dtype=dtype)
    held = param_box.view(live)
    bits.bit_view(held).copy_(bits.bit_view(source_box.view(source)))
    region = Region("a", source_box, "p", param_box)
    layout = LayoutMap({"a": TensorInfo((ROWS, COLUMNS), dtype)}, {"p": info}, (region,), {"p": padding})
    model = module_of({"p": live})
    assert list(attest(model, layout, {"a": source}).proved) == ["p"]
    for name, (row, column) in PLACES.items():
        element = held[(column, row) if box == "turned" else (row, column)].reshape(1).view(torch.uint8)
        for byte, bit in ((0, 0), (-1, 7)):
            element[byte] ^= 1 << bit
            found = attest(model, layout, {"a": source})
            assert "bits differ" in found.failed.get("p", ""), (name, byte)
            element[byte] ^= 1 << bit
    assert list(attest(model, layout, {"a": source}).proved) == ["p"]


# --- what the model holds now --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """One parameter, by default of fresh memory."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight if weight is not None else nn.Parameter(words(1).clone(), requires_grad=False)


class Held(nn.Module):
    """A parameter in a module, a buffer, and a head tied to the parameter."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.register_buffer("scale", words(2).clone())
        self.head = Layer(self.layer.weight)


def held() -> tuple[Held, Attestation]:
    model, params = Held(), {"layer.weight": INFO, "scale": INFO}
    sources = {"a": INFO, "b": INFO}
    regions = (Region("a", WHOLE, "layer.weight", WHOLE), Region("b", WHOLE, "scale", WHOLE))
    found = attest(model, LayoutMap(sources, params, regions), {"a": words(1), "b": words(2)})
    assert sorted(found.proved) == ["layer.weight", "scale"]
    assert found.moved() == {}
    return model, found


def _data(model: Held) -> None:
    model.layer.weight.data = model.layer.weight.data.clone()


def _parameter(model: Held) -> None:
    model.layer.weight = nn.Parameter(words(1).clone(), requires_grad=False)


def _submodule(model: Held) -> None:
    model.layer = Layer()


def _attribute(model: Held) -> None:
    model.layer.__dict__["weight"] = words(1).clone()


def _gone(model: Held) -> None:
    del model.layer.weight


def _shape(model: Held) -> None:
    model.layer.weight.data = model.layer.weight.data.view(6, 4)


def _dtype(model: Held) -> None:
    model.layer.weight.data = model.layer.weight.data.view(torch.float16)


def _buffer(model: Held) -> None:
    model.scale = words(2).clone()


def _untied(model: Held) -> None:
    model.head.weight = nn.Parameter(words(1).clone(), requires_grad=False)


def _untied_module(model: Held) -> None:
    model.head = Layer()


REPLACED: dict[Callable[[Held], None], tuple[str, str]] = {
    _data: ("layer.weight", "the engine replaced its memory"),
    _parameter: ("layer.weight", "the engine replaced its memory"),
    _submodule: ("layer.weight", "the engine replaced its memory"),
    _attribute: ("layer.weight", "the engine replaced its memory"),
    _gone: ("layer.weight", "holds no tensor of this name"),
    _shape: ("layer.weight", "the engine replaced its memory"),
    _dtype: ("layer.weight", "the engine replaced its memory"),
    _buffer: ("scale", "the engine replaced its memory"),
    _untied: ("layer.weight", "as head.weight: the engine replaced its memory"),
    _untied_module: ("layer.weight", "as head.weight: the engine replaced its memory"),
}


@pytest.mark.parametrize("replace", REPLACED, ids=lambda kind: kind.__name__.strip("_"))
def test_other_memory_than_was_proved_is_noticed(replace: Callable[[Held], None]) -> None:
    """The bits are the same everywhere; under which name, and why."""
    model, found = held()
    replace(model)
    name, why = REPLACED[replace]
    moved = found.moved()
    assert list(moved) == [name]
    assert why in moved[name]


def test_a_tensor_is_what_the_model_holds_now() -> None:
    """What is written after a replacement reaches the model, not memory that nothing reads; what is gone is refused."""
    model, found = held()
    for replace in (_data, _parameter, _submodule):
        replace(model)
        found.tensor("layer.weight").zero_()
        assert not bits.bit_view(model.layer.weight).any()
        assert found.live()["layer.weight"].data_ptr() == model.layer.weight.data_ptr()
    _gone(model)
    assert list(found.live()) == ["scale"]
    with pytest.raises(DeltaError, match=r"refdelta\[unattested\] tensor=layer.weight: "):
        found.tensor("layer.weight")


def test_another_object_on_the_same_memory_is_no_other() -> None:
    """What is written there is read; nothing moved."""
    model, found = held()
    model.layer.weight = nn.Parameter(model.layer.weight.data, requires_grad=False)
    model.head.weight = model.layer.weight
    assert found.moved() == {}


def test_packed_gemm_is_shown_by_behaviour() -> None:
    """A layer that keeps its weight but multiplies by a copy is named; a plain one is not."""
    plain, packed = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    copy = packed.weight.detach().clone()
    setattr(plain, "cpu_linear", torch.nn.functional.linear)  # noqa: B010  # vLLM adds this attribute
    setattr(packed, "cpu_linear", lambda x, weight, bias: x @ copy.t())  # noqa: B010
    model = nn.ModuleDict({"plain": plain, "packed": packed})
    assert packed_layers(model) == ["packed"]
