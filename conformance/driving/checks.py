"""The checks of the suite, each stated once: what it asks, the levels that it belongs to, and how it meets the mutants.

A new check is an entry here, and a test marked with its id: ``@pytest.mark.check("every_tensor")``. The columns of the
report, the levels and the kill matrix follow from this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["CHECKS", "CODEC_CHECKS", "LIVE_CHECKS", "Check"]


@dataclass(frozen=True, slots=True)
class Check:
    """One promise that an engine is held to, by one test or several."""

    id: str
    statement: str
    levels: tuple[str, ...]
    """Levels that its tests belong to, where a test does not name others."""
    never_alone: str = ""
    """Why it is kept, where it kills no mutant that no other check kills."""
    not_run: str = ""
    """Why the kill matrix has no column for it."""


_HISTORIES = "random histories (`bit_exact`) do it too, among everything else; this check"


def _table(checks: Sequence[Check]) -> Mapping[str, Check]:
    return {check.id: check for check in checks}


CODEC_CHECKS = _table(
    [
        Check("bit_exact", "applying encode(a, b) to a gives b, bit for bit", ("codec",)),
        Check(
            "idempotent",
            "applying a delta twice equals applying it once",
            ("applier",),
            never_alone=f"{_HISTORIES} says which promise was broken, for one delta at a time, also another writer's",
        ),
        Check(
            "minimal",
            "exactly the positions whose bits differ; unchanged tensors absent",
            ("writer",),
            never_alone="what is sent in excess, or not at all, also changes size (`density_bound`), bytes"
            " (`canonical`, a capability) or result; this check names the tensor and the position",
        ),
        Check(
            "deterministic",
            "the same two states give byte-identical payloads",
            ("writer",),
            never_alone="bytes that change cannot be the canonical ones; an engine that does not offer"
            " `canonical` still has to repeat its own",
        ),
        Check("canonical", "the payload's bytes are those that the format prescribes", ("canonical",)),
        Check("density_bound", "payload bytes = changed * (index size + value size); bounded header", ("writer",)),
        Check(
            "counted",
            "the metadata's counts equal what the payload holds",
            ("writer",),
            never_alone="the written vectors compare the metadata whole (`canonical`, a capability); this check"
            " tells which",
        ),
        Check(
            "composes",
            "a composed delta equals its parts applied in order",
            ("versioned",),
            never_alone=f"{_HISTORIES} states the promise alone, for given vectors and drawn chains",
        ),
        Check(
            "inverts",
            "the inverse restores the state that apply saw, bit for bit",
            ("versioned",),
            never_alone=f"{_HISTORIES} states the promise alone, for given vectors, and for another writer's delta",
        ),
        Check("routes", "routing a patch and writing equals writing and laying out, on every rank", ("router",)),
        Check("refuses", "a malformed or misplaced delta is refused; the state stays bit for bit", ("safe",)),
        Check(
            "declines",
            "what is not offered is refused with nothing changed, or done right; never wrong in silence",
            ("safe", "writer"),
        ),
    ]
)
"""The codec's invariants by id, in the order of the matrix. Always shown for a codec, run or not."""
LIVE_CHECKS = _table(
    [
        Check(
            "base",
            "before any delta the engine equals a fresh one and reads its live weights",
            ("live",),
            never_alone="judges an engine before any delta, which no mutant above has broken by then: packed"
            " copies of weights, a loader that is wrong (the changed loaders below are caught by it)",
        ),
        Check(
            "every_tensor",
            "one delta that touches every tensor of the checkpoint",
            ("live",),
        ),
        Check(
            "chain_of_three",
            "three deltas, one after the other",
            ("live",),
            never_alone="what one update leaves behind shows in whatever comes next, here after each reset; this"
            " check sends three with nothing between them",
        ),
        Check("twice", "the same delta twice leaves what it left once", ("live",)),
        Check(
            "empty",
            "a delta without tensors is a version like any other",
            ("live",),
            never_alone="`versions` has an empty version too, for backends that offer `lineage`; this check is for all",
        ),
        Check(
            "first_element",
            "the first element of every tensor",
            ("live",),
            never_alone="`shard_boundaries` has the corners of every tensor as well; this check has nothing else",
        ),
        Check(
            "last_element",
            "the last element of every tensor",
            ("live",),
            never_alone="`shard_boundaries` has the corners of every tensor as well; this check has nothing else",
        ),
        Check(
            "shard_boundaries",
            "both sides of every cut between ranks",
            ("live",),
            never_alone="`every_tensor` meets the places beside a cut by chance, `last_element` some of them;"
            " this check has both sides of every cut by construction",
        ),
        Check("special_values", "zeros, subnormals, infinities, NaNs, each replaced by its neighbour", ("live",)),
        Check(
            "behaviour",
            "changes that move a fresh engine's log-probabilities move these alike",
            ("live",),
            never_alone="answers are compared after refusals, too; this check changes one family of weights at a"
            " time, and says which one the answers do not read",
        ),
        Check(
            "restarted",
            "a second engine that finds the first one's kernels on disk reads its own weights",
            ("live",),
            not_run="two engines, one after the other, whose model vLLM compiles: minutes each; run by the"
            " suite itself",
        ),
        Check(
            "declined",
            "what the backend does not offer it refuses with nothing changed, or does right",
            ("live",),
            not_run="skipped by an engine that offers everything; backends that decline are judged in tests/live",
        ),
        Check("malformed_second", "a fault in the second tensor: nothing of the first is written", ("transactional",)),
        Check("unknown_name", "names that the checkpoint lacks are refused", ("transactional",)),
        Check("wrong_shape", "shapes that the checkpoint lacks are refused", ("transactional",)),
        Check("one_rank_fails", "one rank must refuse, and no rank writes", ("transactional",)),
        Check(
            "sessions",
            "nothing of one session shows in another: paths used again, several deltas at once, abandoned ones",
            ("live",),
        ),
        Check(
            "failed_write",
            "a write that fails after the agreement, on any rank, leaves the old weights and version on all",
            ("transactional",),
        ),
        Check(
            "account",
            "status and audit say what the engine holds; what was changed behind its back is found and fenced",
            ("transactional",),
        ),
        Check(
            "in_place",
            "an update moves no weights to other memory, and writes no more of them than it changes",
            ("live",),
        ),
        Check("separate_tied", "tied tensors are not separated", ("transactional",)),
        Check(
            "versions",
            "what a delta's lineage states is held against what the engine holds; versions, parts, anchors",
            ("transactional",),
        ),
        Check(
            "server",
            "the same behind the routes of an HTTP server",
            ("served",),
            not_run="the same update behind HTTP routes, in a server of its own; what is broken is broken below it",
        ),
    ]
)
"""The checks of live engines by id, in the order of the matrix."""
CHECKS: Mapping[str, Check] = {**CODEC_CHECKS, **LIVE_CHECKS}
