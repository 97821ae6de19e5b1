"""Who is served first, who has to give way, and that everybody's turn comes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from solutions.engine.kv_manager import KVManager
from solutions.engine.request import FinishReason, Request
from solutions.engine.sampling_params import SamplingParams
from solutions.engine.scheduler import Scheduler, SchedulerConfig
from solutions.engine.step import Step

SIZE = 2


def scheduler_of(
    num_blocks: int, max_running: int, token_budget: int = 8, max_chunk: int | None = None, cache: str = "none"
) -> Scheduler:
    """A scheduler with so many blocks of two tokens."""
    return Scheduler(SchedulerConfig(max_running, token_budget, max_chunk), KVManager(num_blocks, SIZE, cache))


def add(scheduler: Scheduler, name: str, num_prompt: int, max_tokens: int, priority: int = 0) -> Request:
    """A request whose prompt has nothing in common with those of other names."""
    prompt = tuple(100 * sum(name.encode()) + place for place in range(num_prompt))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    request = Request(name, prompt, params, scheduler.memory.new_table(), priority=priority)
    scheduler.add(request)
    return request


def step_of(scheduler: Scheduler) -> Step:
    """A step of a model that always writes token 5; who has all his tokens ends."""
    step = scheduler.schedule()
    emitted = {work.request: [5] for work in step.work if work.gives_token}
    scheduler.commit(step, emitted)
    for request in emitted:
        if len(request.tokens) == request.max_length:
            scheduler.finish(request, FinishReason.LENGTH)
    return step


def serve(scheduler: Scheduler, each: Callable[[Step], None] = lambda step: None) -> list[str]:
    """Steps until nothing is left; names in the order in which they first got anything after they had nothing."""
    order: list[str] = []
    held: set[str] = set()
    for _ in range(1000):
        if scheduler.is_idle:
            scheduler.memory.check_idle()
            return order
        step = step_of(scheduler)
        each(step)
        held -= {request.request_id for request in step.preempted}
        order += [name for work in step.work if (name := work.request.request_id) not in held]
        held |= {work.request.request_id for work in step.work}
    raise AssertionError("requests were left unfinished")


def preempted_by(scheduler: Scheduler) -> list[str]:
    """Serves all; names of those who lost their blocks on the way."""
    lost: list[str] = []
    serve(scheduler, lambda step: lost.extend(request.request_id for request in step.preempted))
    return lost


def test_the_urgent_come_first_and_equals_in_their_order() -> None:
    scheduler = scheduler_of(8, max_running=1)
    for name, priority in (("low", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        add(scheduler, name, 3, 2, priority)
    assert serve(scheduler) == ["urgent", "first", "second", "low"]


@pytest.mark.parametrize("levels", [1, 2])
def test_nobody_waits_for_ever_behind_the_more_urgent(levels: int) -> None:
    scheduler = scheduler_of(8, max_running=1)
    low = add(scheduler, "low", 3, 1, priority=levels)
    for number in range(600):  # one comes in each step, and each step ends one
        add(scheduler, f"urgent {number}", 3, 1)
        if any(work.request is low for work in step_of(scheduler).work):
            break
    assert number == levels * 256, "its waiting counts for as much as was promised, and no more"


@pytest.mark.parametrize("names", [("urgent", "other"), ("other", "urgent")])
def test_the_least_urgent_gives_way(names: tuple[str, str]) -> None:
    scheduler = scheduler_of(6, max_running=2)
    for name in names:
        add(scheduler, name, 3, 7, priority=-(name == "urgent"))
    assert preempted_by(scheduler) == ["other"]


def test_who_was_preempted_has_his_old_place() -> None:
    scheduler = scheduler_of(6, max_running=2)
    for name in ("first", "second", "third"):
        add(scheduler, name, 3, 7)
    assert serve(scheduler) == ["first", "second", "second", "third"]


def test_what_was_preempted_is_found_again() -> None:
    scheduler = scheduler_of(9, max_running=2, token_budget=16, cache="hash")
    add(scheduler, "first", 9, 6)
    second = add(scheduler, "second", 3, 9)
    starts: list[int] = []
    serve(scheduler, lambda step: starts.extend(one.start for one in step.work if one.request is second))
    back = next(start for before, start in pairwise(starts) if start <= before)
    assert back == 4, "of three full blocks, two of which hold its answer, one was needed by the first"


def test_nobody_is_admitted_to_be_preempted_soon() -> None:
    scheduler = scheduler_of(4, max_running=2)
    add(scheduler, "first", 3, 4)
    add(scheduler, "second", 3, 2)  # its prompt would fit, and then there were no block for the first
    assert preempted_by(scheduler) == []


def test_blocks_that_a_prompt_has_yet_to_take_are_not_given_to_others() -> None:
    scheduler = scheduler_of(7, max_running=2, max_chunk=2)
    add(scheduler, "long", 10, 2)
    add(scheduler, "short", 6, 6)
    assert preempted_by(scheduler) == []


def test_a_long_prompt_comes_through_a_stream_of_short_ones() -> None:
    scheduler = scheduler_of(12, max_running=4)
    for number in range(4):
        add(scheduler, f"before {number}", 2, 5)
    long = add(scheduler, "long", 20, 2)
    for number in range(200):
        add(scheduler, f"short {number}", 2, 5)
        step_of(scheduler)
        if long.finish_reason is not None:
            break
    assert number < 20, "it waits for those who ran before it, and for nobody else"
