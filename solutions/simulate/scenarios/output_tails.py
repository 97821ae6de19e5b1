"""Memory planned for the mean answer: the long ones fill it, and the scheduler preempts and computes again."""

from __future__ import annotations

from dataclasses import replace

from ..lengths import Fixed, LogNormal
from ..replica import ReplicaConfig
from ..report import SimulationReport
from ..simulation import simulate
from ..step_time import RooflineTime
from ..workload import Stream, TimedRequest
from .scenario import BLOCK_SIZE, LLAMA_8B, Case, Column, Role, Scenario, percentile, replica_config, replicas

AT_ONCE = 64
PROMPT = Fixed(128)
OUTPUT = LogNormal(mean=400, p95=1400, longest=4000)
MEAN_POOL = AT_ONCE * (PROMPT.tokens + int(OUTPUT.mean / 2))
"""Tokens of so many requests, each with its prompt and half of an average answer: the planner's decode context."""
P95_POOL = AT_ONCE * (PROMPT.tokens + int(OUTPUT.quantile(0.95)))
FEWER = AT_ONCE // 2


def workload(seed: int) -> list[TimedRequest]:
    """Rather more than so many at once can do."""
    return Stream(24.0, PROMPT, OUTPUT).draw(10.0, seed)


def _case(name: str, role: Role, config: ReplicaConfig, kv: str = "bf16") -> Case:
    def run(seed: int) -> SimulationReport:
        return simulate(replicas(1, config, RooflineTime(replace(LLAMA_8B, kv=kv), BLOCK_SIZE)), workload(seed))

    return Case(name, role, run)


SCENARIO = Scenario(
    "output-tails",
    "memory is planned for the mean answer, and answers have a tail",
    f"The pool holds {AT_ONCE} requests of average length. But a long answer is there for longer, so those that run "
    "are longer than the average, and they fill the pool. Somebody loses their blocks at every turn, a reader sees the "
    "text stop, and what was there is computed again. Memory for the 95th percentile ends it; fewer at once let the "
    "others wait before their first token instead of in mid-sentence; swapping saves the second computation, not the "
    "stall.",
    (
        _case(f"memory for the mean, {AT_ONCE} at once", Role.FAILURE, replica_config(MEAN_POOL, max_running=AT_ONCE)),
        _case("memory for the p95", Role.REMEDY, replica_config(P95_POOL, max_running=AT_ONCE)),
        _case(f"{FEWER} at once", Role.REMEDY, replica_config(MEAN_POOL, max_running=FEWER)),
        _case(
            "preempt by swap",
            Role.REMEDY,
            replica_config(MEAN_POOL, max_running=AT_ONCE, preemption="swap", num_host_tokens=P95_POOL),
        ),
        _case("FP8 keys and values", Role.REMEDY, replica_config(2 * MEAN_POOL, max_running=AT_ONCE), kv="fp8"),
    ),
    (
        Column("preemptions", lambda report: report.num_preemptions, ".0f"),
        Column("computed for each needed", lambda report: report.recomputed),
        Column("longest stall, p99 (s)", percentile("longest_gap", 0.99)),
        Column("TTFT p95 (s)", percentile("ttft", 0.95)),
        Column("output tokens/s", lambda report: report.throughput, ",.0f"),
    ),
)
