"""The rules against vLLM's own loader: every rank of small and real engines, traced from configs in a child process."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import layout_table
import pytest
import torch
from hypothesis import given

from conformance.inputs import checkpoints
from refdelta.checkpoints.model_files import ModelFiles
from refdelta.layout.families import table_of
from refdelta.layout.families.gemma4 import MULTIMODAL
from refdelta.layout.proofs import AcrossRanks, difference, lost
from refdelta.layout_map import LayoutMap, TensorInfo, layout_from_config
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.tracing.meta_engine import Sizes
from refdelta.vllm.tracing.tracer import Tracer, trace_config, trace_config_ranks
from tests.layout.broken import BROKEN, Broken
from tests.layout.models import GEMMA4, GEMMA4_MOE, QWEN3, QWEN3_MOE, SMALL, TOWERS, Config, Engine, engines, wrapped

BIAS = "self_attn.o_proj.bias"
"""vLLM's Qwen3 has none, whatever the config says."""


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    """One process for the whole module: it takes about ten seconds to start."""
    with Tracer() as started:
        yield started


def traced(tracer: Tracer, engine: Engine, tensors: Mapping[str, TensorInfo] | None = None) -> list[LayoutMap]:
    """vLLM's map of every rank."""
    sizes = Sizes(engine.tp_size, expert_parallel=engine.dealt)
    return [found.layout for found in tracer.trace(ModelFiles(engine.config, tensors), sizes)]


def findings(tracer: Tracer, engine: Engine, tensors: Mapping[str, TensorInfo] | None = None) -> list[str]:
    """Where rules and vLLM disagree, and what is wrong with vLLM's ranks together."""
    found, together = [], AcrossRanks()
    for rank, layout in enumerate(traced(tracer, engine, tensors)):
        found += [f"rank {rank}: {line}" for line in difference(engine.rules(rank, tensors=tensors), layout)]
        together.add(layout)
    return found + together.findings()


@pytest.mark.parametrize("name", SMALL)
def test_small_engines(tracer: Tracer, name: str) -> None:
    """Every kind of cut; the one thing that vLLM leaves out is found and named."""
    engine = SMALL[name]
    if not (engine.config.get("attention_bias") and engine.config["model_type"].startswith("qwen3")):
        assert findings(tracer, engine) == []
        return
    found = findings(tracer, engine)
    assert found
    assert all(BIAS in line for line in found), found
    layers = range(engine.config["num_hidden_layers"])
    for rank, layout in enumerate(traced(tracer, engine)):
        assert lost(engine.rules(rank), layout) == [f"model.layers.{i}.{BIAS}" for i in layers]


@given(engines())
def test_any_engine(tracer: Tracer, engine: Engine) -> None:
    """Whatever Hypothesis draws, on real vLLM."""
    assert findings(tracer, engine) == []


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_caught(tracer: Tracer, name: str) -> None:
    """vLLM's loader tells each wrong rule from the right one."""
    broken: Broken = BROKEN[name]
    layouts = traced(tracer, broken.engine)
    assert all(difference(broken.engine.rules(rank), layout) == [] for rank, layout in enumerate(layouts))
    assert any(difference(broken.rules(rank), layout) for rank, layout in enumerate(layouts))


@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize(
    ("config", "names"),
    [
        (QWEN3_MOE, ["model.layers.0.mlp.experts.gate_up_proj"]),
        (GEMMA4_MOE, ["model.layers.0.experts.0.gate_proj.weight"]),
    ],
)
def test_the_other_form_of_experts(tracer: Tracer, config: Config, names: list[str], dealt: bool) -> None:
    """Fused Qwen3 experts, as transformers 5 keeps them, and one tensor per expert of Gemma 4."""
    tensors = table_of(config, tensors=names).tensors()
    assert tensors != table_of(config).tensors()
    assert findings(tracer, Engine(config, 2, dealt), tensors) == []


