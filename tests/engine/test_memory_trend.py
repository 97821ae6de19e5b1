"""The measure of a soak sees what is kept, however it is kept, and nothing else."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.memory_trend import MemoryTrend


def trend_of(serve: Callable[[int], None]) -> str:
    trend = MemoryTrend()
    for wave in range(1, 7):
        for request in range(100):
            serve(100 * wave + request)
        trend.sample(100 * wave)
    return trend.check()


@pytest.mark.parametrize("keep", [
    lambda request: torch.zeros(4096),
    lambda request: bytes(16_384),
    lambda request: [object() for _ in range(20)],
], ids=["a tensor", "bytes", "small objects"])  # fmt: skip
def test_what_is_kept_of_each_request_is_seen(keep: Callable[[int], object]) -> None:
    kept: list[object] = []
    with pytest.raises(AssertionError, match="each of 300 requests adds"):
        trend_of(lambda request: kept.append(keep(request)))


def test_what_is_kept_of_a_bounded_number_is_no_trend() -> None:
    kept: dict[int, object] = {}
    trend_of(lambda request: kept.update({request % 64: torch.zeros(4096)}))


def test_pages_of_a_mapped_file_that_are_read_at_last_are_no_trend(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    page = mmap.PAGESIZE
    path.write_bytes(bytes(800 * page))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as weights:
        trend_of(lambda request: weights[request * page : request * page + 1] and None)
