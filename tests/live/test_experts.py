"""Expert weights on CPU: vLLM's packing is a permutation, and what would go wrong around it is caught.

That deltas through it leave the bits and answers of a fresh engine is shown by the suite's own rows: ``qwen3-moe`` and
``gemma4-moe`` of ``pytest conformance/ --engine vllm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conformance import oracle
from conformance.inputs import checkpoints
from conformance.live import changes, judge
from conformance.live.runner import START_TIMEOUT, Host, HostError, environment, start_arguments
from refdelta.codec import bits
from refdelta.vllm.proof.forked import ChildFailed
from refdelta.vllm.proof.post_load import permutations

BF16 = torch.bfloat16


def pack(weights: Mapping[str, Tensor], isa: str) -> dict[str, Tensor]:
    """vLLM's packing function."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    return {name: cpu_prepack_moe_weight(weight, isa) for name, weight in weights.items()}


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("shape", [(2, 64, 96), (3, 96, 64), (1, 32, 160)])
def test_packing_is_a_permutation_of_few_numbers(isa: str, shape: tuple[int, int, int]) -> None:
    """The recovered map reproduces the packed weight bit for bit, NaN payloads and all."""
    places = permutations(lambda weights: pack(weights, isa), {"w": torch.empty(shape, dtype=BF16)})["w"]
    assert places.table_elements == sum(shape)
    words = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(BF16)
    packed = pack({"w": words}, isa)["w"]
    assert not bits.equal(packed, words)
    assert bits.equal(bits.gather(packed, places(torch.arange(words.numel()))).view(shape), words)


def test_a_shape_on_which_packing_aborts_ends_a_copy_of_the_process() -> None:
    """The AMX packer has no check for columns that its tiles do not divide."""
    with pytest.raises(ChildFailed, match="ended with status -6"):
        permutations(lambda weights: pack(weights, "amx"), {"w": torch.empty((4, 64, 48), dtype=BF16)})


def test_experts_that_were_computed_with_are_refused_at_the_start(tmp_path: Path) -> None:
    """A layer whose elements are none of those that were loaded; named, with the reason."""
    checkpoint = checkpoints.make("qwen3-moe", tmp_path / "base")
    env = environment(plugins="refdelta", modules=("tests.live.mixed_experts",))
    with Host(env, tmp_path / "log") as host, pytest.raises(HostError) as caught:
        host.start(checkpoint, backend="delta_snapshot")
    text = str(caught.value)
    assert "refdelta[unsupported_engine]: moe_weights: rank 0: model.layers.0.mlp.experts.routed_experts.w" in text
    assert "w2_weight holds values that are none of its elements (4 expert parameters were not proved)" in text


def test_writing_experts_as_loaded_is_caught(zygote: Host, tmp_path: Path) -> None:
    """The fault that is silent elsewhere: every expert parameter differs from a fresh engine's, and only those."""
    checkpoint = checkpoints.make("qwen3-moe", tmp_path / "base")
    state = checkpoints.load(checkpoint.directory)
    target = changes.every_tensor(state, "experts")
    oracle.write_delta(tmp_path / "delta", oracle.expected_patches(state, target), oracle.total_elements(state))
    fresh = checkpoints.with_state(checkpoint.directory, target, tmp_path / "target")
    for name in ("truth", "found"):
        (tmp_path / name).mkdir()
    job = {"start": start_arguments(str(fresh)), "prompts": [], "out": str(tmp_path / "truth")}
    zygote.call("forked_truths", timeout=START_TIMEOUT, jobs=[job], at_once=1, limit_s=START_TIMEOUT)
    env = environment(plugins="refdelta", modules=("conformance.mutants.live:experts_as_loaded",))
    with Host(env, tmp_path / "log") as host:
        host.start(checkpoint, backend="delta_snapshot")
        assert host.call("sync", info={"target_weights_path": str(tmp_path / "delta")}) is None
        host.call("dump", directory=str(tmp_path / "found"))
    dumps = [judge.read_dumps(tmp_path / name) for name in ("truth", "found")]
    experts = [f"model.layers.{layer}.mlp.experts.routed_experts.{w}_weight" for layer in (0, 2) for w in ("w13", "w2")]
    assert [finding.tensor for finding in judge.compare("qwen3-moe", *dumps)] == experts
