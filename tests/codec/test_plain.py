"""Tensors that do not hold their own elements: shards, placeholders, wrappers. Refused by name, through every entry."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from refdelta import Delta, DeltaEncoder, DeltaError, Reason, TensorPatch, apply_delta, diff, roll_digest, state_digest
from refdelta.digest import layer_digests, positions_digest, run_digest, tensor_digest
from refdelta.plain import obstacle
from refdelta.spec import INVARIANTS, copy_state
from tests.codec.support import assert_same

AT = torch.tensor([4], dtype=torch.int32)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of this process alone: what a trainer with one worker has."""
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Quantised(Tensor):
    """As quanto and torchao build theirs: bfloat16 to whoever asks, int8 and a scale inside."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Quantised:
        made: Quantised = Tensor._make_wrapper_subclass(cls, inside.shape, dtype=torch.float32)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *others: Any) -> Any:
        raise NotImplementedError(f"{func} of a quantised tensor")


class InMemory(Tensor):
    """Holds its elements, and yet runs torch's operations itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *others: Any) -> Any:
        raise NotImplementedError(f"{func} of a tensor with rules of its own")


def plain() -> Tensor:
    return torch.arange(6.0).view(2, 3)


def sharded(*placements: Any) -> Tensor:
    return distribute_tensor(plain(), init_device_mesh("cpu", (1,)), placements)


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.zeros(2, 3)


def freed(t: Tensor) -> Tensor:
    t.untyped_storage().resize_(0)
    return t


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=layout)


def marked(t: Tensor, **marks: object) -> Tensor:
    t = nn.Parameter(t)
    for name, value in marks.items():
        setattr(t, name, value)
    return t


KINDS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "DTensor, sharded": (lambda: sharded(Shard(0)), "DTensor.*full_tensor"),
    "DTensor, replicated": (lambda: sharded(Replicate()), "DTensor.*full_tensor"),
    "DTensor, parameter": (lambda: nn.Parameter(sharded(Shard(0))), "DTensor.*full_tensor"),
    "collective": (lambda: AsyncCollectiveTensor(plain()), r"wait\(\)"),
    "quantised": (lambda: Quantised(torch.zeros(2, 3, dtype=torch.int8)), "Quantised.*dequantised"),
    "own rules": (lambda: plain().as_subclass(InMemory), "InMemory.*plain tensor"),
    "fake": (fake, "FakeTensorMode"),
    "functional": (lambda: torch._to_functional_tensor(plain()), "functionalize"),
    "lazy": (lambda: nn.LazyLinear(2).weight, "run the module once"),
    "lazy buffer": (lambda: nn.UninitializedBuffer(), "run the module once"),
    "nested": (lambda: nested(torch.strided), "one by one"),
    "jagged": (lambda: nested(torch.jagged), "one by one"),
    "freed": (lambda: freed(plain()), "full state dict"),
    "freed view": (lambda: freed(torch.zeros(4, 3)[2:]), "full state dict"),
    "cut short": (lambda: cut_short(), "full state dict"),
    "ZeRO-3": (
        lambda: marked(torch.empty(0), ds_shape=torch.Size((2, 3)), ds_numel=6),
        r"\[0\] for \[2, 3\].*Gathered",
    ),
    "ZeRO-3, size alone": (lambda: marked(torch.empty(0), ds_numel=6), "0 elements for 6.*Gathered"),
    "ZeRO-3, a part": (lambda: marked(torch.zeros(3), ds_shape=(2, 3)), r"\[3\] for \[2, 3\]"),
    "fairscale": (lambda: marked(torch.zeros(3), _is_sharded=True, _orig_size=torch.Size((2, 3))), r"\[2, 3\]: gather"),
    "marked as shard": (lambda: marked(torch.zeros(3), _is_sharded=True), "marked as a shard"),
    "FSDP, flat": (lambda: marked(torch.zeros(6), _is_flat_param=True), "several tensors in one"),
    "FSDP, elsewhere": (lambda: marked(torch.empty(0), _fsdp_flattened=True), "of another rank"),
}


def cut_short() -> Tensor:
    """Its storage ends within it."""
    t = torch.zeros(2, 3)
    t.untyped_storage().resize_(20)
    return t


def state(kind: str) -> dict[str, Tensor]:
    """Twice, since what has no address looks tied to its like."""
    make, _ = KINDS[kind]
    return {"a": plain(), "v": make(), "w": make()}


