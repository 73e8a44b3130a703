"""How one layer's checkpoint tensors tile the runtime parameters, over the ranks. Needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refdelta.files.atomic import check_target
from refdelta.layout.boxes import extent
from refdelta.layout.map import LayoutMap, Region
from refdelta.spec import DeltaError, Reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_picture", "draw"]

_MAX_LABELLED = 12
"""Up to this many tiles of a parameter are labelled with the tensor's name. More tiles (experts) have colours only."""


def draw(ranks: Sequence[LayoutMap], layer: int, out: Path) -> None:
    """Write a PNG or SVG, by the ending of ``out``: one column for each rank, one row for each parameter, one colour
    for each checkpoint tensor.

    Raises `DeltaError` as `check_picture` does, and ``bad_option`` where there is no such layer.
    """
    check_picture(out)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    params = _of_layer(ranks, layer)
    sources = list(dict.fromkeys(r.source for one in ranks for r in one.regions if r.param in params))
    colour = {name: pyplot.get_cmap("Set3")(number % 12) for number, name in enumerate(sources)}
    heights = [1.1 if len(ranks[0].params[param].shape) > 1 else 0.45 for param in params]
    figure, axes = pyplot.subplots(
        len(params),
        len(ranks),
        figsize=(2.2 + 3.1 * len(ranks), 0.4 + sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for row, param in enumerate(params):
        for column, one in enumerate(ranks):
            _parameter(axes[row][column], one, param, colour)
            if row == 0:
                axes[row][column].set_title(f"rank {column}", fontsize=10)
        axes[row][0].set_ylabel(_short(param), rotation=0, ha="right", va="center", fontsize=8)
    figure.savefig(out, dpi=140)
    pyplot.close(figure)


def check_picture(out: Path) -> None:
    """Raise now the `DeltaError` that `draw` would raise about ``out`` later.

    ``bad_option`` where its ending is unknown or matplotlib is missing, ``write_failed`` where it has no directory.
    """
    if out.suffix not in (".png", ".svg"):
        raise DeltaError(Reason.BAD_OPTION, f"{out}: a picture is .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise DeltaError(Reason.BAD_OPTION, "a picture needs matplotlib: pip install 'refdelta[plot]'")
    check_target(out, Path.is_file)


def _of_layer(ranks: Sequence[LayoutMap], layer: int) -> list[str]:
    params = [name for name in ranks[0].params if f".layers.{layer}." in f".{name}"]
    if not params:
        raise DeltaError(Reason.BAD_OPTION, f"layer {layer}: this rank has no parameter of such a layer")
    return params


def _short(param: str) -> str:
    return param.split(".layers.")[-1].split(".", 1)[1].removesuffix(".weight")


def _parameter(axes: Axes, one: LayoutMap, param: str, colour: dict[str, Any]) -> None:
    from matplotlib.patches import Rectangle

    rows, columns = _plane(one.params[param].shape)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_facecolor("0.93")  # what no tensor covers: padding
    regions = [region for region in one.regions if region.param == param]
    for region in regions:
        x, y, width, height = _tile(region, one.params[param].shape)
        axes.add_patch(
            Rectangle((x, y), width, height, facecolor=colour[region.source], edgecolor="white", linewidth=0.8)
        )
        if len(regions) <= _MAX_LABELLED:
            label = f"{_short(region.source)}  {_rows(region, one)}"
            axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=6.5)


def _plane(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter as rows and columns: a vector is one row, leading axes are stacked."""
    if len(shape) < 2:
        return 1, max(1, *shape, 1)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def _tile(region: Region, shape: tuple[int, ...]) -> tuple[float, float, float, float]:
    """x, y, width and height of a region's box in its parameter's plane."""
    columns = _plane(shape)[1]
    ranges = extent(region.param_box, shape)
    first, last = region.param_box.offset, region.param_box.last
    if ranges is None or not ranges:
        return 0, first // columns, columns, last // columns - first // columns + 1
    left, right = ranges[-1]
    return left, first // columns, right - left, last // columns - first // columns + 1


def _rows(region: Region, one: LayoutMap) -> str:
    """Which part of the checkpoint tensor it is, in words."""
    shape = one.sources[region.source].shape
    ranges = extent(region.source_box, shape)
    if ranges is None:
        return ""
    parts = [
        f"{what} {first}:{end}"
        for what, (first, end), size in zip(("rows", "cols", "depth"), ranges, shape, strict=False)
        if (first, end) != (0, size)
    ]
    return ", ".join(parts) or "all"
