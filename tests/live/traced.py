"""Imported into every process of an unpatched engine: after a dump, each rank writes what refdelta traces and recovers.

Only in engines on the lowest digit of a position code. The dump is complete before refdelta is imported, so that what
it holds cannot depend on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conformance.live import probe

_dump = probe.Probe.probe_dump


def _dump_and_trace(self: Any, directory: str) -> str:
    path = _dump(self, directory)
    checkpoint = Path(self.model_runner.vllm_config.model_config.model)
    if checkpoint.name == "digit0":
        found = _traced(self.model_runner.get_model(), checkpoint)
        Path(path).with_suffix(".traced").write_text(json.dumps(found))
    return path


def _traced(model: Any, directory: Path) -> dict[str, object]:
    from refdelta.checkpoints.reading import Checkpoint
    from refdelta.vllm.assumptions.experts import as_loaded
    from refdelta.vllm.proof.attest import attest, packed_layers
    from refdelta.vllm.proof.position_maps import PositionMap
    from refdelta.vllm.proof.post_load import recover_permutations, verdicts
    from refdelta.vllm.tracing.recorder import trace_model

    position_maps = recover_permutations(model)
    with Checkpoint(directory) as checkpoint:
        infos = checkpoint.infos()
        with as_loaded(model):
            layout = trace_model(model, {name: (info.shape, info.dtype) for name, info in infos.items()})
        attestation = attest(model, layout, checkpoint, position_maps)
    post_load_verdicts = verdicts(model, layout, attestation, position_maps, packed_layers(model))
    maps = {param: place for param, place in position_maps.items() if isinstance(place, PositionMap)}
    return {
        "layout": layout.to_json(),
        "failed": dict(attestation.failed),
        "tables": {param: [table.tolist() for table in place.tables] for param, place in maps.items()},
        "verdicts": {name: standing.verdict.value for name, standing in post_load_verdicts.items()},
    }


setattr(probe.Probe, "probe_dump", _dump_and_trace)  # noqa: B010  # a method is replaced on purpose
