"""Each failure mode shows, and each remedy helps: by how much, for the seed that the command takes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import pytest

from solutions.simulate.scenarios import SCENARIOS, Role


@dataclass(frozen=True)
class Claim:
    """In a column, one case exceeds another by a factor at least.

    Args:
        column: title.
        larger: case.
        smaller: case.
        factor: above 1.
    """

    column: str
    larger: str
    smaller: str
    factor: float


CLAIMS = {
    "long-prompts": (
        Claim("chat: longest stall, p99 (s)", "whole prompts", "chunks of 2,048", 10),
        Claim("chat: longest stall, p99 (s)", "chunks of 2,048", "a replica for long ones", 2),
        # Chunks alone don't help those who arrive: the long prompt takes what is left of every budget.
        Claim("chat: TTFT p95 (s)", "chunks of 2,048", "chunks of 1,024 in 2,048", 10),
        Claim("chat: TTFT p95 (s)", "whole prompts", "a replica for long ones", 10),
        Claim("chat: TTFT p95 (s)", "whole prompts", "none above 8,000", 10),
    ),
    "output-tails": (
        Claim("preemptions", "memory for the mean, 64 at once", "32 at once", 2),
        Claim("longest stall, p99 (s)", "memory for the mean, 64 at once", "memory for the p95", 20),
        Claim("longest stall, p99 (s)", "memory for the mean, 64 at once", "FP8 keys and values", 20),
        Claim("TTFT p95 (s)", "32 at once", "memory for the mean, 64 at once", 1.02),
        Claim("computed for each needed", "memory for the mean, 64 at once", "preempt by swap", 1.1),
        Claim("output tokens/s", "memory for the p95", "memory for the mean, 64 at once", 1.01),
    ),
    "kv-transfer": (
        Claim("p95 (s)", "12.5 GB/s (100 Gb/s Ethernet)", "50 GB/s (InfiniBand NDR)", 50),
        Claim("p95 (s)", "12.5 GB/s (100 Gb/s Ethernet)", "12.5 GB/s, FP8 keys and values", 20),
    ),
    "prefix-mix": (
        Claim("TTFT p95 (s)", "time stamp first", "stable part first", 10),
        Claim("TTFT p95 (s)", "time stamp first", "a second replica", 10),
        Claim("TTFT p95 (s)", "time stamp first", "all but 256 tokens stable", 10),
        Claim("hit rate", "all but 256 tokens stable", "stable part first", 1.5),
    ),
    "cache-thrash": (
        Claim("hit rate", "by prefix", "in turn", 2),
        Claim("hit rate", "by prefix", "in turn, twice the pool", 1.3),
        Claim("TTFT p50 (s)", "in turn", "by prefix", 2),
    ),
    "hot-replica": (
        Claim("busiest replica over the mean", "one in fashion", "at most twice the mean", 1.5),
        Claim("TTFT p95 (s)", "one in fashion", "evenly asked for", 5),
        Claim("TTFT p95 (s)", "one in fashion", "at most twice the mean", 5),
        Claim("hit rate", "at most twice the mean", "evenly asked for", 1.01),
    ),
    "stragglers": (
        Claim("TPOT p95 (ms)", "one slow, in turn", "all at full speed", 1.9),
        Claim("E2E p95 (s)", "one slow, in turn", "one slow, by load", 1.1),
        Claim("E2E p95 (s)", "one slow, in turn", "its replica taken out", 1.3),
    ),
    "experts": (
        Claim("TPOT p50 (ms)", "in order", "evenly wanted", 2),
        Claim("TPOT p50 (ms)", "in order", "placed by load", 2),
        Claim("TPOT p50 (ms)", "placed by load", "8 places for copies", 1.1),
    ),
    "overload": (
        Claim("TTFT p95 (s)", "too much", "refused when 16 wait", 3),
        Claim("in time: TTFT < 1 s", "refused when 16 wait", "too much", 2),
        # What is thrown away is not throughput.
        Claim("output tokens/s", "too much", "what can be served", 1.02),
        Claim("in time: TTFT < 1 s", "a second replica", "refused when 16 wait", 1.2),
    ),
    "priorities": (
        Claim("chat: TTFT p95 (s)", "all alike", "the batch job comes second", 20),
        Claim("batch: E2E p95 (s)", "the batch job comes second", "all alike", 1.01),
    ),
}


def test_every_scenario_has_a_failure_and_remedies() -> None:
    assert set(CLAIMS) == set(SCENARIOS)
    for scenario in SCENARIOS.values():
        roles = [case.role for case in scenario.cases]
        assert roles.count(Role.FAILURE) == 1 and Role.REMEDY in roles
        assert roles == sorted(roles, key=list(Role).index)
        failure = next(case.name for case in scenario.cases if case.role is Role.FAILURE)
        named = {name for claim in CLAIMS[scenario.name] for name in (claim.larger, claim.smaller)}
        assert failure in named and named == {case.name for case in scenario.cases}, "a case that nothing is said of"


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_failure_shows_and_the_remedies_help(name: str) -> None:
    check_claims(name, 0)


def check_claims(name: str, *seeds: int, slack: float = 1.0) -> None:
    """Runs a scenario and looks at each claim.

    Args:
        name: of the scenario.
        seeds: of several the factor in the middle counts: one draw may give a replica much more to do than its share.
        slack: so much of what a factor has beyond 1 is asked for.
    """
    scenario = SCENARIOS[name]
    runs = [scenario.run(seed) for seed in seeds]
    for claim in CLAIMS[name]:
        column = next(one for one in scenario.columns if one.title == claim.column)
        pairs = [tuple(column.value(run[case]) for case in (claim.larger, claim.smaller)) for run in runs]
        factor = 1 + slack * (claim.factor - 1)
        # As differences, since the smaller one may be 0.
        assert statistics.median(larger - factor * smaller for larger, smaller in pairs) >= 0, (
            f"seeds {seeds}, {claim.column}: {claim.larger!r} and {claim.smaller!r} have {pairs}; the first should be "
            f"{factor:.3g} times the second at least"
        )
