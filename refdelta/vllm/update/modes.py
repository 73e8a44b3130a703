"""Other ways to write a delta, behind the same checks: vLLM's patch loader, and whole tensors through the loader.

They cost the size of the tensors that a delta touches, not the change: the touched parameters are copied first, since a
loader may write anywhere in them, and audited whole afterwards. What they cannot do is refused before the first write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from refdelta.codec import bits
from refdelta.spec import Delta, DeltaError, Reason, TensorPatch
from refdelta.vllm.update.block_digests import BlockDigests
from refdelta.vllm.update.proven_layout import ProvenLayout
from refdelta.vllm.update.updating import DeltaUpdate

__all__ = ["LoadedUpdate", "update_of"]

Load = Callable[["LoadedUpdate", nn.Module], None]


@dataclass
class LoadedUpdate(DeltaUpdate):
    """A delta that a loader of vLLM's writes."""

    audit_whole: ClassVar[bool] = True
    load: Load = field(default=lambda update, model: None)
    _copies: dict[str, Tensor] = field(default_factory=dict)

    def write(self) -> None:
        """Copy what may be touched, load, and read back every changed element; blocks are audited by the caller."""
        self.proven.check_storage()
        written = [piece for piece in self.pieces if self._is_written(piece)]
        for param in sorted({piece.param for piece in written}):
            self._copies[param] = self._tensor(param).clone()
        if written:
            with torch.inference_mode(self._tensor(written[0].param).is_inference()):
                self.load(self, self.proven.model)
        for piece in written:
            if not bits.equal(self._held(piece), piece.values):
                raise DeltaError(
                    Reason.WRITE_FAILED, f"{piece.param}: vLLM's loader wrote something else, or elsewhere"
                )
            self.written += len(piece.indices)

    def undo(self) -> None:
        """Put the copies back, into what the model holds now. Raises `DeltaError` (``write_failed``) if it cannot."""
        for param in list(self._copies):
            tensor, old = self._tensor(param), self._copies[param]
            if (tensor.shape, tensor.dtype) != (old.shape, old.dtype):
                detail = f"{param}: vLLM's loader left {tensor.dtype} {list(tensor.shape)} in its place"
                raise DeltaError(Reason.WRITE_FAILED, detail)
            with torch.inference_mode(tensor.is_inference()):
                bits.bit_view(tensor).copy_(bits.bit_view(old))
            del self._copies[param]

    def touched(self) -> list[int]:
        """Every block of a parameter that a loader may have written in."""
        params = {piece.param for piece in self.pieces}
        return [number for number, block in enumerate(self.before.blocks) if block.param in params]

    @property
    def loadable(self) -> list[TensorPatch]:
        """What the loader is given: tied names under their first, nothing that the engine drops."""
        layout = self.proven.layout
        others = {*layout.aliases, *layout.dropped, *self.proven.unmapped.reasons}
        return [patch for patch in self.delta.patches if patch.changed and patch.name not in others]

    def whole(self, patch: TensorPatch) -> Tensor:
        """The patched tensor, of which only what this rank holds is right; the rest is zero."""
        full = torch.zeros(patch.shape, dtype=patch.dtype)
        for region in self.proven.layout.regions_of(patch.name):
            held = self.before.held({region.param: self._tensor(region.param)}, region)
            bits.bit_view(region.source_box.view(full)).copy_(bits.bit_view(held))
        bits.scatter_(full, patch.indices.cpu(), patch.values.cpu())
        return full


def update_of(
    mode: str, delta: Delta, proven: ProvenLayout, block_digests: BlockDigests, *, repeated: bool
) -> DeltaUpdate:
    """The update that ``mode`` makes of ``delta``. Raises `DeltaError` (``bad_option``) where it cannot carry it."""
    if mode == "in_place":
        return DeltaUpdate.of(delta, proven, block_digests, repeated=repeated)
    load, limits = _MODES[mode]
    found = LoadedUpdate.of(delta, proven, block_digests, repeated=repeated)
    found.load = load
    for patch in delta.patches:
        if why := limits(patch):
            raise DeltaError(Reason.BAD_OPTION, f"mode={mode} cannot write it: {why}", patch.name)
    if moved := sorted({piece.param for piece in found.pieces} & _rearranged(proven)):
        raise DeltaError(Reason.BAD_OPTION, f"mode={mode} cannot write {moved[0]}, which vLLM rearranges after loading")
    return found


def _rearranged(proven: ProvenLayout) -> set[str]:
    return {param for param, place in proven.position_maps.items() if not place.is_identity}


def _native(update: LoadedUpdate, model: nn.Module) -> None:
    from vllm.model_executor.model_loader import checkpoint_weight_patch as patching

    patches = [patching.CheckpointWeightPatch(p.name, p.shape, p.dtype, p.values, p.indices) for p in update.loadable]
    patching.load_checkpoint_weight_patches(model, patches)


def _native_limits(patch: TensorPatch) -> str | None:
    if not patch.dtype.is_floating_point:
        return f"vLLM's patch loader takes floating dtypes only, not {patch.dtype}"
    if bool(patch.values.float().isnan().any()):
        return "to vLLM's patch loader NaN means an unchanged element"
    return None


def _dense(update: LoadedUpdate, model: nn.Module) -> None:
    loader: Any = model
    loader.load_weights([(patch.name, update.whole(patch)) for patch in update.loadable])


_MODES: Mapping[str, tuple[Load, Callable[[TensorPatch], str | None]]] = {
    "native": (_native, _native_limits),
    "dense": (_dense, lambda patch: None),
}
