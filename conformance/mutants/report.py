"""The stored result of a whole run (`matrix.json`), and docs/MUTANTS.md, which is made of it alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..driving.checks import CHECKS, CODEC_CHECKS, LIVE_CHECKS
from . import ci, thresholds
from .cells import Cell, Cells, Judged, killed_by, to_json
from .loaders import EDITS
from .registry import CODEC, EXAMPLES, FAULTS, LIVE, OWN, SEEDS, Mutant, mutants

UNBROKEN = "unbroken"
"""The live engine without a mutant, in the results."""
STORED = Path(__file__).with_name("matrix.json")
LOADERS = Path(__file__).with_name("loaders.json")
DOCUMENT = Path(__file__).parents[2] / "docs" / "MUTANTS.md"
COMMAND = "python -m conformance.mutants --write"


@dataclass
class Result:
    """What was found of each mutant, in one run or several."""

    libraries: str = ""
    """What the last run ran with."""
    cells: dict[str, Cells] = field(default_factory=dict)
    """Mutant -> its cells; those of the unbroken engine under its name."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Mutant -> what `Judged` says."""
    took: str = ""
    """What the run of all of them took by the clock; empty where the results are of several runs."""

    def add(self, judged: Judged) -> None:
        """Put in what was found of one mutant; of the unbroken engine, on one row of several."""
        known = self.cells.get(judged.name, {}) if judged.name == UNBROKEN else {}
        self.cells[judged.name] = {**known, **judged.cells}
        before = self.seconds.get(judged.name, 0.0) if known else 0.0
        self.seconds[judged.name] = round(before + judged.seconds, 1)

    @property
    def passed(self) -> set[str]:
        """The rows of live engines on which the unbroken one was run."""
        return {test.partition("[")[2].rstrip("]") for test in self.cells.get(UNBROKEN, {})}

    def write(self, path: Path = STORED) -> None:
        """Store it, without mutants that are no more."""
        names = [*(mutant.name for mutant in mutants()), UNBROKEN]
        found = {n: {"seconds": self.seconds[n], "tests": to_json(self.cells[n])} for n in names if n in self.cells}
        whole = {"libraries": self.libraries, "took": self.took, "mutants": found}
        path.write_text(json.dumps(whole, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path = STORED) -> Result:
        """What was stored; nothing where nothing was."""
        if not path.exists():
            return cls()
        whole = json.loads(path.read_text())
        result = cls(whole["libraries"], took=whole["took"])
        for name, found in whole["mutants"].items():
            result.cells[name] = {test: Cell(**cell) for test, cell in found["tests"].items()}
            result.seconds[name] = found["seconds"]
        return result


def survives(mutant: Mutant, cells: Cells) -> bool:
    """Whether no named test killed the mutant in every run."""
    return not any(cell.always for test, cell in cells.items() if is_named(mutant, test, cell))


def is_named(mutant: Mutant, test: str, cell: Cell) -> bool:
    """Whether this is the test, or one of the chapter, that must catch the mutant."""
    if mutant.run == OWN:
        return test == mutant.by
    chapter, _, name = test.partition("::")
    if mutant.run == CODEC:
        return (chapter, cell.check) == (mutant.by, mutant.check)
    return f"{name} ".startswith(f"{mutant.by} [{mutant.row}]")


def checks_of(run: str) -> dict[str, str]:
    """The columns of a matrix: check -> statement."""
    known = CODEC_CHECKS if run == CODEC else LIVE_CHECKS
    return {check.id: check.statement for check in known.values() if not check.not_run}


def signatures(result: Result, wanted: Iterable[Mutant]) -> dict[frozenset[str], list[Mutant]]:
    """The mutants that the same checks kill, together."""
    found: dict[frozenset[str], list[Mutant]] = {}
    for mutant in wanted:
        found.setdefault(frozenset(killed_by(result.cells[mutant.name])), []).append(mutant)
    return found


def alone(result: Result, wanted: Sequence[Mutant]) -> dict[str, list[str]]:
    """Check -> the mutants that it alone kills."""
    found: dict[str, list[str]] = {}
    for signature, own in signatures(result, wanted).items():
        if len(signature) == 1:
            found.setdefault(next(iter(signature)), []).extend(mutant.name for mutant in own)
    return found


def document(result: Result, wanted: Sequence[Mutant]) -> str:
    """docs/MUTANTS.md."""
    survivors = [mutant.name for mutant in wanted if survives(mutant, result.cells[mutant.name])]
    parts = [_head(result, wanted, survivors)]
    for run, title in ((CODEC, "Codecs"), (LIVE, "Live engines")):
        own = [mutant for mutant in wanted if mutant.run == run]
        parts += [f"## {title}", _matrix(result, own, run), _checks(result, own, run), _list(result, own)]
    own = [mutant for mutant in wanted if mutant.run == OWN]
    parts += ["## Parts that the suite has no check for", _OWN_TEXT, _list(result, own)]
    parts += ["## Codecs that go wrong from a size on", _thresholds()]
    parts += ["## vLLM's own loader, changed", _LOADERS_TEXT, _loaders()]
    return "\n\n".join(parts) + "\n"


def _head(result: Result, wanted: Sequence[Mutant], survivors: Sequence[str]) -> str:
    faults = {mutant.fault for mutant in wanted if mutant.fault}
    count, runs = f"{len(faults)} of the {len(FAULTS)}", f"{_unbroken(result)} runs"
    return f"""# Mutants

Made by `{COMMAND}`; not edited by hand. {len(wanted)} engines, each wrong in one way.
Survivors: {", ".join(survivors) or "none"}.

Each run of CI kills {len(ci.NAMES)} of them by name (`conformance/mutants/ci.py`: every part, check, row of live
engines and kind of fault is stood for by one at least), the nightly run all.

They stand for {count} kinds of faults that were seen in public; where a line has no fault, the mutant breaks an
invariant of the format alone. Codecs ran under {SEEDS[CODEC]} seeds of Hypothesis, with {EXAMPLES} examples for each
property (100 where the test that must kill needs them; whole histories under 4 seeds). Live engines ran under
{SEEDS[LIVE]} seeds (as many first states and sets of changes; tests other than the one that must kill under one), on
one engine for each row, which an anchor resets before each test. The engine without a mutant passed the same live tests
({runs}), and the codec that the broken ones are made from passes all codec tests. Router and applier mutants of live
engines turn off what the backend checks of itself, so that it is the suite that finds them.

{_took(result)}

What a report says of one of them: [k and v swapped in a live engine](report-mutant.png)."""


def _took(result: Result) -> str:
    lines = [_row(["run", "mutants", "seconds"]), _row(["---"] * 3)]
    for run, how in ((CODEC, "of processor time"), (LIVE, "by the clock, starts apart"), (OWN, "by the clock")):
        names = [mutant.name for mutant in mutants(run)] + ([UNBROKEN] if run == LIVE else [])
        seconds = round(sum(result.seconds[name] for name in names))
        lines.append(_row([run, str(len(mutants(run))), f"{seconds} {how}"]))
    runs = f"One run, {result.took}" if result.took else "Several runs"
    return "\n".join([*lines, "", f"{runs}, with {result.libraries}."])


def _unbroken(result: Result) -> int:
    return sum(cell.ran for cell in result.cells[UNBROKEN].values())


def _matrix(result: Result, own: Sequence[Mutant], run: str) -> str:
    """Signatures down, checks across."""
    checks = list(checks_of(run))
    grouped = sorted(signatures(result, own).items(), key=lambda item: (len(item[0]), sorted(item[0])))
    lines = ["Mutants that the same checks kill share a line. `X` is the check that must kill, `x` another that did."]
    lines += ["", _row(["mutants", *(f"`{check}`" for check in checks)]), _row(["---"] + [":-:"] * len(checks))]
    for signature, members in grouped:
        must = {mutant.check for mutant in members}
        marks = ["X" if check in must else "x" if check in signature else "" for check in checks]
        lines.append(_row([", ".join(mutant.name for mutant in members), *marks]))
    return "\n".join(lines)


def _checks(result: Result, own: Sequence[Mutant], run: str) -> str:
    single, kills = alone(result, own), [killed_by(result.cells[mutant.name]) for mutant in own]
    lines = [_row(["check", "kills", "alone", "kept although it never kills alone, because"]), _row(["---"] * 4)]
    for check in checks_of(run):
        count, only = sum(check in killed for killed in kills), len(single.get(check, ()))
        lines.append(_row([f"`{check}`", str(count), str(only), "" if only else CHECKS[check].never_alone]))
    if run == LIVE:
        lines += ["", *(f"`{c.id}` has no column: {c.not_run}." for c in LIVE_CHECKS.values() if c.not_run)]
    return "\n".join(lines)


_OWN_TEXT = """Publishing and the client are refdelta's own; the suite judges codecs and engines, not who drives them.
These mutants are caught by refdelta's tests, named here, which pass without them."""


def _list(result: Result, own: Sequence[Mutant]) -> str:
    lines = [_row(["mutant", "part", "what is wrong", "fault", "caught by", "kills"]), _row(["---"] * 6)]
    for mutant in own:
        fault = f"{mutant.fault}: {FAULTS[mutant.fault]}" if mutant.fault else ""
        kinds = [mutant.name, mutant.kind, mutant.does, fault]
        lines.append(_row([*kinds, *_caught(mutant, result.cells[mutant.name])]))
    return "\n".join(lines)


def _caught(mutant: Mutant, cells: Cells) -> tuple[str, str]:
    """The named test that killed most, and how often."""
    named = {test: cell for test, cell in cells.items() if is_named(mutant, test, cell) and cell.killed}
    if not named:
        return "nothing", "0"
    test = max(named, key=lambda name: (named[name].always, named[name].ran))
    return f"`{test}`", f"{named[test].killed} of {named[test].ran}"


def _thresholds() -> str:
    every = thresholds.generated()
    return f"""{len(every)} more, generated (`conformance/mutants/thresholds.py`): each is right below a boundary
(2^8, 2^12, 2^16, 2^18, 2^20, 2^24, 2^31) and wrong from there on. `make test` kills
{len(thresholds.sample(every))} of them by the test that each names, the nightly step `thresholds` all, under three
seeds: `python -m conformance.mutants.thresholds --seeds 3` prints this table with what was killed, and ends with 1
where one survives.

{thresholds.counted(every)}"""


_LOADERS_TEXT = """Copies of vLLM's text with one offset, shard id or name changed, made by
`conformance/mutants/loaders.py` and run by `python -m conformance.mutants.loader_run`: the engine under
refdelta's backend loads with the copy (Qwen3, TP=2). `start`: it does not start. `live`: the suite's check
`base` sees another engine than a fresh one on vLLM's own loader. Where the fault is vLLM's own, every engine
shares it, the fresh one too; then `rules` (the map that is traced from the copy is not the one that the
family's rules give) and `position` (what the engine made of a position-coded checkpoint is not what the rules
say) still see it. The backend itself starts on a loader that is wrong and yet fills everything, since its
trace and its attestation come from that loader; the rules are what `refdelta layout --source both` compares
it with."""


def _loaders() -> str:
    found: dict[str, dict[str, str]] = json.loads(LOADERS.read_text())
    lines = [_row(["copy", "what goes wrong", "changed in", "seen by", "first finding"]), _row(["---"] * 5)]
    for edit in EDITS:
        findings = found[edit.name]
        seen = ", ".join(f"`{witness}`" for witness in findings)
        lines.append(_row([edit.name, edit.does, f"`{edit.place}`", seen, next(iter(findings.values()), "nothing")]))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
