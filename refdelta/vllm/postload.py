"""`refdelta.vllm.proof.post_load`, under the name by which it is known outside."""

from __future__ import annotations

from refdelta.vllm.proof.post_load import (
    NotAPermutation,
    PostLoadVerdict,
    Verdict,
    permutations,
    recover_permutations,
    verdicts,
)

__all__ = ["NotAPermutation", "PostLoadVerdict", "Verdict", "permutations", "recover_permutations", "verdicts"]
