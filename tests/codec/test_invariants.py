"""Every invariant over generated states, and every check seen to fail on a codec that breaks it."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from refdelta import (
    DELTA_FILE,
    INVARIANTS,
    METADATA_FILE,
    Delta,
    DeltaError,
    Reason,
    TensorPatch,
    apply_delta,
    diff,
    read_delta,
    write_delta,
)
from refdelta.spec import Router, copy_state
from tests.codec.support import DTYPES, LAYOUTS, bf16, bytes_of, change, random_tensor, strided_like, tensor_of

State = dict[str, Tensor]

IDS = {
    "bit_exact",
    "idempotent",
    "minimal",
    "deterministic",
    "canonical",
    "density_bound",
    "counted",
    "composes",
    "inverts",
    "routes",
    "refuses",
}

SPECIAL = (0x00, 0x01, 0x7F, 0x80, 0xFF)  # bytes that make zeros of both signs, subnormals, infinities, NaNs


def check(invariant: str, *args: object, **kwargs: object) -> None:
    INVARIANTS[invariant].check(*args, **kwargs)


def test_every_invariant_has_a_statement() -> None:
    assert set(INVARIANTS) == IDS
    for key, invariant in INVARIANTS.items():
        assert invariant.id == key
        assert len(invariant.statement) > 40
        assert invariant.statement.endswith(".")


# Generated states


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A tensor and its successor, at a density from 0 to 1, each in some memory layout."""
    code = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = random_tensor(rng, code, shape)
    if draw(st.booleans()) and code != "BOOL":
        raw = rng.choice(np.array(SPECIAL, dtype=np.uint8), base.numel() * base.element_size())
        base = tensor_of(raw, code, shape)
    density = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    target = change(rng, base, np.flatnonzero(rng.random(base.numel()) < density))
    one, two = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(LAYOUTS))
    event(f"dtype {code}")
    event(f"layout {one}")
    event(f"density {density}")
    event(f"rank {len(shape)}{' empty' if base.numel() == 0 else ''}")
    return strided_like(base, one), strided_like(target, two)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.sampled_from(
    ["w.values", "w.indices", "0.values", "x" * 200]
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[State, State]:
    made = draw(st.dictionaries(names, tensors(), max_size=14))
    event(f"tensors {'> 10' if len(made) > 10 else '1 to 10' if made else '0'}")
    return {name: base for name, (base, _) in made.items()}, {name: target for name, (_, target) in made.items()}


def strided_copy(state: Mapping[str, Tensor]) -> State:
    """A copy in the memory layouts of ``state``: what apply gets to see."""
    copies = {}
    for name, t in state.items():
        storage = t.untyped_storage().clone()
        copies[name] = torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())
    return copies


