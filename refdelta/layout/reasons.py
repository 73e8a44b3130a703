"""Why a rank rightly holds nothing of a checkpoint tensor. The closed set of texts in `LayoutMap.dropped`."""

from __future__ import annotations

from typing import Final

__all__ = ["OTHER_RANKS", "ROTARY", "SHARED_KV", "TOWER"]

ROTARY: Final = "rotary table: recomputed from the config"
TOWER: Final = "tower switched off: the engine serves the text model"
SHARED_KV: Final = "KV-shared layer: it reads an earlier layer's cache"
OTHER_RANKS: Final = "other ranks hold it: another expert, another pipeline stage, or other rows"
"""True of one rank only; `refdelta.layout.proofs` shows that some rank does hold the tensor."""
