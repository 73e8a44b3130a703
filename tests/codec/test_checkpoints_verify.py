"""verify: each check holds on a good delta, and finds the one thing that is wrong with a bad one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refdelta import INVARIANTS, METADATA_FILE, Delta, DeltaError, Lineage, TensorPatch, diff, write_delta
from refdelta.checkpoints.checks import CHECKS, Run
from refdelta.checkpoints.diffing import diff_checkpoints
from refdelta.checkpoints.patching import write_run
from refdelta.checkpoints.reading import Checkpoint
from refdelta.checkpoints.verifying import COMPOSED_OF, Finding, verify
from tests.codec.checkpoints import changed, every_dtype, split, write
from tests.codec.support import bf16, edit_metadata, write_v2

OF_STATES = ("bit_exact", "idempotent", "minimal", "deterministic", "composes", "inverts")


@pytest.fixture(params=[1 << 21, 16], ids=["whole", "16 bytes"], autouse=True)
def _runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refdelta.checkpoints.reading.RUN_BYTES", request.param)


def found(delta: Path, base: Path | None = None, target: Path | None = None) -> dict[str, str]:
    """Check -> outcome."""
    return {finding.id: finding.status.value for finding in findings(delta, base, target)}


def findings(delta: Path, base: Path | None = None, target: Path | None = None) -> list[Finding]:
    with ExitStack() as stack:
        states = [None if path is None else stack.enter_context(Checkpoint(path)) for path in (base, target)]
        return verify(delta, *states)


def detail(delta: Path, base: Path | None, target: Path | None, check: str) -> str:
    return next(finding.detail for finding in findings(delta, base, target) if finding.id == check)


Made = tuple[Path, Path, Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Base, target, and the delta with a full lineage; every dtype, two shards that are cut differently."""
    base = every_dtype()
    target = changed(base, [name for name in base if name != "m.F16"])
    places = write(tmp_path / "base", *split(base, "m.F4", "odd")), write(tmp_path / "target", target, index=False)
    with Checkpoint(places[0]) as old, Checkpoint(places[1]) as new:
        delta = diff_checkpoints(old, new, lineage=Lineage("run", 4, 3))
    return *places, write_delta(delta, tmp_path / "delta")


def test_a_good_delta_holds_everything_that_can_be_checked(made: Made) -> None:
    base, target, delta = made
    outcome = found(delta, base, target)
    assert list(outcome)[: len(INVARIANTS)] == list(INVARIANTS), "in the order of the format"
    assert {check for check, status in outcome.items() if status == "not_checked"} == {"routes", "refuses"}
    assert set(outcome.values()) == {"holds", "not_checked"}
    lineage = {"fits", "payload_sha256", "base_digest", "digest", "layer_digests"}
    assert set(outcome) == {*INVARIANTS, *lineage}


def test_what_the_inputs_do_not_allow_is_said(made: Made) -> None:
    base, target, delta = made
    alone = found(delta)
    assert [alone[check] for check in OF_STATES] == ["not_checked"] * 6
    assert [alone[check] for check in ("canonical", "density_bound", "counted", "payload_sha256")] == ["holds"] * 4
    with_base = found(delta, base)
    assert {check for check in OF_STATES if with_base[check] != "holds"} == {"bit_exact", "deterministic"}
    assert with_base["digest"] == with_base["layer_digests"] == "holds", "rolled from the base"
    with_target = found(delta, None, target)
    assert [with_target[check] for check in OF_STATES] == ["not_checked"] * 6
    assert [with_target[check] for check in ("holds_values", "digest", "base_digest")] == [
        "holds",
        "holds",
        "not_checked",
    ]


def write_variant(delta: Delta, path: Path, **over: Any) -> Path:
    return write_delta(replace(delta, **over), path)


def simple(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], Path, Path, Delta]:
    base = {"a": bf16(*range(40)).reshape(5, 8), "b": torch.arange(6.0).reshape(2, 3)}
    target = {"a": base["a"].clone(), "b": base["b"].clone()}
    target["a"][4, 7] = target["a"][0, 1] = target["b"][1, 0] = 7
    return base, target, write(tmp_path / "b", base), write(tmp_path / "t", target), diff(base, target)


