"""The state of one run of the suite: the engine, every test's result, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

from ..driving import levels, sentences
from ..driving.features import FEATURES
from ..driving.levels import Verdict
from ..driving.options import Options
from ..driving.ranges import IN_PROCESS, Record
from ..engines import capabilities
from ..engines.capabilities import CODEC, LIVE, PROGRAM
from ..engines.codecs import FullCodec
from ..engines.program import Program
from . import causes, matrix, results
from .results import FAILED, NOT_RUN, PASSED, SKIPPED, Result

PACKAGE = __name__.partition(".")[0]
"""The suite's name: that of its folder in a clone, `refdelta_conformance` from a wheel."""


class Exit(IntEnum):
    """How a run ends, however it was started."""

    PASSED = 0
    FAILED = 1
    USAGE = 2
    """The command line makes no sense, or selects nothing that could be judged."""
    INFRASTRUCTURE = 3
    """Nothing failed of the engine; what it is started by or judged with did."""


@dataclass(slots=True)
class Run:
    """State of one run of the suite."""

    options: Options
    codec: FullCodec | None
    """The codec under test; None for a live engine."""
    offered: frozenset[str]
    """The capabilities of the engine."""
    matrix: matrix.Matrix = field(default_factory=matrix.Matrix)
    results: dict[str, Result] = field(default_factory=dict)
    """Every test of this kind, by pytest's id."""
    homes: set[Path] = field(default_factory=set)
    """Directories whose tests are the suite's."""
    commands: dict[str, str] = field(default_factory=dict)
    """pytest's id -> what it is called on a command line."""
    left_out: int = 0
    """Tests of the other kind, deselected by the engine."""
    collect_only: bool = False
    collection_failed: bool = False
    interrupted: bool = False
    unmatched: list[str] = field(default_factory=list)
    """Entries of the xfails file that match no test."""
    began: float = field(default_factory=time.time)
    record: Record = field(default_factory=Record)
    """How large what the engine saw was."""

    @property
    def kind(self) -> str:
        """One of `capabilities.KINDS`."""
        return LIVE if self.options.live else PROGRAM if isinstance(self.codec, Program) else CODEC

    @property
    def name(self) -> str:
        """The engine's, in the matrix."""
        return self.codec.name if self.codec else self.options.backend or self.options.engine

    @property
    def declined(self) -> list[str]:
        """The capabilities that the engine does not declare."""
        return [name for name in capabilities.of_kind(self.kind) if name not in self.offered]

    def is_ours(self, path: Path) -> bool:
        """Whether a test file is the suite's."""
        return any(path.is_relative_to(home) for home in self.homes)

    def count(self, outcome: str) -> int:
        """Tests of this outcome."""
        return sum(result.outcome == outcome for result in self.results.values())

    def verdicts(self) -> list[Verdict]:
        """What the run says of each level."""
        outcomes: dict[str, list[str]] = {}
        for result in self.results.values():
            for level in result.levels:
                outcomes.setdefault(level, []).append(levels.INFRASTRUCTURE if result.unjudged else result.outcome)
        found = levels.judge(outcomes, live=self.options.live, capabilities=self.offered)
        return [self._with_causes(verdict) for verdict in found]

    def _with_causes(self, verdict: Verdict) -> Verdict:
        """A failed level with the number of causes that its failures have."""
        mine = [result for result in self.results.values() if verdict.level.id in result.levels]
        count = len(causes.of(mine))
        if verdict.word != levels.FAILED or not count:
            return verdict
        return replace(verdict, why=f"{count} cause{'s' if count > 1 else ''}: {verdict.why}")

    def causes(self) -> list[causes.Cause]:
        """What the failures have in common, the largest first."""
        return causes.of(self.results.values())

    def outcomes(self) -> list[tuple[str, str]]:
        """Every test with what it came to; a failure that says nothing of the engine is no verdict."""
        return [(result.id, results.NOT_RUN if result.unjudged else result.outcome) for result in self.results.values()]

    def exit(self, pytest_s: int) -> Exit | int:
        """The code to end with, where pytest would end with ``pytest_s``."""
        failed = [result for result in self.results.values() if result.outcome == FAILED]
        if self.unmatched or any(not result.infrastructure for result in failed):
            return Exit.FAILED
        if failed or self.collection_failed:
            return Exit.INFRASTRUCTURE
        if pytest_s == 0 and self.undriven():
            return Exit.INFRASTRUCTURE
        judged = any(result.outcome in (PASSED, FAILED) for result in self.results.values())
        if pytest_s == 0 and not judged and not self.collect_only:
            return Exit.USAGE
        return Exit.USAGE if pytest_s == _NOTHING_COLLECTED else pytest_s

    def undriven(self) -> list[str]:
        """Sizes that the suite plans to reach and did not, in a whole run that found no fault: the suite's own."""
        chapters = {path.name for path in _HOME.glob("test_codec_*.py")}
        whole = chapters <= files_of(result.id for result in self.results.values())
        whole &= all(result.outcome in (PASSED, SKIPPED) for result in self.results.values())
        whole &= self.offered.issuperset(FEATURES[1:])  # else some sizes were spared the engine
        if self.codec is None or not whole or not self.record.seen:  # a worker process keeps a record of its own
            return []
        offered = self.offered | ({IN_PROCESS} if self.kind == CODEC else set())
        lacking = self.record.missing(offered)
        return [f"The suite plans {row.quantity} of {lack} for {row.verb}, and drove none." for row, lack in lacking]

    def left_out_line(self) -> str:
        """How many tests need the other kind of engine."""
        kind, other = ("codec", "a codec") if self.options.live else ("live", "--engine vllm")
        return (
            f"{self.left_out} {kind} tests deselected: they need {other}; this run has --engine {self.options.engine}"
        )

    def partial_line(self) -> str:
        """That not every test ran, or nothing."""
        missing = self.count(NOT_RUN)
        if not missing:
            return ""
        what = "Interrupted" if self.interrupted else "Partial run"
        return f"{what}: {missing} of {len(self.results)} tests did not run, so no check above is complete."

    def unmatched_lines(self) -> list[str]:
        """What is wrong with the xfails file."""
        return [f"The xfails file names a test that does not exist: {name}" for name in self.unmatched]

    def report(self, width: int) -> list[str]:
        """The section that ends the run."""
        lines = [*matrix.header(self.name), "", *self.matrix.table(width), *self.matrix.skip_lines()]
        found = self.causes()
        lines += [f"cause {number} of {len(found)}: {cause.line()}" for number, cause in enumerate(found, 1)]
        lines += [f"level {verdict.line()}" for verdict in self.verdicts()]
        lines += [*self.record.lines(), *self.undriven()]
        lines.append(sentences.line(sentences.read(self.outcomes())))
        if self.left_out:
            lines.append(self.left_out_line())
        lines += filter(None, [self.partial_line()])
        lines += self.unmatched_lines()
        if not self.matrix.judged:
            lines.append("Nothing was judged, so nothing passed.")
        return [*lines, self.proves()]

    def proves(self) -> str:
        """What a pass means, and what not."""
        return matrix.LIVE_PROVES if self.options.live else matrix.CODEC_PROVES


_NOTHING_COLLECTED = 5
_HOME = Path(__file__).parents[1]


def files_of(names: Iterable[str]) -> set[str]:
    """The files of test ids."""
    return {name.partition("::")[0] for name in names}


def by_outcome(found: Mapping[str, Result]) -> list[Result]:
    """Failures first, then expected ones, what did not run, skips, passes; in the order of collection."""
    order = (*(results.FAILED, results.XFAILED, results.NOT_JUDGED), results.NOT_RUN, results.SKIPPED, results.PASSED)
    return sorted(found.values(), key=lambda result: order.index(result.outcome))
