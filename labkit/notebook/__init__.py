"""What notebooks use: `check`, `check_answer`, `progress`, `open_lab`. Plots come from `style` and `pictures`."""

from __future__ import annotations

from labkit.notebook.checking import check
from labkit.notebook.exercises import Digest, check_answer
from labkit.notebook.mixed_lab import open_lab
from labkit.notebook.progress_card import progress

__all__ = ["Digest", "check", "check_answer", "open_lab", "progress"]
