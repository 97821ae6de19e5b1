"""The simulator decides what the engine decides: step by step, token by token, block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from solutions.engine import Engine
from solutions.engine.scheduler import Scheduler
from solutions.simulate.calibration import twin
from solutions.simulate.lengths import Uniform
from solutions.simulate.replica import Replica
from solutions.simulate.simulation import simulate
from solutions.simulate.step_time import ConstantTime
from solutions.simulate.workload import Stream, TimedRequest, merge

Decision = tuple[Any, ...]


def record(scheduler: Scheduler) -> list[Decision]:
    """All that is decided from now on."""
    decisions = list[Decision]()
    decide = scheduler.schedule

    def schedule(*args: Any) -> Any:
        step = decide(*args)
        works = [
            (number(work.request.request_id), work.start, len(work.tokens), work.slots, work.blocks, work.gives_token)
            for work in step.work
        ]
        decisions.append((works, step.moves, [number(one.request_id) for one in step.preempted]))
        return step

    scheduler.schedule = schedule  # type: ignore[method-assign]
    return decisions


def number(request_id: str) -> int:
    """The engine's "7.0" and the simulator's "7" are the same request."""
    return int(request_id.split(".")[0])


def on_the_engine(engine: Engine, requests: list[TimedRequest], taken_in: list[int]) -> list[Decision]:
    """The engine's decisions, if each request is there after so many steps."""
    decisions = record(engine._scheduler)
    left = list(enumerate(requests))
    while left or engine.has_work:
        while left and taken_in[left[0][0]] <= len(decisions):
            index, one = left.pop(0)
            engine.add_request(one.prompt, one.params, request_id=str(index), priority=one.priority)
        assert engine.has_work, "the simulator was at work and the engine is not"
        engine.step()
    engine.check_idle()
    return decisions


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_running=8, token_budget=24, num_blocks=64),
        dict(max_running=6, token_budget=16, max_chunk=5, num_blocks=14, prefix_cache="radix"),
        dict(max_running=6, token_budget=40, num_blocks=14, preemption="swap", num_host_blocks=30),
        dict(max_running=6, token_budget=16, num_blocks=14, prefix_cache="none"),
    ],
    ids=["roomy", "chunks in a radix cache", "swap", "recompute"],
)
def test_every_decision_is_the_engines(make_engine: Callable[..., Engine], settings: dict[str, Any]) -> None:
    # All prompts go on behind what they share: equal ones would get equal answers from the model alone.
    chats = Stream(0.5, Uniform(12, 30), Uniform(2, 12), prefix=8, num_prefixes=2)
    urgent = Stream(0.1, Uniform(4, 12), Uniform(2, 12), kind="urgent", priority=-1)
    # Ids that the tiny model has.
    requests = merge(chats.draw(40.0, seed=1), urgent.draw(40.0, seed=2))
    engine = make_engine(block_size=4, **settings)
    vocab = engine.tokenizer.vocab_size
    requests = [
        TimedRequest(one.seconds, tuple(token % vocab for token in one.prompt), one.params, one.kind, one.priority)
        for one in requests
    ]
    replica = Replica(twin(engine), ConstantTime(1.0))
    simulated = record(replica._scheduler)
    taken_in = list[int]()
    accept = replica.accept

    def note(arrival: TimedRequest, index: int) -> None:
        taken_in.append(len(simulated))
        accept(arrival, index)

    replica.accept = note  # type: ignore[method-assign]
    report = simulate([replica], requests)
    real = on_the_engine(engine, requests, taken_in)
    assert len(simulated) == len(real) > 40
    for index, (ours, theirs) in enumerate(zip(simulated, real, strict=True)):
        assert ours == theirs, f"step {index}: simulated {ours}, the engine decided {theirs}"
    assert report.num_steps == engine.metrics.num_steps
    assert report.num_preemptions == engine.metrics.num_preemptions
    assert report.hit_rate == pytest.approx(engine.metrics.cache_hit_rate)
    assert (report.num_preemptions > 0) == (settings["num_blocks"] < 64), "the case doesn't show what it is for"
    assert (report.hit_rate > 0.05) == (settings.get("prefix_cache") != "none")
