"""``python -m conformance.mutants``: every broken engine against the suite; exit 0 where none survives, else 1."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence

from ..suite import matrix
from . import ci, codec_run, own_run, report
from .beside import beside
from .cells import Judged, killed_by
from .registry import CODEC, EXAMPLES, LIVE, OWN, RUNS, SEEDS, Mutant, mutants


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants", description=__doc__)
    parser.add_argument("--kind", choices=[*RUNS, "router"], action="append", help="codec, live, own, or all routers")
    parser.add_argument("--only", action="append", metavar="ID", help="these mutants alone; repeat")
    parser.add_argument("--ci", action="store_true", help="those of `conformance.mutants.ci` alone")
    parser.add_argument("--seeds", type=int, metavar="N", help="for every kind; by default 20 for codecs, 3 live")
    parser.add_argument("--quick", action="store_true", help="the test that must kill alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--write", action="store_true", help="store what was found, and write docs/MUTANTS.md")
    parser.add_argument("--missing", action="store_true", help="of these, the mutants that the stored result lacks")
    found = parser.parse_args(arguments)
    if found.write and (found.seeds or found.quick):
        parser.error("--write takes all seeds and tests")
    unknown = sorted({*(found.only or ())} - {mutant.name for mutant in mutants()})
    if unknown:
        parser.error(f"no mutant is called {unknown[0]}")
    return found


def chosen(options: argparse.Namespace, stored: report.Result) -> list[Mutant]:
    """The mutants that were asked for."""
    return [
        mutant
        for mutant in mutants()
        if (not options.kind or {mutant.run, mutant.kind} & {*options.kind})
        and (not options.only or mutant.name in options.only)
        and not (options.ci and mutant.name not in ci.NAMES)
        and not (options.missing and mutant.name in stored.cells)
    ]


def run(wanted: Sequence[Mutant], options: argparse.Namespace, passed: set[str]) -> Iterator[Judged]:
    """Each of them, and the unbroken live engine on rows that it has not passed yet."""
    of = {kind: [mutant for mutant in wanted if mutant.run == kind] for kind in RUNS}
    seeds = {kind: options.seeds or count for kind, count in SEEDS.items()}

    def without_engines() -> Iterator[Judged]:
        if of[OWN]:
            yield from own_run.run(of[OWN], processes=options.processes)
        if of[CODEC] and options.quick:
            yield from codec_run.quick(of[CODEC], seeds[CODEC])
        elif of[CODEC]:
            how = {"seeds": seeds[CODEC], "examples": EXAMPLES, "processes": options.processes}
            yield from codec_run.run(of[CODEC], **how)

    def with_engines() -> Iterator[Judged]:
        from . import live_run

        yield from live_run.run(of[LIVE], seeds=seeds[LIVE], quick=options.quick, passed=passed)

    sources = [
        *([without_engines] if of[OWN] or of[CODEC] else []),
        *([with_engines] if of[LIVE] else []),
    ]
    # A live row waits for its engines half of the time.
    return sources[0]() if len(sources) == 1 else beside(sources)


def main(arguments: Sequence[str]) -> int:
    """Run, tell, and store where that is asked for: after each mutant, so that an ended run can go on."""
    options, began = _parsed(arguments), time.monotonic()
    whole = not (options.kind or options.only or options.ci or options.missing)
    if whole and options.write:
        report.STORED.unlink(missing_ok=True)
    stored = report.Result.read()
    wanted = chosen(options, stored)
    found = report.Result(matrix.header("")[2].split(maxsplit=1)[1])
    for judged in run(wanted, options, stored.passed if options.missing else set()):
        print(f"{judged.name}: {', '.join(sorted(killed_by(judged.cells))) or 'nothing'}", flush=True)
        found.add(judged)
        if options.write:
            stored = report.Result.read()  # another run may have stored something meanwhile
            stored.add(judged)
            stored.libraries = found.libraries
            stored.write()
    survivors = [mutant.name for mutant in wanted if report.survives(mutant, found.cells[mutant.name])]
    unbroken = sorted(killed_by(found.cells.get(report.UNBROKEN, {})))
    seconds = round(time.monotonic() - began)
    if whole and options.write:
        stored.took = f"{seconds} s by the clock on {os.cpu_count()} processors"
        stored.write()
    print(f"{len(wanted)} mutants in {seconds} s; survivors: {', '.join(survivors) or 'none'}")
    if unbroken:
        print(f"the engine without a mutant fails {', '.join(unbroken)}")
    if options.write and stored.cells.keys() >= {mutant.name for mutant in mutants()}:
        report.DOCUMENT.write_text(report.document(stored, mutants()))
    return 1 if survivors or unbroken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