def test_what_files_hold_besides(tracer: Tracer) -> None:
    """Keys of KV-shared layers, rotary tables and a second name of the embedding, in one checkpoint."""
    own = layout_from_config(GEMMA4).sources
    extra = {
        "model.layers.4.self_attn.v_proj.weight": TensorInfo((48, 40), torch.float32),
        "model.layers.4.self_attn.k_norm.weight": TensorInfo((24,), torch.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": TensorInfo((4,), torch.float32),
        "lm_head.weight": own["model.embed_tokens.weight"],
    }
    engine, tensors = Engine(GEMMA4, 2), {**own, **extra}
    assert findings(tracer, engine, tensors) == []
    layout = traced(tracer, engine, tensors)[0]
    assert layout.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert set(layout.dropped) == set(extra) - {"lm_head.weight"}


@pytest.mark.parametrize(
    ("config", "stages"),
    [({**QWEN3, "num_hidden_layers": 5, "tie_word_embeddings": True}, 3), (QWEN3_MOE, 2), ({**GEMMA4_MOE}, 2)],
)
def test_pipeline_stages(tracer: Tracer, config: Config, stages: int) -> None:
    """Which layers, embeddings and heads a stage holds; tensor-parallel ranks within it."""
    together = AcrossRanks()
    for found in tracer.trace(ModelFiles(config), Sizes(2, stages)):
        stage, rank = divmod(found.rank, 2)
        rules = layout_from_config(config, tp_size=2, tp_rank=rank, pp_size=stages, pp_rank=stage)
        assert difference(rules, found.layout) == []
        together.add(found.layout)
    assert together.ranks == 2 * stages
    assert together.findings() == []


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (QWEN3, Sizes(5)),
        ({**QWEN3, "num_attention_heads": 6, "num_key_value_heads": 3}, Sizes(2)),
        ({**QWEN3, "intermediate_size": 57}, Sizes(2)),
        (QWEN3, Sizes(2, expert_parallel=True)),
        (GEMMA4, Sizes(1, 5)),
    ],
)
def test_both_refuse(tracer: Tracer, config: Config, sizes: Sizes) -> None:
    """What the rules refuse vLLM refuses, in one sentence, and the process goes on."""
    ep_size = sizes.tp_size if sizes.expert_parallel else 1
    with pytest.raises(DeltaError) as by_rules:
        layout_from_config(config, tp_size=sizes.tp_size, ep_size=ep_size, pp_size=sizes.pp_size)
    with pytest.raises(DeltaError) as by_vllm:
        list(tracer.trace(ModelFiles(config), sizes))
    assert by_rules.value.reason is by_vllm.value.reason is Reason.UNSUPPORTED_ENGINE
    assert "refuses" in by_vllm.value.detail
    assert findings(tracer, SMALL["qwen3"]) == []


def test_ranks_that_do_not_exist(tracer: Tracer) -> None:
    """A rank beyond the engine's size."""
    with pytest.raises(DeltaError, match="ranks"):
        list(tracer.trace(ModelFiles(QWEN3), Sizes(2), [2]))


# --- real sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("qwen3-8b", Sizes(4)),
        ("qwen3-30b-a3b", Sizes(2, expert_parallel=True)),
        ("gemma4-e2b", Sizes(8)),
        ("gemma4-31b", Sizes(2)),
        ("gemma4-26b-a4b", Sizes(4, expert_parallel=True)),
    ],
)
def test_real_sizes(tracer: Tracer, model: str, sizes: Sizes) -> None:
    """A part of `scripts/layout_table.py`, every rank."""
    config = json.loads((layout_table.CONFIGS / f"{model}.json").read_text("utf-8"))
    result = layout_table.run(layout_table.Case(model, config, sizes), tracer)
    assert result.findings == ()
    assert result.refused is None
    assert result.ranks == sizes.tp_size


def test_e4b_has_as_many_elements_as_published(tracer: Tracer) -> None:
    """7.94e9 elements with towers; the per-layer table alone has more than 2^31, half of them on each of two ranks."""
    config = json.loads((layout_table.CONFIGS / "gemma4-e4b.json").read_text("utf-8"))
    config |= {"vision_config": {}, "audio_config": {}}
    layouts = traced(tracer, Engine(config, 2))
    assert sum(info.numel for info in layouts[0].sources.values()) == 7_941_101_354
    (region,) = layouts[1].regions_of("model.language_model.embed_tokens_per_layer.weight")
    assert region.source_box.offset == region.numel == 131_072 * 42 * 256
    assert region.source_box.last > 2**31


