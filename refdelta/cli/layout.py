"""The layout command: where a checkpoint's tensors stand in an engine, by our rules, by vLLM's loader, or by both."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from refdelta.cli.output import FAILED, AsJson, console, print_json, print_table, refusals

if TYPE_CHECKING:
    from refdelta.layout.map import LayoutMap, LayoutReport, Region

__all__ = ["Source", "layout"]


_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)", re.ASCII)
"""ORGANISATION/MODEL. A single word is far more often the name of a directory that is not there."""


_SOURCE_HELP = "Whose map; both where vLLM is installed, else by the rules alone."


class Source(StrEnum):
    """Where the map comes from."""

    RULES = "rules"
    TRACED = "traced"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class _Sizes:
    tp: int
    expert_parallel: bool
    ranks: tuple[int, ...]


def layout(
    model: Annotated[str, typer.Argument(metavar="CONFIG_OR_DIR", help="config.json, checkpoint directory or hub id.")],
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size.")] = 1,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="One rank; by default all of them.")] = None,
    expert_parallel: Annotated[bool, typer.Option("--expert-parallel", help="Deal whole experts out.")] = False,
    asked: Annotated[Source | None, typer.Option("--source", help=_SOURCE_HELP)] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="PNG or SVG of how one layer is cut.")] = None,
    layer: Annotated[int, typer.Option("--layer", min=0, help="The layer of the picture.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Where every tensor of a checkpoint stands in a vLLM engine, proven. Exit 1 when a proof fails or maps differ."""
    with refusals():
        from refdelta.checkpoints.model_files import ModelFiles
        from refdelta.layout.proofs import AcrossRanks

        if picture is not None:
            from refdelta.layout.picture import check_picture

            check_picture(picture)
        source = asked or (Source.BOTH if _has_vllm() else Source.RULES)
        sizes = _Sizes(tp, expert_parallel, _ranks(tp, rank))
        path = _local(model)
        files = ModelFiles.read(path)
        ruled = _by_rules(files, sizes) if source is not Source.TRACED else []
        traced = _by_trace(path, sizes, unasked=asked is None) if source is not Source.RULES else []
        shown = ruled or traced
        differences = _differences(ruled, traced, sizes) if source is Source.BOTH else []
        together = AcrossRanks()
        for one in shown:
            together.add(one)
        findings = together.findings() if rank is None else list(shown[0].check().findings())
        findings = [*findings, *_left_out(ruled, traced)]
        if picture is not None:
            from refdelta.layout.picture import draw

            draw(shown, layer, picture)
    if as_json:
        print_json(_report(shown, sizes, differences, findings))
    else:
        _print(shown, sizes, source, differences, findings)
    return FAILED if differences or findings else 0


def _ranks(tp: int, rank: int | None) -> tuple[int, ...]:
    from refdelta.spec import DeltaError, Reason

    if rank is not None and rank >= tp:
        raise DeltaError(Reason.BAD_OPTION, f"--rank {rank}: with --tp {tp} there are ranks 0 to {tp - 1}")
    return tuple(range(tp)) if rank is None else (rank,)


def _local(model: str) -> Path:
    """The path itself, else a hub id's config: from the local cache, and from the hub where that is not offline."""
    from refdelta.files.opening import exists
    from refdelta.spec import DeltaError, Reason

    path = Path(model)
    if exists(path):
        return path
    missing = f"{model}: no such file or directory"
    if not _HUB_ID.fullmatch(model) or importlib.util.find_spec("huggingface_hub") is None:
        raise DeltaError(Reason.UNREADABLE, missing)
    from huggingface_hub import constants, hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", local_files_only=True))
    except Exception as error:  # the hub client raises many kinds; each means that there is no config
        if constants.HF_HUB_OFFLINE:
            detail = f"{missing}, no such hub id in the local cache, and HF_HUB_OFFLINE is set"
            raise DeltaError(Reason.UNREADABLE, detail) from error
    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeltaError(Reason.UNREADABLE, f"{missing}, and no such hub id: {first}") from error


def _by_rules(files: Any, sizes: _Sizes) -> list[LayoutMap]:
    from refdelta.layout.families.rules import layout_from_config

    return [
        layout_from_config(
            files.config,
            tp_size=sizes.tp,
            tp_rank=rank,
            ep_size=sizes.tp if sizes.expert_parallel else 1,
            ep_rank=rank if sizes.expert_parallel else 0,
            tensors=files.tensors,
        )
        for rank in sizes.ranks
    ]


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _by_trace(path: Path, sizes: _Sizes, *, unasked: bool) -> list[LayoutMap]:
    from refdelta.spec import DeltaError
    from refdelta.vllm.tracing.tracer import trace_config_ranks

    try:
        return trace_config_ranks(path, tp_size=sizes.tp, ranks=sizes.ranks, expert_parallel=sizes.expert_parallel)
    except DeltaError as error:
        if not unasked:
            raise
        detail = f"{error.detail} (vLLM is installed and was asked; --source rules asks the rules alone)"
        raise DeltaError(error.reason, detail, error.tensor) from error


