"""Where the workbook lies and where it keeps what it downloads."""

from __future__ import annotations

import os
from pathlib import Path


def repo_root() -> Path:
    """Return the folder that holds `labkit/`, `labs/` and `solutions/`."""
    return Path(__file__).resolve().parent.parent


def cache_dir() -> Path:
    """Return the folder for models and measurements; it is not created here.

    Returns:
        `$WORKBOOK_CACHE` if that is set and not empty, otherwise `.cache` in the repository (ignored by git).
    """
    chosen = os.environ.get("WORKBOOK_CACHE", "")
    return Path(chosen).expanduser().resolve() if chosen else repo_root() / ".cache"
