"""The plan counted on the prefix cache; then the traffic changed."""

from __future__ import annotations

from ..lengths import Fixed
from ..report import SimulationReport
from ..simulation import simulate
from ..workload import Stream, TimedRequest
from .scenario import Case, Column, Role, Scenario, percentile, replica_config, replicas

PROMPT, SHARED = 2048, 1024
RATE = 22.0


def workload(seed: int, prefix: int) -> list[TimedRequest]:
    """Prompts of one length, that share a beginning or nothing."""
    return Stream(RATE, Fixed(PROMPT), Fixed(20), prefix=prefix).draw(8.0, seed)


def _case(name: str, role: Role, prefix: int, count: int = 1) -> Case:
    config = replica_config(40_000, prefix_cache="hash")

    def run(seed: int) -> SimulationReport:
        return simulate(replicas(count, config), workload(seed, prefix))

    return Case(name, role, run)


SCENARIO = Scenario(
    "prefix-mix",
    "the hit rate drops from a half to nothing, and prefill doubles",
    "The same requests, once with a system prompt of half their length first, once with a time stamp before it: not a "
    "token is shared then, the replica has twice the prefill and can't keep up. The remedies are the layout (what is "
    "stable comes first) or the machines that the plan had saved.",
    (
        _case("stable part first", Role.HEALTHY, SHARED),
        _case("time stamp first", Role.FAILURE, 0),
        _case("a second replica", Role.REMEDY, 0, count=2),
        _case("all but 256 tokens stable", Role.REMEDY, PROMPT - 256),
    ),
    (
        Column("hit rate", lambda report: report.hit_rate),
        Column("prefill and decode (tokens/s)", lambda report: report.num_computed_tokens / report.seconds, ",.0f"),
        Column("TTFT p95 (s)", percentile("ttft", 0.95)),
    ),
)
