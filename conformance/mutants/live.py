"""refdelta's backend and encoder, broken in a running engine: ``--mutant conformance.mutants.live:NAME``.

Each function patches what runs after the engine was proved, so that it starts and the suite has to find the fault. It
is called in every worker and in the process that encodes; `conformance.mutants.switch` puts back what it patched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refdelta.apply import read_delta
from refdelta.codec import bits, encoding
from refdelta.layout_map import LayoutMap, Region
from refdelta.spec import Delta, DeltaError, Lineage, Reason, TensorPatch
from refdelta.vllm.update import session
from refdelta.vllm.update import updating as update
from refdelta.vllm.update.anchor import AnchorUpdate
from refdelta.vllm.update.block_digests import BlockDigests
from refdelta.vllm.update.engine_state import EngineState
from refdelta.vllm.update.ledger import Account, Ledger
from refdelta.vllm.update.options import Options
from refdelta.vllm.update.proven_layout import Piece, ProvenLayout
from refdelta.vllm.update.ranks import RankGroup, StepFailed
from refdelta.vllm.update.updating import DeltaUpdate

from .registry import LIVE, Broken, Mutant, register

QWEN, QWEN_TP2, GEMMA, MOE, TIED = (
    "qwen3-untied tp=1",
    "qwen3-untied tp=2",
    "gemma4-moe tp=1",
    "qwen3-moe tp=1",
    "qwen3-tied-both tp=1",
)
WIDE, FLOAT32 = "qwen3-wide tp=2", "qwen3-float32 tp=1"
"""Of `test_live_sizes`; what must be caught there is in `live_sizes`."""
ROWS: Mapping[str, tuple[str, ...]] = {
    QWEN: (),
    QWEN_TP2: ("base", "every_tensor", "first_element", "last_element", "shard_boundaries", "one_rank_fails"),
    GEMMA: ("base", "every_tensor", "first_element"),
    MOE: ("base", "every_tensor", "first_element"),
    TIED: ("base", "every_tensor", "separate_tied"),
    WIDE: ("every_tensor", "shard_boundaries", "special_values"),
    FLOAT32: ("every_tensor", "shard_boundaries", "special_values"),
}
"""The engines, and the checks that each of them runs; the first runs all."""

Route = Callable[[ProvenLayout, BlockDigests, TensorPatch], list[Piece]]
Moved = Callable[[Tensor, tuple[int, ...]], Tensor]


def caught_by(check: str, by: str = "", *, kind: str, fault: int | None, row: str = QWEN) -> Callable[[Broken], Any]:
    """Register a function; without an argument it breaks the process for good."""

    def decorate(broken: Broken) -> Callable[..., None]:
        @wraps(broken)
        def apply(patch: pytest.MonkeyPatch | None = None) -> None:
            broken(patch or pytest.MonkeyPatch())

        name, test = broken.__name__, by or f"test_{check}"
        register(Mutant(name, kind, LIVE, f"{broken.__module__}:{name}", broken.__doc__ or "", check, test, fault, row))
        return apply

    return decorate


def _undefended(patch: pytest.MonkeyPatch) -> None:
    """Turn off what the backend checks of itself, as in a backend without it: the suite has to find the fault."""

    after = Ledger.after

    def trusting(self: Ledger, delta: Delta, accounts: Sequence[Account], *, repeated: bool) -> Ledger:
        counts = {tensor.name: tensor.changed for tensor in delta.patches}
        sums = [Account({}, account.sums) for account in accounts[1:]]
        lineage = delta.lineage and replace(delta.lineage, layer_digests=None)
        whole = [Account(counts, accounts[0].sums), *sums]
        return after(self, replace(delta, lineage=lineage), whole, repeated=repeated)

    patch.setattr(Ledger, "after", trusting)
    patch.setattr(EngineState, "check_written", lambda self, update, budget: 0)


# --- routers: one rule of the layout each ----------------------------------------------------------------------------


def _rerouted(
    patch: pytest.MonkeyPatch, change: Callable[[Route, ProvenLayout, BlockDigests, TensorPatch], list[Piece]]
) -> None:
    original = update._route
    patch.setattr(update, "_route", lambda *arguments: change(original, *arguments))
    _undefended(patch)


def _renamed(patch: pytest.MonkeyPatch, one: str, other: str) -> None:
    names = {one: other, other: one}

    def route(original: Route, target: ProvenLayout, block_digests: BlockDigests, tensor: TensorPatch) -> list[Piece]:
        name = re.sub("|".join(map(re.escape, names)), lambda found: names[found.group()], tensor.name)
        return original(target, block_digests, replace(tensor, name=name))

    _rerouted(patch, route)


def _moved(
    patch: pytest.MonkeyPatch, names: str, where: Callable[[Tensor, tuple[int, ...]], Tensor], rank: int
) -> None:
    """On ``rank`` the changes of matching tensors are taken for those at other positions, where these are inside."""

    def route(original: Route, target: ProvenLayout, block_digests: BlockDigests, tensor: TensorPatch) -> list[Piece]:
        if RankGroup.world().rank != rank or not re.search(names, tensor.name):
            return original(target, block_digests, tensor)
        at = where(tensor.indices.to(torch.int64), tensor.shape)
        inside = (at >= 0) & (at < tensor.numel)
        kept = TensorPatch(tensor.name, tensor.shape, at[inside].to(tensor.indices.dtype), tensor.values[inside])
        return original(target, block_digests, kept)

    _rerouted(patch, route)


@caught_by("every_tensor", kind="router", fault=23)
def fused_weights_skipped(patch: pytest.MonkeyPatch) -> None:
    """q, k, v, gate and up are not runtime parameters, so their changes go nowhere."""

    def route(original: Route, target: ProvenLayout, block_digests: BlockDigests, tensor: TensorPatch) -> list[Piece]:
        found = original(target, block_digests, tensor)
        return [piece for piece in found if not re.search("qkv_proj|gate_up_proj", piece.param)]

    _rerouted(patch, route)


@caught_by("every_tensor", kind="router", fault=39)
def k_and_v_swapped(patch: pytest.MonkeyPatch) -> None:
    """The changes of k_proj land in v_proj's rows, and the reverse."""
    _renamed(patch, "k_proj", "v_proj")


