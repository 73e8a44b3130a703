"""A post-load step that computes with expert weights; imported by every process of an engine under test."""

from __future__ import annotations

from typing import Any


def _mix() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    process = CPUUnquantizedExperts.process_weights_after_loading

    def process_and_scale(self: Any, layer: Any) -> None:
        process(self, layer)
        layer.w2_weight.data.mul_(0.5)

    CPUUnquantizedExperts.process_weights_after_loading = process_and_scale


_mix()
