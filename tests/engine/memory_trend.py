"""Whether a process that does the same thing again and again needs ever more memory."""

from __future__ import annotations

import gc
import itertools
import statistics
import sys

import psutil

MOST_BYTES = 8192.0
"""A request may add to what was allocated and not freed. Kept logits would be 200,000, a prompt's hidden states 20,000
and more, and what is smaller shows in the objects. Now and then a library writes a kernel for a size that it meets for
the first time: two or three of a megabyte each, half way through, are as much as 3,000."""
MOST_OBJECTS = 8.0
"""A request may add to Python's allocated blocks. Three are its latencies, which the metrics keep for the last 10,000;
a kept `Request` has dozens."""


class MemoryTrend:
    """Samples at moments when nothing is going on, and the slope through them.

    What counts is what the process asked for and has not given back, not the pages it occupies (its RSS): of weights
    that are mapped from a file ever more pages are there, as tokens are met whose embeddings nobody had read, and the
    system takes them back whenever it likes; and an allocator keeps pages that were freed.

    The first third warms up caches and doesn't count. The slope is the median of those between all pairs of samples
    (Theil 1950, Sen 1968): a few samples that are off do not bend it.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[int, int, int]] = []

    def sample(self, num_requests: int) -> None:
        """Notes what is held after so many requests."""
        gc.collect()
        heap = psutil.heap_info()
        self._samples.append((num_requests, heap.heap_used + heap.mmap_used, sys.getallocatedblocks()))

    def check(self) -> str:
        """Demands that it is flat.

        Returns:
            The slopes, in words.

        Raises:
            AssertionError: it rises.
        """
        kept = self._samples[len(self._samples) // 3 :]
        assert len(kept) >= 4, f"{len(self._samples)} samples tell no trend"
        size, objects = _slope([(at, heap) for at, heap, _ in kept]), _slope([(at, count) for at, _, count in kept])
        requests = kept[-1][0] - kept[0][0]
        text = f"each of {requests} requests adds {size:.0f} bytes and {objects:.2f} objects, by {len(kept)} samples"
        assert size <= MOST_BYTES and objects <= MOST_OBJECTS, f"{text}: {self._samples}"
        return text


def _slope(points: list[tuple[int, int]]) -> float:
    return statistics.median((y - b) / (x - a) for (a, b), (x, y) in itertools.combinations(points, 2))
