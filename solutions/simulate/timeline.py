"""How queue, memory and hit rate went over time, at evenly spaced moments."""

from __future__ import annotations

from labkit.checks import check_count

from .report import SimulationReport

SUMMED = ("waiting", "running", "tokens", "preemptions")
AVERAGED = ("occupancy", "cached")


def moments(report: SimulationReport, points: int) -> list[float]:
    """So many moments, in seconds, the last of them the end.

    Raises:
        ValueError: fewer than one, or a report of nothing.
    """
    check_count("points", points, 1)
    if not report.samples:
        raise ValueError("nothing was served, so there is nothing to see over time")
    start, end = report.samples[0].seconds, report.samples[-1].seconds
    return [start + (end - start) * (i + 1) / points for i in range(points)]


def timeline(report: SimulationReport, name: str, points: int = 60, replica: int | None = None) -> list[float]:
    """A quantity of `Sample` at each of the moments, as the last sample before it says.

    Args:
        report: with samples.
        name: "waiting", "running", "tokens" or "preemptions", summed over replicas; "occupancy" or "cached", averaged.
        points: how many moments.
        replica: one of them alone; None for all.

    Raises:
        ValueError: another name.
    """
    if name not in SUMMED + AVERAGED:
        raise ValueError(f"name must be one of {', '.join(SUMMED + AVERAGED)}, got {name!r}")
    samples = [one for one in report.samples if replica is None or one.replica == replica]
    count = len(report.utilization) if replica is None else 1
    now, values, index = dict[int, float](), list[float](), 0
    for moment in moments(report, points):
        while index < len(samples) and samples[index].seconds <= moment:
            now[samples[index].replica] = float(getattr(samples[index], name))
            index += 1
        values.append(sum(now.values()) / (count if name in AVERAGED else 1))
    return values


def hit_rates(report: SimulationReport, points: int = 60) -> list[float]:
    """Share of prompt tokens that the cache had, of the requests that arrived between two moments; 0 without any."""
    rates, before = list[float](), float("-inf")
    for moment in moments(report, points):
        arrived = [one for one in report.outcomes if before < one.arrived <= moment]
        prompts = sum(one.num_prompt for one in arrived)
        rates.append(sum(one.num_cached for one in arrived) / prompts if prompts else 0.0)
        before = moment
    return rates
