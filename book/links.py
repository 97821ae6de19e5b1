"""Where a link of a handout leads inside the book."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

BOOK = Path("book")
"""Folder of the book's own pages, which stand at the top of the site."""

_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def page_of(target: Path, root: Path) -> Path | None:
    """The book's page for a file or folder of the repository.

    Args:
        target: relative to the repository.
        root: of the repository.

    Returns:
        A handout or notebook is its own page, a folder has its README or a list, another file a page that shows it;
        None if there is no such file.
    """
    whole = root / target
    if target.parent == BOOK and target.suffix == ".md" and whole.exists():
        return Path(target.name)
    if whole.is_dir():
        return target / ("README.md" if (whole / "README.md").exists() else "index.md")
    if not whole.exists():
        return None
    return target if target.suffix in (".md", ".ipynb") else target.with_name(target.name + ".md")


def rewrite_links(text: str, page: Path, root: Path, wanted: Callable[[Path], None]) -> str:
    """Lets the relative links of a page lead to pages of the book.

    Args:
        text: Markdown.
        page: its file, relative to the repository.
        root: of the repository.
        wanted: told each file or folder that a link leads to.

    Raises:
        ValueError: a link to a file that doesn't exist.
    """

    placed = page_of(page, root) or page

    def inside(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match[1]))
        found = page_of(target, root)
        if found is None or target.is_absolute() or ".." in target.parts:
            raise ValueError(f"{page}: the link to {match[1]} leads nowhere; mend it or remove it")
        wanted(target)
        return relative(found, placed) + (match[2] or "")

    return _LINK.sub(inside, text)


def relative(target: Path, page: Path) -> str:
    """A link from one page to another."""
    return Path(os.path.relpath(target, page.parent)).as_posix()


def heading_anchor(heading: str) -> str:
    """The anchor of a heading, by GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
