"""What a layout needs to know of a model: its config, and names, shapes and dtypes of its tensors. No weights are
read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refdelta.checkpoints.reading import Checkpoint
from refdelta.codec import bits
from refdelta.codec.state import TensorInfo
from refdelta.spec import DeltaError, Reason

__all__ = ["ModelFiles"]

CONFIG_FILE = "config.json"
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A config, and the tensors beside it where there are safetensors files."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] | None = None

    @classmethod
    def read(cls, path: str | Path) -> ModelFiles:
        """From a config.json, or a directory that holds one and perhaps safetensors files.

        Whether output head and embedding are one parameter depends on the bytes, not on the config: a tied config
        whose files hold two different tensors is read as untied, as engines do. Raises `DeltaError` (``unreadable``).
        """
        path = Path(path)
        file = path
        try:
            file = path / CONFIG_FILE if path.is_dir() else path
            config = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise DeltaError(Reason.UNREADABLE, f"{file}: not a model config ({error})") from error
        if not isinstance(config, dict):
            raise DeltaError(Reason.UNREADABLE, f"{file}: not a model config")
        if not path.is_dir() or not any(path.glob("*.safetensors")):
            return cls(config)
        with Checkpoint(path) as checkpoint:
            untied = _heads_differ(checkpoint)
            return cls(_untied(config) if untied else config, checkpoint.infos())


def _heads_differ(checkpoint: Checkpoint) -> bool:
    embedding = next((name for name in checkpoint if name.endswith("." + _EMBEDDING)), None)
    if embedding is None or _HEAD not in checkpoint:
        return False
    head, table = checkpoint[_HEAD], checkpoint[embedding]
    return head.shape != table.shape or head.dtype != table.dtype or not bits.equal(head, table)


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**config, "tie_word_embeddings": False}
    if isinstance(config.get("text_config"), dict):
        changed["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return changed
