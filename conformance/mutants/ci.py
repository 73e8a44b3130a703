"""The mutants that each run of `make test` kills; the nightly run kills all (`python -m conformance.mutants --ci`).

They are chosen so that every part that can be wrong, every check, every row of live engines and every kind of public
fault is stood for by one at least; `tests/suite/test_mutants.py` holds the choice to that.
"""

from __future__ import annotations

from collections.abc import Iterable

from .registry import LIVE, OWN, Mutant

NAMES: frozenset[str] = frozenset(
    {
        # codec
        *(
            "ComparesValues",
            "ComparesLowByte",
            "MissesLastElement",
            "TakesNanForUnchanged",
            "CountsChangedTensorsOnly",
            "HasNoEmptyDelta",
            "AlwaysI64",
            "StampsTheTime",
            "KeepsModelOrder",
            "ReadsStorageOrder",
            "WrapsPositions",
            "ExchangesBits",
            "OrdersKeysAsText",
            "ReplacesTensors",
            "IgnoresCounts",
            "IgnoresExtensions",
            "IgnoresExtraKeys",
            "DropsWhatItDeclines",
            "EncodesWhatBothHave",
            "InverseHoldsNewValues",
            "EarlierWins",
            "ComposesAcrossAGap",
            "ChecksTheBaseAlone",
            "SwapsKeyAndValue",
            "ServesFirstRankOnly",
            "ForgetsTheSecondPlace",
            "ForgetsToTranspose",
            "CutsFusedEvenly",
            "SwapsGateAndUp",
            "ForgetsVocabularyPadding",
            "WritesOverWhatIsThere",
            "SeesSharedElementsOnce",
            "WritesIntoSharedElements",
            "LeavesBareTensors",
            "CountsFiles",
        ),
        # live
        *(
            "vocabulary_cut_unpadded",
            "second_place_forgotten",
            "experts_as_loaded",
            "encoded_by_value",
            "first_position_skipped",
            "last_position_skipped",
            "repetition_taken_back",
            "empty_is_an_error",
            "every_other_update_kept",
            "linear_weights_held_by_value",
            "unknown_names_skipped",
            "sizes_compared_alone",
            "positions_clamped",
            "aliases_not_compared",
            "nobody_raises",
            "second_rank_writes_nothing",
            "anchor_lacks_norms",
            "deltas_known_by_path",
            "whole_tensors_written",
            "delta_not_undone",
            "fence_ignored",
            "status_repeats_the_delta",
            "first_digit_of_a_layer",
            "values_through_bf16",
        ),
        # own
        *(
            "written_in_place",
            "earlier_runs_overwritten",
            "payload_not_hashed",
            "baseline_moves_when_encoded",
            "only_the_last_step_is_sent",
            "cache_reset_before_the_write",
            "updates_without_a_pause",
            "pause_taken_for_granted",
            "paused_after_a_failure",
            "fenced_engine_resumed",
        ),
    }
)


def stands_for(mutant: Mutant) -> set[tuple[str, ...]]:
    """What a choice has to hold at least one mutant of."""
    found: set[tuple[str, ...]] = {("part", mutant.run, mutant.kind)}
    if mutant.run != OWN:
        found.add(("check", mutant.run, mutant.check))
    if mutant.run == LIVE:
        found.add(("row", mutant.row))
    if mutant.fault:
        found.add(("fault", str(mutant.fault)))
    return found


def missing(wanted: Iterable[Mutant]) -> set[tuple[str, ...]]:
    """What no mutant of the choice stands for, and some other does."""
    everything, chosen = set[tuple[str, ...]](), set[tuple[str, ...]]()
    for mutant in wanted:
        everything |= stands_for(mutant)
        chosen |= stands_for(mutant) if mutant.name in NAMES else set()
    return everything - chosen
