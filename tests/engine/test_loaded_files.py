"""The checkpoint is what vLLM's loader reads, wherever that is: asked of the loader itself, without an engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from refdelta.spec import DeltaError, Reason

pytest.importorskip("vllm", reason="the loader is vLLM's")

from refdelta.vllm.assumptions import loaded_files, versions
from refdelta.vllm.assumptions.loaded_files import LoadedFiles
from refdelta.vllm.auditing.report import AuditReport, Outcome

COMMIT = {"main": "0" * 40, "v2": "2" * 40}
INDEX = "model.safetensors.index.json"


def write(directory: Path, **files: Mapping[str, float]) -> Path:
    """Safetensors files (``_`` stands for ``-``) of tensors that hold one number each."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        filled = {tensor: torch.full((2, 3), value) for tensor, value in tensors.items()}
        save_file(filled, directory / f"{name.replace('_', '-')}.safetensors")
    return directory


def hub(cache: Path, revision: str, **files: Mapping[str, float]) -> Path:
    """A snapshot in a cache as the hub's client keeps it: links to blobs."""
    root = cache / "models--org--tiny"
    snapshot = root / "snapshots" / COMMIT[revision]
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / revision).write_text(COMMIT[revision])
    for number, file in enumerate(write(root / "made", **files).iterdir()):
        blob = root / "blobs" / f"{COMMIT[revision]}{number}"
        blob.parent.mkdir(exist_ok=True)
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../..") / "blobs" / blob.name)
    return snapshot


def asked(model: str | Path, module: nn.Module | None = None, **config: Any) -> LoadedFiles:
    """What an engine on ``model`` would ask; ``config``: of vLLM's `LoadConfig`, and of its `ModelConfig`."""
    from vllm.config.load import LoadConfig

    multimodal = config.pop("multimodal", None)
    model_config = SimpleNamespace(
        model=str(model), revision=config.pop("revision", None), multimodal_config=multimodal
    )
    load_config = LoadConfig(**config)
    return LoadedFiles(SimpleNamespace(model_config=model_config, load_config=load_config), module or nn.Module())


def served(files: LoadedFiles) -> dict[str, float]:
    with files.served() as checkpoint:
        return {name: float(tensor[0, 0]) for name, tensor in checkpoint.items()}


def outcome(files: LoadedFiles) -> DeltaError | None:
    try:
        files.served()
    except DeltaError as error:
        return error
    return None


def refused(files: LoadedFiles) -> DeltaError:
    found = outcome(files)
    assert found is not None
    return found


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_a_download_directory_and_a_revision(tmp_path: Path) -> None:
    """Of two caches and two revisions those that vLLM was told to load."""
    from huggingface_hub import constants

    hub(tmp_path / "weights", "main", model={"w": 1.0})
    hub(tmp_path / "weights", "v2", model={"w": 2.0})
    hub(tmp_path / "default", "main", model={"w": 3.0})
    where: dict[str, Any] = {"download_dir": str(tmp_path / "weights")}
    assert served(asked("org/tiny", **where)) == {"w": 1.0}
    assert served(asked("org/tiny", **where, revision="v2")) == {"w": 2.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "default"))
        assert served(asked("org/tiny")) == {"w": 3.0}
    found = refused(asked("org/none", **where))
    assert found.reason is Reason.NOT_A_CHECKPOINT
    assert "vLLM's loader does not find again what it loaded: LocalEntryNotFoundError: " in found.detail


@pytest.mark.usefixtures("offline")
def test_modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str | None]] = []

    def snapshot_download(model_id: str, revision: str | None = None, **_: object) -> str:
        calls.append((model_id, revision))
        return str(write(tmp_path / "scope", model={"w": 4.0}))

    for name in ("modelscope", "modelscope.hub", "modelscope.hub.snapshot_download"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["modelscope.hub.snapshot_download"], "snapshot_download", snapshot_download, False)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    hub(tmp_path / "weights", "v2", model={"w": 2.0})
    assert served(asked("org/tiny", revision="v2", download_dir=str(tmp_path / "weights"))) == {"w": 4.0}
    assert calls == [("org/tiny", "v2")]


