"""The layout map, observed: vLLM's own loader runs with data-less sources while its copies are recorded.

`model.load_weights` is called once with a meta tensor per checkpoint tensor, under a `TorchDispatchMode` that notes
every ``copy_`` into the model (destination view, source view) and executes none of them. Offsets and strides of the
two views are the map. Sources are told apart by their storage, so fused, sharded, replicated and expert layouts
follow from the copies alone. What a model's loader leaves out on purpose is listed by model (`dropped`). Any other
write into the model is refused: the trace must not change the engine that it looks at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from refdelta.codec.state import TensorInfo
from refdelta.layout.boxes import Box
from refdelta.layout.map import LayoutMap, Region
from refdelta.layout.reasons import OTHER_RANKS
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.tracing.dropped import declared_drops

__all__ = ["runtime_aliases", "runtime_tensors", "trace_model"]

aten = torch.ops.aten

_HEAD = "lm_head.weight"


def runtime_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a live model by name, an aliased one under its first name only."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def runtime_aliases(model: nn.Module) -> dict[str, str]:
    """Further name -> first name, for parameters that the model holds under several names (tied embeddings)."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            aliases[name] = known
    return aliases


def trace_model(model: nn.Module, checkpoint_tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> LayoutMap:
    """The layout of this worker's live model, traced from its own ``load_weights``.

    Args:
        model: the worker's model, loaded; nothing in it is changed.
        checkpoint_tensors: checkpoint tensor name -> (shape, dtype), as in the safetensors files.

    Raises `DeltaError` (``unsupported_engine``) where the loader does more than copy boxes of the checkpoint: converts,
    permutes through a temporary, reads values, or writes by another operation.
    """
    sources = {name: TensorInfo(tuple(shape), dtype) for name, (shape, dtype) in checkpoint_tensors.items()}
    live = runtime_tensors(model)
    recorder = _Recorder(live, sources)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(recorder.stand_ins())  # type: ignore[operator]  # nn.Module's attributes are untyped
    except DeltaError:
        raise
    except Exception as error:
        raise DeltaError(
            Reason.UNSUPPORTED_ENGINE, f"layout: the loader of {type(model).__name__} cannot be traced: {error}"
        ) from error
    mapped = {region.source for region in recorder.regions}
    written = {region.param for region in recorder.regions}
    persistent = dict(model.named_parameters())
    params = {
        name: TensorInfo(tuple(tensor.shape), tensor.dtype)
        for name, tensor in live.items()
        if name in persistent or name in written
    }
    aliases = _tied(model, sources, recorder)
    idle = [name for name in sources if name not in mapped and name not in aliases]
    return LayoutMap(
        sources=sources,
        params=params,
        regions=tuple(recorder.regions),
        padding={name: tuple(boxes) for name, boxes in recorder.padding.items()},
        aliases=aliases,
        dropped=declared_drops(model, idle) | {name: OTHER_RANKS for name in idle if name in recorder.empty},
    )


def _tied(model: nn.Module, sources: Mapping[str, TensorInfo], recorder: _Recorder) -> dict[str, str]:
    """Checkpoint name of a tied tensor -> the checkpoint tensor that fills the shared parameter.

    A model may know one parameter under many names (Gemma 4 lists its layers twice); of those, only names that the
    files or a trainer use count: a tensor of the files that the loader skipped, or the output head.
    """
    filled_by = {param: source for source, param in recorder.empty.items()}
    filled_by |= {region.param: region.source for region in recorder.regions}
    filled = set(filled_by.values())
    tied: dict[str, str] = {}
    for alias, param in runtime_aliases(model).items():
        # A multimodal wrapper nests its language model: the files do not say `language_model.`.
        parts = alias.split(".")
        names = {name for name in (".".join(parts[i:]) for i in range(len(parts))) if name in sources}
        if parts[-2:] == _HEAD.split("."):
            names = names or {_HEAD}
        if param in filled_by:
            tied |= dict.fromkeys(sorted(names - filled), filled_by[param])
    return tied


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a named tensor lies in its storage, in elements."""

    name: str
    offset: int
    numel: int
    dtype: torch.dtype


class _Recorder(TorchDispatchMode):
    """Records copies and padding fills into the live tensors instead of running them."""

    def __init__(self, live: Mapping[str, Tensor], sources: Mapping[str, TensorInfo]) -> None:
        TorchDispatchMode.__init__(self)
        self.regions: list[Region] = []
        self.padding: dict[str, list[Box]] = {}
        self.empty: dict[str, str] = {}
        self._live: dict[int, list[_Placed]] = {}
        for name, tensor in live.items():
            self._live.setdefault(_storage(tensor), []).append(
                _Placed(name, _offset(tensor), tensor.numel(), tensor.dtype)
            )
        self._strided = {name for name, tensor in live.items() if not tensor.is_contiguous()}
        self._stand_ins = {
            name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in sources.items()
        }
        self._source_of = {_storage(tensor): name for name, tensor in self._stand_ins.items()}

    def stand_ins(self) -> list[tuple[str, Tensor]]:
        """What the loader is given: (checkpoint name, meta tensor) in the files' order."""
        return list(self._stand_ins.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default and self._is_live(args[0]):
            self._copied(args[0], args[1])
            return args[0]
        if func in _FILLS and self._is_live(args[0]):
            self._filled(args[0], args[1] if len(args) > 1 else 0)
            return args[0]
        self._refuse_other_writes(func, args)
        return func(*args, **(kwargs or {}))

    def _is_live(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and _storage(tensor) in self._live

    def _copied(self, target: Tensor, source: Tensor) -> None:
        name = self._source_of.get(_storage(source)) if source.is_meta else None
        param = self._param(target)
        if name is None or source.dtype != self._stand_ins[name].dtype:
            raise _untraceable(f"{param.name} is filled from something other than a view of a checkpoint tensor")
        if target.numel() == 0:
            self.empty[name] = param.name
            return
        self.regions.append(
            Region(
                source=name,
                source_box=Box(_offset(source), tuple(target.shape), _strides_as(source, target)),
                param=param.name,
                param_box=_box(target, param),
            )
        )

    def _filled(self, target: Tensor, value: object) -> None:
        param = self._param(target)
        if value != 0:
            raise _untraceable(f"{param.name} is filled with {value!r}")
        if target.numel():
            self.padding.setdefault(param.name, []).append(_box(target, param))

    def _param(self, target: Tensor) -> _Placed:
        offset = _offset(target)
        for param in self._live[_storage(target)]:
            if param.offset <= offset <= param.offset + param.numel and param.dtype == target.dtype:
                if param.name in self._strided:
                    raise _untraceable(f"{param.name} is not contiguous")
                return param
        raise _untraceable("a write into a live storage belongs to no parameter")

    def _refuse_other_writes(self, func: Any, args: Sequence[object]) -> None:
        for position in _written(func):
            if position < len(args) and self._is_live(args[position]):
                raise _untraceable(f"the loader writes a live parameter by {func}")


@cache
def _written(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an operation writes."""
    kinds = [argument.alias_info for argument in func._schema.arguments]
    return tuple(position for position, kind in enumerate(kinds) if kind is not None and kind.is_write)


_FILLS = (aten.fill_.Scalar, aten.zero_.default)


def _untraceable(detail: str) -> DeltaError:
    return DeltaError(Reason.UNSUPPORTED_ENGINE, f"layout: {detail}")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _strides_as(source: Tensor, target: Tensor) -> tuple[int, ...]:
    """Strides of the source view over the target's axes; `copy_` broadcasts, which no layout needs."""
    if source.shape == target.shape:
        return tuple(source.stride())
    if source.numel() == target.numel() == 1:
        return (1,) * target.ndim
    raise _untraceable(f"a copy broadcasts {tuple(source.shape)} to {tuple(target.shape)}")


def _box(target: Tensor, param: _Placed) -> Box:
    return Box(_offset(target) - param.offset, tuple(target.shape), tuple(target.stride()))
