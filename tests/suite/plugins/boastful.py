"""Declares something that nobody knows."""

CAPABILITIES = frozenset({"flies"})
raise ImportError("the suite's own process must not import a plugin")