def whole() -> dict[str, Tensor]:
    return {name: plain() for name in ("a", "v", "w")}


def patch_of(name: str) -> TensorPatch:
    return TensorPatch(name, (2, 3), AT, torch.tensor([9.0]))


CHECKS = {name: known.check for name, known in INVARIANTS.items()}
NO_CHANGE = Delta((), 18)
ENTRIES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "diff, base": lambda bad: diff(bad, whole()),
    "diff, target": lambda bad: diff(whole(), bad),
    "encoder": DeltaEncoder,
    "encoder of a run": lambda bad: DeltaEncoder(bad, run_id="r"),
    "encode": lambda bad: DeltaEncoder(whole()).encode(bad),
    "encode in a run": lambda bad: DeltaEncoder(whole(), run_id="r").encode(bad),
    "apply": lambda bad: apply_delta(Delta((patch_of("a"), patch_of("v")), 18), bad),
    "apply with a digest": lambda bad: apply_delta(Delta((patch_of("v"),), 18), bad, digest="rd1:" + "0" * 16),
    "state digest": state_digest,
    "layer digests": layer_digests,
    "tensor digest": lambda bad: tensor_digest("v", bad["v"]),
    "positions digest": lambda bad: positions_digest("v", torch.float32, (2, 3), AT, bad["v"]),
    "run digest": lambda bad: run_digest("v", torch.float32, (2, 3), 0, bad["v"]),
    "roll digest": lambda bad: roll_digest("rd1:" + "0" * 16, patch_of("v"), bad["v"]),
    "values": lambda bad: TensorPatch("v", (2, 3), AT, bad["v"]),
    "indices": lambda bad: TensorPatch("v", (2, 3), bad["v"], torch.zeros(1)),
    "commit": lambda bad: DeltaEncoder(whole()).commit(Delta((TensorPatch("v", (2, 3), AT, bad["v"]),), 18)),
    "a copy": copy_state,
    "bit_exact": lambda bad: CHECKS["bit_exact"](NO_CHANGE, bad, whole(), apply_delta),
    "bit_exact, target": lambda bad: CHECKS["bit_exact"](NO_CHANGE, whole(), bad, apply_delta),
    "idempotent": lambda bad: CHECKS["idempotent"](NO_CHANGE, bad, apply_delta),
    "minimal": lambda bad: CHECKS["minimal"](NO_CHANGE, bad, whole()),
    "minimal, target": lambda bad: CHECKS["minimal"](NO_CHANGE, whole(), bad),
    "composes": lambda bad: CHECKS["composes"]([NO_CHANGE], NO_CHANGE, bad, apply_delta),
    "inverts": lambda bad: CHECKS["inverts"](NO_CHANGE, bad, apply_delta),
    "refuses": lambda bad: CHECKS["refuses"](lambda: None, bad),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_hold_its_elements_is_refused_by_name(kind: str, entry: str) -> None:
    bad = state(kind)
    with pytest.raises(DeltaError, match=f"(?s).*({KINDS[kind][1]})") as caught:
        ENTRIES[entry](bad)
    assert (caught.value.reason, caught.value.tensor) == (Reason.UNSUPPORTED_TENSOR, "v"), caught.value
    assert torch.equal(bad["a"], plain()), "written all the same"


@pytest.mark.parametrize("kind", KINDS)
def test_a_delta_that_does_not_reach_it_is_applied(kind: str) -> None:
    """No false conflict of two tensors that only look to be at one address, and none touched."""
    weights = state(kind)
    inverse = apply_delta(Delta((patch_of("a"),), 18), weights)
    assert weights["a"].tolist() == [[0, 1, 2], [3, 9, 5]]
    assert inverse.patches[0].values.tolist() == [4.0]


def test_a_module_in_shards_is_refused_and_its_plain_parameters_are_written() -> None:
    """`fully_shard` with parameters that it ignores: three DTensors beside a plain tensor, all of them at address 0."""
    first, last = nn.Linear(3, 2), nn.Linear(4, 5, bias=False)
    model, kept = nn.Sequential(first, nn.Linear(2, 4, bias=False), last), last.get_parameter("weight")
    fully_shard(model, ignored_params={kept})
    assert {type(p).__name__ for p in model.parameters()} == {"DTensor", "Parameter"}
    for attempt in (lambda: DeltaEncoder(model), lambda: diff(model, model), lambda: state_digest(model)):
        with pytest.raises(DeltaError, match="full_tensor") as caught:
            attempt()
        assert (caught.value.reason, caught.value.tensor) == (Reason.UNSUPPORTED_TENSOR, "0.weight")
    apply_delta(Delta((TensorPatch("2.weight", (5, 4), AT, torch.tensor([9.0])),), 36), model)
    assert kept.view(-1)[4] == 9
    # What the message says to do.
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
    encoder = DeltaEncoder(full)
    with torch.no_grad():
        first.bias.fill_(7)
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
    assert [(p.name, p.changed) for p in encoder.encode(full).patches] == [("0.bias", 2)]


