"""The backend's options: vLLM's ``--additional-config '{"refdelta": {...}}'``."""

from __future__ import annotations

from typing import Any

from refdelta.spec import DeltaError, Reason

__all__ = ["check_options"]


def check_options(additional_config: Any) -> None:
    """Raise `DeltaError` (``bad_option``) for anything under ``refdelta``: no option exists yet."""
    options = additional_config.get("refdelta", {}) if isinstance(additional_config, dict) else {}
    if options:
        raise DeltaError(Reason.BAD_OPTION, f"additional_config['refdelta'] knows no option {sorted(options)}")
