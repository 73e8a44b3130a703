"""refdelta: the reference implementation of sparse_delta v2.

The names below are imported from their modules when they are first used: importing `refdelta` alone is quick.
The command imports this package before it starts pytest, which need not say so: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refdelta.apply import apply_delta, apply_to_checkpoint, compose, join, read_delta
    from refdelta.digest import roll_digest, state_digest
    from refdelta.encode import DeltaEncoder, diff, write_delta
    from refdelta.spec import (
        DELTA_FILE,
        FORMAT,
        FORMAT_VERSION,
        INVARIANTS,
        METADATA_FILE,
        Delta,
        DeltaError,
        Invariant,
        Lineage,
        Reason,
        TensorPatch,
    )

__version__ = "0.1.0"

__all__ = [
    "DELTA_FILE",
    "FORMAT",
    "FORMAT_VERSION",
    "INVARIANTS",
    "METADATA_FILE",
    "Delta",
    "DeltaEncoder",
    "DeltaError",
    "Invariant",
    "Lineage",
    "Reason",
    "TensorPatch",
    "apply_delta",
    "apply_to_checkpoint",
    "compose",
    "diff",
    "join",
    "read_delta",
    "roll_digest",
    "state_digest",
    "write_delta",
]

_MODULES = {
    "apply": ("apply_delta", "apply_to_checkpoint", "compose", "join", "read_delta"),
    "digest": ("roll_digest", "state_digest"),
    "encode": ("DeltaEncoder", "diff", "write_delta"),
    "spec": (
        "DELTA_FILE",
        "FORMAT",
        "FORMAT_VERSION",
        "INVARIANTS",
        "METADATA_FILE",
        "Delta",
        "DeltaError",
        "Invariant",
        "Lineage",
        "Reason",
        "TensorPatch",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
