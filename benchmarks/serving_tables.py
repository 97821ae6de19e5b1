"""What loads have shown, as tables: each side by itself, and the engine by each of its peers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from benchmarks.reporting import spread
from solutions.engine.load import LoadReport

Reports = dict[str, list[LoadReport]]
"""By side, one for each repeat; the engine's come first."""
Value = Callable[[LoadReport], float]

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
PERCENTILES = (0.5, 0.95, 0.99)


def ratios(reports: Reports, peer: str, value: Value) -> list[float]:
    """The engine's value by a peer's, one for each repeat; without those where the peer's is zero."""
    ours, theirs = next(iter(reports.values())), reports[peer]
    pairs = [(value(mine), value(its)) for mine, its in zip(ours, theirs, strict=True)]
    return [mine / its for mine, its in pairs if its > 0]


def throughput_head() -> list[str]:
    """Above `throughput_rows`."""
    return ["", "| | output tokens/s | the engine's by its |", "|---|---:|---:|"]


def throughput_rows(reports: Reports, label: str = "") -> Iterator[str]:
    """A row for each side: output tokens per second, and how many times the engine's are its own."""
    for name, several in reports.items():
        ratio = "" if name == next(iter(reports)) else spread(ratios(reports, name, lambda one: one.throughput))
        yield f"| {label}{name} | {spread([one.throughput for one in several])} | {ratio} |"


def latency_tables(reports: Reports, slo_ttft: float, slo_tpot: float) -> Iterator[str]:
    """Two tables: medians over the repeats for each side, and the engine's values by each peer's.

    Args:
        reports: of one load.
        slo_ttft: seconds that a first token may take, if the request is to count for goodput.
        slo_tpot: seconds that a further token may take.
    """
    times: dict[str, Value] = {
        f"{label} p{share * 100:.0f}": lambda report, name=name, share=share: report.percentile(name, share)  # type: ignore[misc]
        for name, label in LATENCIES.items()
        for share in PERCENTILES
    }
    rates: dict[str, Value] = {
        "tokens/s": lambda report: report.throughput,
        "goodput": lambda report: report.goodput(slo_ttft, slo_tpot),
    }
    yield from _head([*times, *rates])
    for name, several in reports.items():
        shown = [f"{statistics.median(map(value, several)):.3f}" for value in times.values()]
        shown += [f"{statistics.median(map(value, several)):.1f}" for value in rates.values()]
        yield f"| {name} | " + " | ".join(shown) + " |"
    chosen = {title: value for title, value in times.items() if not title.endswith("p99")} | rates
    yield from _head(chosen)
    for peer in list(reports)[1:]:
        found = [ratios(reports, peer, value) for value in chosen.values()]
        yield f"| the engine / {peer} | " + " | ".join(spread(one) if one else "–" for one in found) + " |"


def _head(titles: list[str] | dict[str, Value]) -> list[str]:
    return ["", "| | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
