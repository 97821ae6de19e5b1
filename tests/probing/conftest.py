"""Bounds that nobody measured, for tests of what is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.probing import MachineBounds, Point, Spread


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of kept bounds, in a cache folder of the test's own."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "machine_bounds.json"


@pytest.fixture
def bounds() -> MachineBounds:
    """A toy card: at best 100 GB/s, 10 TFLOP/s in bf16 and 2 in fp32, so ridges of 100 and 20."""
    return MachineBounds(
        device="cuda",
        name="Toy 9000",
        threads=0,
        memory_bytes=8 * 2**30,
        free_bytes=7 * 2**30,
        cache_bytes=32 * 2**20,
        buffer_bytes=2**30,
        bandwidth={"read": Spread(95e9, 90e9, 100e9, 9), "write": Spread(80e9, 79e9, 81e9, 9)},
        products={"fp32": Spread(1.95e12, 1.9e12, 2e12, 9), "bf16": Spread(9e12, 5e12, 10e12, 3)},
        launches={"operator": Spread(4e-6, 3e-6, 5e-6, 9), "graph": Spread(1e-6, 1e-6, 1e-6, 9)},
        points=(Point(1, 1.0, Spread(95e9, 90e9, 99e9, 5)), Point(64, 60.0, Spread(5e12, 4e12, 6e12, 5))),
        point_dtype="bf16",
        missing={"fp8": "needs compute capability 8.9, this card has 8.0"},
        torch="2.13.0",
    )
