"""The digest of a state (SPEC.md, section 10): compared in place of the state, and rolled from delta to delta."""

from __future__ import annotations

from refdelta.codec.digests import (
    GAMMA,
    MIX,
    SCHEME,
    ZERO,
    add,
    header_digest,
    layer_digests,
    parse,
    positions_digest,
    roll_digest,
    run_digest,
    state_digest,
    subtract,
    tensor_digest,
    terms_at,
    text,
)

__all__ = [
    "GAMMA",
    "MIX",
    "SCHEME",
    "ZERO",
    "add",
    "header_digest",
    "layer_digests",
    "parse",
    "positions_digest",
    "roll_digest",
    "run_digest",
    "state_digest",
    "subtract",
    "tensor_digest",
    "terms_at",
    "text",
]
