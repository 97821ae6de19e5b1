"""Four replicas, many prefixes: spread evenly they fit into no cache, kept together they do."""

from __future__ import annotations

from collections.abc import Callable

from ..lengths import Fixed, Uniform
from ..report import SimulationReport
from ..routing import PrefixAffinity, RoundRobin, Router
from ..simulation import simulate
from ..workload import Stream, TimedRequest
from .scenario import Case, Column, Role, Scenario, percentile, replica_config, replicas

PREFIX = 1536
NUM_PREFIXES = 32
POOL = 24_000
"""Tokens of a replica: about fifteen prefixes."""


def questions(seed: int, rate: float, skew: float = 0.0) -> list[TimedRequest]:
    """Questions about documents, a page each; with skew, nearly all about the same."""
    prompt = Uniform(PREFIX + 512, PREFIX + 768)
    return Stream(rate, prompt, Fixed(20), prefix=PREFIX, num_prefixes=NUM_PREFIXES, skew=skew).draw(5.0, seed)


def _case(
    name: str, role: Role, make_router: Callable[[], Router], rate: float, *, skew: float = 0.0, pool: int = POOL
) -> Case:
    config = replica_config(pool, prefix_cache="hash")

    def run(seed: int) -> SimulationReport:
        return simulate(replicas(4, config), questions(seed, rate, skew), make_router())

    return Case(name, role, run)


def bounded() -> Router:
    """By prefix, as long as its replica has no more than twice the average to do."""
    return PrefixAffinity(most=2.0)


def _busiest(report: SimulationReport) -> float:
    """Requests of the busiest replica over the average."""
    counts = [sum(one.replica == index for one in report.outcomes) for index in range(len(report.utilization))]
    return max(counts) * len(counts) / sum(counts)


COLUMNS = (
    Column("hit rate", lambda report: report.hit_rate),
    Column("busiest replica over the mean", _busiest),
    Column("TTFT p50 (s)", percentile("ttft", 0.5), ".3f"),
    Column("TTFT p95 (s)", percentile("ttft", 0.95), ".3f"),
)

THRASH = Scenario(
    "cache-thrash",
    "every replica meets every prefix, and each evicts what it needs next",
    f"{NUM_PREFIXES} documents of {PREFIX:,} tokens, four replicas that hold about {POOL // PREFIX} each. In turn, "
    "every replica sees all of them, and the least recently used is gone before it is asked for again. By prefix, each "
    "replica has only its own to keep; a pool of twice the size helps less, and costs more.",
    (
        _case("in turn", Role.FAILURE, RoundRobin, 70.0),
        _case("by prefix", Role.REMEDY, bounded, 70.0),
        _case("in turn, twice the pool", Role.REMEDY, RoundRobin, 70.0, pool=2 * POOL),
    ),
    COLUMNS,
)

HOT = Scenario(
    "hot-replica",
    "one prefix is asked for by nearly everybody, and its replica drowns",
    "Routing by prefix keeps the hit rate and gives one replica most of the work. With a bound on its load the router "
    "lets the excess go elsewhere, where the prefix is computed once and then cached as well.",
    (
        _case("evenly asked for", Role.HEALTHY, PrefixAffinity, 60.0, pool=2 * POOL),
        _case("one in fashion", Role.FAILURE, PrefixAffinity, 60.0, skew=3.5, pool=2 * POOL),
        _case("at most twice the mean", Role.REMEDY, bounded, 60.0, skew=3.5, pool=2 * POOL),
    ),
    COLUMNS,
)