def test_consolidated_files_go_first(tmp_path: Path) -> None:
    """``auto`` takes them for a Mistral's, and leaves what lies beside them."""
    both = write(tmp_path / "both", model={"w": 1.0}, consolidated={"w": 5.0})
    (both / INDEX).write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert served(asked(both)) == {"w": 5.0}
    for load_format in ("hf", "safetensors"):
        assert served(asked(both, load_format=load_format)) == {"w": 1.0}


def test_an_index_chooses(tmp_path: Path) -> None:
    """Files that it does not name are not read; what it says of their tensors is not asked."""
    made = write(tmp_path / "a", model_1={"a": 1.0, "b": 2.0}, model_2={"c": 3.0}, stale={"a": 9.0})
    (made / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"}}))
    assert served(asked(made)) == {"a": 1.0, "b": 2.0, "c": 3.0}


def test_what_is_not_safetensors(tmp_path: Path) -> None:
    for name, load_format in (("pytorch_model.bin", "auto"), ("model.pt", "hf")):
        directory = tmp_path / load_format
        directory.mkdir()
        torch.save({"w": torch.zeros(2, 3)}, directory / name)
        found = refused(asked(directory, load_format=load_format))
        assert found.reason is Reason.UNSUPPORTED_ENGINE
        assert f"load_format={load_format}: the loader read {name}, " in found.detail


def test_no_format_ends_in_a_raw_exception(tmp_path: Path) -> None:
    """Of all that vLLM has. Those that the allow-list does not name are refused before the files are looked for."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    directory = write(tmp_path / "a", model={"w": 1.0})
    read = {name for name in _LOAD_FORMAT_TO_MODEL_LOADER if outcome(asked(directory, load_format=name)) is None}
    assert read == {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor"}
    found = refused(asked(directory, load_format="dummy"))
    assert (found.reason, "load_format=dummy: DummyModelLoader" in found.detail) == (Reason.UNSUPPORTED_ENGINE, True)


def test_a_loader_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class Theirs(DefaultModelLoader):  # type: ignore[misc]  # Any to mypy
        """Reads something else."""

    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Theirs)
    found = refused(asked(write(tmp_path / "a", model={"w": 1.0})))
    assert (found.reason, "load_format=auto: Theirs " in found.detail) == (Reason.UNSUPPORTED_ENGINE, True)


def test_what_the_model_says_of_its_files(tmp_path: Path) -> None:
    """vLLM's models may choose files, and load from several places."""
    directory = write(tmp_path / "a", model={"w": 1.0}, head={"h": 2.0})
    module: Any = nn.Module()
    module.allow_patterns_overrides = ["head*.safetensors"]
    assert served(asked(directory, module)) == {"h": 2.0}
    module.is_unused_checkpoint_weight = lambda name: name == "h"
    found = refused(asked(directory, module))
    assert (found.reason, "weight_sources=1: Module " in found.detail) == (Reason.UNSUPPORTED_ENGINE, True)
    other: Any = nn.Module()
    other.secondary_weights = [SimpleNamespace(prefix="")]
    found = refused(asked(directory, other))
    assert (found.reason, "weight_sources=2: Module " in found.detail) == (Reason.UNSUPPORTED_ENGINE, True)


def test_loads_that_leave_out_or_rename_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a multimodal model is not loaded where only its encoder is asked for."""
    from vllm.model_executor.model_loader import DefaultModelLoader

    directory = write(tmp_path / "a", model={"w": 1.0})
    assert served(asked(directory, multimodal=SimpleNamespace(mm_encoder_only=False))) == {"w": 1.0}
    assert refused(asked(directory, multimodal=SimpleNamespace(mm_encoder_only=True))).detail.startswith(
        "weight_sources=1: Module renames or leaves out"
    )

    def renamed(self: Any, model_config: Any, model: nn.Module) -> Any:
        yield from self._get_weights_iterator(DefaultModelLoader.Source(str(directory), None, prefix="head."))

    monkeypatch.setattr(DefaultModelLoader, "get_all_weights", renamed)
    assert refused(asked(directory)).detail.startswith("weight_sources=1: Module renames or leaves out")


@pytest.mark.parametrize("method", ["_prepare_weights", "get_all_weights"])
def test_another_vllm_is_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    from vllm.model_executor.model_loader import DefaultModelLoader

    monkeypatch.setattr(DefaultModelLoader, method, lambda self, source, model=None: iter([("w", torch.zeros(2))]))
    found = refused(asked(write(tmp_path / "a", model={"w": 1.0})))
    assert found.reason is Reason.UNSUPPORTED_ENGINE
    assert f"vLLM {versions.installed_version()}: DefaultModelLoader.{method} " in found.detail


def test_files_that_have_gone(tmp_path: Path) -> None:
    """Between the engine's load and the proof."""
    files = asked(write(tmp_path / "a", model={"w": 1.0}))
    (tmp_path / "a" / "model.safetensors").unlink()
    found = refused(files)
    assert (found.reason, "Cannot find any model weights" in found.detail) == (Reason.NOT_A_CHECKPOINT, True)


def anchored(files: LoadedFiles, path: Path) -> dict[str, float]:
    with files.at(path) as checkpoint:
        return {name: float(tensor[0, 0]) for name, tensor in checkpoint.items()}


def test_an_anchor_is_what_an_engine_on_it_would_load(tmp_path: Path) -> None:
    files = asked(write(tmp_path / "own", model={"w": 1.0}))
    path = write(tmp_path / "a", model={"w": 2.0})
    assert anchored(files, path) == {"w": 2.0}
    assert anchored(files, path / "model.safetensors") == {"w": 2.0}
    write(path, consolidated={"w": 3.0})  # vLLM remembers listings
    assert anchored(files, path) == {"w": 3.0}
    assert anchored(files, path / "model.safetensors") == {"w": 2.0}


def test_anchors_are_refused_as_checkpoints_are(tmp_path: Path) -> None:
    """What vLLM's loader raises of them is none of refdelta's reasons."""
    files = asked(write(tmp_path / "own", model={"w": 1.0}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    cut = write(tmp_path / "cut", model={"w": 1.0})
    os.truncate(cut / "model.safetensors", 20)
    missing = write(tmp_path / "missing", model={"w": 1.0})
    (missing / INDEX).write_text(json.dumps({"weight_map": {"w": "model.safetensors", "x": "x.safetensors"}}))
    damaged = write(tmp_path / "damaged", model={"w": 1.0})
    (damaged / INDEX).write_text("{")
    for path, reason in (
        (tmp_path / "none", Reason.NOT_A_CHECKPOINT),
        (tmp_path / "empty", Reason.NOT_A_CHECKPOINT),
        (tmp_path / ("n" * 5000), Reason.NOT_A_CHECKPOINT),
        (tmp_path / "loop", Reason.UNREADABLE),
        (cut, Reason.BAD_HEADER),
        (missing, Reason.NOT_A_CHECKPOINT),
        (damaged, Reason.BAD_METADATA),
    ):
        with pytest.raises(DeltaError) as caught:
            files.at(path)
        assert caught.value.reason is reason, path


def test_an_anchor_that_is_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shards have other names by the time that they are opened."""
    files = asked(write(tmp_path / "own", model={"w": 1.0}))
    path = write(tmp_path / "a", model_1={"w": 2.0})
    real = loaded_files.weight_files

    def then_replaced(*arguments: Any) -> Any:
        found = real(*arguments)
        if (path / "model-1.safetensors").exists():
            (path / "model-1.safetensors").unlink()
            write(path, model_2={"w": 3.0})
        return found

    monkeypatch.setattr("refdelta.vllm.assumptions.loaded_files.weight_files", then_replaced)
    assert anchored(files, path) == {"w": 3.0}


def test_an_audit_reads_a_directory_as_the_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine was started on the same directory, so nothing differs."""
    from refdelta.vllm.auditing.extension import AuditExtension

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((2, 3), 5.0), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.w.data.copy_(dict(weights)["w"])

    both = write(tmp_path / "both", model={"w": 1.0}, consolidated={"w": 5.0})
    (both / INDEX).write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    worker: Any = AuditExtension()
    model = Model()
    worker.rank, worker.vllm_config = 0, asked(both).vllm_config
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    monkeypatch.setattr("vllm.config.set_current_vllm_config", lambda config: nullcontext())
    report = AuditReport.from_plain([worker.refdelta_compare(str(both))])
    assert list(report.named(Outcome.EQUAL)) == ["w"]
