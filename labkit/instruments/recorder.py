"""Watches what interpreted kernels do to memory."""

from __future__ import annotations

from typing import Any


def run_interpreted(kernel: Any, grid: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    """Launches a kernel in the interpreter."""
    kernel[grid](*args, **meta)
