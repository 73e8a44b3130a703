"""The checkpoint that an engine serves, and anchors, as vLLM's own loader finds their files.

A hub id in ``--download-dir``, a revision, ModelScope, ``consolidated*.safetensors`` beside other files, an index: the
loader is asked which files it reads, so that what is proved is what was loaded, and an anchor holds what a fresh engine
on it would.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from refdelta.checkpoints.reading import Checkpoint
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.assumptions.versions import installed_version

__all__ = ["LoadedFiles", "weight_files"]


@dataclass(frozen=True)
class LoadedFiles:
    """Where an engine's weights come from."""

    vllm_config: Any
    model: nn.Module

    def served(self) -> Checkpoint:
        """The checkpoint that the engine loaded. Raises `DeltaError` (``unsupported_engine``, ``not_a_checkpoint``)."""
        try:
            directory, names = weight_files(self.vllm_config, self.model)
        except DeltaError:
            raise
        except Exception as error:  # the hub's clients raise many kinds
            says = (str(error).strip() or "no text").splitlines()[0]
            detail = f"vLLM's loader does not find again what it loaded: {type(error).__name__}: {says}"
            raise DeltaError(Reason.NOT_A_CHECKPOINT, detail) from error
        return Checkpoint(directory, names)

    def at(self, path: Path) -> Checkpoint:
        """The checkpoint at ``path``. Raises what `Checkpoint` raises."""
        while True:
            names = self._names(path)
            try:
                return Checkpoint(path, names)
            except DeltaError:
                if self._names(path) == names:
                    raise
            # Another checkpoint was put in this one's place meanwhile.

    def _names(self, path: Path) -> Sequence[str] | None:
        """None where the loader would not load it, or it is a file: `Checkpoint` says what is wrong, if anything is."""
        try:
            return weight_files(self.vllm_config, self.model, path)[1] if path.is_dir() else None
        except Exception:
            return None


_PREPARE_WEIGHTS = [
    "self",
    "model_name_or_path",
    "subfolder",
    "revision",
    "fall_back_to_pt",
    "allow_patterns_overrides",
]


def weight_files(vllm_config: Any, model: torch.nn.Module, directory: Path | None = None) -> tuple[Path, list[str]]:
    """Directory and names of the safetensors files that vLLM's loader reads for ``model``, in order of their names.

    ``directory``: those that it would read there, in place of the engine's own checkpoint.

    The loader says from where it loads (`get_all_weights`) and which files it finds there (`_prepare_weights`). Raises
    `DeltaError` (``unsupported_engine``) where that is not all that it does; what vLLM raises is passed on.
    """
    load_config, model_config = vllm_config.load_config, vllm_config.model_config
    loader, source = _only_source(load_config, model_config, model)
    if directory is not None:
        _forget_listings()
    folder, found, safetensors, _ = loader._prepare_weights(
        str(source.model_or_path if directory is None else directory),
        source.subfolder,
        source.revision,
        source.fall_back_to_pt,
        source.allow_patterns_overrides,
    )
    if not safetensors:
        names = ", ".join(sorted(Path(file).name for file in found)[:3])
        detail = f"load_format={load_config.load_format}: the loader read {names}, and deltas are in the names of"
        raise DeltaError(Reason.UNSUPPORTED_ENGINE, f"{detail} safetensors files; save the checkpoint as such")
    return Path(folder), sorted(str(Path(file).relative_to(folder)) for file in found)


def _only_source(load_config: Any, model_config: Any, model: torch.nn.Module) -> tuple[Any, Any]:
    """vLLM's default loader, and the one place that it loads ``model`` from."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = get_model_loader(load_config)
    if type(loader) is not DefaultModelLoader:
        detail = f"load_format={load_config.load_format}: {type(loader).__name__} does not say which files it read"
        raise DeltaError(Reason.UNSUPPORTED_ENGINE, detail)
    method = getattr(loader, "_prepare_weights", None)
    if method is None or ["self", *inspect.signature(method).parameters] != _PREPARE_WEIGHTS:
        raise _unknown_loader("DefaultModelLoader._prepare_weights takes other arguments")
    asked: list[Any] = []

    class Asking(DefaultModelLoader):
        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            asked.append(source)
            return iter(())

    if next(iter(Asking(load_config).get_all_weights(model_config, model)), None) is not None or not asked:
        raise _unknown_loader("DefaultModelLoader.get_all_weights does not ask _get_weights_iterator")
    multimodal = getattr(model_config, "multimodal_config", None)
    partial = asked[0].prefix or asked[0].is_unused_weight or (multimodal and multimodal.mm_encoder_only)
    if len(asked) > 1 or partial:
        detail = f"weight_sources={len(asked)}: {type(model).__name__} renames or leaves out some of its files' tensors"
        raise DeltaError(Reason.UNSUPPORTED_ENGINE, detail)
    return loader, asked[0]


def _unknown_loader(detail: str) -> DeltaError:
    return DeltaError(
        Reason.UNSUPPORTED_ENGINE, f"vLLM {installed_version()}: {detail}; how it finds its files is not known"
    )


def _forget_listings() -> None:
    """vLLM remembers what it saw in a directory, which may hold another checkpoint by now."""
    from vllm.transformers_utils import repo_utils

    repo_utils.list_repo_files.cache_clear()
