"""Can be imported, and registers nothing."""

CAPABILITIES: frozenset[str] = frozenset()
