"""The layout rules against dense layouts in plain numpy: every element of every rank, patched and gathered back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refdelta.layout.families import table_of
from refdelta.layout.proofs import AcrossRanks
from refdelta.layout.reasons import OTHER_RANKS, ROTARY, SHARED_KV, TOWER
from refdelta.layout_map import Box, LayoutMap, TensorInfo, layout_from_config
from refdelta.spec import DeltaError, Reason, TensorPatch
from tests.layout.broken import BROKEN, Broken
from tests.layout.dense import Array, Rank, lay_out
from tests.layout.models import GEMMA4, GEMMA4_MOE, QWEN3, QWEN3_MOE, SMALL, TOWERS, Engine, engines, wrapped


def numbered(sources: Mapping[str, TensorInfo]) -> dict[str, Array]:
    """Every element of the whole checkpoint is another number, and none is zero, which is padding."""
    state: dict[str, Array] = {}
    first = 1
    for name, info in sources.items():
        state[name] = np.arange(first, first + info.numel, dtype=np.float32).reshape(info.shape)
        first += info.numel
    assert first < 2**24, "float32 counts no further"
    return state


def window(array: Array, box: Box) -> Array:
    """The elements of a box, as a view."""
    strides = tuple(stride * array.itemsize for stride in box.strides)
    return np.lib.stride_tricks.as_strided(array.reshape(-1)[box.offset :], box.shape, strides)


def placed(layout: LayoutMap, state: Mapping[str, Array]) -> dict[str, Array]:
    """The rank's parameters as the map says; zeros where it says nothing."""
    params = {name: np.zeros(info.shape, np.float32) for name, info in layout.params.items()}
    for region in layout.regions:
        window(params[region.param], region.param_box)[...] = window(state[region.source], region.source_box)
    return params


