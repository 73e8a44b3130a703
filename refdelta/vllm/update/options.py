"""The backend's options: vLLM's ``--additional-config '{"refdelta": {...}}'``, and overrides in an ``update_info``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from refdelta.spec import DeltaError, Reason
from refdelta.values import is_int

__all__ = ["Options", "options_of"]

_CHOICES: Final = {
    "lineage": ("accept", "required"),
    "repeat": ("skip", "write"),
    "mode": ("in_place", "native", "dense"),
}
_OF_AN_UPDATE: Final = tuple(_CHOICES)


@dataclass(frozen=True, slots=True)
class Options:
    """How updates are taken."""

    lineage: str = "accept"
    """``accept``: deltas without lineage or digests are applied, and the state is then unverified. ``required``: they
    are refused (base_mismatch)."""
    repeat: str = "skip"
    """What a delta does that leads to the version that the engine holds: nothing, or (``write``) the same again."""
    mode: str = "in_place"
    """How values are written: by this backend, by vLLM's patch loader (``native``), or as whole tensors through the
    model's loader (``dense``)."""
    audit_elements: int | None = None
    """Elements that each update holds against the digests, beside those that it wrote; None: the larger of 4 Mi and
    eight times the changed ones. 0 turns the rotation off."""

    def with_(self, overrides: Mapping[str, Any]) -> Options:
        """These options with some of ``lineage``, ``repeat`` and ``mode`` replaced; None leaves one as it is."""
        given = {name: value for name, value in overrides.items() if value is not None}
        return _checked(replace(self, **{name: given[name] for name in _OF_AN_UPDATE if name in given}))

    def audit_budget(self, changed: int) -> int:
        """Elements to audit in an update that changes ``changed`` elements here."""
        return max(4 << 20, 8 * changed) if self.audit_elements is None else self.audit_elements


def options_of(additional_config: Any) -> Options:
    """The options under ``refdelta``. Raises `DeltaError` (``bad_option``) for unknown ones and illegal values."""
    raw = additional_config.get("refdelta", {}) if isinstance(additional_config, dict) else {}
    if not isinstance(raw, dict):
        raise DeltaError(Reason.BAD_OPTION, f"additional_config['refdelta']: expected a mapping, found {raw!r}")
    known = [field.name for field in fields(Options)]
    if unknown := sorted(set(raw) - set(known)):
        raise DeltaError(Reason.BAD_OPTION, f"additional_config['refdelta'] knows {known}, not {unknown}")
    return _checked(Options(**raw))


def _checked(options: Options) -> Options:
    for name, choices in _CHOICES.items():
        if (value := getattr(options, name)) not in choices:
            raise DeltaError(Reason.BAD_OPTION, f"{name}: expected one of {', '.join(choices)}, found {value!r}")
    budget = options.audit_elements
    if budget is not None and (not is_int(budget) or budget < 0):
        raise DeltaError(Reason.BAD_OPTION, f"audit_elements: expected a number of elements, found {budget!r}")
    return options
