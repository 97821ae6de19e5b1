"""Shows a card where it can be read best: as HTML in a notebook, as text elsewhere."""

from __future__ import annotations

import html
import sys
from typing import Any, Protocol

from labkit.notebook.palette import QUIET


class Card(Protocol):
    """Something with two faces."""

    def as_html(self) -> str:
        """For a notebook: one element, its texts escaped, readable on light and dark ground."""

    def as_text(self) -> str:
        """For a terminal, and for whoever reads a notebook without running it."""


class Place:
    """A place in the output of a cell: first a line that says what is going on, in the end a card."""

    def __init__(self) -> None:
        self._in_notebook = in_notebook()
        self._handle: Any = None

    def wait(self, text: str) -> None:
        """Says what is going on; nothing outside a notebook, whose output can't be replaced."""
        if self._in_notebook:
            self._put(f'<span style="color:{QUIET}">{html.escape(text)}</span>', text)

    def show(self, card: Card) -> None:
        """Shows the card, in the place of what stood there before."""
        if self._in_notebook:
            self._put(card.as_html(), card.as_text())
        else:
            print(card.as_text())

    def _put(self, as_html: str, as_text: str) -> None:
        from IPython.display import display

        bundle = {"text/html": as_html, "text/plain": as_text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code."""
    # Whoever runs in a kernel has IPython loaded; nobody else should wait for its import.
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None
