"""A failure mode as an experiment: what goes wrong, and what each remedy makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from solutions.engine.scheduler import SchedulerConfig
from solutions.planning.hardware import H100
from solutions.planning.model_shape import KNOWN
from solutions.planning.roofline import Serving

from ..replica import Replica, ReplicaConfig
from ..report import SimulationReport
from ..step_time import RooflineTime, StepTimeModel


class Role(Enum):
    """What a case is there to show."""

    HEALTHY = "healthy"
    FAILURE = "failure"
    REMEDY = "remedy"


@dataclass(frozen=True)
class Case:
    """One way to serve a workload.

    Args:
        name: in a few words.
        role: what it shows.
        run: from a seed to a report; the same seed gives every case of a scenario the same arrivals.
    """

    name: str
    role: Role
    run: Callable[[int], SimulationReport]


@dataclass(frozen=True)
class Column:
    """A number that tells the cases apart.

    Args:
        title: with its unit.
        value: read off a report.
        form: how it is written.
    """

    title: str
    value: Callable[[SimulationReport], float]
    form: str = ".2f"


@dataclass(frozen=True)
class Scenario:
    """A failure mode and its remedies.

    Args:
        name: for the command line.
        title: what goes wrong, in a line.
        lesson: why, and what the remedies do about it.
        cases: first the healthy state if there is one, then the failure, then remedies.
        columns: what the table shows.
    """

    name: str
    title: str
    lesson: str
    cases: tuple[Case, ...]
    columns: tuple[Column, ...]

    def run(self, seed: int = 0, tell: Callable[[int], None] = lambda done: None) -> dict[str, SimulationReport]:
        """All cases, by name, on the same arrivals; `tell` hears how many are done."""
        reports = {}
        for case in self.cases:
            reports[case.name] = case.run(seed)
            tell(len(reports))
        return reports


LLAMA_8B = Serving(KNOWN["llama-3-8b"], H100, mfu=0.5, bandwidth_share=0.8, overhead=1e-3)
"""Llama-3-8B on one H100, at half of its arithmetic and four fifths of its bandwidth: estimates, as in the planner."""
BLOCK_SIZE = 64
"""Larger than an engine's, so that a simulation has less to keep; waste is at most one block a request."""


def replica_config(
    num_tokens: float, *, max_running: int = 256, token_budget: int = 2048, max_chunk: int | None = None,
    prefix_cache: str = "none", preemption: str = "recompute", num_host_tokens: int = 0,
) -> ReplicaConfig:  # fmt: skip
    """A replica by the tokens that its pool holds."""
    limits = SchedulerConfig(max_running, token_budget, max_chunk, max_context=200_000, preemption=preemption)
    blocks = int(num_tokens) // BLOCK_SIZE
    return ReplicaConfig(limits, blocks, BLOCK_SIZE, prefix_cache, num_host_tokens // BLOCK_SIZE)


def replicas(count: int, config: ReplicaConfig, step_time: StepTimeModel | None = None) -> list[Replica]:
    """Equal ones, side by side; Llama-3-8B on an H100 if no other time is given."""
    return [Replica(config, step_time or RooflineTime(LLAMA_8B, BLOCK_SIZE), index) for index in range(count)]


def percentile(name: str, share: float, kind: str | None = None) -> Callable[[SimulationReport], float]:
    """Reads a percentile of `ttft`, `tpot`, `e2e` or `longest_gap`, of one stream or of all; NaN for an empty one."""

    def read(report: SimulationReport) -> float:
        if kind is not None and all(one.kind != kind for one in report.outcomes):
            return float("nan")
        return (report if kind is None else report.only(kind)).percentile(name, share)

    return read
