"""The roofline of a machine as a picture, with whatever is placed under it."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from labkit.notebook.palette import BLUE, FAINT, INK, LINES, QUIET
from labkit.probing import MachineBounds


def draw_roofline(
    axes: Axes,
    bounds: MachineBounds,
    dtypes: Sequence[str],
    *,
    intensities: tuple[float, float] | None = None,
    points: bool = True,
) -> None:
    """The slope of the memory, a roof for each dtype, the ridge where they meet.

    Args:
        axes: where; both axes become logarithmic.
        bounds: of the machine.
        dtypes: whose roofs are drawn; the measured points are in the bounds' own dtype.
        intensities: least and largest FLOP per byte that are shown; chosen around points and ridges if not given.
        points: whether to draw the measured passes.

    Raises:
        ValueError: a dtype that this machine has no rate for.
    """
    ridges = [bounds.ridge(dtype) for dtype in dtypes]
    shown = [*ridges, *(point.intensity for point in bounds.points)]
    low, high = intensities or (min(shown) / 3, max(shown) * 4)
    top = min(high, max(ridges))
    axes.plot([low, top], [low * bounds.read, top * bounds.read], color=INK)
    for dtype, ridge, colour in zip(dtypes, ridges, LINES, strict=False):
        if ridge >= high:
            continue
        axes.plot([max(low, ridge), high], [bounds.flops(dtype)] * 2, color=colour)
        where = (high, bounds.flops(dtype))
        axes.annotate(dtype, where, (0, 3), textcoords="offset points", ha="right", size=8, color=colour)
        if low < ridge:
            axes.vlines(ridge, 0, bounds.flops(dtype), color=FAINT, linewidth=1.2, zorder=0)
            axes.annotate(
                f"ridge {ridge:.3g}", (ridge, bounds.flops(dtype)), (4, -11), textcoords="offset points",
                size=8, color=QUIET,
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP per second")
    axes.yaxis.set_minor_formatter(NullFormatter())
    x = (low * top) ** 0.5
    axes.annotate("memory", (x, x * bounds.read), (-6, 4), textcoords="offset points", ha="right", size=8, color=QUIET)
    if points and bounds.points:
        measured = [point.rate.median for point in bounds.points]
        axes.plot([point.intensity for point in bounds.points], measured, "o", color=INK, markersize=4)
        for point in (bounds.points[0], bounds.points[-1]):
            label = f"{point.tokens} token{'s' if point.tokens > 1 else ''}"
            place = (point.intensity, point.rate.median)
            axes.annotate(label, place, (5, -9), textcoords="offset points", size=8, color=BLUE)