def test_the_table_fails_on_a_finding(tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong rule shows as findings of its case."""
    config = json.loads((layout_table.CONFIGS / "qwen3-0.6b.json").read_text("utf-8"))
    case = layout_table.Case("qwen3-0.6b", config, Sizes(2))
    broken = Broken(Engine(config, 2), BROKEN["k before q"].rows)
    monkeypatch.setattr(layout_table.Case, "rules", lambda self, table, rank: broken.rules(rank))
    result = layout_table.run(case, tracer)
    assert len(result.findings) == 2 * 2 * 28
    assert "56 findings" not in result.line()
    assert "112 findings" in result.line()


# --- directories, and the process itself ------------------------------------------------------------------------------


def test_a_directory_with_files(tmp_path: Path) -> None:
    """The files say what the checkpoint holds: KV-shared keys that the config does not give. Nothing leaks here."""
    checkpoints.make("gemma4-text", tmp_path / "model")
    files = ModelFiles.read(tmp_path / "model")
    assert files.tensors is not None
    layouts = trace_config_ranks(tmp_path / "model", tp_size=2)
    for rank, layout in enumerate(layouts):
        rules = layout_from_config(files.config, tp_size=2, tp_rank=rank, tensors=files.tensors)
        assert difference(rules, layout) == []
        assert len(layout.dropped) == 6
    assert not torch.distributed.is_initialized()


def test_a_config_file(tmp_path: Path) -> None:
    """One rank, from a config.json alone, by the fixed name."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    layout = trace_config(tmp_path, tp_size=2, tp_rank=1, expert_parallel=True)
    assert difference(layout_from_config(QWEN3_MOE, tp_size=2, tp_rank=1, ep_size=2, ep_rank=1), layout) == []


def test_a_family_without_rules(tracer: Tracer) -> None:
    """Where files say what the checkpoint holds, no rules are needed: vLLM's loader alone makes the map."""
    qwen3 = {**QWEN3, "num_attention_heads": 8}
    config = {**qwen3, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    sources = layout_from_config(qwen3).sources
    tensors = {name: info for name, info in sources.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    together = AcrossRanks()
    for found in tracer.trace(ModelFiles(config, tensors), Sizes(4)):
        together.add(found.layout)
    assert together.ranks == 4
    assert together.findings() == []
    with pytest.raises(DeltaError, match="no rules"):
        list(tracer.trace(ModelFiles(config), Sizes(4)))


def test_heads_that_differ_untie(tmp_path: Path, tracer: Tracer) -> None:
    """A tied config whose files hold another head is laid out untied, by both."""
    base = checkpoints.make("qwen3-tied-both", tmp_path / "tied").directory
    state = checkpoints.load(base)
    state[checkpoints.HEAD] = state[checkpoints.HEAD].clone()
    state[checkpoints.HEAD][3, 5] += 1
    checkpoints.with_state(base, state, tmp_path / "untied")
    for name, tied in (("tied", True), ("untied", False)):
        files = ModelFiles.read(tmp_path / name)
        (found,) = tracer.trace(files, Sizes())
        assert difference(layout_from_config(files.config, tensors=files.tensors), found.layout) == []
        assert bool(found.layout.aliases) is tied
        assert ("lm_head.weight" in found.layout.params) is not tied


def test_no_config(tmp_path: Path) -> None:
    """A directory without a config, and one whose config is no JSON."""
    (tmp_path / "config.json").write_text("{")
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(DeltaError) as caught:
            trace_config(path)
        assert caught.value.reason is Reason.UNREADABLE


def test_the_caller_does_not_import_vllm() -> None:
    """Tracing goes on elsewhere."""
    code = "import sys, refdelta.vllm.trace; sys.exit('vllm' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def _in_place_of_python(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tracer start this shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_process_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start and later: one sentence with its last words."""
    _in_place_of_python(tmp_path / "dies", "echo 'out of luck' >&2; exit 3", monkeypatch)
    with pytest.raises(DeltaError, match=r"ended with 3: out of luck"):
        Tracer()
    _in_place_of_python(tmp_path / "later", """echo '{"ready": "0"}'; read line; exit 4""", monkeypatch)
    with Tracer() as tracer, pytest.raises(DeltaError, match=r"ended with 4"):
        list(tracer.trace(ModelFiles(QWEN3), Sizes()))


def test_a_process_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, with what it started, after the time it was given."""
    pid = tmp_path / "pid"
    _in_place_of_python(
        tmp_path / "hangs", f"""echo '{{"ready": "0"}}'; sleep 600 & echo $! > {pid}; wait""", monkeypatch
    )
    with Tracer(reply_seconds=0.5) as tracer, pytest.raises(DeltaError, match="no answer within"):
        list(tracer.trace(ModelFiles(QWEN3), Sizes()))
    status = Path(f"/proc/{int(pid.read_text())}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


# --- the multimodal class ---------------------------------------------------------------------------------------------

STUB = """
from unittest.mock import MagicMock
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
"""


def _stand_in_for_torchvision(path: Path) -> Path:
    """Image preprocessing imports it, and no layout depends on that."""
    for module in ("", "transforms", "transforms/functional", "transforms/v2", "transforms/v2/functional", "io", "ops"):
        (path / "torchvision" / module).mkdir(parents=True, exist_ok=True)
        (path / "torchvision" / module / "__init__.py").write_text(STUB)
    (path / "torchvision-0.28.0.dist-info").mkdir()
    (path / "torchvision-0.28.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
    return path


def test_the_multimodal_class(tmp_path: Path) -> None:
    """Served as itself, with towers: runtime names and layout of every tensor."""
    config: dict[str, Any] = wrapped(GEMMA4, **TOWERS)
    with Tracer(python_path=[_stand_in_for_torchvision(tmp_path)]) as tracer:
        for found in tracer.trace(ModelFiles(config), Sizes(2), architecture=MULTIMODAL):
            rules = layout_from_config(config, tp_size=2, tp_rank=found.rank, architecture=MULTIMODAL)
            assert difference(rules, found.layout) == []
            assert found.layout.check().ok
            assert found.layout.dropped == {}
