"""`refdelta layout`: tables, JSON, verdicts, refusals, the picture; rules only, so that no engine is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refdelta.cli import run
from refdelta.layout_map import LayoutMap, layout_from_config
from refdelta.spec import DeltaError, Reason

CONFIGS = Path(__file__).resolve().parents[2] / "conformance" / "configs"
QWEN = CONFIGS / "qwen3-0.6b.json"
GEMMA = CONFIGS / "gemma4-e2b.json"


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``--source`` the rules alone are asked, which needs no engine."""
    monkeypatch.setattr("refdelta.cli.layout._has_vllm", lambda: False)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of one run that must succeed."""
    assert run(["layout", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_holds_the_map_of_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed reads back as the map that the rules give."""
    found = report(capsys, str(QWEN), "--tp", "2")
    config = json.loads(QWEN.read_text())
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        layout = LayoutMap.from_json(json.dumps(rank["layout"]))
        assert layout == layout_from_config(config, tp_size=2, tp_rank=rank["rank"])
    assert found["findings"] == found["differences"] == []


def test_verdicts_name_ties_and_drops(capsys: pytest.CaptureFixture[str]) -> None:
    """Tied heads, KV-shared layers and mapped tensors."""
    (rank,) = report(capsys, str(GEMMA))["ranks"]
    verdicts = rank["verdicts"]
    assert set(verdicts) == set(rank["layout"]["sources"])
    assert verdicts["model.language_model.embed_tokens.weight"] == "mapped"
    assert "lost" not in verdicts.values()
    assert rank["totals"]["tensors"] == len(verdicts)


