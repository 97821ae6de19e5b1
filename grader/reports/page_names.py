"""File names of the report's pages: safe on every file system, and one page for each submission."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable

SLUG_CHARACTERS = 40
DIGEST_CHARACTERS = 10


def page_names(names: Iterable[str]) -> dict[str, str]:
    """A file name for each submission.

    Args:
        names: of the submissions, each once; anything may stand in them.

    Returns:
        E.g. {"Ada L.": "student-ada-l-2f1b4f0e9c.html"}: lower-case ASCII and the start of a hash of the whole name, so
        that names which differ in case, in an accent or in what cannot be printed keep pages of their own.
    """
    taken: dict[str, str] = {}
    for name in names:
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
        length = DIGEST_CHARACTERS
        while (page := f"student-{_slug(name)}{digest[:length]}.html") in taken.values():
            length += 1
        taken[name] = page
    return taken


def _slug(name: str) -> str:
    """The ASCII letters and digits of a name, with a dash at its end; nothing if it has none."""
    plain = unicodedata.normalize("NFKD", name[: 4 * SLUG_CHARACTERS]).encode("ascii", errors="ignore").decode()
    slug = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")[:SLUG_CHARACTERS].rstrip("-")
    return f"{slug}-" if slug else ""
