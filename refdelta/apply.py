"""Reading and applying deltas. Everything is validated before the first byte of a state changes."""

from __future__ import annotations

from refdelta.checkpoints.applying import apply_to_checkpoint
from refdelta.codec.applying import apply_delta
from refdelta.codec.composition import compose, join
from refdelta.files.reading import read_delta

__all__ = ["apply_delta", "apply_to_checkpoint", "compose", "join", "read_delta"]
