"""The sparse_delta v2 conformance suite: ``pytest conformance/ --engine NAME``."""
