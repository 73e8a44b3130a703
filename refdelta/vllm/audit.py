"""`refdelta.vllm.auditing.extension`, under the name by which it is known outside."""

from __future__ import annotations

from refdelta.vllm.auditing.extension import AuditExtension, audit, compare

__all__ = ["AuditExtension", "audit", "compare"]
