"""Why a check is kept that catches no mutant which nothing else catches, and what is not run against mutants."""

from __future__ import annotations

from collections.abc import Mapping

NEVER_ALONE: Mapping[str, str] = {}
"""Check -> why it is kept, of those that never kill alone."""

NOT_RUN: Mapping[str, str] = {
    "declined": "skipped by an engine that offers everything; backends that decline are judged in tests/live",
    "server": "the same update behind HTTP routes, in a server of its own; what is broken is broken below it",
}
"""Live check -> why the matrix has no column for it."""
