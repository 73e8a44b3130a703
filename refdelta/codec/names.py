"""Turn a trainer's tensor names into those of the checkpoint, by leaving out what wrappers put in.

Compilers, data-parallel and adapter wrappers hold the model as a submodule. The submodule's name then stands in every
name below it: ``_orig_mod.model.layers.0._fsdp_wrapped_module.mlp.weight``. The checkpoint's files do not have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from refdelta.spec import DeltaError, Reason

__all__ = ["WRAPPERS", "checkpoint_name", "checkpoint_names", "distinct"]

WRAPPERS: Final = (
    ("_orig_mod",),  # torch.compile
    ("_fsdp_wrapped_module",),  # FullyShardedDataParallel
    ("_checkpoint_wrapped_module",),  # activation checkpointing
    ("module",),  # DistributedDataParallel, DeepSpeed
    ("base_model", "model"),  # PEFT
)
"""What wrappers put into names: parts between two dots."""


def checkpoint_name(name: str) -> str:
    """``name`` without its wrappers, wherever they stand and however they are nested. The last part always stays."""
    *parents, own = name.split(".")
    kept: list[str] = []
    for part in parents:
        kept.append(part)
        for wrapper in WRAPPERS:
            if tuple(kept[-len(wrapper) :]) == wrapper:
                del kept[-len(wrapper) :]
    return ".".join((*kept, own))


def checkpoint_names(names: Iterable[str]) -> Mapping[str, str]:
    """Each of ``names`` with its `checkpoint_name`. Raises `DeltaError` (duplicate_name) where two get the same."""
    return distinct({name: checkpoint_name(name) for name in names})


def distinct(renamed: Mapping[str, str]) -> Mapping[str, str]:
    """``renamed`` (trainer's name -> checkpoint's), unless two get the same: `DeltaError` (duplicate_name)."""
    taken: dict[str, str] = {}
    for name, own in renamed.items():
        other = taken.setdefault(own, name)
        if other != name:
            raise DeltaError(Reason.DUPLICATE_NAME, f"what {other} and {name} are without their wrappers", own)
    return renamed
