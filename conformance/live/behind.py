"""What the suite does in a worker behind its engine's back: flip a bit, replace storage, count what is written.

`probe.Probe` calls these functions in the workers of the engine under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def flip(model: torch.nn.Module, name: str, position: int) -> None:
    """Flip the lowest bit of the last byte of one element, as a stray write would."""
    tensor = tensors(model)[name]
    raw = tensor.detach().reshape(-1)[position : position + 1].view(torch.uint8)
    raw[-1] ^= 1


def replace_storage(model: torch.nn.Module, name: str) -> None:
    """Give a parameter other memory that holds the same bits, as a careless reload does."""
    parameter = dict(model.named_parameters())[name]
    parameter.data = parameter.data.clone()


def tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; the first name of those that are one tensor."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """Where each parameter and buffer lies."""
    return {name: tensor.data_ptr() for name, tensor in tensors(model).items()}


class CountsWrites(TorchDispatchMode):
    """Counts the elements that torch's own operations write into the weights, in the thread that enters it.

    Kernels that are none of torch's are not seen; what moves a whole model is.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in tensors(model).values()}
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count what it writes."""
        for argument, given in zip(func._schema.arguments, [*args], strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(given, Tensor) and given.untyped_storage().data_ptr() in self.storages:
                self.written += _elements(given, [*args[1:]])
        return func(*args, **(kwargs or {}))


def _elements(target: Tensor, rest: list[Any]) -> int:
    """Of an operation with indices as many as these, else the whole target."""
    indices = [found for found in _flat(rest) if not found.is_floating_point() and not found.is_complex()]
    return min([target.numel(), *(found.numel() for found in indices)])


def _flat(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)
