"""How lab code starts a Triton kernel: natively on a GPU, or interpreted on a CPU; elsewhere its torch twin answers.

A launcher asks `backend` once and goes the way it names. Every kernel starts through `launch`, so that the workbook's
instruments see it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Backend = Literal["cuda", "interpreted", "twin"]
Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]

VARIABLE = "TRITON_INTERPRET"
"""Triton reads it when a kernel is decorated, and for its own library when it is first imported."""

_LAUNCHES: ContextVar[bool] = ContextVar("launches", default=True)


@dataclass(frozen=True)
class Started:
    """A launch that was asked for: the kernel, its arguments in order, and what was given by name."""

    kernel: Any
    args: tuple[Any, ...]
    meta: dict[str, Any]


_COLLECTED: ContextVar[list[Started] | None] = ContextVar("collected", default=None)


def triton_fault() -> str | None:
    """Why kernels cannot run in this process, interpreted or otherwise; None if they can."""
    if importlib.util.find_spec("triton") is None:
        if not sys.platform.startswith("linux"):
            return f"Triton has no build for {sys.platform}; its kernels need Linux, or WSL2 on Windows"
        return "Triton is not installed; run `make setup`"
    if interpreting() and "triton.language" in sys.modules and not _library_is_interpreted():
        return f"triton was imported before {VARIABLE}=1 was set; set it when the process starts"
    return None


def interpreting() -> bool:
    """Whether kernels that are imported from now on run in Triton's interpreter."""
    return os.environ.get(VARIABLE, "").lower() in ("1", "true", "on", "yes", "y")


def use_interpreter() -> None:
    """Switches the interpreter on for this process, before Triton is imported, unless the caller has decided.

    Raises:
        ModuleNotFoundError: there is no Triton; the text says what to do.
    """
    os.environ.setdefault(VARIABLE, "1")
    if (fault := triton_fault()) and "triton" not in sys.modules:
        raise ModuleNotFoundError(fault, name="triton")


def _library_is_interpreted() -> bool:
    return type(sys.modules["triton.language"].max).__name__ == "InterpretedFunction"


def backend(*tensors: Tensor) -> Backend:
    """How a launcher must answer for these tensors.

    Args:
        tensors: every tensor that a kernel would read or write.

    Returns:
        "cuda": launch natively. "interpreted": launch; Triton interprets the kernel, slowly, and the instruments see
        each access. "twin": compute with the plain torch function beside the kernel.

    Raises:
        ValueError: no tensors, or tensors on several devices or on one that has no kernels.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        given = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"a kernel needs tensors that lie on one device, got {given}; move them to one")
    if _COLLECTED.get() is not None:
        return "cuda"
    kind = next(iter(devices)).type
    if kind == "cuda":
        return "cuda"
    if kind != "cpu":
        raise ValueError(f"there are no kernels for device {kind!r}; move the tensors to 'cuda' or 'cpu'")
    return "interpreted" if interpreting() else "twin"


def launch(kernel: Any, grid: Grid, *args: Any, **meta: Any) -> None:
    """Runs a kernel once for every point of a grid.

    Args:
        kernel: a function decorated with `triton.jit` (`triton.autotune` around it where wanted).
        grid: up to three numbers of programs, or a function from the kernel's keyword arguments to them.
        args: its tensors and numbers, in order.
        meta: its `tl.constexpr` parameters, `num_warps` and `num_stages`.

    Raises:
        ValueError: the tensors lie on several devices; there is no kernel for them; or bf16 on a CPU, where Triton's
            interpreter computes garbage without saying so.
    """
    tensors = [value for value in (*args, *meta.values()) if isinstance(value, Tensor)]
    way = backend(*tensors)
    name = getattr(kernel, "__name__", None) or getattr(getattr(kernel, "fn", None), "__name__", "the kernel")
    if way == "twin":
        raise ValueError(f"{name} cannot run on a CPU unless {VARIABLE}=1 is set; `backend` says when to use its twin")
    if (collected := _COLLECTED.get()) is not None:
        collected.append(Started(kernel, args, meta))
        return
    if not _LAUNCHES.get():
        return
    if way == "cuda":
        with torch.cuda.device(tensors[0].device):
            kernel[grid](*args, **meta)
        return
    if narrow := sorted({str(tensor.dtype) for tensor in tensors if tensor.dtype == torch.bfloat16}):
        raise ValueError(
            f"{name} was given {narrow[0]} on a CPU, where Triton's interpreter computes garbage in bf16; "
            "use float32 or float16 here, and bf16 on a GPU"
        )
    from labkit.instruments.interpreted import run_interpreted

    run_interpreted(kernel, grid, args, meta)


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Within it `launch` checks its arguments and starts nothing: what a kernel should have written stays unwritten."""
    token = _LAUNCHES.set(False)
    try:
        yield
    finally:
        _LAUNCHES.reset(token)


@contextlib.contextmanager
def collecting() -> Iterator[list[Started]]:
    """Within it launchers take CPU tensors for CUDA ones, and `launch` writes down its calls and starts nothing.

    So the kernels that a GPU would be given are known, and can be compiled, where there is none.
    """
    started: list[Started] = []
    token = _COLLECTED.set(started)
    try:
        yield started
    finally:
        _COLLECTED.reset(token)
