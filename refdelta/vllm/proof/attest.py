"""Proof, on the live engine, that the layout map still holds after loading.

A loader map says nothing about what happens next: kernels repack, permute and swap halves of parameters. So before the
first delta the mapped boxes of every live parameter are compared with the checkpoint, bit for bit. Only a parameter
that passes is ever written in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from refdelta.codec import bits
from refdelta.layout.map import LayoutMap, Region
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.proof.memory import Memory, held_now
from refdelta.vllm.proof.position_maps import PositionMap, live_elements
from refdelta.vllm.tracing.recorder import runtime_aliases, runtime_tensors

__all__ = ["Attestation", "attest", "held_box", "packed_layers", "said", "unlike"]


@dataclass(frozen=True, slots=True)
class Attestation:
    """What was proved about each runtime parameter of this rank; it holds no tensor, and looks each one up."""

    model: nn.Module
    proved: Mapping[str, Memory]
    """Parameter -> the memory that equalled the checkpoint on every mapped element."""
    failed: Mapping[str, str]
    """Parameter -> why it must not be written in place."""
    unproven: tuple[str, ...] = ()
    """Checkpoint tensors that equal bytes make indistinguishable (a constant tensor, or two equal ones): they match,
    but a swap would match too."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further name of a proved parameter -> its name here."""

    def tensor(self, name: str) -> Tensor:
        """What the model holds under a name now. Raises `DeltaError` (``unattested``) where it holds nothing."""
        found = held_now(self.model, name)
        if found is None:
            raise DeltaError(Reason.UNATTESTED, _GONE, name)
        return found

    def live(self) -> dict[str, Tensor]:
        """Every proved parameter as the model holds it now; without those that it holds no more."""
        found = {name: held_now(self.model, name) for name in self.proved}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def moved(self) -> dict[str, str]:
        """Proved parameter -> why what the model holds now, under any of its names, is not what was proved."""
        names = [(name, name) for name in self.proved] + list(self.aliases.items())
        found: dict[str, str] = {}
        for name, first in names:
            if why := _moved(self.proved[first], held_now(self.model, name)):
                found.setdefault(first, why if name == first else f"as {name}: {why}")
        return found


_GONE = "the model holds no tensor of this name any more"


def _moved(proved: Memory, held: Tensor | None) -> str | None:
    if held is None:
        return _GONE
    return None if Memory.of(held) == proved else "the engine replaced its memory after it was proved"


def attest(
    model: nn.Module,
    layout: LayoutMap,
    checkpoint: Mapping[str, Tensor],
    position_maps: Mapping[str, PositionMap | str] | None = None,
) -> Attestation:
    """Compare every mapped box of the live parameters and buffers with the checkpoint, bit for bit.

    Args:
        model: the live model of this rank.
        layout: the traced map of this rank.
        checkpoint: checkpoint tensor name -> tensor on the CPU; read one at a time.
        position_maps: parameter -> where its elements went after loading (what none went to must be zero), or why that
            is unknown. By default, and for other parameters: they stand where they were loaded.
    """
    live = {name: now for name in runtime_tensors(model) if (now := held_now(model, name)) is not None}
    moved = {param: place for param, place in (position_maps or {}).items() if isinstance(place, PositionMap)}
    report = layout.check()
    failed = {name: f"{count} elements are covered by no checkpoint tensor" for name, count in report.uncovered.items()}
    failed |= {name: _GONE for name in layout.params if name not in live}
    failed |= {name: f"written by both {a} and {b}" for name, a, b in report.overlapping}
    failed |= {
        param: f"{unlike(layout.sources[source].dtype, layout.params[param].dtype)} ({source})"
        for source, param in report.dtype_differs
    }
    failed |= {param: f"{source} leaves the parameter" for source, param in report.out_of_bounds}
    failed |= {param: place for param, place in (position_maps or {}).items() if isinstance(place, str)}
    failed |= {param: fault for param, place in moved.items() if param in live and (fault := place.fault(live[param]))}
    look_alikes: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for source, regions in _by_source(layout).items():
        tensor = checkpoint[source]
        for region in regions:
            if region.param in failed:
                continue
            held = held_box(live[region.param], layout.params[region.param].shape, moved.get(region.param), region)
            if finding := held if isinstance(held, str) else _mismatch(held, region, tensor):
                failed[region.param] = finding
        look_alikes[_fingerprint(tensor)].append(source)
    proved = {name: Memory.of(live[name]) for name in layout.params if name not in failed}
    aliases = {alias: name for alias, name in runtime_aliases(model).items() if name in proved}
    return Attestation(model, proved, failed, tuple(sorted(_unproven(look_alikes))), aliases)


