"""What every benchmark prints beside its ratios."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from labkit.probing import machine_bounds


def spread(values: Sequence[float]) -> str:
    """Median and range, as text."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def load_line(when: str) -> str:
    """What else the machine does: numbers of a busy one say little."""
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"load {when}: {busy:.1f} on {os.cpu_count()} cores"


def bounds_line() -> str:
    """What the processor can do at most, with the threads that torch has now."""
    return f"bounds of this machine: {machine_bounds('cpu', quick=True).line()}"