def patch_with(delta: Delta, name: str, **over: Any) -> tuple[TensorPatch, ...]:
    return tuple(replace(patch, **over) if patch.name == name else patch for patch in delta.patches)


def test_bit_exact_finds_a_missing_and_a_wrong_element(tmp_path: Path) -> None:
    _, _, base, target, delta = simple(tmp_path)
    missing = patch_with(delta, "a", indices=torch.tensor([1], dtype=torch.int32), values=bf16(0x40E0))
    path = write_variant(delta, tmp_path / "missing", patches=missing)
    outcome = found(path, base, target)
    assert [outcome[check] for check in OF_STATES] == ["fails", "holds", "holds", "not_checked", "holds", "holds"]
    assert detail(path, base, target, "bit_exact").startswith("1 ")
    assert detail(path, base, target, "bit_exact").endswith("first in a at 39")
    wrong = patch_with(delta, "b", values=torch.tensor([-7.0]))
    path = write_variant(delta, tmp_path / "wrong", patches=wrong)
    assert found(path, base, target)["bit_exact"] == "fails"
    assert found(path, None, target)["holds_values"] == "fails"
    assert found(path, base)["bit_exact"] == "not_checked"


def test_minimal_finds_positions_that_keep_their_bits(tmp_path: Path) -> None:
    base_state, _, base, target, delta = simple(tmp_path)
    kept = patch_with(delta, "b", indices=torch.tensor([2, 3]), values=torch.tensor([2.0, 7.0]))
    path = write_variant(delta, tmp_path / "kept", patches=kept)
    outcome = found(path, base, target)
    assert [outcome[check] for check in OF_STATES] == ["holds", "holds", "fails", "not_checked", "holds", "holds"]
    assert detail(path, base, None, "minimal") == "1 positions keep the base's bits, first in b at 2"
    empty = (*delta.patches[:1], TensorPatch("b", (2, 3), torch.empty(0, dtype=torch.int32), torch.empty(0)))
    path = write_variant(delta, tmp_path / "empty", patches=empty)
    assert detail(path, base, None, "minimal") == "layers without positions: b"
    same = patch_with(delta, "b", values=base_state["b"][1, :1])
    notes: list[dict[str, Any]] = [{"extra": {COMPOSED_OF: 2}}, {"lineage": Lineage("run", 5, 3)}]
    for number, note in enumerate(notes):
        path = write_variant(delta, tmp_path / f"composed{number}", patches=same, **note)
        assert found(path, base)["minimal"] == "noted", "composed deltas need not be minimal"
    path = write_variant(delta, tmp_path / "step", patches=same, lineage=Lineage("run", 4, 3))
    assert found(path, base)["minimal"] == "fails"


def test_other_writers_bytes_are_noted_alone(tmp_path: Path) -> None:
    _, _, base, target, delta = simple(tmp_path)
    layers = [(p.name, list(p.shape), p.indices, p.values) for p in reversed(delta.patches)]
    outcome = found(write_v2(tmp_path / "theirs", layers, delta.total_elements), base, target)
    assert [check for check, status in outcome.items() if status == "noted"] == ["canonical"]
    assert outcome["deterministic"] == "not_checked"
    assert "fails" not in outcome.values()


def test_wide_indices_break_the_bound(tmp_path: Path) -> None:
    _, _, base, _, delta = simple(tmp_path)
    layers = [(p.name, list(p.shape), p.indices.long(), p.values) for p in delta.patches]
    assert found(write_v2(tmp_path / "theirs", layers, delta.total_elements), base)["density_bound"] == "fails"


def test_counted_knows_the_whole_state(tmp_path: Path) -> None:
    _, _, base, target, delta = simple(tmp_path)
    path = write_variant(delta, tmp_path / "d", total_elements=47)
    assert found(path)["counted"] == "holds", "a delta alone does not know"
    assert found(path, base)["counted"] == found(path, None, target)["counted"] == "fails"


