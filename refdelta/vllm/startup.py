"""Prove an engine before its first delta: its layout, its bits, and that its ranks together hold the whole
checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from vllm.logger import init_logger

from refdelta.checkpoints.reading import Checkpoint
from refdelta.codec import digests as digest
from refdelta.layout.map import LayoutMap
from refdelta.spec import DeltaError, Reason
from refdelta.vllm.assumptions.experts import as_loaded, expert_layers, kernel, reads_live_weights
from refdelta.vllm.assumptions.loaded_files import LoadedFiles
from refdelta.vllm.assumptions.versions import installed_version
from refdelta.vllm.proof.attest import Attestation, attest, packed_layers, said, unlike
from refdelta.vllm.proof.position_maps import PositionMap
from refdelta.vllm.proof.post_load import PostLoadVerdict, recover_permutations, verdicts
from refdelta.vllm.proof.unmapped import Unmapped, accounts, find
from refdelta.vllm.tracing.recorder import runtime_tensors, trace_model
from refdelta.vllm.update.block_digests import (
    BlockDigests,
    Boxes,
    boxes_by_source,
    counted_regions,
    elements_on_no_rank,
    header_sum,
    ownership,
)
from refdelta.vllm.update.engine_state import EngineState
from refdelta.vllm.update.ledger import Ledger
from refdelta.vllm.update.proven_layout import ProvenLayout
from refdelta.vllm.update.ranks import RankGroup

__all__ = ["prove"]

_ENGINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Values of vLLM's ``--dtype``."""

logger = init_logger("vllm.refdelta")  # under vLLM's logger, so that its handlers show it


def prove(model: nn.Module, files: LoadedFiles, ranks: RankGroup) -> EngineState:
    """Trace the layout, attest it against the checkpoint, combine the ranks' findings, and take the digest of it all.

    Raises `DeltaError` (``unsupported_engine``) where the engine reads packed copies of its weights, rearranged its
    experts in a way that could not be recovered, or could take no delta at all; what `LoadedFiles.served` raises.
    """
    _refuse_packed(model)
    position_maps = recover_permutations(model)
    with files.served() as checkpoint:
        infos = checkpoint.infos()
        with as_loaded(model):
            layout = trace_model(model, {name: (info.shape, info.dtype) for name, info in infos.items()})
        attestation = attest(model, layout, checkpoint, position_maps)
        boxes = [json.loads(text) for text in ranks.gather(json.dumps(boxes_by_source(layout)))]
        refused = _refused_anywhere(layout, attestation, boxes, ranks)
        _refuse_useless(layout, refused, boxes)
        _refuse_experts(attestation, position_maps, ranks)
        post_load_verdicts = verdicts(model, layout, attestation, position_maps, packed=())
        unmapped = _unmapped(layout, checkpoint, files, ranks)
        _log(layout, attestation, post_load_verdicts, refused, unmapped, ranks)
        moved = {name: place for name, place in position_maps.items() if isinstance(place, PositionMap)}
        proven = ProvenLayout(
            layout, attestation, refused, moved, post_load_verdicts, opened=files.at, unmapped=unmapped
        )
        block_digests = BlockDigests.of(layout, moved, ownership(layout, boxes, ranks.rank, refused))
        block_digests = block_digests.with_values(block_digests.measured(runtime_tensors(model)))
        return EngineState(proven, block_digests, _ledger(block_digests, checkpoint, unmapped, ranks))


def _ledger(block_digests: BlockDigests, checkpoint: Checkpoint, unmapped: Unmapped, ranks: RankGroup) -> Ledger:
    """The digest of every tensor: of those that the ranks count from memory, of the others from the files."""
    sources, counted = block_digests.layout.sources, block_digests.ownership.counted
    rest = sorted(sources.keys() - counted)
    mine = block_digests.owned_sums(block_digests.values)
    for name in rest[ranks.rank :: ranks.size]:
        mine[name] = digest.parse(digest.tensor_digest(name, checkpoint[name]))
    layers = {name: header_sum(name, sources[name]) if name in counted else 0 for name in sources}
    for text in ranks.gather(json.dumps(mine)):
        for name, share in json.loads(text).items():
            layers[name] = (layers[name] + int(share)) % (1 << 64)
    whole = "no rank holds the whole of it"
    dropped = {name: block_digests.layout.dropped.get(name, whole) for name in rest if name not in unmapped.reasons}
    return Ledger(layers, dropped, unmapped=unmapped.reasons)


