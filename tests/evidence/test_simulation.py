"""The simulator against the engine on this machine, and its failure modes under fresh seeds."""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from solutions.engine import Engine, EngineConfig
from solutions.engine.load import run_load
from solutions.engine.scheduler import SchedulerConfig
from solutions.simulate.__main__ import app
from solutions.simulate.calibration import Comparison, Grid, compare, measure_steps, twin, workload_at
from solutions.simulate.demand import Demand
from solutions.simulate.fitting import FittedTime, fit, typical_error
from solutions.simulate.replica import Replica
from solutions.simulate.scenarios import SCENARIOS
from solutions.simulate.simulation import simulate
from tests.simulate.test_scenarios import check_claims

QUICK = os.environ.get("EVIDENCE") == "quick"

LOAD = 0.35
# How far a prediction may be off, as a factor. The machine's speed may change by 1.4 meanwhile (more is skipped). At a
# load of 0.35 that makes service 1.4 times as long and the room left (1 - 0.35) / (1 - 0.35 · 1.4) = 1.3 times smaller,
# together 1.8; the rest is the fit's. At a load of 0.6 waits would be 3.5 times as long: no bound worth stating.
MOST_OFF = {"TTFT mean": 2.5, "TTFT p50": 2.5, "TPOT mean": 2.0, "E2E mean": 2.0, "throughput": 1.5}


def test_a_simulation_foretells_what_the_engine_does() -> None:
    """Steps are measured before and after the run, since a machine's speed drifts; the model is fitted to both."""
    limits = SchedulerConfig(max_running=16, token_budget=288)
    engine = Engine("smollm2", EngineConfig(limits, num_blocks=1024))
    grid = Grid((0, 32, 128), (4, 2, 1, 0), (16, 192)) if QUICK else Grid()
    demands, before = measure_steps(engine, grid)
    first = fit(demands, before)
    workload = workload_at(LOAD, twin(engine), first, 10 if QUICK else 40, seed=1)
    measured = run_load(engine, workload)
    again, after = measure_steps(engine, grid)
    engine.check_idle()
    drift = statistics.median(late / early for late, early in zip(after, before, strict=True))
    times = fit(demands + again, before + after)
    predicted = simulate([Replica(twin(engine), times)], workload)
    rows = {row.name: row for row in compare(predicted, measured)}
    print(f"\n{len(before)} kinds of steps, median error of the fit {typical_error(times, demands, before):.0%}; "
          f"steps took {drift:.2f} times as long afterwards")  # fmt: skip
    for row in rows.values():
        print(f"{row.name:11} predicted {row.predicted:8.3f}  measured {row.measured:8.3f}  error {row.error:+.0%}")
    if not 0.7 < drift < 1.4:
        pytest.skip(f"not verified here: the machine's speed changed by a factor of {drift:.2f} meanwhile")
    for name, most in MOST_OFF.items():
        assert off(rows[name]) <= most, f"{name} is off by a factor of {off(rows[name]):.2f}; {most} is allowed"


def off(row: Comparison) -> float:
    """The error as a factor, at least 1."""
    return max(row.predicted / row.measured, row.measured / row.predicted)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_failure_modes_do_not_hang_on_a_seed(name: str, fresh: random.Random) -> None:
    seeds = [1] if QUICK else [fresh.randrange(10**6) for _ in range(3)]
    check_claims(name, *seeds, slack=0.25)


def test_the_command_calibrates_and_prints_its_error(tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    words = ["calibrate", "--quick", "--repeats", "1", "--requests", "4", "--out", str(times)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for word in ("what a step costs", "median error", "predicted", "measured", "TTFT p95", "throughput", "%"):
        assert word in result.output
    assert FittedTime.read_file(times).seconds(Demand(1, 1, 1, 10, 10)) > 0
