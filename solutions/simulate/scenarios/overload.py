"""More than can be served: everybody is late in a queue that grows, and chats are behind a batch job."""

from __future__ import annotations

from ..lengths import Fixed, Uniform
from ..report import SimulationReport
from ..routing import RefuseWhenFull, Router, least_loaded
from ..simulation import simulate
from ..workload import Stream, TimedRequest, merge
from .scenario import Case, Column, Role, Scenario, percentile, replica_config, replicas

SLO_TTFT, SLO_TPOT = 1.0, 0.1


def _goodput(report: SimulationReport) -> float:
    return report.goodput(SLO_TTFT, SLO_TPOT)


def _burst(seed: int, rate: float) -> list[TimedRequest]:
    return Stream(rate, Uniform(1000, 1400), Uniform(20, 60)).draw(12.0, seed)


def _overload(name: str, role: Role, rate: float, route: Router = least_loaded, count: int = 1) -> Case:
    def run(seed: int) -> SimulationReport:
        return simulate(replicas(count, replica_config(100_000)), _burst(seed, rate), route)

    return Case(name, role, run)


OVERLOAD = Scenario(
    "overload",
    "a third more arrives than can be served, and nobody is served in time",
    "Without a limit the queue grows as long as the burst lasts, and throughput stays high while goodput, what was in "
    "time, goes to nothing. Whoever would wait too long is told so at once: those who are let in are in time.",
    (
        _overload("what can be served", Role.HEALTHY, 20.0),
        _overload("too much", Role.FAILURE, 36.0),
        _overload("refused when 16 wait", Role.REMEDY, 36.0, RefuseWhenFull(16)),
        _overload("a second replica", Role.REMEDY, 36.0, count=2),
    ),
    (
        Column("TTFT p95 (s)", percentile("ttft", 0.95)),
        Column("output tokens/s", lambda report: report.throughput, ",.0f"),
        Column(f"in time: TTFT < {SLO_TTFT:g} s", _goodput, ",.0f"),
        Column("refused", lambda report: report.num_refused, ".0f"),
    ),
)


def _mixed(seed: int, batch_priority: int) -> list[TimedRequest]:
    chats = Stream(6.0, Uniform(200, 600), Uniform(30, 90)).draw(10.0, seed)
    flood = Stream(200.0, Fixed(1200), Fixed(40), kind="batch", priority=batch_priority, start=2.0).draw(3.0, seed)
    return merge(chats, flood)


def _priorities(name: str, role: Role, batch_priority: int) -> Case:
    config = replica_config(100_000, token_budget=512)

    def run(seed: int) -> SimulationReport:
        return simulate(replicas(1, config), _mixed(seed, batch_priority))

    return Case(name, role, run)


PRIORITIES = Scenario(
    "priorities",
    "200 documents to summarise arrive at once, and chats stand in line behind them",
    "First come, first served, is fair to requests and not to people. With a lower priority the batch job waits while "
    "a chat does, loses its blocks first, and still gets on: waiting makes anybody urgent in the end.",
    (
        _priorities("all alike", Role.FAILURE, 0),
        _priorities("the batch job comes second", Role.REMEDY, 2),
    ),
    (
        Column("chat: TTFT p95 (s)", percentile("ttft", 0.95, "chat")),
        Column("chat: E2E p95 (s)", percentile("e2e", 0.95, "chat")),
        Column("batch: E2E p95 (s)", percentile("e2e", 0.95, "batch")),
        Column("output tokens/s", lambda report: report.throughput, ",.0f"),
    ),
)
