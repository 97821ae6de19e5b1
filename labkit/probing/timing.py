"""Times of calls: repeated, and told as a median with its range."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """A measured number.

    Args:
        median: of the repeats.
        low: the least of them.
        high: the largest.
        repeats: how many there were.
    """

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """From the single measurements, at least one."""
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))

    def rate(self, amount: float) -> Spread:
        """The amount per second, if this is in seconds: what took longest was slowest."""
        return Spread(amount / self.median, amount / self.high, amount / self.low, self.repeats)


class Clock(Protocol):
    """Measures how long some calls take together."""

    def seconds(self, call: Call, count: int) -> float:
        """Seconds from the start of the first of `count` calls to the end of the last."""


class WallClock:
    """From the first call until everything that they started on the device is done.

    Args:
        device: `"cpu"` or `"cuda"`.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"

    def seconds(self, call: Call, count: int) -> float:
        """As `Clock`."""
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


class GpuClock:
    """The GPU's own clock, so that what the host does between launches doesn't count once the GPU is busy."""

    def seconds(self, call: Call, count: int) -> float:
        """As `Clock`."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: str) -> Clock:
    """The clock for work on a device."""
    return GpuClock() if device == "cuda" else WallClock(device)


@dataclass(frozen=True)
class Effort:
    """How much time a measurement may take.

    Args:
        seconds: for one measured number, about.
        repeats: at most so many.
        fewest: repeats that there are at least, however long they take.
        sample_seconds: that one repeat lasts at least, by several calls if one is shorter.
    """

    seconds: float
    repeats: int = 9
    fewest: int = 3
    sample_seconds: float = 0.004


FULL = Effort(seconds=2.0)
QUICK = Effort(seconds=0.25)


def time_of(call: Call, clock: Clock, effort: Effort) -> Spread:
    """Seconds of one call.

    A first call maps pages, starts threads and lets libraries choose their kernels; it isn't counted. A second one says
    how many calls make a sample.

    Args:
        call: what is measured.
        clock: by what.
        effort: how much of it.
    """
    clock.seconds(call, 1)
    one = max(clock.seconds(call, 1), 1e-9)
    count = max(1, round(effort.sample_seconds / one))
    affordable = int(effort.seconds / (one * count))
    repeats = max(effort.fewest, min(effort.repeats, affordable))
    return Spread.of([clock.seconds(call, count) / count for _ in range(repeats)])
