"""The engine on this machine: how long its steps take, and whether a simulation foretells what it does."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.checks import check_count
from solutions.engine import Engine
from solutions.engine.load import LoadReport
from solutions.engine.request import blocks_for
from solutions.engine.sampling_params import SamplingParams

from .demand import Demand
from .lengths import Uniform
from .replica import Replica, ReplicaConfig
from .simulation import simulate
from .step_time import StepTimeModel
from .workload import Stream, TimedRequest

WARM_UP_TOKENS = 8
"""Steps that nobody times, before the first that somebody does."""


@dataclass(frozen=True)
class Grid:
    """The steps that are measured: each prefill with each number of decodes at each context.

    Args:
        prefills: tokens of one prompt that a step computes, 0 for decodes alone.
        decodes: sequences that get a token in the same step.
        contexts: tokens that each of them holds.
        repeats: measurements of each, of which the median counts.

    Raises:
        ValueError: nothing to measure, or numbers that can't be.
    """

    prefills: tuple[int, ...] = (0, 8, 32, 128, 256)
    decodes: tuple[int, ...] = (8, 4, 2, 1, 0)
    contexts: tuple[int, ...] = (16, 128, 384)
    repeats: int = 3

    def __post_init__(self) -> None:
        for name, least in (("prefills", 0), ("decodes", 0), ("contexts", 1)):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
            for value in getattr(self, name):
                check_count(f"each of {name}", value, least)
        check_count("repeats", self.repeats, 1)

    @property
    def num_points(self) -> int:
        """Steps of different kinds."""
        return sum(p + d > 0 for p in self.prefills for d in self.decodes) * len(self.contexts)


def measure_steps(
    engine: Engine, grid: Grid, tell: Callable[[int], None] = lambda done: None
) -> tuple[list[Demand], list[float]]:
    """Times steps of a real engine.

    Args:
        engine: with nothing to do; its token budget must hold the largest step, its pool all sequences at once.
        grid: what to measure.
        tell: called with the number of points that are done.

    Returns:
        The demand of each point, and its median seconds.

    Raises:
        ValueError: a grid that doesn't fit the engine.
    """
    limits = engine.config.scheduler
    largest, most = max(grid.prefills) + max(grid.decodes), 1 + max(grid.decodes)
    allowed = min(limits.token_budget, max(grid.decodes) + (limits.max_chunk or limits.token_budget))
    if allowed < largest or limits.max_running < most:
        raise ValueError(
            f"the grid has steps of {largest} tokens in {most} sequences; the engine allows {allowed} in "
            f"{limits.max_running}"
        )
    demands, seconds = list[Demand](), list[float]()
    choose = random.Random(0)
    chunk = max(1, allowed - max(grid.decodes))
    # The first passes of a process are slow: weights are paged in, and memory for what lies between layers is found.
    engine.add_request(_prompt(engine, max(1, *grid.prefills), choose), _params(WARM_UP_TOKENS))
    while engine.has_work:
        engine.step()
    for context in grid.contexts:
        lengths = dict[str, int]()  # by request: tokens that are known, the newest not yet computed
        # Answers that last as long as anybody measures, the other prompts before it included.
        last = grid.num_points // len(grid.contexts) * grid.repeats + most * blocks_for(context, chunk)
        for _ in range(max(grid.decodes)):
            lengths[engine.add_request(_prompt(engine, context, choose), _params(last))] = context
        while any(length == context for length in lengths.values()):
            _step(engine, lengths)
        for decodes in sorted(grid.decodes, reverse=True):
            for name in list(lengths)[decodes:]:
                engine.abort(name)
                del lengths[name]
            for prefill in grid.prefills:
                if prefill + decodes == 0:
                    continue
                taken, asked = list[float](), list[Demand]()
                for _ in range(grid.repeats):
                    if prefill:
                        engine.add_request(_prompt(engine, prefill, choose), _params(1))
                    asked.append(_demand(prefill, list(lengths.values())))
                    taken.append(_step(engine, lengths))
                demands.append(asked[len(asked) // 2])
                seconds.append(statistics.median(taken))
                tell(len(demands))
        for name in lengths:
            engine.abort(name)
    return demands, seconds


def twin(engine: Engine) -> ReplicaConfig:
    """The replica that decides as this engine does."""
    config = engine.config
    return ReplicaConfig(
        config.scheduler, config.num_blocks, config.block_size, config.prefix_cache, config.num_host_blocks
    )  # fmt: skip


def workload_at(load: float, replica: ReplicaConfig, times: StepTimeModel, count: int, seed: int) -> list[TimedRequest]:
    """A small workload that brings a machine to a share of what it can serve, whatever it can.

    The capacity is foretold as well: the same requests, all there at once.

    Args:
        load: the share; above 1 the queue grows as long as requests come.
        replica: who will serve it.
        times: of its steps.
        count: requests.
        seed: decides everything.

    Raises:
        ValueError: a share or a count that isn't positive.
    """
    check_count("count", count, 1)
    if not load > 0:
        raise ValueError(f"load must be positive, got {load}")
    drawn = Stream(1.0, Uniform(24, 160), Uniform(8, 24)).draw(3.0 * count + 50, seed)[:count]
    at_once = simulate([Replica(replica, times)], [dataclasses.replace(one, seconds=0.0) for one in drawn])
    gap = at_once.seconds / len(drawn) / load
    return [dataclasses.replace(one, seconds=one.seconds * gap) for one in drawn]


@dataclass(frozen=True)
class Comparison:
    """One number, foretold and measured.

    Args:
        name: what it is.
        predicted: by the simulation.
        measured: on the engine.
    """

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def compare(predicted: LoadReport, measured: LoadReport) -> list[Comparison]:
    """The five metrics of the same workload, simulated and served; seconds, and tokens per second."""
    rows = [
        Comparison(f"{label} {word}", one(predicted, name), one(measured, name))
        for name, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E"))
        for word, one in _STATISTICS
    ]
    return [*rows, Comparison("throughput", predicted.throughput, measured.throughput)]


_STATISTICS: Sequence[tuple[str, Callable[[LoadReport, str], float]]] = (
    ("mean", lambda report, name: report.mean(name)),
    ("p50", lambda report, name: report.percentile(name, 0.5)),
    ("p95", lambda report, name: report.percentile(name, 0.95)),
)


def _step(engine: Engine, lengths: dict[str, int]) -> float:
    """Seconds of one step; requests that got a token are a token longer."""
    start = time.perf_counter()
    progress = engine.step()
    taken = time.perf_counter() - start
    for one in progress:
        if one.request_id in lengths:
            lengths[one.request_id] += len(one.tokens)
    return taken


def _demand(prefill: int, lengths: list[int]) -> Demand:
    """A whole prompt, and a token for each sequence."""
    prompt = Demand(prefill, min(prefill, 1), min(prefill, 1), prefill * (prefill + 1) // 2, prefill)
    count, total = len(lengths), sum(lengths)
    return prompt + Demand(count, count, count, total, total)


def _prompt(engine: Engine, count: int, choose: random.Random) -> list[int]:
    return [choose.randrange(engine.tokenizer.vocab_size) for _ in range(count)]


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