def test_one_rank_prints_its_boxes(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 of two holds the second half of k, behind its half of q."""
    assert run(["layout", str(QWEN), "--tp", "2", "--rank", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (k_proj,) = [line for line in lines if "layers.0.self_attn.k_proj" in line]
    assert "512:1024, 0:1024" in k_proj
    assert "1024:1536, 0:1024" in k_proj
    assert any("proven: every element has its place" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["/nonexistent/config.json"], "unreadable"),
        (["/" + "n" * 5000], "unreadable"),
        ([str(QWEN), "--tp", "2", "--rank", "2"], "bad_option"),
        ([str(QWEN), "--tp", "3"], "unsupported_engine"),
        ([str(QWEN), "--tp", "0"], "bad_option"),
        ([str(QWEN), "--picture", "x.pdf"], "bad_option"),
        ([str(QWEN), "--picture", "x.png", "--layer", "99"], "bad_option"),
    ],
)
def test_refusals_are_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    """Exit 2, one line, nothing on standard output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(["layout", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: [{reason}] ")
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_the_picture(tmp_path: Path, ending: str) -> None:
    """A file of the kind that its ending says; an SVG names the tensors that it shows."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib (extra plot)")
    out = tmp_path / f"layer{ending}"
    assert run(["layout", str(QWEN), "--tp", "2", "--picture", str(out)]) == 0
    head = out.read_bytes()[:100]
    assert head.startswith(b"\x89PNG") if ending == ".png" else b"<?xml" in head


def test_maps_that_differ_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--source both`` a loader that puts k where v belongs is a finding: exit 1, and both sides are told."""
    layouts = [layout_from_config(json.loads(QWEN.read_text()), tp_size=2, tp_rank=rank) for rank in (0, 1)]

    def traced(path: object, **sizes: object) -> list[LayoutMap]:
        return [LayoutMap.from_json(_swapped(layout.to_json())) for layout in layouts]

    monkeypatch.setattr("refdelta.vllm.tracing.tracer.trace_config_ranks", traced)
    assert run(["layout", str(QWEN), "--tp", "2", "--source", "both"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "regions model.layers.0.self_attn.k_proj.weight" in line] == [
        "rank 0",
        "rank 1",
    ]
    assert lines[-1].startswith("rules and vLLM differ")


BIAS = "model.layers.0.self_attn.o_proj.bias"


def _without_bias(layout: LayoutMap) -> LayoutMap:
    """As vLLM's Qwen3 has it: no parameter for the bias of o_proj."""
    raw = json.loads(layout.to_json())
    raw["regions"] = [region for region in raw["regions"] if not region[0].endswith("o_proj.bias")]
    raw["params"] = {name: info for name, info in raw["params"].items() if not name.endswith("o_proj.bias")}
    return LayoutMap.from_json(json.dumps(raw))


@pytest.mark.parametrize("asked", [[], ["--source", "both"]], ids=["default", "both"])
def test_a_tensor_that_vllm_leaves_out_is_a_finding(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM installed it is asked by default; what the rules alone call proven is then not."""
    config = json.loads(QWEN.read_text()) | {"attention_bias": True, "num_hidden_layers": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    layouts = [layout_from_config(config, tp_size=2, tp_rank=rank) for rank in (0, 1)]

    def traced(path: object, **sizes: object) -> list[LayoutMap]:
        return list(map(_without_bias, layouts))

    monkeypatch.setattr("refdelta.vllm.tracing.tracer.trace_config_ranks", traced)
    monkeypatch.setattr("refdelta.cli.layout._has_vllm", lambda: True)
    assert run(["layout", str(path), "--tp", "2", *asked, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (finding,) = found["findings"]
    assert BIAS in finding
    assert {(one["rank"], one["kind"], one["name"]) for one in found["differences"]} == {
        (rank, kind, BIAS) for rank in (0, 1) for kind in ("params", "regions")
    }
    assert run(["layout", str(path), "--tp", "2", *asked]) == 1
    *_, line, last = capsys.readouterr().out.splitlines()
    assert line == finding
    assert last == "rules and vLLM differ: not proven: 1 findings, 4 differences"
    assert run(["layout", str(path), "--tp", "2", "--source", "rules"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("; vLLM was not asked")


def test_where_vllm_cannot_trace_the_rules_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who did not ask for vLLM is told why it was asked."""

    def traced(path: object, **sizes: object) -> list[LayoutMap]:
        raise DeltaError(Reason.UNSUPPORTED_ENGINE, "layout: no such model")

    monkeypatch.setattr("refdelta.vllm.tracing.tracer.trace_config_ranks", traced)
    monkeypatch.setattr("refdelta.cli.layout._has_vllm", lambda: True)
    assert run(["layout", str(QWEN)]) == 2
    assert "--source rules" in capsys.readouterr().err
    assert run(["layout", str(QWEN), "--source", "both"]) == 2
    assert "--source rules" not in capsys.readouterr().err


def _swapped(text: str) -> str:
    raw = json.loads(text)
    for region in raw["regions"]:
        if ".layers.0." in region[0]:
            swap = {"k_proj": "v_proj", "v_proj": "k_proj"}
            for one, other in swap.items():
                if one in region[0]:
                    region[0] = region[0].replace(one, other)
                    break
    return json.dumps(raw)


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its directory does not exist."""
    code = run(["layout", str(QWEN), "--source", "rules", "--picture", str(tmp_path / "no" / "picture.png")])
    printed = capsys.readouterr().err
    assert code == 2
    assert printed.startswith("error: [write_failed] ")
    assert printed.count("\n") == 1


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """A hub whose cache holds `me/tiny`; (id, whether the cache alone was asked) of every call."""
    calls: list[tuple[str, bool]] = []

    def download(hub_id: str, file: str, *, local_files_only: bool = False) -> str:
        calls.append((hub_id, local_files_only))
        if (hub_id, file) != ("me/tiny", "config.json"):
            raise OSError("no route to the hub\nand more")
        return str(QWEN)

    module = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(module, "hf_hub_download", download)
    monkeypatch.setattr(module.constants, "HF_HUB_OFFLINE", False)
    return calls


def test_a_local_path_comes_before_any_hub(
    hub: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "me" / "tiny").mkdir(parents=True)
    (tmp_path / "me" / "tiny" / "config.json").write_text(QWEN.read_text())
    monkeypatch.chdir(tmp_path)
    assert run(["layout", "me/tiny"]) == 0
    assert hub == []


@pytest.mark.parametrize("name", ["qwen3-8b", "./me/tiny", "/me/tiny", "a/b/c", "me/", "me/config.json", ""])
def test_what_is_no_id_asks_no_hub(
    hub: list[tuple[str, bool]], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["layout", name]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: [unreadable] ")
    assert line.count("\n") == 1
    assert hub == []


def test_an_id_is_looked_up_in_the_cache_first(
    hub: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub itself is asked last, and only where that is not offline."""
    assert run(["layout", "me/tiny"]) == 0
    assert hub == [("me/tiny", True)]
    hub.clear()
    capsys.readouterr()
    assert run(["layout", "me/other"]) == 2
    assert hub == [("me/other", True), ("me/other", False)]
    expected = "error: [unreadable] me/other: no such file or directory, and no such hub id: no route to the hub\n"
    assert capsys.readouterr().err == expected
    hub.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run(["layout", "me/other"]) == 2
    assert hub == [("me/other", True)]
    assert "no such hub id in the local cache, and HF_HUB_OFFLINE is set\n" in capsys.readouterr().err


def test_a_picture_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("worked before it looked at the picture")

    monkeypatch.setattr("refdelta.checkpoints.model_files.ModelFiles.read", work)
    for picture, reason in ((tmp_path / "no" / "x.png", "write_failed"), (tmp_path / "x.pdf", "bad_option")):
        assert run(["layout", str(QWEN), "--picture", str(picture)]) == 2
        assert capsys.readouterr().err.startswith(f"error: [{reason}] {picture}: ")
