"""Machines as three numbers: how much they hold, how fast they read it, how fast they multiply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from labkit.probing import MachineBounds

GB, TB = 10**9, 10**12
TFLOPS = 10**12


@dataclass(frozen=True)
class Hardware:
    """One accelerator, or the processor of a laptop.

    Args:
        name: what it is.
        memory: bytes that it holds.
        bandwidth: bytes per second that it reads from that memory.
        peak: FLOP per second of a dense matrix product, by dtype; what isn't known isn't there.

    Raises:
        ValueError: a number that isn't positive and finite.
    """

    name: str
    memory: float
    bandwidth: float
    peak: Mapping[str, float]

    def __post_init__(self) -> None:
        for what, value in {"memory": self.memory, "bandwidth": self.bandwidth, **self.peak}.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.name}: {what} must be a positive number, got {value}")

    @classmethod
    def measured(cls, bounds: MachineBounds) -> Hardware:
        """A machine as `labkit.probing.machine_bounds` found it: what it reaches, not what its data sheet says."""
        peak = {dtype: bounds.flops(dtype) for dtype in bounds.products}
        return cls(bounds.name, bounds.memory_bytes, bounds.read, peak)

    def flops(self, dtype: str) -> float:
        """FLOP per second in a dtype.

        Raises:
            ValueError: it isn't known, or the machine can't.
        """
        if dtype not in self.peak:
            known = ", ".join(self.peak) or "none; measure it with tools/measure_gpu.py"
            raise ValueError(f"the peak of {self.name} in {dtype} is not known; known are {known}")
        return self.peak[dtype]

    def ridge(self, dtype: str) -> float:
        """FLOP per byte above which the arithmetic limits, below which the memory does."""
        return self.flops(dtype) / self.bandwidth


H100 = Hardware("H100 SXM 80 GB", 80 * GB, 3.35 * TB, {"bf16": 989 * TFLOPS, "fp8": 1979 * TFLOPS})
RTX_5060 = Hardware("RTX 5060 8 GB", 8 * GB, 448 * GB, {})

KNOWN = {"h100": H100, "rtx-5060": RTX_5060}
"""By the name that the command line takes. Sources: the makers' data sheets, dense rates; module sections 1.2 and 6."""