@caught_by("every_tensor", kind="router", fault=39)
def q_norm_and_k_norm_swapped(patch: pytest.MonkeyPatch) -> None:
    """The changes of q_norm land in k_norm, and the reverse."""
    _renamed(patch, "q_norm", "k_norm")


@caught_by("every_tensor", kind="router", fault=28)
def gate_and_up_swapped(patch: pytest.MonkeyPatch) -> None:
    """The changes of gate_proj land in up_proj's half, and the reverse."""
    _renamed(patch, "gate_proj", "up_proj")


@caught_by("every_tensor", kind="router", fault=24)
def layers_are_one(patch: pytest.MonkeyPatch) -> None:
    """Every layer's norms are taken for the first one's."""

    def route(original: Route, target: ProvenLayout, block_digests: BlockDigests, tensor: TensorPatch) -> list[Piece]:
        name = re.sub(r"layers\.\d+\.(\w+norm)", r"layers.0.\1", tensor.name)
        return original(target, block_digests, replace(tensor, name=name))

    _rerouted(patch, route)


@caught_by("every_tensor", kind="router", fault=26)
def o_proj_transposed(patch: pytest.MonkeyPatch) -> None:
    """The positions of o_proj are read column by column."""

    def transposed(at: Tensor, shape: tuple[int, ...]) -> Tensor:
        return (at % shape[0]) * shape[1] + at // shape[0]

    _moved(patch, "o_proj", transposed, 0)


