"""A backend that writes experts where they were loaded, not where the kernel reads them; for engines under test."""

from __future__ import annotations

from refdelta.layout_map import RoutedPatch
from refdelta.spec import TensorPatch
from refdelta.vllm.session import Target


def _route_as_loaded(self: Target, patch: TensorPatch) -> list[RoutedPatch]:
    return self.layout.route(patch)


setattr(Target, "route", _route_as_loaded)  # noqa: B010  # a method is replaced on purpose
