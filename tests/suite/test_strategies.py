"""Every feature that the strategies promise is really drawn, and often enough to matter."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance import oracle
from conformance.driving.features import PLAIN, of_state
from conformance.engines.capabilities import BASIC
from conformance.engines.codecs import CAPABILITIES
from conformance.inputs import labels, memory, strategies
from conformance.inputs.strategies import LABELLED
from conformance.oracle import DTYPES, State

DRAWS = 300
"""What three properties of the suite draw in the profile `ci`. Hypothesis takes constants from the modules that happen
to be loaded, so the draws differ between selections of tests; with fewer, a rare label is missed by chance."""
LEAST = 3
"""Draws of a label that are enough to matter."""


@cache
def counts(name: str) -> Counter[str]:
    """Label -> draws of a strategy that hold it, in one property's worth of draws."""
    make, labels_of, _ = LABELLED[name]
    found: Counter[str] = Counter()

    @settings(max_examples=DRAWS, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
    @given(make())
    def draw(drawn: object) -> None:
        found.update(labels_of(drawn))

    draw()
    return found


@pytest.mark.parametrize(("name", "label"), [(name, label) for name in LABELLED for label in sorted(LABELLED[name][2])])
def test_label_is_drawn(name: str, label: str) -> None:
    found = counts(name)[label]
    assert found >= LEAST, f"{name}: {label!r} in {found} of {DRAWS} draws"


@pytest.mark.parametrize("name", sorted(set(LABELLED) - {"round_trips"}))
def test_labels_are_declared(name: str) -> None:
    assert counts(name).keys() <= LABELLED[name][2]


def test_every_strategy_is_labelled() -> None:
    """Those that only choose a part of a draw have no labels of their own."""
    public = {
        name
        for name, value in vars(strategies).items()
        if callable(value) and getattr(value, "__module__", None) == strategies.__name__ and not name.startswith("_")
    }
    helpers = {"names", "shapes", "changes_of", "codes_for", "domain_of", "capabilities_of", "is_nan", "Domain"}
    helpers |= {"is_negative_zero"}
    assert public - helpers == LABELLED.keys()


def test_draws_tell_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--hypothesis-show-statistics` shows is what the labels say."""
    told: list[str] = []
    monkeypatch.setattr(strategies, "event", told.append)
    drawn: list[str] = []

    @settings(max_examples=10, derandomize=True, database=None)
    @given(strategies.pairs(min_tensors=1))
    def draw(pair: tuple[State, State]) -> None:
        drawn.extend(sorted(labels.state_labels(pair[0])) + sorted(labels.change_labels(*pair)))

    draw()
    assert told == drawn
    assert len(told) > 20


def test_labels_by_hand() -> None:
    """A label that is given to everything would count nothing."""
    zeros, negative = oracle.from_bits([0, 0, 0], "F32", (1, 3)), oracle.from_bits([0, 0x80000000, 0], "F32", (1, 3))
    plain = {"dtype F32", "2-D", "one tensor", "bytes beyond whole words of 8"}
    assert labels.state_labels({"w": zeros}) == plain
    assert labels.state_labels({"a.b": negative}) == plain | {"-0", "name with dots"}
    nan = oracle.from_bits([0x7F800001, 0x7F800000, 0x00000001], "F32", (3,))
    assert labels.state_labels({"w": nan}) == (plain - {"2-D"}) | {
        "1-D", "signalling NaN", "NaN payload", "infinity", "subnormal",
    }  # fmt: skip
    assert labels.state_labels({}) == {"no tensors"}
    sizes = {"one": oracle.from_bits([1], "I64", ()), "byte": oracle.from_bits([0] * 256, "U8", (256,))}
    assert labels.state_labels(sizes) == {
        "dtype I64", "dtype U8", "scalar", "1-D", "tensors", "one element", "255, 256 or 257 elements",
        "bytes in whole words of 8",
    }  # fmt: skip


def test_labels_of_changes_by_hand() -> None:
    zeros, negative = oracle.from_bits([0, 0, 0], "F32", (1, 3)), oracle.from_bits([0, 0x80000000, 0], "F32", (1, 3))
    assert labels.change_labels({"w": zeros}, {"w": zeros}) == {"nothing changed"}
    assert labels.change_labels({"w": zeros}, {"w": negative}) == {
        "density between 5 and 95 %", "a third of a tensor", "only the sign", "lowest byte kept", "+0 to -0",
    }  # fmt: skip
    odd = {"a": oracle.from_bits([1, 2, 3], "U8", (3,)), "b": zeros}
    assert labels.change_labels(odd, {"a": oracle.from_bits([0, 2, 2], "U8", (3,)), "b": negative}) == {
        "density between 5 and 95 %", "a third of a tensor", "more than a third of a tensor", "the first element",
        "the last element", "only the sign", "only the lowest bit", "lowest byte kept", "+0 to -0",
        "values that lie unaligned in the payload",
    }  # fmt: skip
    more = {"w": oracle.from_bits([0, 1, 1], "F32", (1, 3))}
    assert "neighbours" in labels.change_labels({"w": zeros}, more)
    assert labels.chain_labels([{"w": zeros}, {"w": negative}, {"w": zeros}]) == {
        "a position that changes twice", "a position that changes back",
    }  # fmt: skip
    assert labels.chain_labels([{"w": zeros}, {"w": negative}, {"w": negative}]) == {"a step without a change"}
    kept = oracle.Patch("w", (1, 3), "F32", oracle.bits(zeros).astype("int64")[:1], oracle.bits(zeros)[:1])
    assert labels.loose_labels({"w": zeros}, [kept], "I64") == {"positions that keep their bits", "I64"}
    assert labels.loose_labels({"w": zeros}, [], "I64") == {"no layers"}


def test_labels_of_memory_by_hand() -> None:
    state = {"w": oracle.from_bits(range(6), "U8", (2, 3)), "s": oracle.from_bits([1], "F32", ())}
    placed = memory.Placed.of(state, {"w": "stepped", "s": "offset"})
    assert labels.place_labels(placed) == {"stepped tensor", "offset scalar", "several kinds"}
    target = {"w": oracle.from_bits([9, *range(1, 6)], "U8", (2, 3)), "s": state["s"]}
    assert labels.alias_labels(memory.Aliased(state, target, {})) == {"no aliases", "a change beside shared memory"}
    assert labels.alias_labels(memory.Aliased(state, target, {"x": ("w", 1)})) == {"rows of a tensor"}
    both = memory.Aliased(state, target, {"x": ("w", 0), "y": ("w", 1)})
    assert labels.alias_labels(both) == {
        "all of a tensor",
        "rows of a tensor",
        "several aliases of a tensor",
        "a change in shared memory",
    }


@settings(deadline=None)
@given(st.data())
def test_placements_hold_the_state(data: st.DataObject) -> None:
    state = data.draw(strategies.states())
    placed = data.draw(strategies.placements(state))
    assert oracle.difference(state, placed.views) == ""
    for name, view in placed.views.items():
        inside = placed.buffers[name]
        assert not view.numel() or view.untyped_storage().data_ptr() == inside.untyped_storage().data_ptr()
        contiguous = view.is_contiguous() and not view.storage_offset()
        assert contiguous == (placed.kinds[name] == "contiguous") or view.dim() < 2 or not view.numel()


@settings(deadline=None)
@given(strategies.aliased())
def test_aliases_share_memory(drawn: memory.Aliased) -> None:
    tied = drawn.tied(drawn.base)
    for alias, (owner, row) in drawn.aliases.items():
        expected = tied[owner].data_ptr() + (row * tied[owner].stride(0) * tied[owner].element_size() if row else 0)
        assert tied[alias].data_ptr() == expected


@settings(deadline=None)
@given(st.sampled_from([0.0, 0.25, 1 / 3, 1.0]), st.data())
def test_densities_are_those_asked_for(density: float, data: st.DataObject) -> None:
    base, target = data.draw(strategies.pairs(density=density))
    changed = {patch.name: len(patch.indices) for patch in oracle.expected_patches(base, target)}
    for name, tensor in base.items():
        exact = density * tensor.numel()
        assert exact - 1e-6 <= changed.get(name, 0) < exact + 1


def test_corruptions_corrupt() -> None:
    """Every kind leaves something that the suite's reader refuses, in some draws; "nothing" never."""
    refused: Counter[str] = Counter()

    @settings(max_examples=DRAWS, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
    @given(strategies.corrupted())
    def draw(drawn: tuple[State, Mapping[str, Mapping[str, bytes]]]) -> None:
        for kind, files in drawn[1].items():
            refused[kind] += _is_refused(files)

    draw()
    often = {kind for kind, count in refused.items() if count >= LEAST}
    assert often == LABELLED["corrupted"][2] - {"nothing"}
    assert not refused["nothing"]


def _is_refused(files: Mapping[str, bytes]) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        for name, raw in files.items():
            (Path(directory) / name).write_bytes(raw)
        try:
            oracle.read_delta(Path(directory))
        except Exception:
            return True
    return False


@settings(deadline=None)
@given(strategies.pairs())
def test_pairs_differ_in_bits_alone(pair: tuple[State, State]) -> None:
    base, target = pair
    assert [*base] == [*target]
    for name in base:
        assert (base[name].dtype, base[name].shape) == (target[name].dtype, target[name].shape)
        if base[name].dtype == DTYPES["BOOL"]:
            assert set(oracle.bits(target[name]).tolist()) <= {0, 1}, "no bool has other bits"
        shape = [size for size in base[name].shape if size != 1]
        assert len(set(shape)) == len(shape), f"a square shape hides a missing transpose: {shape}"


@settings(deadline=None)
@given(strategies.round_trips())
def test_round_trips_return(states: tuple[State, State, State]) -> None:
    assert oracle.difference(states[0], states[2]) == ""


@settings(deadline=None)
@given(strategies.chains(length=4))
def test_chains_have_their_length(chain: list[State]) -> None:
    assert len(chain) == 4
    assert all([*state] == [*chain[0]] for state in chain)


def test_loose_deltas_are_loose() -> None:
    """Layers out of name order, positions that keep their bits, and I64 where I32 would do are all drawn."""
    found: Counter[str] = Counter()

    @settings(max_examples=DRAWS, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
    @given(strategies.loose_deltas())
    def draw(loose: tuple[State, tuple[oracle.Patch, ...], str]) -> None:
        base, patches, indices = loose
        names = [patch.name for patch in patches]
        found["out of order"] += names != sorted(names)
        found["bits kept"] += any((oracle.bits(base[p.name])[p.indices] == p.bits).any() for p in patches)
        found[indices] += bool(patches)

    draw()
    assert min(found[label] for label in ("out of order", "bits kept", "I32", "I64")) >= 10, found


def test_codes_for_capabilities() -> None:
    least = strategies.codes_for(())
    assert set(least) == {"BF16", "F16", "F32"} == set(strategies.LEAST)
    assert least.signed_zero
    assert least.scalars
    assert least.empty
    assert least.mixed
    bf16 = strategies.codes_for({f"-{name}" for name in BASIC})
    assert (tuple(bf16), bf16.signed_zero, bf16.scalars, bf16.empty, bf16.mixed) == (("BF16",), *[False] * 4)
    assert not least.nan
    assert not least.i64
    assert set(strategies.codes_for({"float64", "float8"})) == oracle.FLOATING - {"F4"}
    whole = strategies.codes_for(CAPABILITIES)
    assert set(whole) == DTYPES.keys()
    assert whole.nan
    assert whole.i64


LEAST_DOMAIN = strategies.codes_for(())


@pytest.mark.parametrize("name", ["states", "pairs", "chains", "loose_deltas", "aliased"])
def test_what_is_declined_is_not_drawn(name: str) -> None:
    """No other dtype, no NaN, no needless I64: and with the whole domain all of that comes up (labels above)."""
    seen: Counter[str] = Counter()

    @settings(max_examples=100, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
    @given(getattr(strategies, name)(LEAST_DOMAIN))
    def draw(drawn: object) -> None:
        for state in _states_in(drawn):
            seen["states"] += bool(state)
            assert strategies.capabilities_of(state) <= {"float16", "float32"}
        if name == "loose_deltas":
            assert drawn[2] == "I32"  # type: ignore[index]  # (base, patches, index code)
            after = oracle.expected_state(drawn[0], drawn[1])  # type: ignore[index]
            assert strategies.capabilities_of(after) <= {"float16", "float32"}

    draw()
    assert seen["states"] > 50


@settings(max_examples=100, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
@given(strategies.pairs(strategies.codes_for({f"-{name}" for name in BASIC})))
def test_what_is_taken_back_is_not_drawn(drawn: tuple[State, State]) -> None:
    assert of_state(drawn[0]) | of_state(drawn[1]) <= {PLAIN}


def _states_in(drawn: object) -> list[State]:
    if isinstance(drawn, memory.Aliased):
        return [drawn.base, drawn.target]
    return [drawn] if isinstance(drawn, dict) else [part for part in drawn if isinstance(part, dict)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_which_patterns_are_nan(code: str) -> None:
    """Against torch's own scalars, one element at a time; and 1 and 2, which stand in for NaNs, are none."""
    patterns = strategies.SPECIALS[code]
    found = strategies.is_nan(code, patterns)
    if code in labels.IEEE:
        exponent, mantissa = labels.IEEE[code]
        top = ((1 << exponent) - 1) << mantissa
        expected = [(int(p) & ((1 << (exponent + mantissa)) - 1)) > top for p in patterns]
        assert found.tolist() == expected
        assert any(expected)
    elif code == "F4" or code not in oracle.FLOATING | {"C64"}:
        assert not found.any()
    else:
        assert found.any()
    assert not strategies.is_nan(code, np.array([1, 2], oracle.unsigned(code))).any()
