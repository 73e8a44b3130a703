"""What may go wrong inside one step, and every way in which it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Fault(NamedTuple):
    """One thing that goes wrong: on which rank, in which part of a call, and how."""

    rank: int
    point: str
    kind: str

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.point}: {self.kind}"


class Chance:
    """The choices of one run of a step: first those of ``path``, then "nothing goes wrong"."""

    def __init__(self, budget: int, path: tuple[int, ...] = ()) -> None:
        self.budget = budget
        self.faults: list[Fault] = []
        self.taken: list[int] = []
        self.options: list[int] = []
        self._path = path

    def fault(self, rank: int, point: str, *kinds: str) -> str | None:
        """The kind of the fault that strikes here, or None; with no budget left nothing goes wrong any more."""
        if len(self.faults) >= self.budget:
            return None
        at = len(self.taken)
        chosen = self._path[at] if at < len(self._path) else 0
        self.taken.append(chosen)
        self.options.append(1 + len(kinds))
        if chosen == 0:
            return None
        self.faults.append(Fault(rank, point, kinds[chosen - 1]))
        return kinds[chosen - 1]


class Scripted(Chance):
    """The faults that are given, each once, and no other."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        super().__init__(0)
        self._left = list(faults)

    def fault(self, rank: int, point: str, *kinds: str) -> str | None:
        """The kind of the given fault at this point."""
        for fault in self._left:
            if fault[:2] == (rank, point) and fault.kind in kinds:
                self._left.remove(fault)
                return fault.kind
        return None


def outcomes(step: Callable[[Chance], T], budget: int) -> Iterator[tuple[tuple[Fault, ...], T]]:
    """Run ``step`` once for every combination of at most ``budget`` faults: the faults, and what came out."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        path = pending.pop()
        chance = Chance(budget, path)
        result = step(chance)
        for at in range(len(path), len(chance.taken)):
            pending += [(*chance.taken[:at], other) for other in range(1, chance.options[at])]
        yield tuple(chance.faults), result
