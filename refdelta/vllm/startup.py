"""What is proved about an engine before its first delta: its layout, its bits, and that its ranks together hold all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import nn
from vllm.logger import init_logger

from refdelta.checkpoint import Checkpoint
from refdelta.layout_map import Box, LayoutMap, TensorInfo, uncovered_elements
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.attest import Attestation, attest, packed_layers
from refdelta.vllm.compat import installed_version
from refdelta.vllm.experts import as_loaded, expert_layers, kernel, reads_live_weights
from refdelta.vllm.position_map import PositionMap
from refdelta.vllm.postload import Standing, recover_permutations, verdicts
from refdelta.vllm.ranks import RankGroup
from refdelta.vllm.session import Target
from refdelta.vllm.trace import runtime_tensors, trace_model

__all__ = ["prove"]

logger = init_logger("vllm.refdelta")  # under vLLM's logger, so that its handlers show it


def prove(model: nn.Module, checkpoint_dir: Path, ranks: RankGroup) -> Target:
    """Trace the layout, attest it against the checkpoint, and combine the ranks' findings.

    Raises `DeltaError` (``unsupported_engine``) where the engine reads packed copies of its weights, or rearranged its
    experts in a way that could not be recovered.
    """
    _refuse_packed(model)
    places = recover_permutations(model)
    with Checkpoint(checkpoint_dir) as checkpoint:
        infos = checkpoint.infos()
        with as_loaded(model):
            layout = trace_model(model, {name: (info.shape, info.dtype) for name, info in infos.items()})
        attestation = attest(runtime_tensors(model), layout, checkpoint, places)
    _refuse_experts(attestation, places, ranks)
    refused = _refused_anywhere(layout, attestation, ranks)
    standings = verdicts(model, layout, attestation, places, packed=())
    _log(layout, attestation, standings, refused, ranks)
    return Target(
        layout, attestation, refused, {k: v for k, v in places.items() if isinstance(v, PositionMap)}, standings
    )


def _refuse_packed(model: nn.Module) -> None:
    if packed := packed_layers(model):
        raise DeltaError(
            Reason.UNSUPPORTED_ENGINE,
            f"cpu_gemm=packed: vLLM {installed_version()} computes {packed[0]} and {len(packed) - 1} more layers from "
            "packed copies of their weights, so an in-place update would serve stale logits; "
            "the refdelta plugin must be loaded in every process before the model is",
        )
    for name, layer in expert_layers(model).items():
        if not reads_live_weights(layer):
            raise DeltaError(
                Reason.UNSUPPORTED_ENGINE, f"moe_kernel={kernel(layer)}: {name} reads copies of its weights"
            )


def _refuse_experts(attestation: Attestation, places: Collection[str], ranks: RankGroup) -> None:
    """Engines with experts are served only where every expert parameter was proved, on every rank."""
    mine = [f"{param}: {why}" for param, why in attestation.failed.items() if param in places]
    for rank, findings in enumerate(json.loads(text) for text in ranks.gather(json.dumps(mine))):
        if findings:
            raise DeltaError(
                Reason.UNSUPPORTED_ENGINE,
                f"moe_weights: rank {rank}: {findings[0]} ({len(findings)} expert parameters were not proved)",
            )


def _refused_anywhere(layout: LayoutMap, attestation: Attestation, ranks: RankGroup) -> dict[str, str]:
    """Checkpoint tensor -> why no delta may touch it: a parameter that failed on any rank, or elements on no rank."""
    mine = {
        "refused": {
            r.source: f"{r.param}: {attestation.failed[r.param]}"
            for r in layout.regions
            if r.param in attestation.failed
        },
        "boxes": _boxes(layout),
    }
    everybody = [json.loads(text) for text in ranks.gather(json.dumps(mine))]
    refused: dict[str, str] = {}
    for rank, other in enumerate(everybody):
        refused |= {name: f"rank {rank}: {why}" for name, why in other["refused"].items()}
    refused |= _held_nowhere(layout.sources, [other["boxes"] for other in everybody])
    return refused


def _boxes(layout: LayoutMap) -> dict[str, list[list[object]]]:
    boxes: dict[str, list[list[object]]] = {}
    for region in layout.regions:
        box = region.source_box
        boxes.setdefault(region.source, []).append([box.offset, box.shape, box.strides])
    return boxes


def _held_nowhere(
    sources: Mapping[str, TensorInfo], by_rank: list[dict[str, list[tuple[int, list[int], list[int]]]]]
) -> dict[str, str]:
    """Tensors of which some elements are on no rank although others are: a delta could be lost there in silence."""
    found: dict[str, str] = {}
    for name, info in sources.items():
        boxes = {Box(o, tuple(n), tuple(s)) for held in by_rank for o, n, s in held.get(name, [])}
        if boxes and (missing := uncovered_elements(info, sorted(boxes, key=lambda box: box.offset))):
            found[name] = f"{missing} of its {info.numel} elements are on no rank"
    return found


def _log(
    layout: LayoutMap,
    attestation: Attestation,
    standings: Mapping[str, Standing],
    refused: Mapping[str, str],
    ranks: RankGroup,
) -> None:
    logger.info(
        "refdelta: rank %d of %d: %d checkpoint tensors onto %d parameters; %d attested, %d failed, %d dropped for a "
        "reason, %d tied, %d unproven (equal bytes); after loading: %s",
        ranks.rank,
        ranks.size,
        len(layout.sources),
        len(layout.params),
        len(attestation.proved),
        len(attestation.failed),
        len(layout.dropped),
        len(layout.aliases),
        len(attestation.unproven),
        ", ".join(f"{count} {verdict}" for verdict, count in Counter(s.verdict for s in standings.values()).items()),
    )
    for name, why in refused.items():
        logger.warning("refdelta: deltas that touch %s will be refused: %s", name, why)
