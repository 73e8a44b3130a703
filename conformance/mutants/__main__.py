"""``python -m conformance.mutants``: every broken engine against the suite; exit 0 where none survives, else 1."""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Sequence

from conformance import matrix
from conformance.mutants import codec_run, report
from conformance.mutants.cells import Cells, killed_by
from conformance.mutants.registry import CODEC, EXAMPLES, LIVE, OWN, RUNS, SEEDS, Mutant, mutants


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants", description=__doc__)
    parser.add_argument("--kind", choices=[*RUNS, "router"], action="append", help="codec, live, own, or all routers")
    parser.add_argument("--only", action="append", metavar="ID", help="these mutants alone; repeat")
    parser.add_argument("--seeds", type=int, metavar="N", help="for every kind; by default 20 for codecs, 3 live")
    parser.add_argument("--quick", action="store_true", help="the test that must kill alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--write", action="store_true", help="store what was found, and write docs/MUTANTS.md")
    found = parser.parse_args(arguments)
    if found.write and (found.seeds or found.quick):
        parser.error("--write takes all seeds and tests")
    unknown = sorted({*(found.only or ())} - {mutant.name for mutant in mutants()})
    if unknown:
        parser.error(f"no mutant is called {unknown[0]}")
    return found


def chosen(kinds: Sequence[str] | None, only: Sequence[str] | None) -> list[Mutant]:
    """The mutants of these kinds and names."""
    return [
        mutant
        for mutant in mutants()
        if (not kinds or {mutant.run, mutant.kind} & {*kinds}) and (not only or mutant.name in only)
    ]


def run(wanted: Sequence[Mutant], options: argparse.Namespace) -> dict[str, Cells]:
    """The cells of all of them."""
    of = {kind: [mutant for mutant in wanted if mutant.run == kind] for kind in RUNS}
    found: dict[str, Cells] = {}
    seeds = {kind: options.seeds or count for kind, count in SEEDS.items()}
    if of[CODEC]:
        found |= codec_run.run(
            of[CODEC],
            seeds=seeds[CODEC],
            examples=EXAMPLES,
            processes=options.processes,
            told=_tell,
            quick=options.quick,
        )
    if of[OWN]:
        from conformance.mutants import own_run

        found |= own_run.run(of[OWN], processes=options.processes, told=_tell)
    if of[LIVE]:
        from conformance.mutants import live_run

        found |= live_run.run(of[LIVE], seeds=seeds[LIVE], told=_tell, quick=options.quick)
    return found


def _tell(name: str, cells: Cells) -> None:
    print(f"{name}: {', '.join(sorted(killed_by(cells))) or 'nothing'}", flush=True)


def _made(seconds: int) -> dict[str, object]:
    """How a whole kind was run: seconds by the clock and of all processes, and what with."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = round(sum(one.ru_utime + one.ru_stime for one in used))
    _, libraries = matrix.header("")[2].split(maxsplit=1)
    return {"seconds": seconds, "cpu_seconds": cpu, "libraries": libraries}


def main(arguments: Sequence[str]) -> int:
    """Run, tell, and store where that is asked for."""
    options, began = _parsed(arguments), time.monotonic()
    wanted = chosen(options.kind, options.only)
    cells = run(wanted, options)
    survivors = [mutant.name for mutant in wanted if report.survives(mutant, cells[mutant.name])]
    unbroken = sorted(killed_by(cells.get(report.UNBROKEN, {})))
    seconds = round(time.monotonic() - began)
    print(f"{len(wanted)} mutants in {seconds} s; survivors: {', '.join(survivors) or 'none'}")
    if unbroken:
        print(f"the engine without a mutant fails {', '.join(unbroken)}")
    if options.write:
        made = {} if options.only else {run: _made(seconds) for run in RUNS if {m.run for m in wanted} >= {run}}
        result = report.Result.read() if report.STORED.exists() else report.Result({}, {})
        known = {mutant.name for mutant in mutants()} | {report.UNBROKEN}
        kept = {name: old for name, old in result.cells.items() if name in known}
        result = report.Result({**result.made, **made}, {**kept, **cells})
        result.write()
        if known == result.cells.keys():
            report.DOCUMENT.write_text(report.document(result, mutants()))
    return 1 if survivors or unbroken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
