"""Copies of vLLM's loader with one place changed are seen. All: ``python -m conformance.mutants.loader_run``."""

from __future__ import annotations

import json

import pytest

from conformance.mutants.loader_run import STORED, WITNESSES, run
from conformance.mutants.loaders import BY_NAME, EDITS, Edit, Moved, install

AGAIN = ("k_and_v_offsets_exchanged", "columns_of_the_other_rank", "padding_of_ones")


def test_every_copy_was_seen_by_a_witness() -> None:
    """At the start, or by a fresh engine on vLLM's own loader and by those that would see it were it vLLM's fault."""
    found = json.loads(STORED.read_text())
    assert len(EDITS) >= 10
    assert found.keys() == {"unchanged", *BY_NAME}
    assert found["unchanged"] == {}
    for name, findings in found.items():
        if name != "unchanged":
            assert findings.keys() <= set(WITNESSES), f"{name}: the trace is not what the engine loaded"
            assert "start" in findings or {"live", "rules", "position"} <= findings.keys(), name


@pytest.mark.timeout(600)
def test_some_again() -> None:
    stored = json.loads(STORED.read_text())
    found = run([BY_NAME[name] for name in AGAIN])
    assert {name: findings.keys() for name, findings in found.items()} == {
        name: stored[name].keys() for name in ("unchanged", *AGAIN)
    }


def test_every_copy_differs_in_what_its_edit_says() -> None:
    for edit in EDITS:
        before, after = edit.source()
        assert before != after
        compile(after, edit.name, "exec")


def test_another_vllm_is_not_guessed_at() -> None:
    edit = EDITS[0]
    other = Edit("other", "", edit.module, edit.place, (("no such text", ""),))
    with pytest.raises(Moved, match="stands 0 times"):
        install(other)
