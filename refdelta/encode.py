"""Making deltas: the difference of two states, and its files."""

from __future__ import annotations

from refdelta.codec.encoding import DeltaEncoder, diff
from refdelta.files.writing import write_delta

__all__ = ["DeltaEncoder", "diff", "write_delta"]
