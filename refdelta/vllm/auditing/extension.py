"""Audit of anybody's engine: what it holds, compared bit for bit with a checkpoint plus deltas, whatever updated it.

Start vLLM with ``--worker-extension-cls refdelta.vllm.audit.AuditExtension``; no backend of refdelta is needed. Every
rank traces its own layout, which writes nothing, and reads the checkpoint one tensor at a time. `audit` asks an `LLM`;
``refdelta audit`` asks a server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from refdelta.checkpoints.patching import StateDigests, check_fits_checkpoint, write_run
from refdelta.checkpoints.reading import Checkpoint
from refdelta.codec import bits
from refdelta.codec.composition import compose, join
from refdelta.codec.state import TensorInfo
from refdelta.files.reading import read_delta
from refdelta.layout.boxes import positions_at
from refdelta.layout.map import LayoutMap, Region
from refdelta.layout.reasons import OTHER_RANKS
from refdelta.spec import DTYPE_CODES, Delta, DeltaError, Reason, TensorPatch
from refdelta.vllm.assumptions.experts import PROVEN_KERNELS, as_loaded, expert_layers, kernel, reads_live_weights
from refdelta.vllm.assumptions.linears import linears_as_loaded
from refdelta.vllm.assumptions.loaded_files import LoadedFiles
from refdelta.vllm.auditing.report import METHOD, AuditReport, Difference, Outcome, RankAudit, TensorAudit
from refdelta.vllm.proof.attest import held_box, packed_layers
from refdelta.vllm.proof.position_maps import PositionMap
from refdelta.vllm.proof.post_load import recover_permutations
from refdelta.vllm.tracing.recorder import runtime_tensors, trace_model

__all__ = ["AuditExtension", "audit", "compare", "explained"]


class AuditExtension:
    """vLLM's worker extension. It only reads, and it never raises: an error is part of the answer, on every rank.

    (vLLM's RPC channel falls out of step when a rank other than the last one raises.)
    """

    rank: int
    vllm_config: Any
    model_runner: Any

    def refdelta_compare(self, checkpoint_dir: str, delta_paths: Sequence[str] = ()) -> dict[str, Any]:
        """This rank's `RankAudit` as plain values, or ``{"rank": int, "error": text of a DeltaError}``.

        Args:
            checkpoint_dir: a checkpoint, on a file system that every rank reads.
            delta_paths: directories of deltas, applied in this order; the parts of one update stand together.
        """
        from vllm.config import set_current_vllm_config

        try:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                found = compare(
                    self.model_runner.get_model(), Path(checkpoint_dir), list(map(Path, delta_paths)), self._files().at
                )
            return RankAudit(self.rank, *found).to_plain()
        except DeltaError as error:
            return {"rank": self.rank, "error": str(explained(error, self._files().served, Path(checkpoint_dir)))}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return {"rank": self.rank, "error": str(DeltaError(Reason.RANK_FAILED, text))}

    def _files(self) -> LoadedFiles:
        return LoadedFiles(self.vllm_config, self.model_runner.get_model())


def explained(error: DeltaError, served: Callable[[], Checkpoint], checkpoint_dir: Path) -> DeltaError:
    """The error of a layout that cannot be traced, where the engine's own checkpoint tells that it is another model's.

    served: opens that checkpoint; where it cannot be found and read, nothing is known but the possibility.
    """
    if error.reason is not Reason.UNSUPPORTED_ENGINE:
        return error
    try:
        with served() as own, Checkpoint(checkpoint_dir) as given:
            has, asked, path = own.infos(), given.infos(), own.path
    except Exception:  # a hub id that is not in the cache, ...
        return DeltaError(error.reason, f"{error.detail}; is it another model than {checkpoint_dir}?")
    for name in sorted(has.keys() | asked.keys()):
        if has.get(name) != asked.get(name):
            says = f"it has {_said(has.get(name))}, the checkpoint {_said(asked.get(name))}"
            detail = f"the engine runs another model, {path}, than {checkpoint_dir}: {says}"
            return DeltaError(_why(has.get(name), asked.get(name)), detail, name)
    return error


def _said(info: TensorInfo | None) -> str:
    return "none of this name" if info is None else f"{DTYPE_CODES.get(info.dtype, info.dtype)} {list(info.shape)}"


def _why(has: TensorInfo | None, asked: TensorInfo | None) -> Reason:
    if has is None or asked is None:
        return Reason.UNKNOWN_TENSOR
    return Reason.SHAPE_MISMATCH if has.shape != asked.shape else Reason.DTYPE_MISMATCH


def audit(
    llm: Any, checkpoint_dir: str | os.PathLike[str], deltas: Sequence[str | os.PathLike[str]] = ()
) -> AuditReport:
    """Compare a vLLM ``LLM`` that was made with ``worker_extension_cls="refdelta.vllm.audit.AuditExtension"``.

    Raises `DeltaError`: what reading the files raises; ``base_mismatch`` or ``digest_mismatch`` where a lineage does
    not fit; ``unsupported_engine`` where the layout cannot be traced, or the extension is missing; ``unknown_tensor``,
    ``shape_mismatch`` or ``dtype_mismatch`` where the engine runs another model.
    """
    arguments = (os.path.abspath(checkpoint_dir), [os.path.abspath(delta) for delta in deltas])
    try:
        answers = llm.collective_rpc(METHOD, args=arguments)
    except Exception as error:
        if METHOD in str(error) and "is not implemented" in str(error):
            detail = (
                "the engine has no audit: make the LLM with worker_extension_cls=refdelta.vllm.audit.AuditExtension"
            )
            raise DeltaError(Reason.UNSUPPORTED_ENGINE, detail) from error
        raise
    return AuditReport.from_plain(answers)


Findings = tuple[dict[str, TensorAudit], dict[str, int], dict[str, int]]


def compare(
    model: nn.Module,
    checkpoint_dir: Path,
    delta_paths: Sequence[Path] = (),
    opened: Callable[[Path], Checkpoint] = Checkpoint,
) -> Findings:
    """This rank's live model against a checkpoint plus deltas: the last three fields of `RankAudit`."""
    change = _read(delta_paths)
    with opened(checkpoint_dir) as checkpoint:
        infos = checkpoint.infos()
        live = _Live.of(model, infos)
        expected = _Expected(checkpoint, live.layout, change)
        tensors = {name: live.compare(name, tensor) for name, tensor in expected}
    return tensors, dict(live.layout.check().uncovered), live.dirty_padding()


# --- what the engine should hold --------------------------------------------------------------------------------------


def _read(paths: Sequence[Path]) -> Delta | None:
    """The deltas as one. Raises `DeltaError` where they do not follow each other."""
    updates = [list(parts) for _, parts in groupby((read_delta(path) for path in paths), key=_update_of)]
    whole = [
        parts[0] if parts[0].lineage is None or not parts[0].lineage.is_partial else join(parts) for parts in updates
    ]
    return compose(whole) if whole else None


def _update_of(delta: Delta) -> object:
    """Equal for the parts of one update, and for nothing else."""
    lineage = delta.lineage
    return (lineage.run_id, lineage.version) if lineage is not None and lineage.is_partial else object()


class _Expected:
    """The checkpoint's tensors with the change applied, one at a time; at the end the lineage's digests are checked."""

    def __init__(self, checkpoint: Checkpoint, layout: LayoutMap, change: Delta | None) -> None:
        self._checkpoint = checkpoint
        self._patches: Mapping[str, TensorPatch] = {}
        self._lineage = None if change is None else change.lineage
        if change is not None:
            layout.check_aliases(change.patches)
            # Of a tied tensor that the files hold once, the trainer may send both names: the same change.
            patches = [p for p in change.patches if p.name in layout.sources or p.name not in layout.aliases]
            check_fits_checkpoint(Delta(tuple(patches), change.total_elements), checkpoint.infos())
            self._patches = {patch.name: patch for patch in patches}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        stated = self._lineage is not None and (self._lineage.base_digest or self._lineage.digest)
        digests = StateDigests() if stated else None
        for name in self._checkpoint:
            tensor, patch = self._checkpoint[name], self._patches.get(name)
            if digests:
                info = self._checkpoint.info(name)
                digests.add_tensor(name, info)
                digests.add_run(name, info, 0, tensor.flatten())
            old = None if patch is None else write_run(patch, 0, tensor)
            if digests and patch is not None and old is not None:
                digests.change(patch, old)
            yield name, tensor
        if digests:
            self._check(digests)

    def _check(self, digests: StateDigests) -> None:
        lineage = self._lineage
        assert lineage is not None
        if lineage.base_digest not in (None, digests.before):
            based = f"the deltas are based on version {lineage.base_version} of run {lineage.run_id}"
            raise DeltaError(
                Reason.BASE_MISMATCH, f"{based}, {lineage.base_digest}; the checkpoint is {digests.before}"
            )
        if lineage.digest not in (None, digests.after):
            raise DeltaError(
                Reason.DIGEST_MISMATCH, f"expected {lineage.digest} after the deltas, found {digests.after}"
            )


# --- what it holds ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Compared:
    """One box of a checkpoint tensor, compared."""

    elements: int
    differing: int = 0
    position: int = 0
    """Of the first differing element, flat in the checkpoint tensor."""
    first: Difference | None = None


@dataclass(frozen=True)
class _Live:
    """A rank's live tensors and the way to them from checkpoint coordinates."""

    tensors: Mapping[str, Tensor]
    layout: LayoutMap
    position_maps: Mapping[str, PositionMap]
    closed: Mapping[str, str]
    """Parameter -> why its elements cannot be read."""
    copied: Mapping[str, str]
    """Parameter -> why equal elements would not make equal products."""

    @classmethod
    def of(cls, model: nn.Module, sources: Mapping[str, TensorInfo]) -> _Live:
        """Trace a live model; nothing in it is changed."""
        tensors = runtime_tensors(model)
        position_maps = _places(model)
        with ExitStack() as stack:
            stack.enter_context(as_loaded(model))
            stack.enter_context(linears_as_loaded(model))
            layout = trace_model(model, {name: (info.shape, info.dtype) for name, info in sources.items()})
        closed = {param: place for param, place in position_maps.items() if isinstance(place, str)}
        known = {param: place for param, place in position_maps.items() if isinstance(place, PositionMap)}
        for param, place in known.items():
            try:
                place.unused(tensors[param].numel())
            except ValueError as error:
                closed[param] = str(error)
        return cls(tensors, layout, known, closed, _copied(model))

    def compare(self, name: str, expected: Tensor) -> TensorAudit:
        """Every element of one checkpoint tensor that this rank holds."""
        info = TensorInfo(tuple(expected.shape), expected.dtype)
        regions = self.layout.regions_of(self.layout.aliases.get(name, name))
        if not regions:
            return self._absent(name, info)
        found = [self._compare_region(region, expected) for region in regions]
        why = next((f"{r.param}: {one}" for r, one in zip(regions, found, strict=True) if isinstance(one, str)), None)
        if why is not None:
            return TensorAudit(info, Outcome.NOT_COMPARABLE, reason=why)
        return self._judged(info, regions, [one for one in found if isinstance(one, _Compared)])

    def _judged(self, info: TensorInfo, regions: Sequence[Region], found: Sequence[_Compared]) -> TensorAudit:
        first = min((one for one in found if one.first), key=lambda one: one.position, default=None)
        copied = next((f"{r.param}: {self.copied[r.param]}" for r in regions if r.param in self.copied), None)
        outcome = Outcome.DIFFERS if first else Outcome.NOT_COMPARABLE if copied else Outcome.EQUAL
        boxes = tuple(dict.fromkeys(region.source_box for region in regions))
        return TensorAudit(
            info,
            outcome,
            elements=sum(one.elements for one in found),
            differing=sum(one.differing for one in found),
            first=None if first is None else first.first,
            reason=None if first else copied,
            boxes=() if any(box.numel == info.numel for box in boxes) else boxes,
        )

    def _compare_region(self, region: Region, expected: Tensor) -> _Compared | str:
        held = self._held(region, expected.dtype)
        if isinstance(held, str):
            return held
        at = bits.differing(held, region.source_box.view(expected).to(held.device)).cpu()
        if not len(at):
            return _Compared(held.numel())
        positions = positions_at(region.source_box, at)
        chosen = int(positions.argmin())
        first = _difference(region.param, int(positions[chosen]), expected, held.flatten()[at[chosen]])
        return _Compared(held.numel(), len(at), int(positions[chosen]), first)

    def dirty_padding(self) -> dict[str, int]:
        """Parameter -> how many of its padding elements are not zero, where any."""
        counts = {param: sum(map(_nonzero, self._padding(param))) for param in self.layout.params}
        return {param: count for param, count in counts.items() if count}

    def _padding(self, param: str) -> Iterator[Tensor]:
        tensor = self.tensors[param]
        if param in self.closed or not tensor.numel() or not tensor.is_contiguous():
            return
        if place := self.position_maps.get(param):
            yield bits.gather(tensor, place.unused(tensor.numel()))
        elif tuple(tensor.shape) == self.layout.params[param].shape:
            yield from (box.view(tensor) for box in self.layout.padding.get(param, ()))

    def _held(self, region: Region, dtype: torch.dtype) -> Tensor | str:
        param, tensor = region.param, self.tensors[region.param]
        if param in self.closed:
            return self.closed[param]
        if not tensor.numel():
            return (
                "packed: the parameter is empty, products read a copy of its weight that was rearranged after loading"
            )
        if tensor.dtype != dtype:
            return f"derived: it holds {tensor.dtype}, computed from {dtype}"
        return held_box(tensor, self.layout.params[param].shape, self.position_maps.get(param), region)

    def _absent(self, name: str, info: TensorInfo) -> TensorAudit:
        reason = self.layout.dropped.get(name)
        if reason == OTHER_RANKS:
            return TensorAudit(info, Outcome.ELSEWHERE, reason=reason)
        if reason is None:
            return TensorAudit(info, Outcome.NOT_COMPARABLE, reason="it reaches no parameter, and no rule says why")
        return TensorAudit(info, Outcome.NOT_COMPARABLE, reason=f"dropped: {reason}")


def _places(model: nn.Module) -> dict[str, PositionMap | str]:
    """Expert parameter -> where its elements went after loading, or why that is unknown."""
    layers = expert_layers(model)
    strange = {name: kernel(layer) for name, layer in layers.items() if kernel(layer) not in PROVEN_KERNELS}
    if strange:  # one kernel serves all layers; nothing is run that was not seen to be a permutation
        kinds = ", ".join(sorted(set(strange.values())))
        why = f"derived: what kernel {kinds} makes of experts after loading was not proven"
        return {f"{name}.{param}": why for name, layer in layers.items() for param in layer._parameters}
    return recover_permutations(model)


def _copied(model: nn.Module) -> dict[str, str]:
    """Parameter -> why its matrix product does not read it, as a trial product shows."""
    packed = {
        f"{name}.weight": "packed: it is equal, but its product reads a packed copy" for name in packed_layers(model)
    }
    for name, layer in expert_layers(model).items():
        if kernel(layer) in PROVEN_KERNELS and not reads_live_weights(layer):
            packed |= {
                f"{name}.{param}": "packed: it is equal, but its kernel reads copies" for param in layer._parameters
            }
    return packed


def _difference(param: str, position: int, expected: Tensor, found: Tensor) -> Difference:
    """Of the element at a flat position of the checkpoint tensor."""
    wanted, rest, index = expected.flatten()[position], position, list[int]()
    for size in reversed(expected.shape):
        rest, axis = divmod(rest, size)
        index.append(axis)
    return Difference(tuple(reversed(index)), param, _hex(wanted), _hex(found))


def _nonzero(padding: Tensor) -> int:
    return int(bits.bit_view(padding).ne(0).sum())


def _hex(element: Tensor) -> str:
    width = element.itemsize
    word = int(bits.bit_view(element.cpu())) & ((1 << 8 * width) - 1)
    return f"0x{word:0{2 * width}x}"