def written(delta: Delta) -> tuple[Delta, bytes, dict[str, object]]:
    """The delta as it is read back, the payload's bytes, the metadata."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_delta(delta, Path(folder) / "d")
        return read_delta(path), (path / DELTA_FILE).read_bytes(), json.loads((path / METADATA_FILE).read_text())


def apply_strided(base: State) -> Callable[[Delta, MutableMapping[str, Tensor]], Delta]:
    """apply_delta on tensors laid out as ``base`` is; `check` only ever passes contiguous ones."""

    def apply(delta: Delta, weights: MutableMapping[str, Tensor]) -> Delta:
        laid_out = strided_copy(base)
        for name, t in laid_out.items():
            t.view(_int(t)).copy_(weights[name].view(_int(t)))
        inverse = apply_delta(delta, laid_out)
        weights.update(copy_state(laid_out))
        return inverse

    return apply


def _int(t: Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize]


@given(pairs())
def test_codec_holds_what_single_deltas_promise(states: tuple[State, State]) -> None:
    base, target = states
    delta, payload, metadata = written(diff(base, target))
    apply = apply_strided(base)
    check("bit_exact", delta, base, target, apply)
    check("idempotent", delta, base, apply)
    check("minimal", delta, base, target)
    check("canonical", delta, payload)
    check("density_bound", delta, len(payload))
    check("counted", delta, metadata, sum(t.numel() for t in base.values()))
    check("inverts", delta, base, apply)


@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, 2**31 + 1])
def test_the_bound_knows_how_wide_positions_are(numel: int) -> None:
    """Around 2^31 elements; there is no tensor of that size."""
    widths = (torch.int32, torch.int64) if numel <= 2**31 else (torch.int64, torch.int32)
    right, wrong = (
        Delta((TensorPatch("w", (numel,), torch.tensor([3, 5], dtype=dtype), bf16(1, 2)),), numel) for dtype in widths
    )
    check("density_bound", right, right.payload_bytes + 200)
    with pytest.raises(AssertionError, match="payload expected"):
        check("density_bound", wrong, wrong.payload_bytes + 200)


@given(pairs())
def test_the_bytes_follow_from_the_states(states: tuple[State, State]) -> None:
    base, target = states
    shuffled = dict(reversed(base.items()))
    orders = itertools.cycle([(base, target), (shuffled, copy_state(target))])
    check("deterministic", lambda: written(diff(*next(orders)))[1], threads=(1, 2))


def naive_compose(deltas: list[Delta]) -> Delta:
    """Later wins, element by element."""
    merged: dict[str, dict[int, bytes]] = {}
    kinds: dict[str, TensorPatch] = {}
    for patch in (patch for delta in deltas for patch in delta.patches):
        kinds[patch.name] = patch
        found = zip(patch.indices.tolist(), bytes_of(patch.values), strict=True)
        merged.setdefault(patch.name, {}).update({at: row.tobytes() for at, row in found})
    patches = []
    for name, elements in merged.items():
        at = sorted(elements)
        code = next(code for code, dtype in DTYPES.items() if dtype == kinds[name].dtype)
        values = tensor_of(np.frombuffer(b"".join(elements[i] for i in at), np.uint8), code, (len(at),))
        patches.append(TensorPatch(name, kinds[name].shape, torch.tensor(at, dtype=torch.int64), values))
    return Delta(tuple(patches), deltas[0].total_elements)


@given(pairs(), st.integers(0, 2**32))
def test_chains_compose(states: tuple[State, State], seed: int) -> None:
    """a -> b -> c -> a: the composition keeps positions that end as they began."""
    a, b = states
    rng = np.random.default_rng(seed)
    c = {name: change(rng, t, np.flatnonzero(rng.random(t.numel()) < 0.3)) for name, t in b.items()}
    deltas = [diff(a, b), diff(b, c), diff(c, a)]
    check("composes", deltas, naive_compose(deltas), a, apply_strided(a))


# A layout map in miniature: columns dealt out to ranks, each rank's part transposed and stored behind a pad.


@dataclass(frozen=True)
class Routed:
    param: str
    indices: Tensor
    values: Tensor


@dataclass(frozen=True)
class Columns:
    """Columns [low, high) of a 2-D tensor, transposed, behind ``pad`` rows."""

    low: int
    high: int
    pad: int

    def route(self, patch: TensorPatch, /) -> list[Routed]:
        width = patch.shape[1]
        at = patch.indices.long()
        rows, columns = at // width, at % width
        mine = (columns >= self.low) & (columns < self.high)
        places = (columns[mine] - self.low + self.pad) * patch.shape[0] + rows[mine]
        return [Routed("p", places, patch.values[mine])]

    def lay_out(self, state: Mapping[str, Tensor]) -> State:
        part = state["w"][:, self.low : self.high].T
        return {"p": torch.cat([torch.full((self.pad, part.shape[1]), 9, dtype=part.dtype), part])}


def lay_out(layout: Router, state: Mapping[str, Tensor]) -> State:
    assert isinstance(layout, Columns)
    return layout.lay_out(state)


@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 2**32))
def test_routing_equals_laying_out(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = random_tensor(rng, "I16", (rows, columns))
    delta = diff({"w": base}, {"w": change(rng, base, np.flatnonzero(rng.random(base.numel()) < 0.5))})
    ranks = [Columns(0, columns // 2, 1), Columns(columns // 2, columns, 2)]
    for patch in delta.patches:
        check("routes", ranks, patch, {"w": base}, lay_out)


corruptions = st.sampled_from(["unknown name", "other shape", "other dtype", "unsorted", "out of range", "negative"])


@given(pairs(), corruptions, st.integers(0, 2**32))
def test_misplaced_deltas_are_refused(states: tuple[State, State], fault: str, seed: int) -> None:
    """The fault is in any one of the patches; all the others are good."""
    base, target = states
    delta = diff(base, target)
    fitting = [i for i, patch in enumerate(delta.patches) if patch.changed > (1 if fault == "unsorted" else 0)]
    if not fitting:
        event("nothing to corrupt")
        return
    event(fault)
    number = fitting[seed % len(fitting)]
    bad, reason = corrupt(delta.patches[number], fault)
    patches = (*delta.patches[:number], bad, *delta.patches[number + 1 :])
    weights = strided_copy(base)
    total = delta.total_elements + bad.numel
    check("refuses", lambda: apply_delta(Delta(patches, total), weights), weights, reason)


def corrupt(patch: TensorPatch, fault: str) -> tuple[TensorPatch, Reason]:
    last = torch.arange(patch.changed) == patch.changed - 1
    if fault == "unknown name":
        return replace(patch, name=f"{patch.name}?" + "y" * 20), Reason.UNKNOWN_TENSOR
    if fault == "other shape":
        return replace(patch, shape=(*patch.shape, 1)), Reason.SHAPE_MISMATCH
    if fault == "other dtype":
        other = torch.float32 if patch.dtype != torch.float32 else torch.int32
        return replace(patch, values=torch.zeros(patch.changed, dtype=other)), Reason.DTYPE_MISMATCH
    if fault == "unsorted":
        return replace(patch, indices=patch.indices.flip(0)), Reason.INDEX_ORDER
    if fault == "out of range":
        return replace(patch, indices=torch.where(last, patch.numel, patch.indices.long())), Reason.INDEX_RANGE
    return replace(patch, indices=torch.where(~last.flip(0), patch.indices.long(), -1)), Reason.INDEX_RANGE


# Checks that can fail


BASE = {"w": bf16(0x0000, 0x3F80, 0x7FC1, 0x4000, 0x0001, 0xFF80).view(2, 3), "x": torch.zeros(2)}
TARGET = {"w": bf16(0x8000, 0x3F80, 0x7FC2, 0x4080, 0x0001, 0xFF80).view(2, 3), "x": torch.zeros(2)}


def good() -> Delta:
    return diff(BASE, TARGET)


def with_patch(edit: Callable[[TensorPatch], TensorPatch]) -> Delta:
    (patch,) = good().patches
    return Delta((edit(patch),), 8)


def keep(*which: int) -> Delta:
    at = list(which)
    return with_patch(lambda patch: replace(patch, indices=patch.indices[at], values=patch.values[at]))


def adds(delta: Delta, weights: MutableMapping[str, Tensor]) -> Delta:
    """Takes values for differences."""
    inverse = apply_delta(delta, {name: t.clone() for name, t in weights.items()})
    for patch in delta.patches:
        weights[patch.name].view(-1)[patch.indices.long()] += patch.values
    return inverse


def no_inverse(delta: Delta, weights: MutableMapping[str, Tensor]) -> Delta:
    apply_delta(delta, weights)
    return delta


def writes_then_refuses(weights: State) -> None:
    weights["x"].fill_(1)
    raise DeltaError(Reason.INDEX_ORDER, "too late")


def padded(by: int) -> bytes:
    payload = written(good())[1]
    length = int.from_bytes(payload[:8], "little")
    return (length + by).to_bytes(8, "little") + payload[8 : 8 + length] + b" " * by + payload[8 + length :]


def counter() -> Callable[[], bytes]:
    """Bytes that change with the fourth call."""
    calls = itertools.count(1)
    return lambda: bytes([next(calls) // 4])


def check_late_refusal() -> None:
    state = copy_state(BASE)
    check("refuses", lambda: writes_then_refuses(state), state, Reason.INDEX_ORDER)


def refuse(reason: Reason) -> None:
    raise DeltaError(reason, "no")


METADATA = {"changed_elements": 3, "total_elements": 8, "density_pct": 37.5}
LAYOUT = Columns(0, 2, 1)


@dataclass(frozen=True)
class Shifted(Columns):
    """A rank that takes its rows where another rank's are."""

    def route(self, patch: TensorPatch, /) -> list[Routed]:
        return [replace(routed, indices=routed.indices + 1) for routed in Columns.route(self, patch)]


