"""A model of given parameters, as an engine holds one: by dotted names, in modules within modules."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

__all__ = ["module_of"]


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Parameters that share the memory of ``tensors``."""
    model = nn.Module()
    for name, tensor in tensors.items():
        *owners, leaf = name.split(".")
        module = model
        for owner in owners:
            if owner not in module._modules:
                module.add_module(owner, nn.Module())
            module = module.get_submodule(owner)
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return model
