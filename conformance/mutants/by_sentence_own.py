"""refdelta, broken where a sentence of SPEC.md binds what the suite does not judge; caught by refdelta's own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from io import FileIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refdelta.codec import applying, composition, digests, encoding, state
from refdelta.codec.state import Weights, first_names
from refdelta.encode import DeltaEncoder
from refdelta.files import opening, reading, writing
from refdelta.spec import Delta, DeltaError, Lineage
from refdelta.vllm.update.ledger import Ledger
from refdelta.vllm.update.options import Options

from .registry import SENTENCE, Broken, Mutant, register


def breaks(*ids: str, by: str) -> Callable[[Broken], Broken]:
    """The decorator that registers a function which breaks these sentences, and the test of refdelta's that sees it."""

    def decorate(broken: Broken) -> Broken:
        place, does = f"{broken.__module__}:{broken.__name__}", broken.__doc__ or ""
        register(Mutant(broken.__name__, "sentence", SENTENCE, place, does, by, by, None, breaks=ids))
        return broken

    return decorate


_NAMES, _LINEAGE, _PLAIN = "tests/codec/test_names.py", "tests/codec/test_lineage.py", "tests/codec/test_plain.py"
_COMPOSE, _APPLY = "tests/codec/test_compose.py", "tests/codec/test_apply.py"


# -- files -------------------------------------------------------------------------------------------------------------


@breaks("S2.2-4", by="tests/codec/test_crash.py::test_a_reader_starts_again_where_the_delta_was_replaced_under_it")
def files_opened_by_path(patch: pytest.MonkeyPatch) -> None:
    """Each file is opened by its own path, wherever that leads by then."""

    def by_path(self: opening.Folder, name: str) -> FileIO:
        return opening.open_file(self.path / name, self.missing)

    patch.setattr(opening.Folder, "open", by_path)
    patch.setattr(opening.Folder, "is_current", lambda self: True)


@breaks("S2.2-5", by="tests/codec/test_read.py::test_no_allocation_beyond_what_the_file_holds")
def buffers_of_one_size(patch: pytest.MonkeyPatch) -> None:
    """Whatever is read gets a mebibyte."""
    patch.setattr(opening, "new_bytes", lambda size: torch.empty(max(size, 1 << 20), dtype=torch.uint8)[:size])


@breaks("S4.6-2", by="tests/codec/test_write.py::test_what_is_read_is_written_again")
def unknown_keys_dropped(patch: pytest.MonkeyPatch) -> None:
    """A reader keeps the keys that it knows."""
    patch.setattr(reading, "check_extra", lambda extra: {})


@breaks("S7.3-1", by="tests/codec/test_write.py::test_a_header_longer_than_readers_take_is_not_written")
def long_headers_written(patch: pytest.MonkeyPatch) -> None:
    """A writer does not ask how long a header is."""
    made = writing._header_bytes

    def unbounded(patches: Any) -> bytes:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(writing, "MAX_HEADER_BYTES", 2**63)
            return made(patches)

    patch.setattr(writing, "_header_bytes", unbounded)


# -- applying ----------------------------------------------------------------------------------------------------------


@breaks("S5.1-3", by=f"{_APPLY}::test_a_write_that_fails_half_way_is_undone")
def failed_writes_left(patch: pytest.MonkeyPatch) -> None:
    """What was written before a failure stays."""
    patch.setattr(applying, "_undo", lambda patches, tensors, cause: None)


@breaks("S5.3-1", by=f"{_NAMES}::test_aliases_that_do_not_agree_are_refused")
def shared_memory_ignored(patch: pytest.MonkeyPatch) -> None:
    """Of two names of one tensor the one that comes last wins."""
    patch.setattr(applying, "_check_aliases", lambda delta, tensors: None)


@breaks("S5.3-2", by=f"{_APPLY}::test_names_that_a_module_ties_change_under_any_of_them")
def ties_taken_for_aliases(patch: pytest.MonkeyPatch) -> None:
    """A tied tensor has to be stated under each of its names."""
    patch.setattr(applying, "_untied", lambda tensors, delta: tensors)


# -- what counts -------------------------------------------------------------------------------------------------------


@breaks("S1-2", by=f"{_NAMES}::test_a_wrapped_module_gives_the_names_of_the_checkpoint")
def wrappers_names_kept(patch: pytest.MonkeyPatch) -> None:
    """A trainer's names are sent as they are."""
    patch.setattr(state, "checkpoint_names", lambda names: {name: name for name in names})


