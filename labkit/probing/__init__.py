"""What this machine can do at most: `machine_bounds()`, measured once and remembered."""

from __future__ import annotations

from labkit.probing.bounds import MachineBounds, Point
from labkit.probing.kept import kept_bounds, machine_bounds
from labkit.probing.timing import Spread

__all__ = ["MachineBounds", "Point", "Spread", "kept_bounds", "machine_bounds"]
