"""vLLM's loader uses every tensor that transformers' model uses: the witness for what every vLLM would drop alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.inputs import checkpoints
from conformance.live.completeness import compare
from conformance.live.runner import START_TIMEOUT, Host, environment

pytestmark = pytest.mark.timeout(600)

SHARED_KV = r"layers\.[45]\.self_attn\.[kv]_(proj|norm)\."
"""The last two layers of the Gemma 4 text model read earlier layers' cache."""
LAST_SCALAR = r"layers\.{last}\.layer_scalar$"
"""It scales all of the last layer's output, and the final norm takes the scale out again."""
TOWERS = r"_tower\.|embed_(vision|audio)\."
"""Text does not pass through them."""
DROPPED = "model.layers.1.self_attn.k_norm.weight"
"""What `tests.live.dropping` drops."""
IDLE = {
    "gemma4-text": [SHARED_KV, LAST_SCALAR.format(last=5)],
    "gemma4-multimodal": [TOWERS, LAST_SCALAR.format(last=5)],
    "gemma4-moe": [LAST_SCALAR.format(last=2)],
}
"""Model -> tensors that must move neither implementation."""


@pytest.mark.parametrize("model", checkpoints.MODELS)
def test_every_tensor_moves_both_alike_or_neither(model: str, zygote: Host, tmp_path: Path) -> None:
    """And those that move neither are known by name, with the reason."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = compare(checkpoints.make(model, tmp_path / "base"), zygote, scratch)
    assert found.findings == []
    idle = {name for effect in found.effects if not effect.moves for name in effect.change}
    everything = {name for effect in found.effects for name in effect.change}
    assert idle == {name for name in everything if any(re.search(rule, name) for rule in IDLE.get(model, []))}
    assert everything == set(checkpoints.load(tmp_path / "base"))


def test_a_tensor_that_the_loader_drops_is_named(tmp_path: Path) -> None:
    """A fresh engine drops it too, so nothing else would notice."""
    env = environment(plugins="", modules=("tests.live.dropping",), unpack=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with Host(env, tmp_path / "log") as host:
        host.call("warm", timeout=START_TIMEOUT)
        found = compare(checkpoints.make("qwen3-untied", tmp_path / "base"), host, scratch)
    (finding,) = found.findings
    assert finding.startswith(f"{DROPPED}: moves transformers by ")
    assert finding.endswith(", vLLM by 0")
