"""The checkpoint that an engine serves, and anchors, as vLLM's own loader finds their files.

A hub id in ``--download-dir``, a revision, ModelScope, ``consolidated*.safetensors`` beside other files, an index: the
loader is asked which files it reads, so that what is proved is what was loaded, and an anchor holds what a fresh engine
on it would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from refdelta.checkpoint import Checkpoint
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.compat import weight_files

__all__ = ["LoadedFiles"]


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
