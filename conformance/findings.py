"""What a check found, as fields: where, what was expected and what was there. Reports read these, never the text.

    Finding                     one fault: tensor, position, expected and found bits (or other values, as text)
    Mismatch(finding)           the AssertionError that carries findings
    require(holds, ...)         raise a Mismatch unless it holds
    EngineFailed                the engine neither did nor refused what it was asked: a crash, a hang
    Late                        an EngineFailed: no answer in time
    InfrastructureFailed        nothing can be said of the engine: its process or module did not start

Nothing is imported here: the oracle uses it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. Texts are for people; bits are hexadecimal, `0x` and two digits a byte."""

    what: str
    """What was compared, or what happened: "bits", "positions", "reason", "refusal", ..."""
    tensor: str | None = None
    """The tensor's name in the checkpoint, or the parameter's in the engine."""
    position: tuple[int, ...] | None = None
    """Index of the first differing element, one number per axis; () in a scalar."""
    flat: int | None = None
    """The same, flat and row-major."""
    expected: str | None = None
    found: str | None = None
    dtype: str | None = None
    differing: int | None = None
    """How many elements differ."""
    elements: int | None = None
    """Of how many."""
    rank: int | None = None
    context: str = ""
    """What was being done."""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}"
        where = " ".join(filter(None, [rank, shown(self.tensor or ""), self._place()]))
        head = f"{where}: " if where else ""
        said = [f"{word} {value}" for word, value in (("expected", self.expected), ("found", self.found)) if value]
        body = ", ".join(said) or self.what
        text = f"{head}{body}" if where or not said else f"{self.what}: {body}"
        return (f"{self.context}: " if self.context else "") + text + self._count()

    def _place(self) -> str:
        if self.position is None:
            return ""
        return f"at flat {self.flat} {list(self.position)}" if self.flat is not None else f"at {list(self.position)}"

    def _count(self) -> str:
        if self.differing is None:
            return ""
        of = f" of {self.elements}" if self.elements is not None else ""
        return f" ({self.differing}{of} elements differ{f', {self.dtype}' if self.dtype else ''})"

    def fields(self) -> dict[str, object]:
        """For JSON: every field by name, absent ones as None."""
        return asdict(self) | {"position": None if self.position is None else list(self.position)}


def shown(name: str) -> str:
    """A tensor's name, escaped where a reader could not see what it is."""
    return name if name.isascii() and name.isprintable() else ascii(name)


class Mismatch(AssertionError):
    """A check failed, and this is what it found."""

    def __init__(self, *findings: Finding, text: str | None = None) -> None:
        super().__init__(text or "\n".join(map(str, findings)))
        self.findings = findings


class EngineFailed(AssertionError):
    """The engine neither did nor refused what it was asked."""


class Late(EngineFailed):
    """The engine did not answer in time. ``starved``: others had the cores, so it says nothing of the engine."""

    def __init__(self, text: str, *, starved: bool) -> None:
        super().__init__(text)
        self.starved = starved


class InfrastructureFailed(AssertionError):
    """Something that the engine is judged with, or started by, did not work."""


def require(
    holds: object,
    what: str,
    *,
    expected: object = None,
    found: object = None,
    tensor: str | None = None,
    position: tuple[int, ...] | None = None,
    context: str = "",
) -> None:
    """Raise a Mismatch with these fields unless it holds."""
    if not holds:
        wanted, got = (None if value is None else str(value) for value in (expected, found))
        raise Mismatch(Finding(what, tensor, position, expected=wanted, found=got, context=context))


def findings_of(error: BaseException | None) -> tuple[Finding, ...]:
    """The findings that an exception carries: itself, one of a group, or what it was raised from."""
    if error is None:
        return ()
    if isinstance(error, Mismatch):
        return error.findings
    if isinstance(error, BaseExceptionGroup):
        return tuple(finding for part in error.exceptions for finding in findings_of(part))
    return findings_of(error.__cause__)


def is_infrastructure(error: BaseException | None) -> bool:
    """Whether this failure says nothing of the engine."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_infrastructure, error.exceptions))
    return isinstance(error, InfrastructureFailed)
