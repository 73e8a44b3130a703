"""Ways in which an engine may come to hold other memory than was proved, without a bit that differs.

Imported by every process of an engine under test; methods of the worker for ``collective_rpc``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from conformance.live.probe import Probe

_undo: list[Callable[[], None]] = []


def _replace(self: Probe, kind: str, name: str, rank: int = 0) -> None:
    """Replace what the model of ``rank`` holds under ``name`` by a copy, in the way of `_KINDS`."""
    if self.rank == rank:
        owner, _, leaf = name.rpartition(".")
        model = self.model_runner.get_model()
        with torch.inference_mode(False):
            _KINDS[kind](self.model_runner if kind == "model" else model.get_submodule(owner), leaf, model, owner)


def _restore(self: Probe, rank: int = 0) -> None:
    """As it was before, the very memory."""
    while self.rank == rank and _undo:
        _undo.pop()()


def _data(module: nn.Module, leaf: str, *_: object) -> None:
    parameter = module._parameters[leaf]
    assert parameter is not None
    old = parameter.data

    def put() -> None:
        parameter.data = old

    parameter.data = old.clone()
    _undo.append(put)


def _parameter(module: nn.Module, leaf: str, *_: object) -> None:
    old = module._parameters[leaf]
    assert old is not None
    module._parameters[leaf] = nn.Parameter(old.detach().clone(), requires_grad=False)
    _undo.append(lambda: module._parameters.update({leaf: old}))


def _buffer(module: nn.Module, leaf: str, *_: object) -> None:
    old = module._buffers[leaf]
    assert old is not None
    module._buffers[leaf] = old.clone()
    _undo.append(lambda: module._buffers.update({leaf: old}))


def _submodule(module: nn.Module, leaf: str, model: nn.Module, owner: str) -> None:
    """Another module in its place, under this one name; of tied modules the others stay."""
    above, _, name = owner.rpartition(".")
    parent, made = model.get_submodule(above), copy.copy(module)
    made.__dict__["_parameters"] = {
        key: p if p is None else nn.Parameter(p.detach().clone(), requires_grad=False)
        for key, p in module._parameters.items()
    }
    parent._modules[name] = made
    _undo.append(lambda: parent._modules.update({name: module}))


def _tied(module: nn.Module, leaf: str, model: nn.Module, owner: str) -> None:
    """Another parameter of the same shape and bits as this one's under its name."""
    other, old = model.get_parameter(f"{owner.replace('layers.1.', 'layers.0.')}.{leaf}"), module._parameters[leaf]
    module._parameters[leaf] = other
    _undo.append(lambda: module._parameters.update({leaf: old}))


def _gone(module: nn.Module, leaf: str, *_: object) -> None:
    old = module._parameters.pop(leaf)
    _undo.append(lambda: module._parameters.update({leaf: old}))


def _attribute(module: nn.Module, leaf: str, *_: object) -> None:
    """What code that says ``module.weight`` reads is no parameter any more."""
    found: Tensor = getattr(module, leaf)
    module.__dict__[leaf] = found.detach().clone()
    _undo.append(lambda: module.__dict__.__delitem__(leaf))


def _shape(module: nn.Module, leaf: str, *_: object) -> None:
    """The same memory, seen in another shape."""
    parameter = module._parameters[leaf]
    assert parameter is not None
    old = parameter.data

    def put() -> None:
        parameter.data = old

    parameter.data = old.view(-1)
    _undo.append(put)


def _model(runner: Any, *_: object) -> None:
    """The worker serves another model object."""
    old = runner.model

    def put() -> None:
        runner.model = old

    runner.model = copy.copy(old)
    _undo.append(put)


_KINDS: dict[str, Callable[..., None]] = {
    "data": _data,
    "parameter": _parameter,
    "buffer": _buffer,
    "submodule": _submodule,
    "tied": _tied,
    "gone": _gone,
    "attribute": _attribute,
    "shape": _shape,
    "model": _model,
}

for _name, _method in {"test_replace": _replace, "test_restore": _restore}.items():
    setattr(Probe, _name, _method)
