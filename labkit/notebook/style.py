"""The common look of all plots, independent of what a user's own matplotlib is told."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes

from labkit.notebook.palette import FAINT, INK, LINES, QUIET

STYLE: dict[str, Any] = {
    # Small files: a notebook with a dozen figures stays below half a megabyte.
    "figure.dpi": 88,
    "savefig.dpi": "figure",
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=LINES),
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
}


def use_style() -> None:
    """Makes every later figure look alike, whatever a `matplotlibrc` says."""
    plt.style.use(["default", STYLE])


def panels(columns: int = 1, rows: int = 1, *, height: float = 3.0, width: float = 10.0, **options: Any) -> Any:
    """A figure with panels side by side.

    Args:
        columns: panels in a row.
        rows: rows of panels.
        height: of a row, in inches.
        width: of the figure, in inches.
        options: as for `plt.subplots`.

    Returns:
        One `Axes`, or an array of them as from `plt.subplots`.
    """
    return plt.subplots(rows, columns, figsize=(width, rows * height), **options)[1]


def bare(axes: Axes, title: str = "") -> Axes:
    """Takes frame and ticks from a panel that is a picture, not a plot."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(title)
    return axes
