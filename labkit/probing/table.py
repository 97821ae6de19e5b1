"""The bounds of a machine as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from labkit.probing.bounds import MachineBounds
from labkit.probing.products import DTYPES
from labkit.probing.timing import Spread

WIDE = 1.3
"""A range of more than so many times its low end says that other work was going on."""
_GIB = 2**30


def print_bounds(bounds: MachineBounds, console: Console) -> None:
    """Prints what was measured, with its range; then what was not, and why."""
    console.print(headline(bounds))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, justify in (("", "left"), ("median", "right"), ("range", "right"), ("", "left"), ("ridge", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in _rows(bounds):
        table.add_row(*row)
    console.print(table)
    for note in notes(bounds):
        console.print(note)


def headline(bounds: MachineBounds) -> str:
    """The machine in a line."""
    how = f"{bounds.threads} threads" if bounds.threads else "GPU"
    cache = f", last-level cache {bounds.cache_bytes / 2**20:.0f} MiB" if bounds.cache_bytes else ""
    return (
        f"{bounds.name}, {how}: {bounds.memory_bytes / _GIB:.1f} GiB of memory, {bounds.free_bytes / _GIB:.1f} free"
        f"{cache}; torch {bounds.torch}"
    )


def notes(bounds: MachineBounds) -> Iterator[str]:
    """What has to be said beside the numbers."""
    for name, why in bounds.missing.items():
        yield f"{name}: not measured; {why}"
    spreads = {**bounds.bandwidth, **bounds.products}
    if wide := [name for name, spread in spreads.items() if spread.high > WIDE * spread.low]:
        yield f"wide ranges ({', '.join(wide)}): other programs may be running; close them and measure again"
    if bounds.quick:
        yield "measured in a hurry; without --quick the medians are of more repeats"
    if bounds.device == "cpu":
        yield "a GPU: *not verified here*; the numbers are those of the processor"


def _rows(bounds: MachineBounds) -> Iterator[tuple[str, str, str, str, str]]:
    for kind, spread in bounds.bandwidth.items():
        yield (kind, *_scaled(spread, 1e9, "GB/s"), "")
    for dtype in (dtype for dtype in DTYPES if dtype in bounds.products):
        spread, what = bounds.products[dtype], "OP" if dtype == "int8" else "FLOP"
        unit = (1e12, f"T{what}/s") if spread.median >= 1e12 else (1e9, f"G{what}/s")
        yield (f"products in {dtype}", *_scaled(spread, *unit), f"{bounds.ridge(dtype):.3g} {what}/byte")
    names = {"operator": "starting an operator", "graph": "the same in a CUDA graph"}
    for name, spread in bounds.launches.items():
        yield (names[name], *_scaled(spread, 1e-6, "µs"), "")


def _scaled(spread: Spread, unit: float, name: str) -> tuple[str, str, str]:
    return f"{spread.median / unit:.3g}", f"{spread.low / unit:.3g} – {spread.high / unit:.3g}", name
