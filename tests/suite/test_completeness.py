"""`conformance.live.completeness`: which tensors are changed together, and what counts as a finding."""

from __future__ import annotations

import pytest
import torch

from conformance.live.completeness import MOVED, TOLERANCE, Comparison, Effect, changed, changes

NOTHING = torch.zeros(3, dtype=torch.float64)
FAR = torch.tensor([0.0, -0.4, 0.1], dtype=torch.float64)
CLOSE = FAR + TOLERANCE / 2
OTHER = FAR * 1.01


@pytest.mark.parametrize(
    ("theirs", "ours", "findings"),
    [
        (FAR, CLOSE, []),
        (NOTHING, NOTHING, []),
        (NOTHING + TOLERANCE / 2, NOTHING, []),
        (FAR, NOTHING, ["k: moves transformers by 0.4, vLLM by 0"]),
        (NOTHING, FAR, ["k: moves transformers by 0, vLLM by 0.4"]),
        (FAR, OTHER, ["k: moves transformers by 0.4, vLLM by 0.404"]),
        (FAR, -FAR, ["k: moves transformers by 0.4, vLLM by 0.4"]),
        (NOTHING + MOVED / 2, NOTHING, ["k: moves transformers by 0.0025, vLLM by 0"]),
    ],
)
def test_findings(theirs: torch.Tensor, ours: torch.Tensor, findings: list[str]) -> None:
    """Not alike is a finding, whoever moves; alike is none, wherever it goes."""
    assert Comparison(0.0, (Effect(("k",), theirs, ours),)).findings == findings


def test_a_dropped_tensor_is_named_where_nothing_agrees() -> None:
    """Dropping one changes every answer: then that one is the finding, and without one the difference itself."""
    dropped, other = Effect(("k",), FAR, NOTHING), Effect(("q",), FAR, OTHER)
    assert [line[:2] for line in Comparison(0.5, (other, dropped)).findings] == ["k:"]
    assert Comparison(0.5, (other,)).findings == ["the two differ by 0.5 before any change"]


def test_what_changes_together() -> None:
    """Each by itself, tied names and towers as one; together they are everything, once."""
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.vision_tower.x", "model.embed_audio.y", "norm"]
    found = changes(names, ("model.embed_tokens.weight", "lm_head.weight"))
    assert found == [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("norm",),
        ("model.vision_tower.x", "model.embed_audio.y"),
    ]
    assert changes(["a", "b"], None) == [("a",), ("b",)]


def test_changed_tensors() -> None:
    """Every element moves, differently in each tensor; tied names stay equal; integers stay as they are."""
    state = {name: torch.ones(4, 3, dtype=torch.bfloat16) for name in ("a", "b", "c")} | {"n": torch.ones(2).int()}
    new = changed(state, ("a", "b"), ("a", "b"))
    assert torch.equal(new["a"], new["b"])
    apart = changed(state, ("a", "b", "n"), None)
    assert set(apart) == {"a", "b"}
    assert not torch.equal(apart["a"], apart["b"])
    assert bool((apart["a"] != 1).all())
