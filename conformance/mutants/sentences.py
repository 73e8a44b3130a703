"""Which check or vector finds an engine that breaks a sentence of SPEC.md, and what stands in docs/SENTENCES.md.

    python -m conformance.mutants.sentences           every mutant of a sentence, under every test that can tell
    python -m conformance.mutants.sentences --write   store what was found, and write what is made of it

A link of a sentence is a test, with its parameters, that fails for a mutant which breaks the sentence, and passes
without. Of the many that do, those stay that fail for the fewest other sentences, vectors first. Three files are made:
`sentences.json` here (mutant -> its links), `conformance/sentences.json` (sentence -> tests of the suite, which a
report is read by), and docs/SENTENCES.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import core as hypothesis_core

from ..driving import sentences as known
from . import codec_run, own_run, report
from .cells import KILLED
from .registry import SENTENCE, Mutant, mutants

ROOT = Path(__file__).parents[2]
"""The repository: a wheel has no mutants."""
IDS = ROOT / "tests" / "codec" / "spec_ids.txt"
STORED = Path(__file__).with_name("sentences.json")
DOCUMENT = ROOT / "docs" / "SENTENCES.md"
COMMAND = "python -m conformance.mutants.sentences --write"
LINKS = 4
"""Of a mutant, at most."""
ELSEWHERE = ("declines", "deterministic", "corrupted")
"""Chapters that are there for something else than one sentence of the format."""
EXAMPLES = 30
"""Of a property."""
RIGHT = ("conformance.mutants.right:Plain", "conformance.mutants.ruled:Ruled", "conformance.engines.codecs:Reference")
"""What the mutants are made from."""

MATRIX: Mapping[str, tuple[str, ...]] = {
    # codecs
    "WrapsPositions": ("S3.2-3",),
    "TakesI64AtTheBoundary": ("S3.2-3",),
    "StampsTheTime": ("S6-9",),
    # live engines
    "values_added": ("S3.3-3",),
    "written_by_value": ("S3.3-4",),
    "nan_left_out": ("S3.3-4",),
    "positions_clamped": ("S3.2-2",),
    "unknown_names_skipped": ("S5.1-1",),
    "sizes_compared_alone": ("S5.1-1",),
    "result_compared_too_late": ("S5.1-1", "S9.3-2"),
    "first_position_skipped": ("S5.1-2",),
    "last_position_skipped": ("S5.1-2",),
    "second_rank_writes_nothing": ("S5.1-2",),
    "aliases_not_compared": ("S5.3-1",),
    "empty_is_an_error": ("S5.4-1",),
    "encoded_by_value": ("S8.4-1",),
    "base_digest_not_compared": ("S9.3-1",),
    "result_not_compared": ("S9.3-2",),
    "runs_not_told_apart": ("S9.5-1",),
    "parts_taken_incomplete": ("S9.7-5",),
    "last_part_wins": ("S9.7-6",),
    # refdelta's own parts
    "written_in_place": ("S2.2-1",),
    "earlier_runs_overwritten": ("S2.2-2",),
    "payload_not_hashed": ("S9.2-2",),
    "baseline_moves_when_encoded": ("S9.4-1",),
    "only_the_last_step_is_sent": ("S9.4-2",),
}
"""Mutants of the kill matrix (`matrix.json`), and the sentences that they break."""

UNLINKED: Mapping[str, str] = {
    "S4.1-7": "a permission of readers: one that refuses and one that takes are both right, so nothing breaks it",
    "S10.4-1": "advice to who relies on a digest, in no file and no call; refdelta's audits are judged in tests/live",
    "S13.2-2": "a permission of readers: the suite has one fault in each file, so it never asks",
}
"""Sentences without a link, and why."""


def sentences() -> dict[str, str]:
    """Id -> sentence, in the order of SPEC.md."""
    return dict(line.split(" ", 1) for line in IDS.read_text(encoding="utf-8").splitlines())


# -- running -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """What was found of one mutant."""

    kills: tuple[str, ...]
    """Every test that failed: ``chapter::test[parameters]``, or a test of refdelta's by its node."""

    def chosen(self, often: Mapping[str, int]) -> list[str]:
        """The links: those that fail for the fewest sentences, vectors first; of some chapters in need alone."""

        def order(test: str) -> tuple[bool, int, bool, str]:
            of_a_vector = "[valid/" in test or "[invalid/" in test
            return test.partition("::")[0] in ELSEWHERE, often[test], not of_a_vector, test

        return sorted(self.kills, key=order)[:LINKS]


def able(tests: Iterable[codec_run.Test]) -> list[codec_run.Test]:
    """The tests that a mutant of a sentence is run under: those that take little."""
    left_out = {"test_fresh_processes", "test_three_million_elements", "test_thread_counts"}
    return [t for t in tests if t.chapter != "routes" and "large" not in t.needs and t.name not in left_out]


