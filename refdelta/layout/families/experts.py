"""The experts of one layer, in either form that files have."""

from __future__ import annotations

from collections.abc import Iterator

from refdelta.layout.families.common import COLUMNS, ROWS, Row

__all__ = ["experts"]


def experts(at: str, count: int, hidden: int, inner: int, *, fused: bool, layer: int) -> Iterator[Row]:
    """Gate and up as halves of ``w13_weight``, down as ``w2_weight``; ``at`` ends in ``experts.``.

    ``fused``: two tensors for all experts; else three for each.
    """
    w13, w2 = at + "routed_experts.w13_weight", at + "routed_experts.w2_weight"
    if fused:
        gate_up, both, down = at + "gate_up_proj", (count, 2 * inner, hidden), (count, hidden, inner)
        yield Row(w13, gate_up, both, ROWS, experts=count, half=0, layer=layer)
        yield Row(w13, gate_up, both, ROWS, experts=count, half=1, layer=layer)
        yield Row(w2, at + "down_proj", down, COLUMNS, experts=count, layer=layer)
        return
    for k in range(count):
        one, wide, tall = f"{at}{k}.", (inner, hidden), (hidden, inner)
        yield Row(w13, one + "gate_proj.weight", wide, ROWS, experts=count, expert=k, layer=layer)
        yield Row(w13, one + "up_proj.weight", wide, ROWS, experts=count, expert=k, layer=layer)
        yield Row(w2, one + "down_proj.weight", tall, COLUMNS, experts=count, expert=k, layer=layer)
