"""Lengths, workloads, traces, slow ranks and fits: each against what is known of it."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from grader.judge.numerics import check_close
from solutions.engine.step import Step
from solutions.simulate.demand import Demand
from solutions.simulate.fitting import FittedTime, fit, typical_error
from solutions.simulate.lengths import Fixed, Lengths, LogNormal, Uniform, parse_lengths
from solutions.simulate.slow_ranks import ExpertParallel, TensorParallel, balanced, imbalance, in_order
from solutions.simulate.step_time import ConstantTime
from solutions.simulate.workload import Stream, merge, read_trace


@pytest.mark.parametrize("lengths", [Fixed(7), Uniform(3, 12), LogNormal(300, 900)])
def test_what_is_drawn_has_the_mean_and_the_quantiles(lengths: Lengths) -> None:
    choose = random.Random(1)
    drawn = sorted(lengths.draw(choose) for _ in range(40_000))
    error = statistics.pstdev(drawn) / 200
    # A log-normal is rounded to whole tokens.
    assert abs(statistics.mean(drawn) - lengths.mean) <= 4 * error + 0.01
    for share in (0.05, 0.5, 0.95):
        below = sum(value <= lengths.quantile(share) + 0.5 for value in drawn) / len(drawn)
        # Four standard errors of a share, and no less than the share: lengths have ties.
        assert below >= share - 4 * (share * (1 - share) / len(drawn)) ** 0.5
        under = sum(value < lengths.quantile(share) - 0.5 for value in drawn) / len(drawn)
        assert under <= share + 4 * (share * (1 - share) / len(drawn)) ** 0.5


def test_a_log_normal_has_the_p95_that_was_asked_for() -> None:
    lengths = LogNormal(mean=400, p95=1400)
    assert lengths.quantile(0.95) == pytest.approx(1400)
    assert LogNormal(400, 1400, longest=900).quantile(0.95) == 900
    choose = random.Random(2)
    assert max(LogNormal(400, 1400, longest=900).draw(choose) for _ in range(1000)) == 900


@pytest.mark.parametrize(
    ("text", "lengths"), [("120", Fixed(120)), ("50-150", Uniform(50, 150)), ("300~900", LogNormal(300, 900))]
)
def test_lengths_are_read(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text) == lengths


def test_streams_are_poisson_and_share_what_they_say() -> None:
    stream = Stream(20.0, Uniform(10, 30), Fixed(5), prefix=12, num_prefixes=4, skew=1.0, priority=2, start=10.0)
    requests = stream.draw(210.0, seed=8)
    assert requests == stream.draw(210.0, seed=8) != stream.draw(210.0, seed=9)
    # A Poisson count: mean and variance 4,000; five standard deviations.
    assert abs(len(requests) - 4000) < 5 * 4000**0.5
    gaps = [b.seconds - a.seconds for a, b in pairwise(requests)]
    assert min(one.seconds for one in requests) >= 10.0 and min(gaps) >= 0.0
    # The gaps' standard deviation is their mean.
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1, abs=0.1)
    starts = statistics.multimode(one.prompt[:10] for one in requests)
    counts = sorted(sum(one.prompt[:10] == s for one in requests) for s in {r.prompt[:10] for r in requests})
    assert len(starts) == 1 and len(counts) == 4
    assert counts[-1] / len(requests) == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4), abs=0.05)
    assert {len(one.prompt) for one in requests} == set(range(10, 31))
    assert len({one.prompt[12:] for one in requests if len(one.prompt) > 14}) > 3000, "what isn't shared differs"
    assert {one.priority for one in requests} == {2}


def test_a_trace_is_read_line_by_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"seconds": 2, "input": 30, "output": 4, "prefix": "a", "prefix_tokens": 20}\n\n'
        '{"seconds": 1.5, "input": 10, "output": 3, "kind": "batch", "priority": 1}\n'
        '{"seconds": 3, "input": 25, "output": 4, "prefix": "a", "prefix_tokens": 20}\n'
    )
    batch, first, second = read_trace(trace)
    assert (batch.seconds, len(batch.prompt), batch.params.max_tokens) == (1.5, 10, 3)
    assert (batch.kind, batch.priority) == ("batch", 1)
    assert first.prompt[:20] == second.prompt[:20] and first.prompt[20:25] != second.prompt[20:25]
    for wrong, said in (('{"seconds": 1}', "line 1: KeyError"), ("[]", "line 1"), ("x", "line 1"), ("", "no request")):
        trace.write_text(wrong)
        with pytest.raises(ValueError, match=said):
            read_trace(trace)


def test_a_group_waits_for_its_slowest() -> None:
    step = Step(())
    assert TensorParallel(ConstantTime(2.0), (1.0, 0.5, 0.8))(step) == 4.0
    assert ExpertParallel(ConstantTime(2.0), 0.5, 3.0)(step) == 4.0


def test_experts_are_placed_by_their_load() -> None:
    popularity = [8.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert in_order(6, 2) == ((0, 1, 2), (3, 4, 5))
    assert imbalance(popularity, in_order(6, 2)) == 10 / 8
    # One expert is half of all load: alone it can't be shared out, with a copy it can.
    assert imbalance(popularity, balanced(popularity, 3)) == 8 * 3 / 16 + 1 * 3 / 16
    copied = balanced(popularity, 3, spare=3)
    assert sum(held.count(0) for held in copied) >= 3 and all(len(held) == 3 for held in copied)
    assert imbalance(popularity, copied) < 1.15
    assert imbalance([1.0] * 8, in_order(8, 4)) == 1.0
    with pytest.raises(ValueError, match="must lie on a rank"):
        imbalance(popularity, ((0, 1), (2, 3)))
    with pytest.raises(ValueError, match="don't divide"):
        balanced(popularity, 4)


TRUE = FittedTime(knee=16, step=0.02, token=1e-3, further_token=3e-3, sequence=5e-4, read=1e-6, pair=2e-7)
DEMANDS = [
    Demand(tokens, sequences, sequences, pairs, read)
    for tokens in (1, 4, 16, 60, 200)
    for sequences in (1, 3)
    for pairs, read in ((10, 5), (10_000, 3_000), (500, 9_000))
]


def test_a_fit_finds_the_numbers_that_made_the_times() -> None:
    found = fit(DEMANDS, [TRUE.seconds(one) for one in DEMANDS])
    assert found.knee == 16
    names = ("step", "token", "further_token", "sequence", "read", "pair")
    ratios = torch.tensor([getattr(found, name) / getattr(TRUE, name) for name in names], dtype=torch.float64)
    # Coordinate descent stops at 1e-10 of its scale; float32's bound leaves room for that and for nothing else.
    check_close("coefficients", ratios.float(), torch.ones(6).double(), scale=1.0, dtype=torch.float32)


def test_a_fit_bears_noise_and_never_goes_below_zero() -> None:
    choose = random.Random(3)
    noisy = [TRUE.seconds(one) * choose.uniform(0.9, 1.1) for one in DEMANDS]
    found = fit(DEMANDS, noisy)
    assert typical_error(found, DEMANDS, [TRUE.seconds(one) for one in DEMANDS]) < 0.05
    # Times that fall with the sequences: the best that isn't negative is no part at all.
    falling = [0.1 - 0.02 * one.sequences for one in DEMANDS]
    assert fit(DEMANDS, falling).sequence == 0.0


def test_step_times_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    TRUE.save(path)
    assert FittedTime.read_file(path) == TRUE
    path.write_text('{"knee": 4}')
    with pytest.raises(ValueError, match="calibrate --out"):
        FittedTime.read_file(path)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: LogNormal(100, 500), "p95"),
        (lambda: Uniform(5, 4), "high"),
        (lambda: parse_lengths("a-b"), "lengths are written"),
        (lambda: Stream(0.0, Fixed(1), Fixed(1)), "rate"),
        (lambda: Stream(1.0, Fixed(1), Fixed(1), skew=-1.0), "skew"),
        (lambda: ConstantTime(0.0), "positive"),
        (lambda: TensorParallel(ConstantTime(1.0), ()), "speeds"),
        (lambda: ExpertParallel(ConstantTime(1.0), 0.5, 0.9), "imbalance"),
        (lambda: fit(DEMANDS[:3], [1.0] * 3), "6 measured steps"),
        (lambda: fit(DEMANDS, [0.0] * len(DEMANDS)), "positive"),
        (lambda: FittedTime(4, -1.0, 0, 0, 0, 0, 0), "step must be"),
    ],
)
def test_numbers_that_cannot_be_are_refused(make: object, named: str) -> None:
    assert merge(Stream(1.0, Fixed(1), Fixed(1)).draw(10.0, seed=0))
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]
