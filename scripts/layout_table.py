"""Rules against vLLM's own loader at real size: every rank of every model and size, without weights.

    python scripts/layout_table.py                        everything
    python scripts/layout_table.py --only qwen3-8b --tp 1 4

Per case both maps of every rank are compared element by element (`refdelta.layout.proofs.difference`) and all ranks
together are proven to hold the checkpoint exactly (`AcrossRanks`). Prints a Markdown table; exit 1 on any finding.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from refdelta.checkpoints.model_files import ModelFiles
from refdelta.layout.families import Ranks, Table, lay_out, table_of
from refdelta.layout.proofs import AcrossRanks, difference
from refdelta.layout_map import LayoutMap
from refdelta.spec import DeltaError
from refdelta.vllm.tracing.meta_engine import Sizes
from refdelta.vllm.tracing.tracer import Tracer

CONFIGS = Path(__file__).resolve().parent.parent / "conformance" / "configs"
SIZES = (1, 2, 4, 8, 16)
WITH_TOWERS = ("gemma4-e4b",)
"""Models laid out a second time with transformers' default towers, as their published files have them."""

HEADER = "| model | ranks | tensors | elements | parameters | seconds | slowest rank | peak MiB | result |"
RULER = "|---|---|---:|---:|---:|---:|---:|---:|---|"


@dataclass(frozen=True, slots=True)
class Case:
    """One model at one size."""

    model: str
    config: Mapping[str, Any]
    sizes: Sizes

    @property
    def name(self) -> str:
        """As in the table: ``TP 8``, ``TP 8 EP 8``."""
        tp = self.sizes.tp_size
        return f"TP {tp} EP {tp}" if self.sizes.expert_parallel else f"TP {tp}"

    def rules(self, table: Table, rank: int) -> LayoutMap:
        """The map of one rank by the rules; the table is the same for all of them."""
        tp = self.sizes.tp_size
        ep_size, ep_rank = (tp, rank) if self.sizes.expert_parallel else (1, 0)
        return lay_out(table, Ranks(tp, rank, ep_size, ep_rank))


@dataclass(frozen=True, slots=True)
class Result:
    """What one case took, and what was found wrong."""

    model: str
    case: str
    ranks: int = 0
    tensors: int = 0
    elements: int = 0
    parameters: int = 0
    seconds: float = 0.0
    """For all ranks, comparison and proofs included."""
    slowest_rank: float = 0.0
    """Seconds to build and trace the slowest rank."""
    peak_mib: float = 0.0
    """Of the tracing process."""
    refused: str | None = None
    """Why there is no such engine, where rules and vLLM agree on that."""
    findings: tuple[str, ...] = ()

    def line(self) -> str:
        """A line of the table."""
        if self.refused is not None:
            return f"| {self.model} | {self.case} | | | | | | | no such engine: {self.refused} |"
        verdict = "agree, proven" if not self.findings else f"{len(self.findings)} findings"
        numbers = f"{self.tensors} | {self.elements:,} | {self.parameters} | {self.seconds:.1f}"
        return f"| {self.model} | {self.case} | {numbers} | {self.slowest_rank:.1f} | {self.peak_mib:.0f} | {verdict} |"


def cases(models: Sequence[str], sizes: Sequence[int]) -> Iterator[Case]:
    """Every case, model by model; experts also dealt out whole wherever there are experts and several ranks."""
    for path in sorted(CONFIGS.glob("*.json")):
        if models and path.stem not in models:
            continue
        config = json.loads(path.read_text("utf-8"))
        yield from _cases(path.stem, config, sizes)
        if path.stem in WITH_TOWERS:
            yield from _cases(f"{path.stem} with towers", {**config, "vision_config": {}, "audio_config": {}}, sizes)


def _cases(model: str, config: Mapping[str, Any], sizes: Sequence[int]) -> Iterator[Case]:
    for tp in sizes:
        yield Case(model, config, Sizes(tp))
        if tp > 1 and config.get("text_config", config).get("num_experts"):
            yield Case(model, config, Sizes(tp, expert_parallel=True))


def run(case: Case, tracer: Tracer) -> Result:
    """Trace every rank and compare it."""
    started = time.perf_counter()
    table = table_of(case.config)
    try:
        case.rules(table, 0)
    except DeltaError as error:
        return _both_refuse(case, tracer, error.detail.removeprefix("layout: "))
    result, together = Result(case.model, case.name), AcrossRanks()
    findings: list[str] = []
    try:
        for traced in tracer.trace(ModelFiles(case.config), case.sizes):
            rules = case.rules(table, traced.rank)
            findings += [f"rank {traced.rank}: {found}" for found in difference(rules, traced.layout)]
            together.add(traced.layout)
            result = replace(
                result,
                ranks=result.ranks + 1,
                tensors=len(traced.layout.sources),
                elements=sum(info.numel for info in traced.layout.sources.values()),
                parameters=len(traced.layout.params),
                slowest_rank=max(result.slowest_rank, traced.seconds),
                peak_mib=traced.peak_mib,
            )
    except DeltaError as error:
        findings.append(str(error))
    findings += together.findings()
    return replace(result, seconds=time.perf_counter() - started, findings=tuple(findings))


def _both_refuse(case: Case, tracer: Tracer, refused: str) -> Result:
    """A size that the rules refuse must be one that vLLM refuses."""
    try:
        list(tracer.trace(ModelFiles(case.config), case.sizes, [0]))
    except DeltaError:
        return Result(case.model, case.name, refused=refused)
    return Result(case.model, case.name, findings=(f"the rules refuse what vLLM builds: {refused}",))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL", help=f"of {CONFIGS}")
    parser.add_argument("--tp", nargs="+", type=int, default=list(SIZES), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.only) - {path.stem for path in CONFIGS.glob("*.json")})
    if unknown:
        parser.error(f"no config of that name: {', '.join(unknown)}")
    started = time.perf_counter()
    results: list[Result] = []
    gc.disable()  # maps are hundreds of thousands of small objects
    print(HEADER, RULER, sep="\n", flush=True)
    for model in dict.fromkeys(case.model for case in cases(options.only, options.tp)):
        with Tracer() as tracer:
            for case in (case for case in cases(options.only, options.tp) if case.model == model):
                results.append(run(case, tracer))
                print(results[-1].line(), flush=True)
                gc.collect()
    return _report(results, time.perf_counter() - started, options.json)


def _report(results: Sequence[Result], seconds: float, file: Path | None) -> int:
    findings = [f"{result.model} {result.case}: {finding}" for result in results for finding in result.findings]
    ranks, own = sum(result.ranks for result in results), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n{len(results)} cases, {ranks} ranks, {seconds:.0f} s; this process used {own:.0f} MiB")
    for finding in findings[:40]:
        print(f"  {finding}")
    if len(findings) > 40:
        print(f"  and {len(findings) - 40} more")
    if file is not None:
        file.write_text(json.dumps({"seconds": seconds, "results": [asdict(r) for r in results]}, indent=1), "utf-8")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
