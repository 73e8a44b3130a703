"""Why a check is kept that catches no mutant which nothing else catches, and what is not run against mutants."""

from __future__ import annotations

from collections.abc import Mapping

_HISTORIES = "random histories (`bit_exact`) do it too, among everything else; this check"
NEVER_ALONE: Mapping[str, str] = {
    "idempotent": f"{_HISTORIES} says which promise was broken, for one delta at a time, also another writer's",
    "minimal": "what is sent in excess, or not at all, also changes size (`density_bound`), bytes (`canonical`, a"
    " capability) or result; this check names the tensor and the position",
    "deterministic": "bytes that change cannot be the canonical ones; an engine that does not offer `canonical` still"
    " has to repeat its own",
    "counted": "the written vectors compare the metadata whole (`canonical`, a capability); this check tells which",
    "composes": f"{_HISTORIES} states the promise alone, for given vectors and drawn chains",
    "inverts": f"{_HISTORIES} states the promise alone, for given vectors, and for another writer's delta",
    "base": "judges an engine before any delta, which no mutant above has broken by then: packed copies of weights, a"
    " loader that is wrong (the changed loaders below are caught by it)",
    "every_tensor": "what it must catch misplaces whole tensors, which every check that writes sees; no other has all"
    " tensors in one delta",
    "chain_of_three": "what one update leaves behind shows in whatever comes next, here after each reset; this check"
    " sends three with nothing between them",
    "empty": "`versions` has an empty version too, for backends that offer `lineage`; this check is for all",
    "first_element": "`shard_boundaries` has the corners of every tensor as well; this check has nothing else",
    "last_element": "`shard_boundaries` has the corners of every tensor as well; this check has nothing else",
    "shard_boundaries": "`every_tensor` meets the places beside a cut by chance, `last_element` some of them; this"
    " check has both sides of every cut by construction",
    "behaviour": "answers are compared after refusals, too; this check changes one family of weights at a time, and"
    " says which one the answers do not read",
}
"""Check -> why it is kept, of those that never kill alone."""

NOT_RUN: Mapping[str, str] = {
    "restarted": "two engines, one after the other, whose model vLLM compiles: minutes each; run by the suite itself",
    "declined": "skipped by an engine that offers everything; backends that decline are judged in tests/live",
    "server": "the same update behind HTTP routes, in a server of its own; what is broken is broken below it",
}
"""Live check -> why the matrix has no column for it."""
