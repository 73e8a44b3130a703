"""Models with PEFT's adapters: which of their tensors belong to the checkpoint, and which cannot be sent.

PEFT wraps layers of the model, and the wrappers' names become part of the tensors' names:

- ``q_proj.base_layer.weight`` is the checkpoint's ``q_proj.weight``; ``q_proj.lora_A.default.weight`` and the like are
  the adapter's. The model computes with both, so the base alone is not what was trained. Where the adapter is merged
  (``merge_adapter()``, seen in ``merged_adapters``) the base holds all, and the adapter's weights are left out. Where
  it is not, the model is refused. Merging changes the trainer's weights, so the trainer has to do and undo it.
- ``lm_head.modules_to_save.default.weight`` is the trained copy of the checkpoint's ``lm_head.weight``, and is sent
  under that name; ``lm_head.original_module.weight`` is the frozen one from before, and is left out.

Layers are recognised by how they are built, without importing PEFT, so a model with a ``base_layer`` of its own keeps
the name. A mapping has names only, and these do not say whether an adapter is merged. So a mapping with PEFT's names
is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn

from refdelta.codec.names import checkpoint_name
from refdelta.spec import DeltaError, Reason

__all__ = ["Adapters", "check_no_adapters"]

_MERGE: Final = "encode between merge_adapter() and unmerge_adapter(), or give the model of merge_and_unload()"
_NO_ADAPTER_NAME: Final = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class Adapters:
    """The layers of a model that PEFT wraps, by their names without wrappers."""

    tuned: Mapping[str, nn.Module]
    """Layers with a ``base_layer`` and an adapter's weights."""
    saved: Mapping[str, nn.Module]
    """Layers with an ``original_module`` and trained copies in ``modules_to_save``, by adapter."""

    @classmethod
    def of(cls, model: nn.Module) -> Adapters:
        """The adapters of ``model``, wherever they stand."""
        tuned, saved = {}, {}
        for path, layer in model.named_modules(remove_duplicate=False):
            children = layer._modules
            if "base_layer" in children and (hasattr(layer, "merged_adapters") or any(map(_is_lora, children))):
                tuned[_prefix(path)] = layer
            elif "original_module" in children and "modules_to_save" in children:
                saved[_prefix(path)] = layer
        return cls(tuned, saved)

    def checkpoint_name(self, name: str) -> str | None:
        """The checkpoint's name of the tensor ``name`` (without wrappers); None for one that no checkpoint has.

        Raises `DeltaError` (unknown_tensor) where that is unknown: the adapter is not merged, or it is switched off.
        """
        parts, kept, at = name.split("."), list[str](), 0
        while at < len(parts):
            prefix, part = ".".join(parts[:at]), parts[at]
            if prefix in self.tuned and part != "base_layer":
                _check_merged(self.tuned[prefix], name)
                return None
            if prefix in self.saved and part in ("original_module", "modules_to_save"):
                copy = _trained_copy(self.saved[prefix], name)
                taken = ["original_module"] if copy is None else ["modules_to_save", copy]
                if parts[at : at + len(taken)] != taken:
                    return None
                at += len(taken)
                continue
            if prefix not in self.tuned and not (part == "token_adapter" and ".".join(parts[: at + 1]) in self.tuned):
                kept.append(part)
            at += 1
        return ".".join(kept)


def _is_lora(part: str) -> bool:
    return part.startswith("lora_")


def _prefix(path: str) -> str:
    """``path`` of a module without wrappers."""
    return checkpoint_name(f"{path}.x").removesuffix("x").removesuffix(".")


def _check_merged(layer: nn.Module, name: str) -> None:
    """An adapter's weight may be left out once the base layer holds what it adds."""
    merged, active = list(getattr(layer, "merged_adapters", ())), _active(layer)
    if getattr(layer, "disable_adapters", False) is True:
        _refuse(name, "its adapter is switched off: encode outside of disable_adapter()")
    if not merged or not set(active) <= set(merged):
        _refuse(name, f"a weight of an adapter that is not merged, which no checkpoint holds: {_MERGE}")


def _trained_copy(layer: nn.Module, name: str) -> str | None:
    """The adapter whose copy of a saved module the model computes with; None where it is the original."""
    copies = layer.get_submodule("modules_to_save")._modules
    if getattr(layer, "disable_adapters", False) is True:
        _refuse(name, "its adapter is switched off: encode outside of disable_adapter()")
    active = _active(layer) if hasattr(layer, "active_adapter") else list(copies)
    if not any(adapter in copies for adapter in active):
        return None
    if len(active) > 1:
        _refuse(name, f"adapters {sorted(active)} are active, and one module has one trained copy: activate one")
    return active[0]


def _active(layer: nn.Module) -> list[str]:
    active = getattr(layer, "active_adapter", ())
    return [active] if isinstance(active, str) else list(active)


def _refuse(name: str, detail: str) -> None:
    raise DeltaError(Reason.UNKNOWN_TENSOR, detail, name)


def check_no_adapters(names: Iterable[str]) -> None:
    """Refuse (unknown_tensor) names that a model in PEFT's adapters gives its tensors, not a checkpoint.

    A checkpoint may hold adapters itself, beside its base layers (Phi-4-multimodal): those names stay. So do those of
    an adapter's own file, which has no base layers.
    """
    split = {name: name.split(".") for name in names}
    with_adapters = any(_is_lora(part) for parts in split.values() for part in parts)
    for name, parts in split.items():
        in_peft = ".base_model.model." in f".{name}"
        pairs = list(itertools.pairwise(parts))
        if (
            any(part in ("modules_to_save", "original_module") for part in parts[:-1])
            or any(_is_lora(a) and (b == "default" or (in_peft and b not in _NO_ADAPTER_NAME)) for a, b in pairs)
            or ("base_layer" in parts[:-1] and (in_peft or not with_adapters))
        ):
            _refuse(
                name,
                "the name that PEFT gives it, which no checkpoint has: give the model itself, with its adapters merged "
                "(merge_adapter()), or the tensors under the checkpoint's names",
            )
