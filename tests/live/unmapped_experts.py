"""A backend that writes experts where they were loaded, not where the kernel reads them; for engines under test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from refdelta.layout_map import Region
from refdelta.spec import TensorPatch
from refdelta.vllm.target import Piece, Target
from tests.live.mutants import undefended

_route = Target.route


def _route_as_loaded(
    self: Target, patch: TensorPatch, numbers: Sequence[int], regions: Sequence[Region]
) -> list[Piece]:
    return _route(replace(self, places={}), patch, numbers, regions)


setattr(Target, "route", _route_as_loaded)  # noqa: B010  # a method is replaced on purpose
undefended()
