"""Names that a test and the engines under it share; on their own, since `faults` and `raising` patch on import."""

FAULT = "REFDELTA_TEST_FAULT"
"""The environment variable that names the JSON file with the faults."""