def test_another_state_is_not_the_deltas(made: Made) -> None:
    base, target, delta = made
    outcome = found(delta, target, target)
    assert [outcome[check] for check in ("bit_exact", "minimal", "base_digest")] == ["holds", "fails", "fails"]
    outcome = found(delta, base, base)
    assert [outcome[check] for check in ("bit_exact", "digest", "layer_digests")] == ["fails", "holds", "holds"]
    outcome = found(delta, None, base)
    assert [outcome[check] for check in ("holds_values", "digest", "layer_digests")] == ["fails", "fails", "fails"]


def edited(delta: Path, edit: Callable[[dict[str, str]], object]) -> None:
    edit_metadata(delta, lambda metadata: edit(metadata["lineage"]))


@pytest.mark.parametrize("check", ["base_digest", "digest"])
def test_digests_that_lie(made: Made, check: str) -> None:
    base, target, delta = made
    edited(delta, lambda lineage: lineage.update({check: "rd1:00000000000000ff"}))
    outcome = found(delta, base, target)
    assert [name for name, status in outcome.items() if status == "fails"] == [check]
    assert "rd1:00000000000000ff" in detail(delta, base, target, check)


def test_layer_digests_that_lie(made: Made) -> None:
    base, target, delta = made
    edit_metadata(delta, lambda metadata: metadata["lineage"]["layer_digests"].update({"m.I8": "rd1:00000000000000ff"}))
    assert detail(delta, base, target, "layer_digests").endswith("differ, first m.I8")


def test_states_of_other_shapes(tmp_path: Path, made: Made) -> None:
    base, _, delta = made
    other = write(tmp_path / "other", {"w": torch.zeros(2, 3)})
    for states in ((other, None), (None, other), (base, other)):
        outcome = found(delta, *states)
        assert outcome["fits"] == "fails"
        assert [outcome[check] for check in OF_STATES] == ["not_checked"] * 6


def test_what_cannot_be_read_is_refused(tmp_path: Path, made: Made) -> None:
    base, target, delta = made
    (delta / METADATA_FILE).write_text("{}")
    with pytest.raises(DeltaError):
        found(delta, base, target)


def test_broken_writes_are_seen(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks look at what writing did: one that forgets all but the first write of a run, and one that adds up."""
    base, target, delta = made
    written: set[tuple[str, int]] = set()

    def forgets(patch: TensorPatch, start: int, run: Tensor) -> Tensor:
        place = patch.name, start
        if place in written:
            return patch.values
        written.add(place)
        return write_run(patch, start, run)

    def adds_up(patch: TensorPatch, start: int, run: Tensor) -> Tensor:
        run.view(torch.uint8)[0] ^= 1
        return write_run(patch, start, run) if start else patch.values

    monkeypatch.setattr("refdelta.checkpoints.checks.write_run", forgets)
    assert found(delta, base, target)["inverts"] == "fails"
    monkeypatch.setattr("refdelta.checkpoints.checks.write_run", adds_up)
    assert found(delta, base)["idempotent"] == "fails"


def test_a_composition_where_the_earlier_one_wins_is_seen(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    base, _, delta = made
    monkeypatch.setattr("refdelta.checkpoints.checks.compose", lambda deltas: next(iter(deltas)))
    assert found(delta, base)["composes"] == "fails"


def test_deterministic_compares_with_a_second_encoding() -> None:
    """In a whole delta only a codec that encodes by chance could fail here: what is missing fails bit_exact as well."""
    base, target = bf16(1, 2, 3, 4), bf16(1, 7, 3, 8)
    check = next(check for check in CHECKS if check.id == "deterministic")

    def wrong(at: list[int], values: Tensor) -> int:
        return len(check.wrong(Run.of(TensorPatch("w", (4,), torch.tensor(at), values), 0, base, target)))

    assert wrong([1, 3], bf16(7, 8)) == 0
    assert wrong([1], bf16(7)) > 0
    assert wrong([0, 1, 3], bf16(1, 7, 8)) > 0
    assert wrong([1, 3], bf16(7, 9)) > 0
