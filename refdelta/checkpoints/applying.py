"""A delta directory applied to a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from refdelta.checkpoints.patching import patch_checkpoint
from refdelta.checkpoints.reading import Checkpoint
from refdelta.codec.arguments import check_path
from refdelta.codec.composition import compose as compose
from refdelta.codec.composition import join as join
from refdelta.files.reading import read_delta

__all__ = ["apply_to_checkpoint"]


def apply_to_checkpoint(
    delta_path: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Write the checkpoint ``checkpoint_dir`` with the delta ``delta_path`` applied to ``out_dir``.

    A checkpoint is a directory of safetensors shards, with or without an index, or one file. Streamed: the delta and a
    piece of one tensor are in memory. Names, order, dtypes and header metadata stay, other files are copied; see
    `refdelta.checkpoints.patching.patch_checkpoint` for what is not, and for what is refused.
    """
    for name, path in (("delta_path", delta_path), ("checkpoint_dir", checkpoint_dir), ("out_dir", out_dir)):
        check_path(name, path)
    with Checkpoint(checkpoint_dir) as source:
        patch_checkpoint(read_delta(delta_path), source, Path(out_dir), overwrite=overwrite)
