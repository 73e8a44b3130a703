"""Good reasons for a rank to hold nothing of a checkpoint tensor: the closed set of strings in `LayoutMap.dropped`."""

from __future__ import annotations

from typing import Final

__all__ = ["OTHER_RANKS", "ROTARY", "SHARED_KV", "TOWER"]

ROTARY: Final = "rotary table: recomputed from the config"
TOWER: Final = "tower switched off: the engine serves the text model"
SHARED_KV: Final = "KV-shared layer: it reads an earlier layer's cache"
OTHER_RANKS: Final = "other ranks hold it: another expert, another pipeline stage, or other rows"
"""This holds for one rank alone. `refdelta.layout.proofs` shows that another rank does hold the tensor."""