def unlike(files: torch.dtype, engine: torch.dtype) -> str:
    """Of a parameter into which the checkpoint's values were converted: why it cannot be patched."""
    both = f"the engine holds {said(engine)}, the checkpoint's files {said(files)}"
    return f"{both}, so no element can be patched bit for bit"


def said(dtype: torch.dtype) -> str:
    """As vLLM's ``--dtype`` says it."""
    return str(dtype).removeprefix("torch.")


def packed_layers(model: nn.Module) -> list[str]:
    """CPU layers whose GEMM does not read the live weight but a packed copy of it (vLLM's ``cpu_linear``).

    Shown by behaviour, not by a flag: with a zero weight passed in, a GEMM that reads its argument gives zeros.
    """
    return [name for name, module in model.named_modules() if hasattr(module, "cpu_linear") and _is_packed(module)]


def _is_packed(module: nn.Module) -> bool:
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.numel() == 0:
        return True
    ones = torch.ones((1, weight.shape[1]), dtype=weight.dtype)
    found: Tensor = module.cpu_linear(ones, torch.zeros_like(weight), None)  # type: ignore[operator]
    return bool(found.ne(0).any())


def _by_source(layout: LayoutMap) -> dict[str, list[Region]]:
    grouped: dict[str, list[Region]] = defaultdict(list)
    for region in layout.regions:
        grouped[region.source].append(region)
    return grouped


def held_box(param: Tensor, shape: tuple[int, ...], place: PositionMap | None, region: Region) -> Tensor | str:
    """The elements that a region was loaded into, or why there are none."""
    if param.numel() == 0:
        return "the parameter is empty: its weight was repacked after loading"
    if not param.is_contiguous():
        return "the parameter is not contiguous"
    if place is None and tuple(param.shape) != shape:
        return f"its shape is {list(param.shape)} after loading, was {list(shape)}"
    return live_elements(param, region.param_box, place)


def _mismatch(held: Tensor, region: Region, source: Tensor) -> str | None:
    if held.dtype != source.dtype:
        return f"dtype {held.dtype}, checkpoint {source.dtype}"
    wanted = region.source_box.view(source.contiguous()).to(held.device)
    if bits.equal(held, wanted):
        return None
    return f"its bits differ from the checkpoint's {region.source} right after loading"


def _fingerprint(tensor: Tensor) -> tuple[object, ...]:
    """Equal for equal bytes; a constant tensor gets one that it shares with itself moved about."""
    words = bits.bit_view(tensor.contiguous()).flatten()
    if words.numel() == 0:
        return (tuple(tensor.shape), tensor.dtype)
    total = int(words.sum(dtype=torch.int64))
    weighted = int((words[:65536].to(torch.int64) * torch.arange(1, min(words.numel(), 65536) + 1)).sum())
    return (tuple(tensor.shape), tensor.dtype, total, weighted)


def _unproven(look_alikes: Mapping[tuple[object, ...], list[str]]) -> Iterable[str]:
    for fingerprint, names in look_alikes.items():
        if len(names) > 1 or _constant(fingerprint):
            yield from names


def _constant(fingerprint: tuple[object, ...]) -> bool:
    shape = fingerprint[0]
    if len(fingerprint) < 4 or not isinstance(shape, tuple):
        return False
    count, total, weighted = 1, fingerprint[2], fingerprint[3]
    for size in shape:
        count *= int(size)
    head = min(count, 65536)
    assert isinstance(total, int)
    assert isinstance(weighted, int)
    return count > 1 and total % count == 0 and weighted == (total // count) * head * (head + 1) // 2
