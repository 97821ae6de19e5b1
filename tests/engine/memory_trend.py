"""Whether a process that does the same thing again and again needs ever more memory."""

from __future__ import annotations

import gc
import itertools
import statistics
import sys

import psutil

MOST_BYTES = 32 * 2**20
"""The process may grow by so much from the first to the last sample that counts: pages that the allocator keeps come
and go, up to 20 MB where trees of drafts make passes of every size. Kept logits of each request would be 100 MB, and
smaller leaks show in the objects."""
MOST_OBJECTS = 8.0
"""A request may add to Python's allocated blocks. Three are its latencies, which the metrics keep for the last 10,000;
a kept `Request` has dozens."""


class MemoryTrend:
    """Samples at moments when nothing is going on, and the slope through them.

    The first third warms up allocators and caches and doesn't count. The slope is the median of those between all
    pairs of samples (Theil 1950, Sen 1968): a few samples that are off do not bend it.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[int, int, int]] = []

    def sample(self, num_requests: int) -> None:
        """Notes what is held after so many requests."""
        gc.collect()
        self._samples.append((num_requests, psutil.Process().memory_info().rss, sys.getallocatedblocks()))

    def check(self) -> str:
        """Demands that it is flat.

        Returns:
            The slopes, in words.

        Raises:
            AssertionError: it rises.
        """
        kept = self._samples[len(self._samples) // 3 :]
        assert len(kept) >= 4, f"{len(self._samples)} samples tell no trend"
        size, objects = _slope([(at, rss) for at, rss, _ in kept]), _slope([(at, count) for at, _, count in kept])
        requests = kept[-1][0] - kept[0][0]
        text = f"each of {requests} requests adds {size:.0f} bytes and {objects:.2f} objects, by {len(kept)} samples"
        assert size * requests <= MOST_BYTES and objects <= MOST_OBJECTS, f"{text}: {self._samples}"
        return text


def _slope(points: list[tuple[int, int]]) -> float:
    return statistics.median((y - b) / (x - a) for (a, b), (x, y) in itertools.combinations(points, 2))
