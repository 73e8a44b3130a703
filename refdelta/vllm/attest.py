"""`refdelta.vllm.proof.attest`, under the name by which it is known outside."""

from __future__ import annotations

from refdelta.vllm.proof.attest import Attestation, attest, held_box, packed_layers, said, unlike

__all__ = ["Attestation", "attest", "held_box", "packed_layers", "said", "unlike"]