def test_tied_tensors_without_memory_stand_in_nobodys_way() -> None:
    """A change of a plain one beside them, with a digest, looks at first names."""
    one, two, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(2, 3, bias=False)
    two.weight = one.weight
    model = nn.Sequential(one, two, last)
    fully_shard(model, ignored_params={last.get_parameter("weight")})
    delta = Delta((TensorPatch("2.weight", (3, 2), AT, torch.tensor([9.0])),), 15)
    apply_delta(delta, model, digest="rd1:" + "0" * 16)
    assert last.weight.flatten()[4] == 9


def test_inside_of_a_transform() -> None:
    """torch.vmap hands on tensors that have neither storage nor address."""
    found = []
    torch.vmap(lambda x: found.append(obstacle(x)) or x)(plain())  # type: ignore[func-returns-value]
    assert len(found) == 1
    assert found[0] is not None
    assert "transform" in found[0]


@pytest.mark.parametrize(
    ("bad", "advice"),
    [
        pytest.param(torch.eye(3).to_sparse, "to_dense", id="coo"),
        pytest.param(torch.eye(3).to_sparse_csr, "to_dense", id="csr"),
        pytest.param(torch.eye(3).to_mkldnn, "to_dense", id="mkldnn"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.zeros(2, 3), 1.0, 0, torch.qint8), "dequantize", id="q"),
        pytest.param(lambda: torch.zeros(2, 3, device="meta"), "load its values", id="meta"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_layouts_and_dtypes_that_the_format_has_not_say_what_to_do(bad: Callable[[], Tensor], advice: str) -> None:
    for weights in ({"w": bad()}, holding(bad())):
        for attempt in (DeltaEncoder, state_digest):
            with pytest.raises(DeltaError, match=advice) as caught:
                attempt(weights)
            assert (caught.value.reason, caught.value.tensor) == (Reason.UNSUPPORTED_DTYPE, "w")


def holding(t: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("w", t)
    return module


# What is plain, whatever it is called


class Named(Tensor):
    """A subclass that leaves everything to torch."""


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(plain, id="tensor"),
        pytest.param(lambda: nn.Parameter(plain()), id="parameter"),
        pytest.param(lambda: nn.Buffer(plain()), id="buffer"),
        pytest.param(lambda: plain().as_subclass(Named), id="subclass"),
        pytest.param(lambda: torch.zeros(1, 3).expand(2, 3), id="expanded"),
        pytest.param(lambda: torch.zeros(9, 7)[3:5, 1:7:2], id="sliced"),
        pytest.param(lambda: torch.zeros(3, 2).t(), id="transposed"),
        pytest.param(lambda: torch.zeros(()), id="scalar"),
        pytest.param(lambda: torch.empty(0), id="empty"),
        pytest.param(lambda: torch.empty(2, 0, 3), id="empty in one dimension"),
        pytest.param(lambda: torch.zeros(4, 3)[2:2], id="empty, behind others"),
        pytest.param(lambda: freed(torch.empty(0)), id="empty and freed"),
        pytest.param(lambda: marked(plain(), ds_shape=torch.Size((2, 3)), ds_numel=6), id="ZeRO-3, gathered"),
        pytest.param(lambda: marked(torch.empty(0), ds_shape=torch.Size((0,)), ds_numel=0), id="ZeRO-3, empty"),
        pytest.param(lambda: marked(plain(), _is_sharded=True, _orig_size=torch.Size((2, 3))), id="fairscale, whole"),
        pytest.param(lambda: marked(plain(), _is_sharded=False), id="not sharded"),
        pytest.param(lambda: marked(plain(), _fsdp_flattened=True), id="FSDP, unsharded"),
    ],
)
def test_what_holds_its_elements_is_taken(make: Callable[[], Tensor]) -> None:
    base = {"w": make()}
    assert obstacle(base["w"]) is None
    assert DeltaEncoder(base).encode(base).total_elements == base["w"].numel()


# Incomplete states


class Partitioned(nn.Module):
    """As ZeRO-3 leaves a model between two steps: nothing but placeholders, with what they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(3))
        self.proj = nn.Linear(3, 2, bias=False)

    def partition(self) -> None:
        self.proj.weight.ds_shape, self.proj.weight.ds_numel = self.proj.weight.shape, 6  # type: ignore[attr-defined]
        self.gathered, self.proj.weight.data = self.proj.weight.data, torch.empty(0)

    def gather(self) -> None:
        self.proj.weight.data = self.gathered


def test_a_partitioned_trainer_makes_no_empty_deltas() -> None:
    model = Partitioned()
    encoder = DeltaEncoder(model)
    model.partition()
    for weights in (model, dict(model.named_parameters())):
        for attempt in (DeltaEncoder, encoder.encode, state_digest, lambda w: diff(w, w)):
            with pytest.raises(DeltaError, match="GatheredParameters") as caught:
                attempt(weights)
            assert (caught.value.reason, caught.value.tensor) == (Reason.UNSUPPORTED_TENSOR, "proj.weight")
    model.gather()
    with torch.no_grad():
        model.proj.weight[1, 2] += 1
    assert [(p.name, p.indices.tolist()) for p in encoder.encode(model).patches] == [("proj.weight", [5])]


def test_placeholders_without_a_mark_are_warned_of() -> None:
    """A state dict holds bare tensors: nothing tells such a placeholder from an empty tensor."""
    model = Partitioned()
    model.partition()
    with pytest.warns(UserWarning, match=r"1 of 2 tensors.*proj\.weight.*named_parameters"):
        DeltaEncoder(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.gather()
        DeltaEncoder(model.state_dict())


class GatheredElsewhere(nn.Linear):
    """As FSDP with ``rank0_only=True`` on every other rank."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return {}


def test_a_module_whose_state_is_elsewhere_is_refused() -> None:
    for attempt in (DeltaEncoder, DeltaEncoder(nn.Linear(3, 2)).encode, state_digest):
        with pytest.raises(DeltaError, match="state_dict has none") as caught:
            attempt(GatheredElsewhere(3, 2))
        assert caught.value.reason is Reason.BAD_OPTION
    assert DeltaEncoder(nn.Module()).encode({}).total_elements == 0


@pytest.mark.parametrize("run_id", [None, "run"])
def test_names_and_sizes_stay_those_of_the_construction(run_id: str | None) -> None:
    good = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    encoder = DeltaEncoder(good, run_id=run_id)
    changed: dict[str, tuple[Reason, dict[str, Tensor]]] = {
        "missing": (Reason.UNKNOWN_TENSOR, {"a": good["a"]}),
        "none": (Reason.UNKNOWN_TENSOR, {}),
        "extra": (Reason.UNKNOWN_TENSOR, {**good, "c": torch.zeros(0)}),
        "renamed": (Reason.UNKNOWN_TENSOR, {"a": good["a"], "B": good["b"]}),
        "empty": (Reason.SHAPE_MISMATCH, {**good, "b": torch.empty(0)}),
        "grown": (Reason.SHAPE_MISMATCH, {**good, "b": torch.zeros(5)}),
        "reshaped": (Reason.SHAPE_MISMATCH, {**good, "a": torch.zeros(3, 2)}),
        "converted": (Reason.DTYPE_MISMATCH, {**good, "a": torch.zeros(2, 3, dtype=torch.bfloat16)}),
    }
    for fault, (reason, weights) in changed.items():
        with pytest.raises(DeltaError) as caught:
            encoder.encode(weights)
        assert caught.value.reason is reason, fault
    assert encoder.encode({**good, "a": good["a"] + 1}).changed_elements == 6


def test_fsdp_that_gathers_its_own_state() -> None:
    """Version 1 with a flat parameter: the module's state dict is whole; its parameters are flat."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu"))
        assert DeltaEncoder(model).encode(model).total_elements == 8
    with pytest.raises(DeltaError, match="flat parameter") as caught:
        DeltaEncoder(dict(model.named_parameters()))
    assert caught.value.reason is Reason.UNSUPPORTED_TENSOR
    assert_same({"weight": model.weight.detach()}, {"weight": model.state_dict()["weight"]})
