"""Backends that are broken on purpose; the suite must fail on each. See ``tests/live/test_mutants.py``."""


def module(name: str) -> str:
    """The module that applies the mutant ``name`` in the process that imports it."""
    return f"conformance.live.mutant_{name}"