def name_of(test: codec_run.Test) -> str:
    return f"{test.chapter}::{test.item}"


def fails(test: codec_run.Test, place: str) -> bool:
    """Whether the test finds something wrong with the engine at `place`."""
    hypothesis_core.global_force_seed = 0  # type: ignore[assignment]  # what ``--hypothesis-seed`` sets
    return test.run(codec_run.engine_at(place), place, EXAMPLES)[0] == KILLED


_TESTS: list[codec_run.Test] = []
"""For forked processes."""


def _found(mutant: Mutant) -> tuple[str, Found]:
    if mutant.by:
        return mutant.name, Found((mutant.by,) if own_run._outcome(mutant.by, mutant.place)[0] == KILLED else ())
    # Properties take long, and are the link of last resort: a case that is always the same is a better one.
    for drawn in (False, True):
        kills = tuple(name_of(test) for test in _TESTS if test.seeded == drawn and fails(test, mutant.place))
        if kills:
            break
    return mutant.name, Found(kills)


def run(wanted: Sequence[Mutant], processes: int) -> Iterator[tuple[str, Found]]:
    """Every mutant; AssertionError where a test fails without one, since it would tell nothing."""
    _TESTS[:] = able(codec_run.collect())
    codec_run.register_profile(EXAMPLES)
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for place, broken in pool.imap_unordered(_broken, RIGHT):
            assert not broken, f"{place} without a mutant fails {broken}"
        for node in sorted({mutant.by for mutant in wanted if mutant.by}):
            word, finding = pool.apply(own_run._outcome, (node, None))
            assert word != KILLED, f"{node} fails without a mutant: {finding}"
        yield from pool.imap_unordered(_found, wanted)


def _broken(place: str) -> tuple[str, list[str]]:
    return place, [name_of(test) for test in _TESTS if fails(test, place)]


def check() -> list[str]:
    """The mutants of codecs that their first stored link does not find, and what is found without a mutant."""
    tests = {name_of(test): test for test in codec_run.collect()}
    codec_run.register_profile(EXAMPLES)
    found, places = stored(), {m.name: m.place for m in mutants(SENTENCE) if not m.by}
    first = {name: tests[found[name][0]] for name in places}
    wrong = [name for name, test in first.items() if not fails(test, places[name])]
    right = {name_of(test): test for test in first.values()}
    return wrong + [f"{place}: {name}" for place in RIGHT for name, test in right.items() if fails(test, place)]


# -- what is made of it ------------------------------------------------------------------------------------------------


def breaking() -> dict[str, tuple[str, ...]]:
    """Mutant -> the sentences that it breaks."""
    return {**MATRIX, **{mutant.name: mutant.breaks for mutant in mutants(SENTENCE)}}


def choose(found: Mapping[str, Found]) -> dict[str, list[str]]:
    """Mutant -> its links."""
    of, reach = breaking(), dict[str, set[str]]()
    for name, one in found.items():
        for test in one.kills:
            reach.setdefault(test, set()).update(of[name])
    often = {test: len(ids) for test, ids in reach.items()}
    return {name: one.chosen(often) for name, one in found.items()}


def of_the_matrix() -> dict[str, list[str]]:
    """The links of the mutants of the kill matrix: the tests that must kill, and did in every run."""
    result, by_name = report.Result.read(), {mutant.name: mutant for mutant in mutants()}
    return {
        name: [
            test.partition(" ")[0]
            for test, cell in result.cells[name].items()
            if cell.always and report.is_named(by_name[name], test, cell)
        ]
        for name in MATRIX
    }


def stored() -> dict[str, list[str]]:
    """Mutant -> its links: those that were stored, and those of the kill matrix."""
    whole: dict[str, list[str]] = json.loads(STORED.read_text(encoding="utf-8"))
    return {**of_the_matrix(), **whole}


def links(of_mutants: Mapping[str, Sequence[str]]) -> dict[str, dict[str, list[str]]]:
    """Sentence -> mutant that breaks it -> links."""
    table: dict[str, dict[str, list[str]]] = {name: {} for name in sentences()}
    for mutant, ids in breaking().items():
        for name in ids:
            table[name][mutant] = list(of_mutants.get(mutant, ()))
    return table


