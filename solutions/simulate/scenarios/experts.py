"""Mixture of experts: all ranks wait for the one that holds the experts in fashion."""

from __future__ import annotations

from ..report import SimulationReport
from ..simulation import simulate
from ..slow_ranks import ExpertParallel, Placement, balanced, imbalance, in_order
from ..step_time import RooflineTime
from .kv_transfer import LLAMA_70B
from .scenario import BLOCK_SIZE, Case, Column, Role, Scenario, percentile, replica_config, replicas
from .stragglers import workload

EXPERTS, RANKS = 64, 8
POPULARITY = tuple(1 / (expert + 1) ** 0.7 for expert in range(EXPERTS))
SHARE = 0.6
"""Of a step that the experts take with tokens spread evenly; an assumption, as is the model that stands in for one."""


def _case(name: str, role: Role, placement: Placement, popularity: tuple[float, ...] = POPULARITY) -> Case:
    times = ExpertParallel(RooflineTime(LLAMA_70B, BLOCK_SIZE), SHARE, imbalance(popularity, placement))

    def run(seed: int) -> SimulationReport:
        return simulate(replicas(1, replica_config(200_000), times), workload(seed)[::2])

    return Case(name, role, run)


SCENARIO = Scenario(
    "experts",
    "a few experts get most of the tokens, and their rank sets the pace",
    f"{EXPERTS} experts on {RANKS} ranks, their popularity falling like that of words. In order of their numbers, the "
    "first rank has several times the mean load. Placed by load the ranks are even, as far as one expert alone is not "
    "too much for a rank; copies of the most popular take care of that.",
    (
        _case("evenly wanted", Role.HEALTHY, in_order(EXPERTS, RANKS), (1.0,) * EXPERTS),
        _case("in order", Role.FAILURE, in_order(EXPERTS, RANKS)),
        _case("placed by load", Role.REMEDY, balanced(POPULARITY, RANKS)),
        _case("8 places for copies", Role.REMEDY, balanced(POPULARITY, RANKS, spare=RANKS)),
    ),
    (
        Column("TPOT p50 (ms)", lambda report: 1e3 * report.percentile("tpot", 0.5), ".1f"),
        Column("TTFT p95 (s)", percentile("ttft", 0.95), ".3f"),
        Column("E2E p95 (s)", percentile("e2e", 0.95)),
    ),
)