def assert_same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Names, shapes and bytes."""
    assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in expected.items()}
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


def changed(state: Mapping[str, Array], seed: int) -> tuple[dict[str, Array], list[TensorPatch]]:
    """Some elements of every tensor replaced, and the patches that say so."""
    random = np.random.default_rng(seed)
    new, patches = {}, []
    for name, array in state.items():
        at = np.flatnonzero(random.random(array.size) < 0.07)
        values = -random.integers(1, 2**20, at.size).astype(np.float32)
        new[name] = array.copy()
        new[name].reshape(-1)[at] = values
        patches.append(TensorPatch(name, array.shape, torch.from_numpy(at), torch.from_numpy(values)))
    return new, patches


def check(engine: Engine, seed: int) -> None:
    """All ranks of an engine: laid out, patched, gathered, and proven together."""
    state = numbered(engine.rules(0).sources)
    new, patches = changed(state, seed)
    gathered = {name: np.zeros_like(array) for name, array in state.items()}
    together = AcrossRanks()
    for number in range(engine.tp_size):
        layout, rank = engine.rules(number), Rank(engine.tp_size, number, engine.dealt)
        params = placed(layout, state)
        assert_same(params, lay_out(engine.config, state, rank))
        for patch in patches:
            for piece in layout.route(patch):
                params[piece.param].reshape(-1)[piece.indices.numpy()] = piece.values.numpy()
        assert_same(params, lay_out(engine.config, new, rank))
        for region in layout.regions:
            window(gathered[region.source], region.source_box)[...] = window(params[region.param], region.param_box)
        together.add(layout)
    assert together.findings() == []
    held = {name: array for name, array in new.items() if gathered[name].any()}
    assert_same({name: gathered[name] for name in held}, held)
    assert set(state) - set(held) == {n for n, reason in engine.rules(0).dropped.items() if reason == TOWER}


@pytest.mark.parametrize("engine", SMALL.values(), ids=SMALL)
def test_small_engines(engine: Engine) -> None:
    """Every kind of cut, by hand."""
    check(engine, seed=1)


@given(engines(), st.integers(0, 2**32 - 1))
def test_any_engine(engine: Engine, seed: int) -> None:
    """Heads, head sizes per layer, sharing, experts, sizes: whatever is drawn."""
    check(engine, seed)


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_broken_rules_are_caught(broken: Broken) -> None:
    """The dense layout tells each wrong rule from the right one, and the right one from none."""
    engine = broken.engine
    state = numbered(engine.rules(0).sources)
    seen = 0
    for number in range(engine.tp_size):
        expected = lay_out(engine.config, state, Rank(engine.tp_size, number, engine.dealt))
        assert_same(placed(engine.rules(number), state), expected)
        seen += _differs(broken.rules(number), state, expected)
    assert seen


def _differs(layout: LayoutMap, state: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    if {n: info.shape for n, info in layout.sources.items()} != {n: x.shape for n, x in state.items()}:
        return True
    found = placed(layout, state)
    return {n: x.tobytes() for n, x in found.items()} != {n: x.tobytes() for n, x in expected.items()}


def test_boxes_by_hand() -> None:
    """Rank 3 of 4 of a Qwen3 with 12 heads of 8 and 2 kv heads: q rows 72..95, the second kv head; o columns 72..95."""
    layout = Engine(QWEN3, 4).rules(3)
    at = "model.layers.1.self_attn."
    boxes = {r.source.removeprefix(at): (r.source_box, r.param_box) for r in layout.regions if r.source.startswith(at)}
    assert layout.params[at + "qkv_proj.weight"].shape == (40, 40)
    assert boxes["q_proj.weight"] == (Box(72 * 40, (24, 40), (40, 1)), Box(0, (24, 40), (40, 1)))
    assert boxes["k_proj.weight"] == (Box(8 * 40, (8, 40), (40, 1)), Box(24 * 40, (8, 40), (40, 1)))
    assert boxes["v_proj.weight"] == (Box(8 * 40, (8, 40), (40, 1)), Box(32 * 40, (8, 40), (40, 1)))
    assert boxes["o_proj.weight"] == (Box(72, (40, 24), (96, 1)), Box(0, (40, 24), (24, 1)))


def test_padding_by_hand() -> None:
    """130 rows padded to 192, 48 a rank: the third of 4 holds 96..129 and 14 rows of padding, the last only padding."""
    third, last = Engine(QWEN3, 4).rules(2), Engine(QWEN3, 4).rules(3)
    name = "model.embed_tokens.weight"
    assert third.padding[name] == (Box(34 * 40, (14, 40), (40, 1)),)
    assert third.regions_of(name)[0].source_box == Box(96 * 40, (34, 40), (40, 1))
    assert last.padding[name] == (Box(0, (48, 40), (40, 1)),)
    assert last.regions_of(name) == []
    assert last.dropped[name] == OTHER_RANKS
    assert last.check().ok


def test_experts_by_hand() -> None:
    """5 experts dealt to 2 ranks: 0..2 and 3..4; expert 4 is the second of rank 1, its up the lower half."""
    layout = Engine(QWEN3_MOE, 2, dealt=True).rules(1)
    at = "model.layers.0.mlp.experts."
    assert layout.params[at + "routed_experts.w13_weight"].shape == (2, 24, 32)
    (region,) = layout.regions_of(at + "4.up_proj.weight")
    assert region.param_box == Box((24 + 12) * 32, (12, 32), (32, 1))
    assert layout.dropped[at + "2.up_proj.weight"] == OTHER_RANKS
    assert layout.dropped.keys() == {n for n in layout.sources if any(f"experts.{e}." in n for e in (0, 1, 2))}


def test_tied_and_untied() -> None:
    """A tied head is the embedding's other name, whether the files hold it or not; an untied one is a parameter."""
    tied = {**QWEN3, "tie_word_embeddings": True}
    layout = layout_from_config(tied)
    assert layout.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in layout.params
    both = layout_from_config(tied, tensors={**layout.sources, "lm_head.weight": TensorInfo((130, 40), torch.float32)})
    assert both.aliases == layout.aliases
    assert both.check().ok
    assert layout_from_config(QWEN3).aliases == {}
    assert layout_from_config(QWEN3).params["lm_head.weight"].shape == (192, 40)
    assert layout_from_config(wrapped(GEMMA4)).aliases == {"lm_head.weight": "model.language_model.embed_tokens.weight"}


def test_what_files_hold_besides() -> None:
    """Rotary tables and the keys of KV-shared layers are dropped for their reasons; an unknown tensor is unmapped."""
    info = TensorInfo((3, 5), torch.float32)
    shared, rotary, unknown = (
        "model.layers.3.self_attn.k_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.2.self_attn.q_proj.scale",
    )
    layout = layout_from_config(
        GEMMA4, tensors={**layout_from_config(GEMMA4).sources, shared: info, rotary: info, unknown: info}
    )
    assert layout.dropped == {shared: SHARED_KV, rotary: ROTARY}
    assert layout.check().unmapped == (unknown,)


def test_fused_and_single_experts_hold_the_same() -> None:
    """Either form of the files fills the same parameters with the same elements."""
    for config in (QWEN3_MOE, GEMMA4_MOE):
        single = ["model.layers.0.mlp.experts.0.gate_proj.weight"]
        forms = []
        for names in (single, ["model.layers.0.mlp.experts.gate_up_proj"]):
            tensors = _tensors(config, names)
            layout = layout_from_config(config, tp_size=2, tp_rank=1, tensors=tensors)
            assert layout.check().ok
            forms.append((layout, numbered(tensors)))
        (one, one_state), (fused, fused_state) = forms
        assert one.params == fused.params
        for name, array in fused_state.items():
            if name.endswith("gate_up_proj"):
                gates = [
                    one_state[f"{name.removesuffix('gate_up_proj')}{e}.gate_proj.weight"] for e in range(len(array))
                ]
                ups = [one_state[f"{name.removesuffix('gate_up_proj')}{e}.up_proj.weight"] for e in range(len(array))]
                array[...] = np.stack([np.concatenate(pair) for pair in zip(gates, ups, strict=True)])
            elif name.endswith("experts.down_proj"):
                prefix = name.removesuffix("down_proj")
                array[...] = np.stack([one_state[f"{prefix}{e}.down_proj.weight"] for e in range(len(array))])
            else:
                array[...] = one_state[name]
        assert_same(placed(one, one_state), placed(fused, fused_state))


