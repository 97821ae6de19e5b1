"""Starts a kernel in Triton's interpreter, never unwatched."""

from __future__ import annotations

import contextlib
from typing import Any

from triton.runtime.interpreter import InterpretedFunction

from labkit.instruments.recorder import Recorder, watching


def run_interpreted(kernel: Any, grid: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    """Launches a kernel under the active recorder, or else under one that stops at faults.

    Raises:
        KernelFailed: the kernel raised, or reached outside its tensors.
        RuntimeError: the kernel was made for a GPU.
    """
    kernel, meta = _untuned(kernel, meta)
    with contextlib.nullcontext() if watching() else Recorder(strict=True):
        kernel[grid](*args, **meta)


def _untuned(kernel: Any, meta: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The bare kernel, and its parameters with those of its tuner's first configuration: time tells nothing here."""
    while not isinstance(kernel, InterpretedFunction):
        if not hasattr(kernel, "fn"):
            name = getattr(kernel, "__name__", kernel)
            raise RuntimeError(
                f"{name} was made for a GPU: its module was imported before the interpreter was switched on"
            )
        if configs := getattr(kernel, "configs", None):
            meta = {**configs[0].kwargs, **meta}
        kernel = kernel.fn
    return kernel, meta
