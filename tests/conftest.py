"""Hypothesis profiles: `ci` repeats itself, `nightly` searches. Chosen with HYPOTHESIS_PROFILE.

Tests marked `nightly` are left out by ``-m "not nightly"``, as `make test` does; how many they are is said.
"""

from __future__ import annotations

import os
import signal
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


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it runs in the background ignore Ctrl-C, and children inherit that; some tests send one.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LEFT_OUT: pytest.StashKey[int] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)  # before those that select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[LEFT_OUT] = sum(item.get_closest_marker("nightly") is not None for item in items)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    left_out = config.stash.get(LEFT_OUT, 0)
    if config.getoption("-m") != "not nightly" or not left_out:
        return []
    return [f"{left_out} tests are left to the nightly run: make nightly"]


def pytest_configure() -> None:
    """Load the profile; a bad name is a usage error in one line, which an import could not raise."""
    try:
        settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
    except InvalidArgument as error:
        raise pytest.UsageError(f"HYPOTHESIS_PROFILE: {' '.join(str(error).split())}") from error