@caught_by("every_tensor", kind="router", fault=27, row=QWEN_TP2)
def second_rank_gets_first_rows(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 writes rank 0's half of every row-sharded projection into its own shard."""
    _moved(patch, "(q|k|v|gate|up)_proj", lambda at, shape: _half_up(at, shape[0] * shape[1]), 1)


def _half_up(at: Tensor, numel: int) -> Tensor:
    return torch.where(at < numel // 2, at + numel // 2, -1)


@caught_by("every_tensor", kind="router", fault=27, row=QWEN_TP2)
def second_rank_gets_first_columns(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 writes rank 0's columns of every column-sharded projection into its own shard."""

    def right(at: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.where(at % shape[1] < shape[1] // 2, at + shape[1] // 2, -1)

    _moved(patch, "(o|down)_proj", right, 1)


@caught_by("shard_boundaries", kind="router", fault=31, row=QWEN_TP2)
def vocabulary_cut_unpadded(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 takes the vocabulary to be cut at half its rows, not at half of the padded ones."""

    def shifted(at: Tensor, shape: tuple[int, ...]) -> Tensor:
        padded = -(-shape[0] // 64) * 64
        return at + (padded // 2 - shape[0] // 2) * shape[1]

    _moved(patch, "embed_tokens|lm_head", shifted, 1)


@caught_by("every_tensor", kind="router", fault=24, row=GEMMA)
def buffers_skipped(patch: pytest.MonkeyPatch) -> None:
    """Checkpoint tensors that become buffers (layer scalars) are no parameters, so their changes go nowhere."""

    def route(original: Route, target: ProvenLayout, block_digests: BlockDigests, tensor: TensorPatch) -> list[Piece]:
        return [] if tensor.name.endswith("layer_scalar") else original(target, block_digests, tensor)

    _rerouted(patch, route)


@caught_by("every_tensor", kind="router", fault=24, row=GEMMA)
def second_place_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A k that is v too is written to K alone."""
    _rerouted(patch, lambda original, *arguments: original(*arguments)[:1])


@caught_by("every_tensor", kind="router", fault=28, row=MOE)
def experts_as_loaded(patch: pytest.MonkeyPatch) -> None:
    """Experts are written where they were loaded, not where the kernel reads them."""
    route = ProvenLayout.route

    def as_loaded(
        self: ProvenLayout, tensor: TensorPatch, numbers: Sequence[int], regions: Sequence[Region]
    ) -> list[Piece]:
        return route(replace(self, position_maps={}), tensor, numbers, regions)

    patch.setattr(ProvenLayout, "route", as_loaded)
    _undefended(patch)


@caught_by("every_tensor", kind="router", fault=27, row=MOE)
def experts_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Expert 0's changes land in expert 1, and the reverse."""
    _renamed(patch, "experts.0.", "experts.1.")


# --- writing in place ------------------------------------------------------------------------------------------------


def _put(patch: pytest.MonkeyPatch, write: Callable[[Tensor, Piece], None]) -> None:
    patch.setattr(update, "_put", write)
    _undefended(patch)


@caught_by("every_tensor", kind="applier", fault=None)
def values_added(patch: pytest.MonkeyPatch) -> None:
    """Values are taken for differences."""

    def put(tensor: Tensor, piece: Piece) -> None:
        bits.scatter_(tensor, piece.indices, bits.gather(tensor, piece.indices) + piece.values)

    _put(patch, put)


@caught_by("special_values", kind="encoder", fault=1)
def encoded_by_value(patch: pytest.MonkeyPatch) -> None:
    """The encoder compares numbers: a sign of zero is missed, and a NaN differs from itself."""

    def differing(a: Tensor, b: Tensor) -> Tensor:
        return (a != b).flatten().nonzero().flatten()

    # The encoder looks the function up on its own name for the module.
    patch.setattr(encoding, "bits", _Overlay(differing))


class _Overlay:
    """`refdelta.codec.bits` with another `differing`."""

    def __init__(self, differing: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.differing = differing

    def __getattr__(self, name: str) -> object:
        return getattr(bits, name)


@caught_by("special_values", kind="applier", fault=1)
def written_by_value(patch: pytest.MonkeyPatch) -> None:
    """The backend skips elements that hold an equal number already: a sign of zero is not written."""

    def put(tensor: Tensor, piece: Piece) -> None:
        differs = bits.gather(tensor, piece.indices) != piece.values
        bits.scatter_(tensor, piece.indices[differs], piece.values[differs])

    _put(patch, put)


@caught_by("special_values", kind="applier", fault=3)
def nan_left_out(patch: pytest.MonkeyPatch) -> None:
    """NaN stands for unchanged: what becomes NaN keeps its old value."""

    def put(tensor: Tensor, piece: Piece) -> None:
        number = ~piece.values.isnan()
        bits.scatter_(tensor, piece.indices[number], piece.values[number])

    _put(patch, put)


@caught_by("special_values", kind="applier", fault=12)
def through_float16(patch: pytest.MonkeyPatch) -> None:
    """Values are carried in float16 on the way: what is larger or finer is lost."""

    def put(tensor: Tensor, piece: Piece) -> None:
        bits.scatter_(tensor, piece.indices, piece.values.to(torch.float16).to(piece.values.dtype))

    _put(patch, put)


@caught_by("first_element", kind="applier", fault=5)
def first_position_skipped(patch: pytest.MonkeyPatch) -> None:
    """Position 0 of a parameter is taken for padding."""

    def put(tensor: Tensor, piece: Piece) -> None:
        kept = piece.indices > 0
        bits.scatter_(tensor, piece.indices[kept], piece.values[kept])

    _put(patch, put)


@caught_by("last_element", kind="applier", fault=5)
def last_position_skipped(patch: pytest.MonkeyPatch) -> None:
    """The last element of a parameter is never written."""

    def put(tensor: Tensor, piece: Piece) -> None:
        kept = piece.indices < tensor.numel() - 1
        bits.scatter_(tensor, piece.indices[kept], piece.values[kept])

    _put(patch, put)


@caught_by("every_tensor", kind="applier", fault=2)
def low_byte_kept(patch: pytest.MonkeyPatch) -> None:
    """An element is written only where its lowest byte changes."""

    def put(tensor: Tensor, piece: Piece) -> None:
        old = bits.gather(tensor, piece.indices)
        differs = ((bits.bit_view(old) ^ bits.bit_view(piece.values)) & 0xFF) != 0
        bits.scatter_(tensor, piece.indices[differs], piece.values[differs])

    _put(patch, put)


@caught_by("twice", kind="applier", fault=16)
def repetition_taken_back(patch: pytest.MonkeyPatch) -> None:
    """A delta that changes nothing any more is written as its own inverse."""
    write = DeltaUpdate.write
    last: dict[str, Tensor] = {}

    def toggling(self: DeltaUpdate) -> None:
        write(self)
        for piece, old in self._old:
            place = f"{piece.param} {piece.region} {piece.indices.tolist()}"
            if place in last and bits.equal(old, piece.values):
                bits.scatter_(self._tensor(piece.param), piece.indices, last[place])
            last[place] = old

    patch.setattr(DeltaUpdate, "write", toggling)
    _undefended(patch)


@caught_by("empty", kind="applier", fault=16)
def empty_is_an_error(patch: pytest.MonkeyPatch) -> None:
    """A step without a change is refused."""
    of = DeltaUpdate.of.__func__  # type: ignore[attr-defined]

    def refusing(cls: type[DeltaUpdate], delta: Delta, *rest: Any, **options: Any) -> DeltaUpdate:
        if not delta.patches:
            raise DeltaError(Reason.BAD_OPTION, "nothing to do")
        made: DeltaUpdate = of(cls, delta, *rest, **options)
        return made

    patch.setattr(DeltaUpdate, "of", classmethod(refusing))


@caught_by("chain_of_three", kind="applier", fault=17)
def every_other_update_kept(patch: pytest.MonkeyPatch) -> None:
    """Old values stand in for new ones in every second update of a parameter."""
    seen: dict[int, int] = {}

    def put(tensor: Tensor, piece: Piece) -> None:
        seen[tensor.data_ptr()] = count = seen.get(tensor.data_ptr(), 0) + 1
        if count % 2:
            bits.scatter_(tensor, piece.indices, piece.values)

    _put(patch, put)


@caught_by("behaviour", kind="applier", fault=28)
def linear_weights_held_by_value(patch: pytest.MonkeyPatch) -> None:
    """Products keep the weight that they saw first, as a packed copy does: parameters look right, answers are stale."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    held: dict[object, Tensor] = {}

    def apply(self: object, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = held.setdefault(layer, layer.weight.detach().clone())
        return torch.nn.functional.linear(x, weight, bias)

    patch.setattr(UnquantizedLinearMethod, "apply", apply)


# --- refusals --------------------------------------------------------------------------------------------------------


@caught_by("unknown_name", kind="reader", fault=23)
def unknown_names_skipped(patch: pytest.MonkeyPatch) -> None:
    """A name that the engine does not know is not an error."""
    stage = session.Session.stage

    def lenient(self: session.Session, path: Path) -> str:
        def known(place: Path) -> Delta:
            delta, sources = read_delta(place), self.proven.layout.sources
            return replace(delta, patches=tuple(patch for patch in delta.patches if patch.name in sources))

        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(session, "read_delta", known)
            return stage(self, path)

    patch.setattr(session.Session, "stage", lenient)


@caught_by("wrong_shape", kind="reader", fault=26)
def sizes_compared_alone(patch: pytest.MonkeyPatch) -> None:
    """Any shape will do whose positions are inside."""
    check = LayoutMap.check_patch

    def lenient(self: LayoutMap, tensor: TensorPatch) -> None:
        known = self.sources.get(tensor.name)
        fits = known is not None and (not tensor.changed or int(tensor.indices[-1]) < known.numel)
        check(self, replace(tensor, shape=known.shape) if known is not None and fits else tensor)

    patch.setattr(LayoutMap, "check_patch", lenient)


@caught_by("malformed_second", kind="reader", fault=5)
def positions_clamped(patch: pytest.MonkeyPatch) -> None:
    """Positions outside the tensor are moved to its ends."""
    check = TensorPatch.check_indices

    def clamping(self: TensorPatch) -> None:
        inside = self.indices.clamp(0, max(0, self.numel - 1))
        object.__setattr__(self, "indices", inside)
        check(self)

    patch.setattr(TensorPatch, "check_indices", clamping)


@caught_by("separate_tied", kind="reader", fault=None, row=TIED)
def aliases_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A change to one of two tied names is written to both."""
    patch.setattr(LayoutMap, "check_aliases", lambda self, patches: None)


# --- one rank of several ---------------------------------------------------------------------------------------------


@caught_by("one_rank_fails", kind="rank", fault=38, row=QWEN_TP2)
def first_rank_raises_alone(patch: pytest.MonkeyPatch) -> None:
    """The first rank raises for all, where only the last may."""
    patch.setattr(RankGroup, "is_reporting_rank", property(lambda self: self.rank == 0))


@caught_by("one_rank_fails", kind="rank", fault=38, row=QWEN_TP2)
def nobody_raises(patch: pytest.MonkeyPatch) -> None:
    """A rank's failure is logged, and the update answers that it succeeded."""
    patch.setattr(RankGroup, "is_reporting_rank", property(lambda self: False))


@caught_by("every_tensor", kind="rank", fault=38, row=QWEN_TP2)
def second_rank_writes_nothing(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 agrees to everything and writes nothing."""
    put = update._put

    def only_first(tensor: Tensor, piece: Piece) -> None:
        if RankGroup.world().rank != 1:
            put(tensor, piece)

    _put(patch, only_first)


# --- versions --------------------------------------------------------------------------------------------------------

_BASE = "test_another_base_is_refused"
_RESULT = "test_another_result_is_refused"


def _base_check(patch: pytest.MonkeyPatch, seen: Callable[[Ledger, Lineage], Lineage]) -> None:
    """The base check is given another lineage than the delta's."""
    check = Ledger.check_base

    def changed(self: Ledger, lineage: Lineage | None, options: Options) -> None:
        check(self, None if lineage is None else seen(self, lineage), options)

    patch.setattr(Ledger, "check_base", changed)


@caught_by("versions", _BASE, kind="version", fault=15)
def base_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Any delta is taken, whatever it is based on."""
    patch.setattr(Ledger, "check_base", lambda self, lineage, options: None)


@caught_by("versions", _BASE, kind="version", fault=35)
def base_digest_not_compared(patch: pytest.MonkeyPatch) -> None:
    """The version that a delta is based on is compared, not the weights."""
    _base_check(patch, lambda ledger, lineage: replace(lineage, base_digest=ledger.digest))


@caught_by("versions", _BASE, kind="version", fault=15)
def base_version_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Of a delta without a base digest nothing is compared."""
    _base_check(patch, lambda ledger, lineage: replace(lineage, base_version=ledger.version))


@caught_by("versions", _BASE, kind="version", fault=19)
def runs_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    """Versions of another run count as this one's."""
    _base_check(patch, lambda ledger, lineage: replace(lineage, run_id=ledger.run_id or lineage.run_id))


@caught_by("versions", _RESULT, kind="version", fault=35)
def result_not_compared(patch: pytest.MonkeyPatch) -> None:
    """The digest that a delta states for its result is not compared."""
    after = Ledger.after

    def trusting(self: Ledger, delta: Delta, accounts: Sequence[Account], *, repeated: bool) -> Ledger:
        lineage = delta.lineage and replace(delta.lineage, digest=None, layer_digests=None)
        return after(self, replace(delta, lineage=lineage), accounts, repeated=repeated)

    patch.setattr(Ledger, "after", trusting)


@caught_by("versions", _RESULT, kind="version", fault=36)
def result_compared_too_late(patch: pytest.MonkeyPatch) -> None:
    """The result's digest is compared after the write, and nothing is undone."""
    after, write = Ledger.after, DeltaUpdate.write
    late: list[DeltaError] = []

    def noting(self: Ledger, delta: Delta, accounts: Sequence[Account], *, repeated: bool) -> Ledger:
        try:
            return after(self, delta, accounts, repeated=repeated)
        except DeltaError as error:
            late.append(error)
            return self

    def raising(self: DeltaUpdate) -> None:
        write(self)
        if late:
            raise late.pop()

    patch.setattr(Ledger, "after", noting)
    patch.setattr(DeltaUpdate, "write", raising)
    patch.setattr(DeltaUpdate, "undo", lambda self: None)


@caught_by("versions", _RESULT, kind="version", fault=16)
def version_moves_on_failure(patch: pytest.MonkeyPatch) -> None:
    """An update that is refused leaves its version behind."""
    from refdelta.vllm.backend import DeltaSnapshotEngine

    step = DeltaSnapshotEngine._step

    def moving(self: DeltaSnapshotEngine, name: str, action: Callable[[], Any]) -> Any:
        deltas = self.session.deltas if self.session else []
        try:
            return step(self, name, action)
        except StepFailed:
            lineage = deltas[-1].lineage if deltas and name == "settle" else None
            if lineage is not None:
                state = self.state
                state.ledger = replace(state.ledger, run_id=lineage.run_id, version=lineage.version)
            raise

    patch.setattr(DeltaSnapshotEngine, "_step", moving)


@caught_by("versions", "test_a_repeated_version_changes_nothing", kind="version", fault=16)
def repetition_refused(patch: pytest.MonkeyPatch) -> None:
    """A version that is sent again, because its answer was lost, is taken for one on another base."""
    patch.setattr(Ledger, "holds", lambda self, lineage: False)


@caught_by("versions", "test_a_repeated_version_changes_nothing", kind="version", fault=35)
def repetition_not_compared(patch: pytest.MonkeyPatch) -> None:
    """The version that the engine holds is taken for a repetition, whatever weights it states."""

    def by_number(self: Ledger, lineage: Lineage | None) -> bool:
        return lineage is not None and (lineage.run_id, lineage.version) == (self.run_id, self.version)

    patch.setattr(Ledger, "holds", by_number)
    patch.setattr(Ledger, "_checked", _accepting(Ledger._checked))


def _accepting(checked: Callable[..., Ledger]) -> Callable[..., Ledger]:
    def accept(self: Ledger, after: Ledger, delta: Delta, repeated: bool) -> Ledger:
        return self if repeated else checked(self, after, delta, repeated)

    return accept


@caught_by("versions", "test_parts_are_one_update", kind="version", fault=22)
def parts_taken_incomplete(patch: pytest.MonkeyPatch) -> None:
    """One part of two is an update of its own."""

    def whole(deltas: Iterable[Delta]) -> Delta:
        found = list(deltas)
        lineage = found[0].lineage and replace(found[0].lineage, part=None, digest=None)
        return replace(found[0], lineage=lineage)

    patch.setattr(session, "_combined", whole)


@caught_by("versions", "test_parts_are_one_update", kind="version", fault=22)
def last_part_wins(patch: pytest.MonkeyPatch) -> None:
    """Of the parts of an update the last one is written."""

    def last(parts: Iterable[Delta]) -> Delta:
        *_, found = parts
        return replace(found, lineage=found.lineage and replace(found.lineage, part=None))

    patch.setattr(session, "join", last)


@caught_by("versions", "test_an_anchor_replaces_everything", kind="version", fault=18)
def anchor_lacks_norms(patch: pytest.MonkeyPatch) -> None:
    """An anchor leaves out what it takes for unchanged: the norms."""
    put = AnchorUpdate._put

    def sparing(self: AnchorUpdate, live: Tensor, region: Region, new: Tensor) -> None:
        if "norm" not in region.param:
            put(self, live, region, new)

    patch.setattr(AnchorUpdate, "_put", sparing)
    _undefended(patch)


@caught_by("versions", "test_an_anchor_replaces_everything", kind="version", fault=15)
def anchor_keeps_the_version(patch: pytest.MonkeyPatch) -> None:
    """After an anchor the engine still says the version before it."""
    settle = AnchorUpdate.settle

    def stale(self: AnchorUpdate, told: Sequence[Mapping[str, object]], ledger: Ledger) -> Ledger:
        return replace(settle(self, told, ledger), run_id=ledger.run_id, version=ledger.version)

    patch.setattr(AnchorUpdate, "settle", stale)
