"""`refdelta.vllm.calls.client`, under the name by which it is known outside."""

from __future__ import annotations

from refdelta.vllm.calls.client import Audit, Client, Kv, LocalEngine, Status, SyncResult

__all__ = ["Audit", "Client", "Kv", "LocalEngine", "Status", "SyncResult"]
