"""What is measured is what the engine did, and a comparison says how far off it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from solutions.engine import Engine
from solutions.engine.load import LoadReport, Served
from solutions.engine.scheduler import SchedulerConfig
from solutions.simulate.calibration import Grid, compare, measure_steps, workload_at
from solutions.simulate.demand import Demand
from solutions.simulate.replica import Replica, ReplicaConfig
from solutions.simulate.simulation import simulate
from solutions.simulate.step_time import ConstantTime


def test_the_demands_are_those_of_the_steps_that_were_timed(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running=8, token_budget=32, num_blocks=128)
    steps = list[Demand]()
    decide = engine._scheduler.schedule

    def schedule(*args: Any) -> Any:
        step = decide(*args)
        steps.append(Demand.of(step))
        return step

    engine._scheduler.schedule = schedule  # type: ignore[method-assign]
    grid = Grid(prefills=(0, 5, 24), decodes=(4, 1, 0), contexts=(3, 40), repeats=3)
    demands, seconds = measure_steps(engine, grid)
    engine.check_idle()
    assert len(demands) == len(seconds) == grid.num_points == 16
    assert all(one > 0 for one in seconds)
    # In order among all that ran: each was a real step, and none was counted twice.
    rest = iter(steps)
    for demand in demands:
        assert demand in rest, f"no step had the demand {demand}"
    kinds = {(one.tokens, one.sequences) for one in demands}
    assert kinds == {(4, 4), (9, 5), (28, 5), (1, 1), (6, 2), (25, 2), (5, 1), (24, 1)}


def test_a_grid_that_does_not_fit_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running=8, token_budget=32, num_blocks=128)
    with pytest.raises(ValueError, match="steps of 44 tokens in 5 sequences; the engine allows 32 in 8"):
        measure_steps(engine, Grid(prefills=(40,), decodes=(4,), contexts=(3,)))
    assert not engine.has_work
    with pytest.raises(ValueError, match="prefills must not be empty"):
        Grid(prefills=())
    with pytest.raises(ValueError, match="repeats"):
        Grid(repeats=0)


def test_the_workload_brings_the_load_that_was_asked_for() -> None:
    config, times = ReplicaConfig(SchedulerConfig(max_running=8, token_budget=64)), ConstantTime(0.01)

    def run(load: float) -> tuple[float, float]:
        """Requests per second that come, and that are served."""
        requests = workload_at(load, config, times, count=150, seed=2)
        report = simulate([Replica(config, times)], requests)
        return len(requests) / requests[-1].seconds, len(requests) / report.seconds

    light, heavy = run(0.5), run(2.0)
    # Poisson: the last of 150 arrivals is off by 1 / √150 = 8 % as a rule.
    assert heavy[0] / light[0] == pytest.approx(4.0, rel=1e-6)
    assert light[1] / light[0] == pytest.approx(1.0, abs=0.1), "half of the capacity is served as it comes"
    assert heavy[1] / heavy[0] == pytest.approx(0.5, abs=0.15), "of twice the capacity, half is served in time"
    with pytest.raises(ValueError, match="load"):
        workload_at(0.0, config, times, count=5, seed=0)


def test_the_error_is_of_the_prediction() -> None:
    predicted = LoadReport((Served(2.0, 3.0, 11), Served(4.0, 6.0, 5)), seconds=8.0)
    measured = LoadReport((Served(1.0, 4.0, 11), Served(2.0, 8.0, 5)), seconds=10.0)
    rows = {row.name: row for row in compare(predicted, measured)}
    assert rows["TTFT mean"].error == 1.0 and rows["TTFT p95"].error == 1.0
    assert rows["E2E mean"].error == 4.5 / 6 - 1
    assert rows["throughput"].predicted == 2.0 and rows["throughput"].error == 0.25
    assert len(rows) == 10
