"""Turns live mutants on and off while an engine runs; loaded by every process of it (`Backend.modules`)."""

from __future__ import annotations

import importlib

import pytest

from ..live.probe import Probe

_ON: list[pytest.MonkeyPatch] = []


def set_mutant(place: str | None) -> None:
    """Put back what the last mutant patched in this process, and apply the one at ``module:function``."""
    while _ON:
        _ON.pop().undo()
    if place is not None:
        module, _, name = place.partition(":")
        patch = pytest.MonkeyPatch()
        _ON.append(patch)
        getattr(importlib.import_module(module), name)(patch)


def _switch(self: Probe, place: str | None) -> int:
    set_mutant(place)
    return self.rank


setattr(Probe, "mutant_switch", _switch)  # noqa: B010  # a method of every worker
