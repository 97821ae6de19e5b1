"""One prompt of 60,000 tokens among chats: its prefill stands in everybody's way."""

from __future__ import annotations

from dataclasses import replace

from ..lengths import Fixed, Uniform
from ..report import SimulationReport
from ..routing import LongPromptsApart, RefuseLongPrompts, Router, least_loaded
from ..simulation import simulate
from ..workload import Stream, TimedRequest, merge
from .scenario import Case, Column, Role, Scenario, percentile, replica_config, replicas

LONG = 60_000
POOL = 200_000
WHOLE = 65_536
"""A budget that any prompt fits into: nothing is ever cut."""


def workload(seed: int) -> list[TimedRequest]:
    """Chats for 20 seconds, and three long prompts."""
    chats = Stream(12.0, Uniform(200, 600), Uniform(50, 150)).draw(20.0, seed)
    long = Stream(1.0, Fixed(LONG), Fixed(50), kind="long").draw(60.0, seed)
    return merge(chats, [replace(one, seconds=when) for one, when in zip(long, (2.0, 8.0, 14.0), strict=False)])


def _case(name: str, role: Role, budget: int, chunk: int | None, route: Router = least_loaded) -> Case:
    config = replica_config(POOL, token_budget=budget, max_chunk=chunk)

    def run(seed: int) -> SimulationReport:
        return simulate(replicas(2, config), workload(seed), route)

    return Case(name, role, run)


SCENARIO = Scenario(
    "long-prompts",
    "a prompt of 60,000 tokens makes every reader on its replica wait",
    "A step that computes a whole long prompt takes seconds, and whoever decodes in it gets one token in that time. "
    "Chunks bound the stall; the cap on one prompt's chunk leaves room in the budget for short prompts behind it. A "
    "pool of their own keeps long prompts away from chats, a limit turns them down.",
    (
        _case("whole prompts", Role.FAILURE, WHOLE, None),
        _case("chunks of 2,048", Role.REMEDY, 2048, None),
        _case("chunks of 1,024 in 2,048", Role.REMEDY, 2048, 1024),
        _case("a replica for long ones", Role.REMEDY, WHOLE, None, LongPromptsApart(8_000)),
        _case("none above 8,000", Role.REMEDY, WHOLE, None, RefuseLongPrompts(8_000)),
    ),
    (
        Column("chat: longest stall, p99 (s)", percentile("longest_gap", 0.99, "chat")),
        Column("chat: TTFT p95 (s)", percentile("ttft", 0.95, "chat")),
        Column("long: TTFT p50 (s)", percentile("ttft", 0.5, "long")),
        Column("refused", lambda report: report.num_refused, ".0f"),
    ),
)
