"""Needs a module that is not installed, as only an import tells."""

import no_such_module_of_a_backend  # type: ignore[import-not-found]  # noqa: F401

CAPABILITIES: frozenset[str] = frozenset()
