"""Names that a test and the engines under it share; a module of its own, because `faults` and `raising` patch on import."""

FAULT = "REFDELTA_TEST_FAULT"
"""The environment variable that names the JSON file with the faults."""