def _differences(ruled: Sequence[LayoutMap], traced: Sequence[LayoutMap], sizes: _Sizes) -> list[dict[str, Any]]:
    from refdelta.layout.proofs import difference

    return [
        {"rank": rank, **asdict(found)}
        for rank, one, other in zip(sizes.ranks, ruled, traced, strict=True)
        for found in difference(one, other)
    ]


def _left_out(ruled: Sequence[LayoutMap], traced: Sequence[LayoutMap]) -> list[str]:
    """What the architecture has a place for and vLLM's loader puts nowhere: no engine would hold it."""
    from refdelta.layout.proofs import lost

    names = {name: None for one, other in zip(ruled, traced, strict=False) for name in lost(one, other)}
    return [f"checkpoint tensor {name} reaches no parameter of vLLM's, though the rules have a place" for name in names]


def _report(
    shown: Sequence[LayoutMap], sizes: _Sizes, differences: Sequence[dict[str, Any]], findings: Sequence[str]
) -> dict[str, Any]:
    return {
        "tp": sizes.tp,
        "expert_parallel": sizes.expert_parallel,
        "ranks": [
            {
                "rank": rank,
                "totals": _totals(one, one.check()),
                "verdicts": _verdicts(one),
                "layout": json.loads(one.to_json()),
            }
            for rank, one in zip(sizes.ranks, shown, strict=True)
        ],
        "differences": list(differences),
        "findings": list(findings),
    }


def _verdicts(one: LayoutMap) -> dict[str, str]:
    """What becomes of each checkpoint tensor on this rank; what happens after loading only a live engine tells."""
    tied = {name: f"aliased: {canonical}" for name, canonical in one.aliases.items()}
    gone = {name: f"dropped: {reason}" for name, reason in one.dropped.items()}
    return {name: (tied | gone).get(name) or ("mapped" if one.regions_of(name) else "lost") for name in one.sources}


def _totals(one: LayoutMap, report: LayoutReport) -> dict[str, int]:
    return {
        "tensors": len(one.sources),
        "elements": sum(info.numel for info in one.sources.values()),
        "parameters": len(one.params),
        "regions": len(one.regions),
        "mapped_elements": report.mapped_elements,
        "padding_elements": sum(report.padding.values()),
        "dropped_tensors": len(one.dropped),
        "tied_names": len(one.aliases),
    }


def _print(
    shown: Sequence[LayoutMap],
    sizes: _Sizes,
    source: Source,
    differences: Sequence[dict[str, Any]],
    findings: Sequence[str],
) -> None:
    if len(shown) == 1:
        print_table(_regions(shown[0]))
    _print_totals(shown, sizes)
    _print_not_held(shown[0])
    out = console()
    for found in differences:
        words = f"rank {found['rank']}: {found['kind']} {found['name']}: rules {found['first']}; vLLM {found['second']}"
        out.print(Text(words))
    for finding in findings:
        out.print(Text(finding))
    agree = {Source.RULES: "rules", Source.TRACED: "vLLM's loader", Source.BOTH: "rules and vLLM's loader agree"}
    verdict = "proven: every element has its place, none has two" if not findings else f"{len(findings)} findings"
    if differences:
        verdict = f"not proven: {len(findings)} findings, {len(differences)} differences"
    alone = "; vLLM was not asked" if source is Source.RULES else ""
    out.print(Text(f"{'rules and vLLM differ' if differences else agree[source]}: {verdict}{alone}"))


def _regions(one: LayoutMap) -> Table:
    table = Table("checkpoint tensor", "shape", "box", "parameter", "shape", "box", box=box.SIMPLE_HEAD)
    for region in one.regions:
        source, param = one.sources[region.source], one.params[region.param]
        table.add_row(
            Text(region.source),
            str(list(source.shape)),
            _box_words(region, source.shape, of_param=False),
            Text(region.param),
            str(list(param.shape)),
            _box_words(region, param.shape, of_param=True),
        )
    return table


def _box_words(region: Region, shape: Sequence[int], *, of_param: bool) -> str:
    """The box as ranges of the axes, or its offset where it follows none."""
    from refdelta.layout.boxes import extent

    found = region.param_box if of_param else region.source_box
    ranges = extent(found, tuple(shape))
    if ranges is None:
        return f"{found.numel} from {found.offset}"
    whole = all((first, end) == (0, size) for (first, end), size in zip(ranges, shape, strict=True))
    return "all" if whole else ", ".join(f"{first}:{end}" for first, end in ranges)


def _print_totals(shown: Sequence[LayoutMap], sizes: _Sizes) -> None:
    names = ("tensors", "elements", "parameters", "regions", "mapped", "padding", "dropped", "tied")
    table = Table("rank", *names, box=box.SIMPLE_HEAD)
    for rank, one in zip(sizes.ranks, shown, strict=True):
        table.add_row(str(rank), *(f"{count:,}" for count in _totals(one, one.check()).values()))
    print_table(table)


def _print_not_held(one: LayoutMap) -> None:
    reasons: dict[str, list[str]] = {}
    for name, reason in one.dropped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        console().print(Text(f"dropped, {reason}: {len(names)} tensors, {names[0]} first"))
    for alias, canonical in one.aliases.items():
        console().print(Text(f"tied: {alias} is {canonical}"))
