"""Builds the site: collects the pages, runs Sphinx on them, follows every link of the result."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .collecting import Collector
from .site_links import broken_links


class BookError(Exception):
    """The book can't be built; the message says why."""


@dataclass(frozen=True)
class Built:
    """A finished site.

    Args:
        front: its first page.
        pages: how many pages went in.
    """

    front: Path
    pages: int


def build(root: Path, out: Path, jobs: int = 1) -> Built:
    """Build the site.

    Args:
        root: of the repository.
        out: gets `source`, what Sphinx reads, and `html`, the site.
        jobs: processes of Sphinx.

    Raises:
        BookError: a page with a fault, or a link that leads nowhere.
    """
    source, site = out / "source", out / "html"
    try:
        pages = Collector(root, source).collect()
    except ValueError as error:
        raise BookError(str(error)) from error
    # A warning is a fault of a page, so it ends the build, after all of them are told.
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "-j", str(jobs)]
    done = subprocess.run([*command, str(source), str(site)], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BookError(f"Sphinx found faults in the pages:\n{done.stderr.strip()[-4000:]}")
    broken = broken_links(site)
    if broken:
        raise BookError("links that lead nowhere:\n" + "\n".join(broken[:40]))
    return Built(site / "index.html", pages)