def _tensors(config: Mapping[str, object], names: list[str]) -> dict[str, TensorInfo]:
    return table_of(config, tensors=names).tensors()


def test_pipeline_stages() -> None:
    """5 layers over 3 stages: 2, 2 and 1; every tensor on one stage, the tied embedding on the first and the last."""
    config = {**QWEN3, "num_hidden_layers": 5, "tie_word_embeddings": True}
    stages = [layout_from_config(config, pp_size=3, pp_rank=stage) for stage in range(3)]
    held = [{name.split(".")[2] for name in stage.params if ".layers." in name} for stage in stages]
    assert held == [{"0", "1"}, {"2", "3"}, {"4"}]
    assert ["model.embed_tokens.weight" in stage.params for stage in stages] == [True, False, True]
    assert ["model.norm.weight" in stage.params for stage in stages] == [False, False, True]
    together = AcrossRanks()
    for stage in stages:
        assert stage.check().ok
        together.add(stage)
    assert together.findings() == []


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (QWEN3, {"tp_size": 5}),  # 12 heads
        ({**QWEN3, "num_key_value_heads": 3}, {"tp_size": 4}),  # neither divides the other
        ({**QWEN3, "intermediate_size": 57}, {"tp_size": 2}),
        (QWEN3, {"tp_size": 2, "tp_rank": 2}),
        (QWEN3, {"ep_size": 2}),  # no experts
        (QWEN3_MOE, {"ep_size": 6}),  # 5 experts
        (QWEN3_MOE, {"tp_size": 2, "tp_rank": 1, "ep_size": 2, "ep_rank": 0}),
        (GEMMA4, {"pp_size": 5}),  # a shared cache on another stage
        ({**QWEN3, "model_type": "qwen9"}, {}),
        ({**QWEN3, "quantization_config": {"quant_method": "fp8"}}, {}),
        ({**QWEN3, "hidden_size": 0}, {}),
        ({**QWEN3, "num_attention_heads": "12"}, {}),
        ({**QWEN3, "dtype": "int8"}, {}),
        ({name: value for name, value in QWEN3.items() if name != "vocab_size"}, {}),
        ({**QWEN3_MOE, "shared_expert_intermediate_size": 8}, {}),
        ({**GEMMA4_MOE, "num_experts": None}, {}),
        ({**GEMMA4, "layer_types": ["full_attention"]}, {}),
        ({**GEMMA4, "layer_types": [*["sliding_attention"] * 4, "full_attention"]}, {}),  # nothing to share
        ({**GEMMA4, "per_layer_config": {"1": {"intermediate_size": 8}}}, {}),
        (wrapped(GEMMA4, tie_word_embeddings=False), {}),
    ],
)
def test_refused(config: Mapping[str, object], sizes: dict[str, Any]) -> None:
    """What has no layout, or one that nobody wrote down, is refused with a sentence."""
    with pytest.raises(DeltaError) as caught:
        layout_from_config(config, **sizes)
    assert caught.value.reason is Reason.UNSUPPORTED_ENGINE


def test_files_that_contradict_the_config_are_refused() -> None:
    """A shape in the files that the config does not give."""
    tensors = {**layout_from_config(QWEN3).sources, "model.norm.weight": TensorInfo((41,), torch.float32)}
    with pytest.raises(DeltaError) as caught:
        layout_from_config(QWEN3, tensors=tensors)
    assert caught.value.reason is Reason.SHAPE_MISMATCH
    assert caught.value.tensor == "model.norm.weight"


def test_multimodal_names() -> None:
    """Served as itself, the multimodal model holds its towers whole, and the text model one level deeper."""
    config = wrapped(GEMMA4, **TOWERS)
    text = layout_from_config(config, tp_size=2, tp_rank=1)
    both = layout_from_config(config, tp_size=2, tp_rank=1, architecture="Gemma4ForConditionalGeneration")
    assert {f"language_model.{name}" for name in text.params} < set(both.params)
    towers = {name.removeprefix("model.") for name in text.dropped}
    assert towers == {name for name in both.params if not name.startswith("language_model.")}
    assert both.dropped == {}
    assert both.check().ok