def _held(patch: pytest.MonkeyPatch, change: Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """What counts of a module, changed."""
    found = state._tensors_in
    patch.setattr(state, "_tensors_in", lambda module: change(module, found(module)))


@breaks("S8.1-1", by=f"{_NAMES}::test_what_counts_is_what_the_checkpoint_holds")
def frozen_left_out(patch: pytest.MonkeyPatch) -> None:
    """What has no gradient does not count."""
    _held(patch, lambda module, found: {name: t for name, t in found.items() if t.requires_grad})


@breaks("S8.1-2", by=f"{_NAMES}::test_what_counts_is_what_the_checkpoint_holds")
def scratch_counted(patch: pytest.MonkeyPatch) -> None:
    """Buffers that are never saved count."""
    _held(patch, lambda module, found: {**dict(module.named_buffers()), **found})


@breaks("S8.2-2", by=f"{_NAMES}::test_what_counts_is_what_the_checkpoint_holds")
def ties_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """A tied tensor counts under each of its names."""
    patch.setattr(state, "first_names", lambda tensors: tensors)


@breaks("S8.2-3", by=f"{_NAMES}::test_tied_tensors_are_sent_once_and_arrive_under_any_name")
def ties_sent_twice(patch: pytest.MonkeyPatch) -> None:
    """A tied tensor is sent under each of its names."""
    patch.setattr(state, "first_names", lambda tensors: tensors)


@breaks("S8.2-4", by=f"{_LINEAGE}::test_tensors_of_a_mapping_that_share_memory_roll_under_each_name")
def a_mapping_s_tensors_counted_once(patch: pytest.MonkeyPatch) -> None:
    """Two names of one tensor in a mapping count once."""
    found = state.tracked

    def once(weights: Weights) -> dict[str, Tensor]:
        return first_names(found(weights))

    for module in (encoding, digests):
        patch.setattr(module, "tracked", once)


@breaks("S8.3-1", by=f"{_PLAIN}::test_names_and_sizes_stay_those_of_the_construction")
def tensors_come_and_go(patch: pytest.MonkeyPatch) -> None:
    """What both states have is compared."""

    def common(base: Mapping[str, Tensor], target: dict[str, Tensor]) -> None:
        for name in [n for n in target if n not in base or base[n].shape != target[n].shape]:
            del target[name]

    patch.setattr(encoding, "check_comparable", common)


@breaks("S8.3-2", "S8.3-3", by=f"{_PLAIN}::test_a_partitioned_trainer_makes_no_empty_deltas")
def placeholders_taken(patch: pytest.MonkeyPatch) -> None:
    """A placeholder is taken for a tensor without elements."""
    patch.setattr(state, "check_plain", lambda t, name: t)


# -- a sender's baseline -----------------------------------------------------------------------------------------------


@breaks("S9.4-3", by=f"{_LINEAGE}::test_versions_and_digests_of_a_run")
def acknowledgements_ignored(patch: pytest.MonkeyPatch) -> None:
    """The baseline stays, whatever has arrived."""
    patch.setattr(DeltaEncoder, "commit", lambda self, delta: None)


@breaks("S9.4-2", by=f"{_LINEAGE}::test_fault_17_the_baseline_moves_on_acknowledgement")
def every_encoding_a_version(patch: pytest.MonkeyPatch) -> None:
    """The version moves with every delta that is made."""
    made = DeltaEncoder.encode

    def counting(self: DeltaEncoder, weights: Weights) -> Delta:
        delta = made(self, weights)
        if self._position is not None:
            self._position = replace(self._position, version=self._position.version + 1)
        return delta

    patch.setattr(DeltaEncoder, "encode", counting)


@breaks("S9.4-4", by=f"{_LINEAGE}::test_fault_16_a_refused_delta_keeps_the_version_and_an_empty_one_is_a_version")
def refusals_move_the_version(patch: pytest.MonkeyPatch) -> None:
    """A delta that is refused is a version all the same."""
    commit = DeltaEncoder.commit

    def moving(self: DeltaEncoder, delta: Delta) -> None:
        try:
            commit(self, delta)
        except DeltaError:
            if self._position is not None:
                self._position = replace(self._position, version=self._position.version + 1)
            raise

    patch.setattr(DeltaEncoder, "commit", moving)


@breaks("S9.5-2", by=f"{_LINEAGE}::test_versions_and_digests_of_a_run")
def runs_begin_at_zero(patch: pytest.MonkeyPatch) -> None:
    """A run that resumes counts from 0 again."""
    begin = DeltaEncoder.__init__

    def at_zero(self: DeltaEncoder, weights: Weights, *, run_id: str | None = None, version: int = 0) -> None:
        begin(self, weights, run_id=run_id)

    patch.setattr(DeltaEncoder, "__init__", at_zero)


@breaks("S9.6-1", by=f"{_LINEAGE}::test_the_inverse_states_both_digests_and_leads_back")
def inverse_goes_forward(patch: pytest.MonkeyPatch) -> None:
    """An inverse has the versions of its delta."""
    patch.setattr(applying, "_inverse_lineage", lambda lineage: lineage)


@breaks("S9.6-2", by=f"{_LINEAGE}::test_the_inverse_of_a_delta_without_versions_still_states_digests")
def inverse_in_another_run(patch: pytest.MonkeyPatch) -> None:
    """An inverse without versions is the first of a run of its own."""
    digested = applying._digested
    patch.setattr(applying, "_digested", lambda known, a, b: digested(known or Lineage("undo", 1), a, b))


# -- parts and compositions --------------------------------------------------------------------------------------------


@breaks("S9.7-1", by=f"{_COMPOSE}::test_parts_that_are_not_a_whole")
def parts_of_two_updates_joined(patch: pytest.MonkeyPatch) -> None:
    """Parts are counted, and their lineages not compared."""
    common = composition._common_lineage

    def of_the_first(parts: Sequence[Delta]) -> Lineage:
        first = parts[0].lineage
        if first is None:
            return common(parts)
        alike = [replace(p, lineage=p.lineage and replace(first, part=p.lineage.part)) for p in parts]
        return common(alike)

    patch.setattr(composition, "_common_lineage", of_the_first)


@breaks("S9.7-2", "S12.2-2", by=f"{_COMPOSE}::test_parts_that_are_not_a_whole")
def totals_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Parts of states of different sizes are joined."""
    patch.setattr(composition, "_check_same_total", lambda a, b: None)


@breaks("S9.7-3", by=f"{_LINEAGE}::test_a_part_has_counts_of_its_own")
def parts_not_counted(patch: pytest.MonkeyPatch) -> None:
    """The counts of a part are not compared: they may be those of the whole update."""
    check = reading._check_counts

    def lenient(metadata: reading._Metadata, layers: Sequence[reading._Layer]) -> None:
        if metadata.lineage is None or not metadata.lineage.is_partial:
            check(metadata, layers)

    patch.setattr(reading, "_check_counts", lenient)


@breaks("S9.7-4", by=f"{_COMPOSE}::test_parts_that_are_not_a_whole")
def positions_in_two_parts(patch: pytest.MonkeyPatch) -> None:
    """Of a position in two parts the later one wins."""
    patch.setattr(composition, "_disjoint", lambda name, indices: composition._later_wins(name, indices))


@breaks("S9.7-6", by=f"{_COMPOSE}::test_parts_make_the_whole")
def first_part_alone(patch: pytest.MonkeyPatch) -> None:
    """Of several parts the first one is applied."""
    merged = composition._merged

    def first(deltas: Sequence[Delta], pick: Any) -> Any:
        return merged(deltas[:1] if pick is composition._disjoint else deltas, pick)

    patch.setattr(composition, "_merged", first)


@breaks("S12.2-1", by=f"{_COMPOSE}::test_states_that_differ")
def nothing_composed(patch: pytest.MonkeyPatch) -> None:
    """No deltas at all are an empty one."""
    listed = composition._listed

    def some(given: Iterable[Delta]) -> list[Delta]:
        return listed([*given] or [Delta((), 0)])

    patch.setattr(composition, "_listed", some)


@breaks("S12.3-2", by=f"{_COMPOSE}::test_metadata_that_all_state_is_kept")
def metadata_of_the_first(patch: pytest.MonkeyPatch) -> None:
    """A composition has the further metadata of its first delta."""
    patch.setattr(composition, "_common_extra", lambda deltas: dict(deltas[0].extra))


# -- receivers ---------------------------------------------------------------------------------------------------------


@breaks("S14.2-1", by="tests/engine/test_ledger.py::test_a_change_without_lineage_is_unverified")
def all_taken_for_verified(patch: pytest.MonkeyPatch) -> None:
    """A state is verified, whatever its deltas say."""
    after = Ledger.after

    def verified(self: Ledger, delta: Delta, accounts: Any, *, repeated: bool) -> Ledger:
        return replace(after(self, delta, accounts, repeated=repeated), verified=True)

    patch.setattr(Ledger, "after", verified)


@breaks("S14.2-2", by="tests/engine/test_shares.py::test_bases")
def lineage_never_required(patch: pytest.MonkeyPatch) -> None:
    """Deltas without lineage are always taken."""
    check = Ledger.check_base

    def accepting(self: Ledger, lineage: Lineage | None, options: Options) -> None:
        check(self, lineage, replace(options, lineage="accept"))

    patch.setattr(Ledger, "check_base", accepting)
