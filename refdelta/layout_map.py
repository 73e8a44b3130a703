"""Layout maps of engines: their regions, and the rules of the model families that give them from a config."""

from __future__ import annotations

from refdelta.codec.state import TensorInfo
from refdelta.layout.boxes import Box, coverage, extent, uncovered_elements
from refdelta.layout.families.rules import layout_from_config
from refdelta.layout.map import LayoutMap, LayoutReport, Region, RoutedPatch

__all__ = [
    "Box",
    "LayoutMap",
    "LayoutReport",
    "Region",
    "RoutedPatch",
    "TensorInfo",
    "coverage",
    "extent",
    "layout_from_config",
    "uncovered_elements",
]