def unproven(table: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    """Sentences without a link that are not in the short list, and those in it that have one."""
    linked = {name for name, of in table.items() if any(of.values())}
    return sorted((table.keys() - linked) ^ UNLINKED.keys())


def installed(table: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """`conformance/sentences.json`."""
    found = []
    for name, sentence in sentences().items():
        tests = {test: None for of in table[name].values() for test in of}
        own = [test for test in tests if test.startswith("tests/")]
        ours = [_file(test) for test in tests if test not in own]
        why = UNLINKED.get(
            name, "" if ours else "the suite has no test of it; refdelta's own tests hold refdelta to it"
        )
        found.append({"id": name, "sentence": sentence, "tests": ours, "not_judged": why})
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _file(test: str) -> str:
    """The name that a test of the suite has in a report."""
    chapter, _, name = test.partition("::")
    return f"test_{'' if chapter.startswith('live') else 'codec_'}{chapter}.py::{name}"


# -- the document ------------------------------------------------------------------------------------------------------


def document(table: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """docs/SENTENCES.md."""
    linked = [name for name in table if name not in UNLINKED]
    suite = [name for name in linked if any(not t.startswith("tests/") for of in table[name].values() for t in of)]
    head = f"""# Sentences

Made by `{COMMAND}`; not edited by hand.

[SPEC.md](SPEC.md) has {len(table)} sentences that require, advise or permit something. {len(linked)} of them have a
link here: a test that fails for an engine which breaks the sentence, and passes for the same engine without the fault.
{len(suite)} are judged by tests of the suite, so a report of a run says of each whether the engine keeps it. The
other {len(linked) - len(suite)} are about trainers, writers and receivers, and show in no call of a codec:
refdelta's own tests (`tests/...`) hold refdelta to them. The rest stands at the end, with the reason.

A name like `invalid/keys/key_extra` is a golden vector (`conformance/vectors/`), judged by the test before it. Of many
tests that fail, at most {LINKS} of each broken engine are listed: those that fail for the fewest other sentences."""
    parts = [head]
    rows = [_row(("sentence", "an engine that breaks it", "found by")), _row(("---",) * 3)]
    said, does = sentences(), {m.name: m.does for m in [*mutants(SENTENCE), *mutants()]}
    for name in linked:
        for number, (mutant, tests) in enumerate(table[name].items()):
            first = f"[{name}](SPEC.md#{name}) {said[name]}" if number == 0 else f"{name}"
            rows.append(_row((first, f"`{mutant}`: {does[mutant]}", "; ".join(_shown(tests)))))
    parts += ["\n".join(rows), "## Without a link"]
    rows = [_row(("sentence", "why")), _row(("---",) * 2)]
    rows += [_row((f"[{name}](SPEC.md#{name}) {said[name]}", why)) for name, why in UNLINKED.items()]
    parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _shown(tests: Sequence[str]) -> Iterator[str]:
    """Tests, and vectors after the test that takes them."""
    by_function: dict[str, list[str]] = {}
    for test in tests:
        function, _, parameters = test.partition("[")
        by_function.setdefault(function, []).extend([parameters.removesuffix("]")] if parameters else [])
    for function, cases in by_function.items():
        yield f"`{function}`" + (f" {', '.join(f'`{case}`' for case in cases)}" if cases else "")


def _row(cells: Sequence[str]) -> str:
    links = (re.sub(r"\[(S[\d.]+-\d+)\]\(#", r"[\1](SPEC.md#", cell) for cell in cells)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in links) + " |"


def write(of_mutants: Mapping[str, Sequence[str]]) -> None:
    """The two files that are made of the links."""
    table = links(of_mutants)
    known.STORED.write_text(installed(table), encoding="utf-8")
    DOCUMENT.write_text(document(table), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run, tell, and store where that is asked for; 1 where a mutant survives or a sentence has no link."""
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants.sentences", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", metavar="MUTANT", help="these alone; stored beside the others")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--write", action="store_true", help=f"store what was found, and write {DOCUMENT.name}")
    parser.add_argument(
        "--check", action="store_true", help="run the first stored link of each mutant of a codec alone"
    )
    parser.add_argument("--made", action="store_true", help="write what is made of what was stored, and run nothing")
    options, began, found = parser.parse_args(arguments), time.monotonic(), dict[str, Found]()
    if options.made:
        write(stored())
        return 0
    if options.check:
        wrong = check()
        print(f"wrong: {', '.join(wrong) or 'none'}")
        return 1 if wrong else 0
    wanted = [m for m in mutants(SENTENCE) if not options.only or m.name in options.only]
    for name, one in run(wanted, options.processes):
        found[name] = one
        print(f"{name}: {len(one.kills)} tests, {', '.join(one.kills[:2]) or 'nothing'}", flush=True)
    survivors = sorted(name for name, one in found.items() if not one.kills)
    if options.write:
        before = json.loads(STORED.read_text(encoding="utf-8")) if options.only and STORED.exists() else {}
        chosen = {**before, **choose(found)}
        mine = {m.name: chosen[m.name] for m in mutants(SENTENCE) if m.name in chosen}
        STORED.write_text(json.dumps(mine, indent=1) + "\n", encoding="utf-8")
        write(stored())
    missing = unproven(links(stored())) if options.write else []
    print(f"{len(found)} mutants in {time.monotonic() - began:.0f} s; survivors: {', '.join(survivors) or 'none'}")
    if missing:
        print(f"sentences without a link: {', '.join(missing)}")
    return 1 if survivors or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
