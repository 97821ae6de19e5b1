"""A load run measures what requests waited for, from their own arrival, and counts what was in time."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from solutions.engine.__main__ import app
from solutions.engine.load import LoadReport, random_load, run_load
from solutions.engine.metrics import Served


def test_the_five_metrics_follow_from_three_numbers() -> None:
    fast, slow, single = Served(0.1, 1.0, 10), Served(2.0, 3.0, 5), Served(0.3, 0.3, 1)
    for one in (fast, slow, single):
        assert one.e2e == pytest.approx(one.ttft + (one.num_tokens - 1) * one.tpot)
    report = LoadReport((fast, slow, single), seconds=4.0)
    assert report.throughput == 16 / 4
    assert report.goodput(ttft=1.0, tpot=0.2) == 11 / 4
    assert report.goodput(ttft=1.0, tpot=0.05) == 1 / 4
    assert [report.percentile("ttft", share) for share in (0.0, 0.33, 0.5, 0.67, 1.0)] == [0.1, 0.1, 0.3, 2.0, 2.0]
    assert report.mean("e2e") == pytest.approx(4.3 / 3)


def test_a_load_is_decided_by_its_seed() -> None:
    wanted = dict(count=50, rate=10.0, num_input=20, num_output=10, shared=0.5, vocab_size=1000)
    arrivals = random_load(**wanted, seed=1)  # type: ignore[arg-type]
    assert arrivals == random_load(**wanted, seed=1) != random_load(**wanted, seed=2)  # type: ignore[arg-type]
    times = [one.seconds for one in arrivals]
    assert times == sorted(times) and times[0] == 0.0
    # The mean of 49 gaps of 0.1 s; within five standard errors, 0.1 / 7 each.
    assert abs(times[-1] / 49 - 0.1) < 5 * 0.1 / 7
    assert {len(one.prompt) for one in arrivals} <= set(range(10, 31))
    assert {one.params.max_tokens for one in arrivals} <= set(range(5, 16))
    first = arrivals[0].prompt
    assert all(one.prompt[:5] == first[:5] for one in arrivals)
    assert {one.seconds for one in random_load(**{**wanted, "rate": None}, seed=1)} == {0.0}  # type: ignore[arg-type]


def test_everybody_is_served_and_time_runs_from_arrival(make_engine: Any) -> None:
    engine = make_engine(max_running=2, token_budget=32)
    arrivals = random_load(12, 200.0, 10, 5, 0.5, 1000, seed=3)
    report = run_load(engine, arrivals)
    engine.check_idle()
    assert sorted(one.num_tokens for one in report.served) == sorted(one.params.max_tokens for one in arrivals)
    # The engine counts from when it took a request in, after its arrival; else the two agree on what was served.
    assert sorted(one.num_tokens for one in engine.metrics.served) == sorted(one.num_tokens for one in report.served)
    assert all(0 < one.ttft <= one.e2e <= report.seconds for one in report.served)
    assert report.seconds >= arrivals[-1].seconds
    # Two run at once, so the last of twelve waits for others: its time counts from when it came.
    assert report.percentile("ttft", 1.0) > 2 * report.percentile("ttft", 0.1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (dict(count=0), "count"),
        (dict(rate=0.0), "rate"),
        (dict(shared=1.5), "shared"),
        (dict(num_output=0), "num_output"),
    ],
)
def test_loads_that_cannot_be_are_refused(make_engine: Any, wrong: dict[str, Any], named: str) -> None:
    right: dict[str, Any] = dict(count=1, rate=None, num_input=2, num_output=1, shared=0.0, vocab_size=10, seed=0)
    assert len(random_load(**right)) == 1
    with pytest.raises(ValueError, match=named):
        random_load(**{**right, **wrong})
    with pytest.raises(ValueError, match="at least one"):
        run_load(make_engine(), [])


def test_the_command_prints_them_all() -> None:
    result = CliRunner().invoke(app, ["bench", "--requests", "2", "--input", "4", "--output", "2", "--blocks", "32"])
    assert result.exit_code == 0, result.output
    assert "47,520 bytes" in result.output, "46,080, and its share of the block that rows of nobody write to"
    for word in ("TTFT", "TPOT", "E2E", "throughput", "goodput", "cache hits", "of what the memory allows"):
        assert word in result.output
    refused = CliRunner().invoke(app, ["bench", "--requests", "1", "--input", "2000", "--blocks", "8"])
    assert refused.exit_code == 2 and "the pool has 8" in refused.output
