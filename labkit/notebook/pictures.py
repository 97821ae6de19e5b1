"""Pictures that several notebooks draw: masks, timelines, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from labkit.notebook.palette import BLUE, FAINT, INK, QUIET, owner_colour
from labkit.notebook.style import bare


def draw_mask(axes: Axes, mask: np.ndarray, title: str, *, colours: Sequence[str] | None = None) -> None:
    """A mask as a grid of cells.

    Args:
        axes: where.
        mask: bool `[queries, keys]`, True where a query may see a key.
        title: of the panel.
        colours: one for each query; all blue if not given.
    """
    queries, keys = mask.shape
    image = np.full((queries, keys, 3), to_rgb(FAINT))
    for query in range(queries):
        image[query, mask[query]] = to_rgb(colours[query] if colours else BLUE)
    axes.imshow(image, aspect="equal")
    axes.set_xticks(np.arange(keys + 1) - 0.5, [], minor=True)
    axes.set_yticks(np.arange(queries + 1) - 0.5, [], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5 if max(mask.shape) <= 16 else 0.5)
    bare(axes, title).tick_params(which="minor", length=0)
    axes.set(xlabel="keys", ylabel="queries")


def draw_timeline(axes: Axes, timeline: Sequence[Sequence[int | None]], title: str, *, steps: int) -> None:
    """Who had which slot in which step.

    Args:
        axes: where.
        timeline: for each step the request of each slot, None where it idled.
        title: of the panel.
        steps: width of the panel in steps, the same for timelines that are compared.
    """
    for slot in range(len(timeline[0])):
        row = [step[slot] for step in timeline]
        start = 0
        for end in range(1, len(row) + 1):
            if end < len(row) and row[end] == row[start]:
                continue
            who = row[start]
            colour = FAINT if who is None else owner_colour(who)
            axes.add_patch(Rectangle((start, slot + 0.06), end - start, 0.88, facecolor=colour, edgecolor="white"))
            if who is not None and end - start > 1:
                axes.text((start + end) / 2, slot + 0.5, str(who), ha="center", va="center", color="white")
            start = end
    bare(axes, title)
    axes.set(xlim=(0, steps), ylim=(len(timeline[0]), 0), xlabel="steps →", ylabel="slots")


def draw_steps(axes: Axes, steps: Sequence[Mapping[int, int]], title: str) -> None:
    """How many tokens of each request each step computed: a plain cell for one token, a number for more.

    Args:
        axes: where.
        steps: for each step the number of tokens by request.
        title: of the panel.
    """
    requests = 1 + max(request for step in steps for request in step)
    for x, step in enumerate(steps):
        for request, count in step.items():
            axes.add_patch(Rectangle((x + 0.05, request + 0.07), 0.9, 0.86, facecolor=owner_colour(request)))
            if count > 1:
                axes.text(x + 0.5, request + 0.5, str(count), ha="center", va="center", color="white", size=8)
    bare(axes, title)
    axes.set(xlim=(0, len(steps)), ylim=(requests, 0), xlabel="steps →", ylabel="requests")


@dataclass(frozen=True)
class Cell:
    """A piece of memory.

    Args:
        owner: number of the sequence that it is set aside for, or None.
        used: the share that holds something, from 0 to 1.
        label: a few characters to write on it.
    """

    owner: int | None
    used: float = 1.0
    label: str = ""


def draw_memory(axes: Axes, cells: Sequence[Cell], columns: int, title: str) -> None:
    """Memory as a grid: full colour where something is stored, a tint where space is only set aside, grey where free.

    Args:
        axes: where.
        cells: in the order of their addresses.
        columns: cells in a row.
        title: of the panel.
    """
    rows = -(-len(cells) // columns)
    for index, cell in enumerate(cells):
        x, y = index % columns, index // columns
        outline = Rectangle((x + 0.05, y + 0.07), 0.9, 0.86, facecolor="none", edgecolor=FAINT, linewidth=0.8)
        if cell.owner is not None:
            colour = owner_colour(cell.owner)
            outline.set(facecolor=(*to_rgb(colour), 0.22), edgecolor="none")
            axes.add_patch(Rectangle((x + 0.05, y + 0.07), 0.9 * cell.used, 0.86, facecolor=colour))
        axes.add_patch(outline)
        if cell.label:
            ink = QUIET if cell.owner is None else INK
            axes.text(x + 0.5, y + 0.5, cell.label, ha="center", va="center", color=ink, size=8)
    bare(axes, title)
    axes.set(xlim=(0, columns), ylim=(rows, 0))
