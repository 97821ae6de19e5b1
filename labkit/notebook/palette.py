"""The colours of pictures and cards."""

from __future__ import annotations

INK = "#1f2933"
QUIET = "#616e7c"
FAINT = "#e4e7eb"

BLUE = "#2b6cb0"
ORANGE = "#dd7a1f"
GREEN = "#2f855a"
RED = "#c53030"
PURPLE = "#805ad5"
TEAL = "#2c9aa8"

LINES = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL)
"""For the lines of a plot, in this order."""

OWNERS = (
    "#5b8fd1", "#f0a04b", "#5fae7f", "#d8707a", "#9b82d6", "#4fb3bf", "#c9b24a", "#e59ac1", "#8a9a5b", "#a67c5b",
    "#6f7fb8", "#d39a7a",
)  # fmt: skip
"""For sequences, requests and blocks, which are many; see `owner_colour`."""


def owner_colour(owner: int) -> str:
    """The colour of a sequence, request or block, by its number; a second round of them is darker."""
    colour = OWNERS[owner % len(OWNERS)]
    if owner // len(OWNERS) % 2 == 0:
        return colour
    return "#" + "".join(f"{int(colour[i : i + 2], 16) * 2 // 3:02x}" for i in (1, 3, 5))