def _unmapped(layout: LayoutMap, checkpoint: Checkpoint, files: LoadedFiles, ranks: RankGroup) -> Unmapped:
    """What some rank leaves out without a reason; every rank reads it, so that all refuse alike."""
    mine = json.dumps(accounts(layout.check().unmapped, layout.dropped))
    reasons = find(layout.sources, [json.loads(text) for text in ranks.gather(mine)])
    digests = {name: digest.parse(digest.tensor_digest(name, checkpoint[name])) for name in reasons}
    return Unmapped(reasons, digests, files.served)


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


def _refuse_experts(attestation: Attestation, position_maps: Collection[str], ranks: RankGroup) -> None:
    """Engines with experts are served only where every expert parameter was proved, on every rank."""
    mine = [f"{param}: {why}" for param, why in attestation.failed.items() if param in position_maps]
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
    refused |= elements_on_no_rank(layout.sources, boxes)
    tied = {alias: name for alias, name in layout.aliases.items() if alias in layout.sources}
    return refused | {alias: refused[name] for alias, name in tied.items() if name in refused}


def _refuse_useless(layout: LayoutMap, refused: Mapping[str, str], boxes: Sequence[Boxes]) -> None:
    """Refuse at the start an engine that could take no delta at all, instead of refusing every delta."""
    held = {name for other in boxes for name in other}
    if held <= refused.keys():
        raise DeltaError(Reason.UNSUPPORTED_ENGINE, _useless(layout, refused, held))


def _useless(layout: LayoutMap, refused: Mapping[str, str], held: Collection[str]) -> str:
    dtypes = {r.source: (layout.sources[r.source].dtype, layout.params[r.param].dtype) for r in counted_regions(layout)}
    others = sorted(name for name, (files, engine) in dtypes.items() if files != engine)
    if not others:
        first = next((f"{name}: {refused[name]}" for name in sorted(held)), "none reaches a parameter")
        return f"updatable_tensors=0 of {len(held)}: {first}"
    files, engine = dtypes[others[0]]
    rest = f" and {len(others) - 1} more tensors" if len(others) > 1 else ""
    start = f"start the engine with --dtype {said(files)}, or " if files in _ENGINE_DTYPES else ""
    why = f"{unlike(files, engine)} ({others[0]}{rest})"
    return f"dtype={said(engine)}: {why}; {start}save the checkpoint in {said(engine)}"


def _log(
    layout: LayoutMap,
    attestation: Attestation,
    post_load_verdicts: Mapping[str, PostLoadVerdict],
    refused: Mapping[str, str],
    unmapped: Unmapped,
    ranks: RankGroup,
) -> None:
    logger.info(
        "refdelta: rank %d of %d: %d checkpoint tensors onto %d parameters; %d attested, %d failed, %d dropped for a "
        "reason, %d unmapped, %d tied, %d unproven (equal bytes); after loading: %s",
        ranks.rank,
        ranks.size,
        len(layout.sources),
        len(layout.params),
        len(attestation.proved),
        len(attestation.failed),
        len(layout.dropped),
        len(unmapped.reasons),
        len(layout.aliases),
        len(attestation.unproven),
        ", ".join(
            f"{count} {verdict}" for verdict, count in Counter(s.verdict for s in post_load_verdicts.values()).items()
        ),
    )
    for name, why in refused.items():
        logger.warning("refdelta: deltas that touch %s will be refused: %s", name, why)
    for name, why in unmapped.reasons.items():
        logger.warning(
            "refdelta: unmapped: %s: %s; the engine's digest counts it as the files have it and vouches for none of "
            "its bits; a delta or an anchor that changes it will be refused",
            name,
            why,
        )