@dataclass(frozen=True)
class Skips(Columns):
    def route(self, patch: TensorPatch, /) -> list[Routed]:
        return []


BROKEN: dict[str, Callable[[], object]] = {
    "bit_exact: comparison by value": lambda: check("bit_exact", keep(1, 2), BASE, TARGET, apply_delta),
    "bit_exact: values added": lambda: check("bit_exact", good(), BASE, TARGET, adds),
    "bit_exact: nothing written": lambda: check("bit_exact", good(), BASE, TARGET, lambda delta, weights: None),
    "bit_exact: a tensor dropped": lambda: check("bit_exact", good(), BASE, TARGET, lambda d, w: w.pop("x")),
    "idempotent: values added": lambda: check("idempotent", with_patch(lambda p: p), BASE, adds),
    "minimal: sign of zero missed": lambda: check("minimal", keep(1, 2), BASE, TARGET),
    "minimal: NaN always changed": lambda: check("minimal", good(), TARGET, TARGET),
    "minimal: unchanged tensor present": lambda: check(
        "minimal",
        Delta((*good().patches, TensorPatch("x", (2,), torch.empty(0, dtype=torch.int32), torch.empty(0))), 8),
        BASE,
        TARGET,
    ),
    "deterministic: changes between calls": lambda: check("deterministic", counter()),
    "canonical: longer padding": lambda: check("canonical", good(), padded(8)),
    "canonical: flipped bit": lambda: check("canonical", good(), written(good())[1][:-1] + b"\x00"),
    "canonical: cut": lambda: check("canonical", good(), written(good())[1][:-1]),
    "density_bound: I64 for a small tensor": lambda: check(
        "density_bound", with_patch(lambda p: replace(p, indices=p.indices.long())), 500
    ),
    "density_bound: header too long": lambda: check("density_bound", good(), 18 + 64 + 256 + 6 + 1),
    "density_bound: file too short": lambda: check("density_bound", good(), 17),
    "counted: changed": lambda: check("counted", good(), {**METADATA, "changed_elements": 2}, 8),
    "counted: total over changed tensors": lambda: check("counted", good(), METADATA | {"total_elements": 6}, 8),
    "counted: density of four decimals": lambda: check("counted", good(), {**METADATA, "density_pct": 37.5001}, 8),
    "counted: density": lambda: check("counted", good(), {**METADATA, "density_pct": 50.0}, 8),
    "composes: earlier wins": lambda: check(
        "composes", [good(), diff(TARGET, BASE)], naive_compose([diff(TARGET, BASE), good()]), BASE, apply_delta
    ),
    "inverts: the delta itself": lambda: check("inverts", good(), BASE, no_inverse),
    "routes: shifted": lambda: check("routes", [LAYOUT, Shifted(0, 2, 1)], good().patches[0], BASE, lay_out),
    "routes: skipped silently": lambda: check("routes", [Skips(0, 2, 1)], good().patches[0], BASE, lay_out),
    "refuses: accepted": lambda: check("refuses", lambda: None, BASE, Reason.INDEX_ORDER),
    "refuses: other reason": lambda: check("refuses", lambda: refuse(Reason.INDEX_RANGE), BASE, Reason.INDEX_ORDER),
    "refuses: written before": check_late_refusal,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_checks_fail_on_what_is_broken(fault: str) -> None:
    with pytest.raises(AssertionError, match=fault.split(":")[0]):
        BROKEN[fault]()


def test_checks_pass_on_what_is_not() -> None:
    delta, payload, metadata = written(good())
    assert metadata.items() >= METADATA.items()
    check("bit_exact", delta, BASE, TARGET, apply_delta)
    check("idempotent", delta, BASE, apply_delta)
    check("minimal", delta, BASE, TARGET)
    check("canonical", delta, payload)
    check("density_bound", delta, len(payload))
    check("counted", delta, METADATA, 8)
    check("inverts", delta, BASE, apply_delta)
    check("routes", [LAYOUT, Columns(2, 3, 0)], delta.patches[0], BASE, lay_out)
    check("refuses", lambda: refuse(Reason.INDEX_ORDER), BASE, Reason.INDEX_ORDER)


def test_every_invariant_has_a_broken_codec() -> None:
    assert {fault.split(":")[0] for fault in BROKEN} == IDS


@pytest.mark.parametrize("numel", [3, 300, 3000])
def test_dense_is_smaller_from_a_third_on(numel: int) -> None:
    """6 bytes a change against 2 an element: equal at a third."""
    third = math.ceil(numel / 3)
    for changed in (third - 1, third, third + 1):
        values = torch.zeros(changed, dtype=torch.bfloat16)
        patch = TensorPatch("w", (1, numel), torch.arange(changed, dtype=torch.int32), values)
        assert (patch.payload_bytes < 2 * numel) == (changed < third)
