"""Hypothesis profiles: `ci` repeats itself, `nightly` searches. Chosen with HYPOTHESIS_PROFILE."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import InvalidArgument

_EXAMPLES = Path(__file__).parent.parent / ".hypothesis" / "examples"

settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly",
    derandomize=False,
    database=DirectoryBasedExampleDatabase(_EXAMPLES),
    deadline=None,
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_configure() -> None:
    """Load the profile; a bad name is a usage error in one line, which an import could not raise."""
    try:
        settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
    except InvalidArgument as error:
        raise pytest.UsageError(f"HYPOTHESIS_PROFILE: {' '.join(str(error).split())}") from error
