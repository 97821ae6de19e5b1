"""Where queueing theory and arithmetic know the answer, the simulation must give it."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from grader.judge.numerics import check_close
from solutions.engine.sampling_params import SamplingParams
from solutions.planning.hardware import H100
from solutions.planning.model_shape import KNOWN
from solutions.planning.roofline import Serving
from solutions.simulate.demand import Demand
from solutions.simulate.lengths import Fixed, Uniform
from solutions.simulate.report import SimulationReport
from solutions.simulate.simulation import simulate
from solutions.simulate.step_time import ConstantTime, RooflineTime
from solutions.simulate.timeline import timeline
from solutions.simulate.workload import Stream, TimedRequest
from tests.simulate.conftest import make_replica


def request(seconds: float, num_prompt: int, num_output: int, seed: int = 7) -> TimedRequest:
    """A request by its lengths."""
    params = SamplingParams(temperature=0.0, max_tokens=num_output, seed=seed, ignore_eos=True)
    return TimedRequest(seconds, tuple(range(seed, seed + num_prompt)), params)


def exactly(what: str, actual: list[float], right: list[float]) -> None:
    """Equal but for roundings of a clock that has come to the largest of them."""
    reference = torch.tensor(right, dtype=torch.float64)
    # A clock is a sum of as many terms as there were events; each rounds once.
    scale = float(reference.abs().max()) * max(1, len(right))
    check_close(what, torch.tensor(actual, dtype=torch.float64), reference, scale=scale, dtype=torch.float64)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_one_at_a_time_is_the_queue_m_d_1(load: float) -> None:
    """Poisson arrivals, service of a second each, one server: the mean wait is ρ / (2 (1 − ρ)) seconds."""
    requests = Stream(load, Fixed(1), Fixed(1)).draw(12_000 / load, seed=3)
    server = make_replica(max_running=1, token_budget=1, prefix_cache="none")
    waits = [one.ttft - 1.0 for one in simulate([server], requests).outcomes]
    # Lindley: who comes next waits for what is left of the wait and the service before.
    right = [0.0]
    for earlier, later in pairwise(requests):
        right.append(max(0.0, right[-1] + 1.0 - (later.seconds - earlier.seconds)))
    assert max(abs(a - b) for a, b in zip(waits, right, strict=True)) < 1e-6
    # Means of 40 long batches are nearly independent; four standard errors, wrong once in 15,000 seeds.
    size = len(waits) // 40
    batches = [statistics.mean(waits[i * size : (i + 1) * size]) for i in range(40)]
    error = statistics.stdev(batches) / math.sqrt(40)
    assert abs(statistics.mean(batches) - load / (2 * (1 - load))) < 4 * error
    assert error < 0.1 * load / (1 - load), "a wait without its half, M/M/1's, must be told apart"


@pytest.mark.parametrize(("prompt", "chunk", "output"), [(1, 4, 1), (4, 4, 3), (5, 4, 3), (17, 4, 1), (16, 16, 20)])
def test_a_request_alone_takes_its_steps(prompt: int, chunk: int, output: int) -> None:
    """Chunks of the prompt, the last of which gives the first token, and a step for each further one."""
    server = make_replica(ConstantTime(0.25), max_running=2, token_budget=64, max_chunk=chunk)
    report = simulate([server], [request(2.0, prompt, output)])
    (outcome,) = report.outcomes
    assert report.seconds == outcome.e2e, "the clock of a load starts with its first request"
    chunks = math.ceil(prompt / chunk)
    assert (outcome.ttft, outcome.e2e) == (0.25 * chunks, 0.25 * (chunks + output - 1))
    assert outcome.longest_gap == (0.25 if output > 1 else 0.0)
    assert outcome.num_tokens == output and server.metrics.num_steps == chunks + output - 1


def test_a_full_batch_makes_the_next_one_wait() -> None:
    """Places for two, three come: the third begins when the first is done."""
    server = make_replica(max_running=2, token_budget=64)
    report = simulate([server], [request(0.0, 3, 2, 1), request(0.0, 3, 5, 20), request(0.5, 3, 2, 40)])
    # Step 1: both prompts. The first is done after step 2, the third's prompt is in step 3.
    assert [(one.ttft, one.e2e) for one in report.outcomes] == [(1.0, 2.0), (1.0, 5.0), (2.5, 3.5)]
    assert report.seconds == 5.0 and report.utilization == (1.0,)
    assert [one.longest_gap for one in report.outcomes] == [1.0, 1.0, 1.0]


def test_the_longest_stall_is_the_step_with_the_other_prompt() -> None:
    """Steps take a second a token: in the middle of one answer comes a prompt of 50."""
    server = make_replica(lambda step: float(step.num_tokens), max_running=2, token_budget=64)
    first, second = simulate([server], [request(0.0, 1, 8, 1), request(2.5, 50, 2, 100)]).outcomes
    # Tokens at 1, 2, 3; then 51 seconds, then two tokens in two seconds, then alone again.
    assert (first.longest_gap, first.e2e) == (51.0, 3 + 51 + 2 + 3)
    assert (second.ttft, second.longest_gap) == (3 + 51 - 2.5, 2.0)


def test_replicas_run_side_by_side() -> None:
    pool = [make_replica(index=index, max_running=1, token_budget=64, num_blocks=2, block_size=4) for index in range(2)]
    report = simulate(pool, [request(0.0, 6, 2, 1), request(0.0, 6, 2, 50)])
    assert [(one.replica, one.ttft, one.e2e) for one in report.outcomes] == [(0, 1.0, 2.0), (1, 1.0, 2.0)]
    assert report.utilization == (1.0, 1.0)
    assert max(timeline(report, "running", points=4)) == 2 and max(timeline(report, "occupancy", points=4)) == 1.0
    assert max(timeline(report, "running", points=4, replica=1)) == 1


def busy_report() -> SimulationReport:
    """A queue that grows and empties, with preemptions."""
    requests = Stream(0.4, Uniform(2, 20), Uniform(2, 20)).draw(200.0, seed=5)
    server = make_replica(max_running=6, token_budget=16, num_blocks=14, block_size=4)
    report = simulate([server], requests)
    assert report.num_preemptions > 10
    return report


def test_littles_law_holds_to_the_last_digit() -> None:
    """Requests in the system, summed over time, are the times that all of them spent there."""
    report = busy_report()
    inside = sum(
        (earlier.waiting + earlier.running) * (later.seconds - earlier.seconds)
        for earlier, later in pairwise(report.samples)
    )
    exactly("requests · seconds", [inside], [sum(one.e2e for one in report.outcomes)])


def test_the_timeline_is_what_the_samples_say() -> None:
    report = busy_report()
    # So many moments that their mean is the integral over the run, to 1 %.
    values = timeline(report, "running", points=20_000)
    span = report.samples[-1].seconds - report.samples[0].seconds
    mean = sum(
        earlier.running * (later.seconds - earlier.seconds) / span for earlier, later in pairwise(report.samples)
    )
    assert abs(statistics.mean(values) / mean - 1) < 0.01
    assert timeline(report, "preemptions")[-1] == report.num_preemptions
    assert timeline(report, "occupancy")[-1] == 0.0
    assert 0.9 < max(timeline(report, "occupancy", points=500)) <= 1.0


SERVING = Serving(KNOWN["llama-3-8b"], H100, num_gpus=2, mfu=0.5, bandwidth_share=0.8, overhead=1e-3)


def test_the_roofline_of_a_step_is_the_planners() -> None:
    """Decodes alone: bytes as the planner counts them. A prompt: its arithmetic, and the attention's on top."""
    model = RooflineTime(SERVING)
    batch, context = 48, 1500
    decodes = Demand(batch, batch, batch, batch * context, batch * context)
    exactly("decode step", [model.seconds(decodes)], [SERVING.decode_step(batch, context).seconds])
    prompt = 4096
    pairs = prompt * (prompt + 1) // 2
    # Section 1.2: 4 L d_attn FLOP for each query and key, 2 N for each token.
    flops = 2 * 8.03e9 * prompt + 4 * 32 * (32 * 128) * pairs
    took = model.seconds(Demand(prompt, 1, 1, pairs, prompt))
    exactly("prefill", [took], [flops / (2 * 989e12 * 0.5) + 1e-3])
    assert took > SERVING.prefill(prompt).seconds


def test_blocks_that_move_cost_their_bytes() -> None:
    model = RooflineTime(SERVING, block_size=16, host_bandwidth=25e9)
    still = Demand(4, 4, 4, 400, 400)
    block = 16 * 131072  # 128 KiB a token
    before = model.seconds(still)
    exactly("swaps", [model.seconds(replace(still, swapped=10))], [before + 10 * block / 25e9])
    read_and_written = 2 * 10 * block / (2 * 3.35e12 * 0.8)
    exactly("copies", [model.seconds(replace(still, copied=10))], [before + read_and_written])
