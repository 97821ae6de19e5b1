"""Nothing is lost, nothing is left to chance, and what can't be is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from solutions.engine.kv_manager import PREFIX_CACHES
from solutions.engine.scheduler import PREEMPTIONS
from solutions.simulate.disaggregation import Link, simulate_disaggregated
from solutions.simulate.lengths import Fixed, LogNormal, Uniform
from solutions.simulate.replica import Replica
from solutions.simulate.report import SimulationReport
from solutions.simulate.routing import (
    LongPromptsApart,
    PrefixAffinity,
    RefuseLongPrompts,
    RefuseWhenFull,
    RoundRobin,
    least_loaded,
)  # fmt: skip
from solutions.simulate.simulation import simulate
from solutions.simulate.step_time import ConstantTime, ReceivedPrompts
from solutions.simulate.workload import Stream, TimedRequest, merge
from tests.simulate.conftest import make_replica


def random_run(seed: int) -> tuple[list[Replica], list[TimedRequest], SimulationReport]:
    """Some replicas under some load; the seed decides everything."""
    choose = random.Random(seed)
    running = choose.randint(1, 8)
    pool = [
        make_replica(
            index=index, max_running=running, token_budget=running + choose.choice([0, 5, 40]),
            max_chunk=choose.choice([None, 3, 8]), num_blocks=choose.randint(13, 22), block_size=4,
            prefix_cache=choose.choice(PREFIX_CACHES), preemption=choose.choice(PREEMPTIONS),
            num_host_blocks=choose.choice([0, 20]),
        )
        for index in range(choose.randint(1, 3))
    ]  # fmt: skip
    stream = Stream(choose.choice([0.2, 2.0]), Uniform(1, 25), LogNormal(6, 15, 25), prefix=9, num_prefixes=3, skew=1.0)
    requests = merge(
        stream.draw(60.0, seed), Stream(0.1, Fixed(20), Fixed(3), kind="slow", priority=1).draw(60.0, seed)
    )
    routers = [RoundRobin(), least_loaded, PrefixAffinity(8), PrefixAffinity(8, most=1.5)]
    return pool, requests, simulate(pool, requests, choose.choice(routers))


def test_every_request_ends_with_its_tokens_and_every_pool_is_whole() -> None:
    preempted = hits = 0
    for seed in range(40):
        pool, requests, report = random_run(seed)
        for one in pool:
            one.check_idle()
        assert [one.number for one in report.outcomes] == list(range(len(requests)))
        for outcome, request in zip(report.outcomes, requests, strict=True):
            assert outcome.num_tokens == request.params.max_tokens
            assert outcome.num_prompt == len(request.prompt) > outcome.num_cached
            assert outcome.arrived == request.seconds
            # A step takes a second, so the first token can't come sooner, nor the others faster.
            assert outcome.ttft > 1 - 1e-9 and outcome.e2e - outcome.ttft > outcome.num_tokens - 1 - 1e-9
            assert outcome.longest_gap < outcome.e2e - outcome.ttft + 1e-9
        assert report.recomputed == 1.0 or report.num_preemptions > 0
        assert sum(one.num_preemptions for one in report.outcomes) == report.num_preemptions
        preempted += report.num_preemptions
        hits += report.hit_rate > 0
    assert preempted > 100 and hits > 10


def test_the_seed_decides_everything() -> None:
    first, second, other = (random_run(seed)[2] for seed in (11, 11, 12))
    assert first == second != other


def test_two_pools_and_a_link_in_numbers() -> None:
    """Prompts of 10 tokens, a step a second, a link of 4 tokens a second: transfers of 2.5 s, one after the other."""
    requests = [replace(one, seconds=when) for one, when in zip(stream(3), (0.0, 0.0, 20.0), strict=True)]
    prefill = make_replica(max_running=4, token_budget=64, prefix_cache="none")
    decode = make_replica(ReceivedPrompts(ConstantTime(1.0)), max_running=4, token_budget=64, prefix_cache="none")
    done = simulate_disaggregated([prefill], [decode], Link(4e3, 1e3), requests)
    assert done.transfers == (2.5, 5.0, 2.5)
    assert [one.ttft for one in done.whole.outcomes] == [1.0, 1.0, 1.0]
    # First token at 1, received at 3.5 and 6; the second request's comes in the middle of a step that ends at 6.5.
    assert [one.longest_gap for one in done.whole.outcomes] == [3.5, 6.5, 3.5]
    assert [one.e2e for one in done.whole.outcomes] == [1 + 2.5 + 3, 1 + 5 + 0.5 + 3, 1 + 2.5 + 3]
    assert [one.num_tokens for one in done.whole.outcomes] == [4, 4, 4]
    # The one that came first has a longer prompt and is sent later; the report goes by arrival all the same.
    slow = replace(requests[0], prompt=requests[0].prompt * 3)
    chunked = make_replica(max_running=4, token_budget=20, max_chunk=10, prefix_cache="none")
    swapped = simulate_disaggregated([chunked], [decode], Link(4e3, 1e3), [slow, requests[1]])
    assert [one.num_prompt for one in swapped.whole.outcomes] == [30, 10]
    assert [one.ttft for one in swapped.whole.outcomes] == [3.0, 1.0] and swapped.transfers == (8.0, 2.5)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        simulate_disaggregated([prefill], [decode], Link(1.0, 1.0), stream(1, output=1))


def stream(count: int, output: int = 4) -> list[TimedRequest]:
    """Different prompts of 10 tokens."""
    return Stream(1.0, Fixed(10), Fixed(output)).draw(100.0, seed=4)[:count]


def test_received_prompts_cost_one_token_and_preempted_ones_all() -> None:
    seen = list[int]()

    def count_tokens(step: object) -> float:
        seen.append(step.num_tokens)  # type: ignore[attr-defined]
        return 1.0

    tight = make_replica(
        ReceivedPrompts(count_tokens), max_running=2, token_budget=64, num_blocks=7, block_size=4, prefix_cache="none"
    )
    report = simulate([tight], [replace(one, seconds=0.0) for one in stream(2, output=8)])
    assert seen[0] == 2, "two prompts of 10 tokens that were received: one token each"
    assert report.num_preemptions == 1 and max(seen) > 10, "what was preempted is computed again"


def test_routers_go_where_they_say() -> None:
    pool = [make_replica(index=index, max_running=1, token_budget=1) for index in range(3)]
    short, long = stream(1)[0], Stream(1.0, Fixed(50), Fixed(2)).draw(50.0, seed=1)[0]
    in_turn = RoundRobin()
    assert [in_turn(short, pool) for _ in range(4)] == [0, 1, 2, 0]
    assert LongPromptsApart(20)(long, pool) == 2 and LongPromptsApart(20)(short, pool) == 0
    assert RefuseLongPrompts(20)(long, pool) is None and RefuseLongPrompts(20)(short, pool) == 0
    home = PrefixAffinity(8)(short, pool)
    changed = replace(short, prompt=(*short.prompt[:8], 1, 2, 3))
    assert PrefixAffinity(8)(changed, pool) == home == PrefixAffinity(8)(short, pool)
    homes = {PrefixAffinity(8)(one, pool) for one in Stream(1.0, Fixed(10), Fixed(2)).draw(60.0, seed=2)}
    assert homes == {0, 1, 2}
    for index in range(4):
        pool[home].accept(short, index)
    assert least_loaded(short, pool) != home
    assert PrefixAffinity(8, most=1.25)(short, pool) != home == PrefixAffinity(8)(short, pool)
    full = RefuseWhenFull(4, PrefixAffinity(8))
    assert full(short, pool) is None and RefuseWhenFull(5, PrefixAffinity(8))(short, pool) == home


def test_the_refused_are_counted_and_not_served() -> None:
    server = make_replica(max_running=1, token_budget=1, prefix_cache="none")
    requests = [replace(one, seconds=0.0) for one in stream(9)]
    report = simulate([server], requests, RefuseWhenFull(3))
    # All come at once, before the first step: three may wait.
    assert report.num_refused == 6 and len(report.outcomes) == 3
    assert [one.number for one in report.outcomes] == [0, 1, 2]


def test_a_report_can_be_split() -> None:
    _, requests, report = random_run(0)
    slow = report.only("slow")
    assert len(slow.outcomes) == sum(one.kind == "slow" for one in requests) < len(report.outcomes)
    assert slow.percentile("ttft", 1.0) <= report.percentile("ttft", 1.0)
    with pytest.raises(ValueError, match="there are chat, slow"):
        report.only("fast")


def test_what_cannot_be_simulated_is_refused() -> None:
    requests = stream(3)
    assert len(simulate([make_replica()], requests).outcomes) == 3
    with pytest.raises(ValueError, match="at least one of each"):
        simulate([make_replica()], [])
    with pytest.raises(ValueError, match="order of their arrival"):
        simulate([make_replica()], requests[::-1])
    with pytest.raises(ValueError, match="the pool has 2"):
        simulate([make_replica(num_blocks=2, block_size=4)], requests)


def test_prefixes_spread_evenly_over_replicas() -> None:
    """A hash that favours replicas makes affinity useless; a checksum's linearity does."""
    pool = [make_replica(index=index) for index in range(4)]
    prefixes = Stream(1.0, Fixed(8), Fixed(1)).draw(4000.0, seed=6)
    homes = [PrefixAffinity(8)(one, pool) for one in prefixes]
    expected = len(homes) / 4
    chi_square = sum((homes.count(index) - expected) ** 2 / expected for index in range(4))
    assert chi_square < 21.1, "exceeded once in 10,000 prefix sets by an even hash (3 degrees of freedom)"
