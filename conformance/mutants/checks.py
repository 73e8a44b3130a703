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
}
"""Check -> why it is kept, of those that never kill alone."""

NOT_RUN: Mapping[str, str] = {
    "declined": "skipped by an engine that offers everything; backends that decline are judged in tests/live",
    "server": "the same update behind HTTP routes, in a server of its own; what is broken is broken below it",
}
"""Live check -> why the matrix has no column for it."""
