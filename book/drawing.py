"""Shapes of a diagram as SVG. Colours are classes, which the book's style sheet sets for dark and light pages."""

from __future__ import annotations

from html import escape


class Drawing:
    """A canvas in pixels; shapes are drawn in the order of the calls.

    Args:
        width: of the canvas.
        height: of the canvas.
        title: what it shows, for those who can't see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, text: str = "", kind: str = "plain") -> None:
        """A rectangle; each line of its text is centred.

        Args:
            x: left edge.
            y: upper edge.
            width: of the box.
            height: of the box.
            text: lines, separated by newlines.
            kind: "plain", "a", "b", "c" or "d" for a colour, "faint" for what is empty or over.
        """
        self._shapes.append(f'<rect class="shape {kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="3"/>')
        lines = text.split("\n") if text else []
        for index, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + (index - (len(lines) - 1) / 2) * 16, line, "middle")

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "words") -> None:
        """One line of text, centred on `y`; `anchor` as in SVG, `kind` "words", "small" or "strong"."""
        self._shapes.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" dy="0.35em" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], kind: str = "line") -> None:
        """A line through points with a head at its end; kind "line" or "dashed"."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(f'<polyline class="{kind}" points="{path}" marker-end="url(#head)"/>')

    def line(self, *points: tuple[float, float], kind: str = "line") -> None:
        """The same without a head; kind may be "roof" for a thick one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(f'<polyline class="{kind}" points="{path}"/>')

    def dot(self, x: float, y: float, kind: str = "a") -> None:
        """A small disc."""
        self._shapes.append(f'<circle class="shape {kind}" cx="{x:g}" cy="{y:g}" r="5"/>')

    def svg(self) -> str:
        """The finished drawing, as wide as its canvas or as the page if that is narrower."""
        width, height = self._size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
        )
        return (
            f'<svg role="img" viewBox="0 0 {width} {height}" style="max-width: {width}px">'
            f"<title>{escape(self._title)}</title>{head}{''.join(self._shapes)}</svg>"
        )
