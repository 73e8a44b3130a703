"""What one mutant did to one test, over some seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PASSED, KILLED, SKIPPED = "passed", "killed", "skipped"


@dataclass(slots=True)
class Cell:
    """Outcomes of one test against one mutant."""

    check: str
    killed: int = 0
    ran: int = 0
    finding: str = ""
    """What the first kill said, shortened."""

    def add(self, word: str, finding: str = "") -> None:
        """One outcome; a skip is no run."""
        self.ran += word in (PASSED, KILLED)
        if word == KILLED:
            self.killed += 1
            self.finding = self.finding or " ".join(finding.split())[:160]

    @property
    def always(self) -> bool:
        """Whether every run killed, and there was one."""
        return self.killed == self.ran > 0

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {"check": self.check, "killed": self.killed, "ran": self.ran, "finding": self.finding}


Cells = dict[str, Cell]
"""Test -> what it did to one mutant."""


@dataclass(slots=True)
class Judged:
    """What all tests did to one mutant, or to the engine without one."""

    name: str
    cells: Cells
    seconds: float
    """Of processor time for a codec, by the clock for the others."""


def killed_by(cells: Mapping[str, Cell]) -> set[str]:
    """The checks that killed, under some seed."""
    return {cell.check for cell in cells.values() if cell.killed}


def to_json(cells: Mapping[str, Cell]) -> dict[str, object]:
    """Those that ran."""
    return {test: cell.to_json() for test, cell in cells.items() if cell.ran}
