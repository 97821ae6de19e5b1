"""A batch is as slow as the slowest GPU that works on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..lengths import Uniform
from ..replica import Replica
from ..report import SimulationReport
from ..routing import RoundRobin, Router, least_loaded
from ..simulation import simulate
from ..slow_ranks import TensorParallel
from ..step_time import RooflineTime
from ..workload import Stream, TimedRequest
from .kv_transfer import LLAMA_70B
from .scenario import BLOCK_SIZE, Case, Column, Role, Scenario, percentile, replica_config

Speeds = tuple[float, ...]
WELL, SLOW = (1.0,), (0.5,)
"""A card that is too hot runs at half its clock."""


def workload(seed: int) -> list[TimedRequest]:
    """A load that two healthy replicas of 8 carry well."""
    return Stream(24.0, Uniform(300, 900), Uniform(30, 90)).draw(12.0, seed)


def _case(name: str, role: Role, groups: tuple[Speeds, ...], make_router: Callable[[], Router]) -> Case:
    """Tensor-parallel groups with these speeds of their ranks."""
    config = replica_config(200_000)

    def run(seed: int) -> SimulationReport:
        pool = [
            Replica(
                config, TensorParallel(RooflineTime(replace(LLAMA_70B, num_gpus=len(ranks)), BLOCK_SIZE), ranks), index
            )
            for index, ranks in enumerate(groups)
        ]
        return simulate(pool, workload(seed), make_router())

    return Case(name, role, run)


def by_load() -> Router:
    """A router that goes by the number of requests."""
    return least_loaded


SCENARIO = Scenario(
    "stragglers",
    "one of 16 GPUs runs at half speed, and half of all requests feel it",
    "In a group of eight all wait for the slowest at every layer. A router that goes by load sends the slow replica "
    "less; taken out, it takes seven good cards along, and the other replica carries all.",
    (
        _case("all at full speed", Role.HEALTHY, (8 * WELL, 8 * WELL), RoundRobin),
        _case("one slow, in turn", Role.FAILURE, (8 * WELL, 7 * WELL + SLOW), RoundRobin),
        _case("one slow, by load", Role.REMEDY, (8 * WELL, 7 * WELL + SLOW), by_load),
        _case("its replica taken out", Role.REMEDY, (8 * WELL,), by_load),
    ),
    (
        Column("TPOT p50 (ms)", lambda report: 1e3 * report.percentile("tpot", 0.5), ".1f"),
        Column("TPOT p95 (ms)", lambda report: 1e3 * report.percentile("tpot", 0.95), ".1f"),
        Column("TTFT p95 (s)", percentile("ttft", 0.95), ".3f"),
        Column("E2E p95 (s)", percentile("e2e", 0.95)),
    ),
)
