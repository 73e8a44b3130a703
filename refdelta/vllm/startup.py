"""What is proved about an engine before its first delta: its layout, its bits, and that its ranks together hold all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from vllm.logger import init_logger

from refdelta import digest
from refdelta.checkpoint import Checkpoint
from refdelta.layout_map import LayoutMap
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.attest import Attestation, attest, packed_layers
from refdelta.vllm.compat import installed_version
from refdelta.vllm.experts import as_loaded, expert_layers, kernel, reads_live_weights
from refdelta.vllm.ledger import Ledger
from refdelta.vllm.position_map import PositionMap
from refdelta.vllm.postload import Standing, recover_permutations, verdicts
from refdelta.vllm.ranks import RankGroup
from refdelta.vllm.shares import Boxes, Shares, boxes_by_source, census, header_sum, held_nowhere
from refdelta.vllm.target import Target
from refdelta.vllm.trace import runtime_tensors, trace_model

__all__ = ["Proved", "prove"]

logger = init_logger("vllm.refdelta")  # under vLLM's logger, so that its handlers show it


@dataclass(frozen=True)
class Proved:
    """What an engine starts with."""

    target: Target
    shares: Shares
    ledger: Ledger


def prove(model: nn.Module, checkpoint_dir: Path, ranks: RankGroup) -> Proved:
    """Trace the layout, attest it against the checkpoint, combine the ranks' findings, and take the digest of it all.

    Raises `DeltaError` (``unsupported_engine``) where the engine reads packed copies of its weights, or rearranged its
    experts in a way that could not be recovered.
    """
    _refuse_packed(model)
    places = recover_permutations(model)
    with Checkpoint(checkpoint_dir) as checkpoint:
        infos = checkpoint.infos()
        with as_loaded(model):
            layout = trace_model(model, {name: (info.shape, info.dtype) for name, info in infos.items()})
        attestation = attest(model, layout, checkpoint, places)
        _refuse_experts(attestation, places, ranks)
        boxes = [json.loads(text) for text in ranks.gather(json.dumps(boxes_by_source(layout)))]
        refused = _refused_anywhere(layout, attestation, boxes, ranks)
        standings = verdicts(model, layout, attestation, places, packed=())
        _log(layout, attestation, standings, refused, ranks)
        moved = {name: place for name, place in places.items() if isinstance(place, PositionMap)}
        target = Target(layout, attestation, refused, moved, standings)
        shares = Shares.of(layout, moved, census(layout, boxes, ranks.rank, refused))
        shares = shares.with_values(shares.measured(runtime_tensors(model)))
        return Proved(target, shares, _ledger(shares, checkpoint, ranks))


def _ledger(shares: Shares, checkpoint: Checkpoint, ranks: RankGroup) -> Ledger:
    """The digest of every tensor: of those that the ranks count from memory, of the others from the files."""
    sources, counted = shares.layout.sources, shares.census.counted
    rest = sorted(sources.keys() - counted)
    mine = shares.owned_sums(shares.values)
    for name in rest[ranks.rank :: ranks.size]:
        mine[name] = digest.parse(digest.tensor_digest(name, checkpoint[name]))
    layers = {name: header_sum(name, sources[name]) if name in counted else 0 for name in sources}
    for text in ranks.gather(json.dumps(mine)):
        for name, share in json.loads(text).items():
            layers[name] = (layers[name] + int(share)) % (1 << 64)
    dropped = {name: shares.layout.dropped.get(name, "no rank holds the whole of it") for name in rest}
    return Ledger(layers, dropped)


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


def _refused_anywhere(
    layout: LayoutMap, attestation: Attestation, boxes: Sequence[Boxes], ranks: RankGroup
) -> dict[str, str]:
    """Checkpoint tensor -> why no delta may touch it: a parameter that failed on any rank, or elements on no rank."""
    mine = {
        r.source: f"{r.param}: {attestation.failed[r.param]}" for r in layout.regions if r.param in attestation.failed
    }
    refused: dict[str, str] = {}
    for rank, other in enumerate(json.loads(text) for text in ranks.gather(json.dumps(mine))):
        refused |= {name: f"rank {rank}: {why}" for name, why in other.items()}
    return refused | held_nowhere(layout.sources, boxes)


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
