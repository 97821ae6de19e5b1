"""Measures a machine from its bandwidth to its launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labkit.machine import facts
from labkit.probing.bandwidth import measure_bandwidth
from labkit.probing.bounds import MachineBounds
from labkit.probing.buffers import buffer_bytes, cache_bytes, free_bytes
from labkit.probing.decode_points import measure_points
from labkit.probing.launches import measure_launches
from labkit.probing.products import DTYPES, measure_products
from labkit.probing.timing import FULL, QUICK, Effort, Spread, clock_of

NO_CACHE_SIZE = "the system doesn't tell the size of the last-level cache; the buffer is many times what is usual"


def measure(device: str, *, quick: bool = False, tell: Callable[[str], None] = lambda what: None) -> MachineBounds:
    """Measures everything, in well under a minute. Nothing of the machine is changed.

    Args:
        device: `"cpu"` or `"cuda"`.
        quick: in a few seconds, with fewer repeats.
        tell: called with what is measured next.

    Raises:
        ValueError: a device that isn't here, or too little free memory.
    """
    check_device(device)
    effort = QUICK if quick else FULL
    machine, free, cache = facts(), free_bytes(device), cache_bytes(device)
    size = buffer_bytes(cache, free, device)
    clock = clock_of(device)
    missing = {} if cache else {"cache": NO_CACHE_SIZE}

    tell("bandwidth of memory")
    buffer = torch.rand(size // 4, device=device, generator=torch.Generator(device).manual_seed(0))
    bandwidth = measure_bandwidth(buffer, clock, effort)
    del buffer
    products: dict[str, Spread] = {}
    for dtype in DTYPES:
        tell(f"matrix products in {dtype}")
        found, why = measure_products(device, clock, effort, (dtype,))
        products |= found
        missing |= why
    tell("launches")
    launches, why = measure_launches(device, effort)
    missing |= why
    # A model's weights come in 16 bits where that is fast, which on most CPUs it isn't.
    dtype = "bf16" if device == "cuda" and "bf16" in products else "fp32"
    tell("passes over weights")
    points = measure_points(device, dtype, size, clock, Effort(effort.seconds / 2, repeats=3))
    gpu = machine.gpu if device == "cuda" else None
    return MachineBounds(
        device=device,
        name=gpu.name if gpu else machine.cpu,
        threads=0 if gpu else torch.get_num_threads(),
        memory_bytes=gpu.memory_bytes if gpu else machine.memory_bytes,
        free_bytes=free,
        cache_bytes=cache,
        buffer_bytes=size,
        bandwidth=bandwidth,
        products=products,
        launches=launches,
        points=points,
        point_dtype=dtype,
        missing=missing,
        quick=quick,
        torch=machine.torch,
    )


def default_device() -> str:
    """`"cuda"` where torch sees a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Refuses a device that can't be measured.

    Raises:
        ValueError: another name, or `"cuda"` where torch sees no such device.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device; use 'cpu', or ask: make doctor")
