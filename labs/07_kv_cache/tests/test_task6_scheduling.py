"""Task 6: static and continuous batching, compared step by step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.refusal import check_refused
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.generation_request import GenerationRequest
from labkit.specs import TinyLlama

pytestmark = pytest.mark.task(6)

POLICIES = ["StaticBatching", "ContinuousBatching"]
CONFIG = ModelConfig.tiny(num_layers=2)
VOCAB = 13


def scheduler(lab: Any, policy: str, num_slots: int) -> Any:
    """A scheduler of that policy."""
    return getattr(lab, policy)(num_slots)


def choose(logits: Tensor, step: int) -> int:
    """The judge's greedy, so that task 3 can't decide task 6."""
    return int(logits.argmax())


def next_token(tokens: list[int]) -> int:
    """The model of these tests: the next token depends on all tokens so far."""
    return (7 * len(tokens) + sum((i + 1) * token for i, token in enumerate(tokens))) % VOCAB


def alone(request: GenerationRequest) -> list[int]:
    """What a request gives by itself."""
    tokens = list(request.prompt)
    while len(tokens) - len(request.prompt) < request.max_new_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_tokens:
            break
    return tokens[len(request.prompt) :]


class CountingModel:
    """Answers a batch, and writes down who ran with how many tokens."""

    def __init__(self) -> None:
        self.steps: list[dict[int, list[int]]] = []
        self.tokens: dict[int, list[int]] = {}

    def run(self, ids: list[int], tokens: list[list[int]]) -> list[Tensor]:
        """Logits after the last token of each request."""
        self.steps.append(dict(zip(ids, tokens, strict=True)))
        rows = []
        for request_id, new in zip(ids, tokens, strict=True):
            held = self.tokens.setdefault(request_id, [])
            held += new
            rows.append(torch.nn.functional.one_hot(torch.tensor(next_token(held)), VOCAB).float())
        return rows


def some_requests(seed: int, arrivals: bool) -> list[GenerationRequest]:
    """Requests of many lengths; some stop early."""
    rng = random.Random(seed)
    return [
        GenerationRequest(
            tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))),
            rng.choice([1, 2, 3, 7]),
            (rng.randrange(VOCAB),) if rng.random() < 0.5 else (),
            rng.randint(0, 9) if arrivals else 0,
        )
        for _ in range(rng.randint(1, 8))
    ]


def test_a_free_slot_is_filled_in_the_next_step(lab: Any) -> None:
    batch = scheduler(lab, "ContinuousBatching", 3)
    for request_id in range(7):
        batch.add(request_id)
    timeline = []
    for leaving in ([], [1], [2], [], [0, 3], [4], [6, 5]):
        timeline.append(batch.schedule())
        for request_id in leaving:
            batch.remove(request_id)
    wanted = [[0, 1, 2], [0, 1, 2], [0, 3, 2], [0, 3, 4], [0, 3, 4], [5, 6, 4], [5, 6, None]]
    assert timeline == wanted, (
        f"slots by step are {timeline}, should be {wanted}: who leaves makes room for the next step, nobody else "
        "moves, and the first in the queue takes the first free slot"
    )
    assert batch.schedule() == [None] * 3, "with nobody left every slot idles; an empty step is legal"


def test_a_static_batch_waits_for_its_slowest(lab: Any) -> None:
    batch = scheduler(lab, "StaticBatching", 3)
    for request_id in range(5):
        batch.add(request_id)
    timeline = []
    for leaving in ([1], [2], [], [0], [3], [4]):
        timeline.append(batch.schedule())
        for request_id in leaving:
            batch.remove(request_id)
        if len(timeline) == 5:
            batch.add(5)
    wanted = [[0, 1, 2], [0, None, 2], [0, None, None], [0, None, None], [3, 4, None], [None, 4, None]]
    assert timeline == wanted, (
        f"slots by step are {timeline}, should be {wanted}: nobody joins before the whole batch has left"
    )
    assert batch.schedule() == [5, None, None], "request 5 came while a batch ran; it is in the next one"


@pytest.mark.parametrize("policy", POLICIES)
def test_counts_follow_the_requests(lab: Any, policy: str) -> None:
    batch = scheduler(lab, policy, 2)
    counts = [(batch.num_waiting, batch.num_running)]
    for request_id in (4, 9, 2):
        batch.add(request_id)
    counts.append((batch.num_waiting, batch.num_running))
    assert batch.schedule() == [4, 9], "requests join in the order in which they were added, whatever their ids"
    counts.append((batch.num_waiting, batch.num_running))
    batch.remove(4)
    counts.append((batch.num_waiting, batch.num_running))
    assert counts == [(0, 0), (3, 0), (1, 2), (1, 1)], f"(num_waiting, num_running) went {counts}"


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_can_be_aborted_anywhere(lab: Any, policy: str) -> None:
    batch = scheduler(lab, policy, 2)
    for request_id in (0, 1, 2, 3, 4):
        batch.add(request_id)
    batch.remove(1)
    assert batch.schedule() == [0, 2], "a request aborted in the queue never runs"
    batch.remove(3)
    batch.remove(2)
    batch.remove(0)
    assert batch.schedule() == [4, None], "only request 4 is left; it takes the first free slot"
    batch.remove(4)
    assert batch.schedule() == [None, None], "all were aborted; an empty step is legal"
    batch.add(1)
    assert batch.schedule() == [1, None], "an id can be used again once it has left"


@pytest.mark.parametrize("policy", POLICIES)
def test_confused_callers_are_refused(lab: Any, policy: str) -> None:
    batch = scheduler(lab, policy, 1)
    batch.add(0)
    batch.add(1)
    assert batch.schedule() == [0], "a good start comes first"
    check_refused("a request that runs, added again", lambda: batch.add(0))
    check_refused("a request that waits, added again", lambda: batch.add(1))
    check_refused("a request that nobody knows, removed", lambda: batch.remove(7))
    check_refused("no slots", lambda: scheduler(lab, policy, 0))
    assert (batch.num_waiting, batch.num_running) == (1, 1), "refused calls changed the counts"
    batch.remove(0)
    check_refused("a request removed twice", lambda: batch.remove(0))
    assert batch.schedule() == [1], "refused calls changed the queue"
    batch.remove(1)
    assert batch.schedule() == [None], "a request that was added twice ran twice"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_batched_outputs_equal_each_request_alone(lab: Any, policy: str, seed: int) -> None:
    requests = some_requests(seed, arrivals=seed % 2 == 1)
    model = CountingModel()
    outputs, timeline = lab.serve(scheduler(lab, policy, 1 + seed % 4), requests, model.run, choose)
    right = [alone(request) for request in requests]
    assert outputs == right, f"requests {requests} gave {outputs}, each alone gives {right}"
    assert sum(map(len, right)) == sum(len(step) for step in model.steps), (
        f"{sum(map(len, right))} tokens were generated in {sum(len(step) for step in model.steps)} rows: each row "
        "gives one token"
    )
    ran = [sorted(request_id for request_id in step if request_id is not None) for step in timeline]
    assert [step for step in ran if step] == [sorted(step) for step in model.steps], (
        f"by the timeline {ran} ran, the model was called for {[sorted(step) for step in model.steps]}"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_goes_in_once_then_the_newest_token(lab: Any, policy: str) -> None:
    requests = [GenerationRequest((3, 1, 4), 3), GenerationRequest((5,), 1), GenerationRequest((9, 2), 4)]
    model = CountingModel()
    outputs, _ = lab.serve(scheduler(lab, policy, 2), requests, model.run, choose)
    for request_id, request in enumerate(requests):
        right = alone(request)
        fed = [step[request_id] for step in model.steps if request_id in step]
        wanted = [list(request.prompt), *([token] for token in right[:-1])]
        assert fed == wanted, (
            f"request {request_id} was given {fed}, should be {wanted}: the whole prompt in its first step, then the "
            "token generated last, and nothing after its end"
        )
        assert outputs[request_id] == right, f"request {request_id} gave {outputs[request_id]}, alone gives {right}"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_finished_request_has_left_in_the_next_step(lab: Any, policy: str) -> None:
    first = next_token([3, 6])
    stopping = GenerationRequest((3, 6), 9, (next_token([3, 6, first]),))
    assert len(alone(stopping)) == 2, "choose another prompt: this one stops at once"
    requests = [stopping, GenerationRequest((1,), 4), GenerationRequest((8, 8), 2)]
    outputs, timeline = lab.serve(scheduler(lab, policy, 2), requests, CountingModel().run, choose)
    assert outputs == [alone(request) for request in requests], f"outputs are {outputs}"
    if policy == "StaticBatching":
        wanted = [[0, 1], [0, 1], [None, 1], [None, 1], [2, None], [2, None]]
    else:
        wanted = [[0, 1], [0, 1], [2, 1], [2, 1]]
    assert timeline == wanted, (
        f"the timeline is {timeline}, should be {wanted}: request 0 meets its stop token in its second step, which is "
        "its last"
    )


def test_choose_gets_the_request_s_own_step(lab: Any) -> None:
    seen: list[tuple[int, int]] = []

    def noting(logits: Tensor, step: int) -> int:
        seen.append((int(logits.argmax()), step))
        return (int(logits.argmax()) + 1) % VOCAB

    requests = [GenerationRequest((3,), 3), GenerationRequest((4, 4), 1), GenerationRequest((5,), 2)]
    outputs, _ = lab.serve(scheduler(lab, "ContinuousBatching", 2), requests, CountingModel().run, noting)
    assert [step for _, step in seen] == [0, 0, 1, 0, 2, 1], (
        f"choose was called with steps {[step for _, step in seen]}, should be [0, 0, 1, 0, 2, 1]: a request that "
        "joins late starts at 0"
    )
    assert sorted((likely + 1) % VOCAB for likely, _ in seen) == sorted(token for out in outputs for token in out), (
        "what choose returns is the token, likeliest or not"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_join_when_they_have_arrived(lab: Any, policy: str) -> None:
    requests = [
        GenerationRequest((1,), 2, arrival=3),
        GenerationRequest((2,), 3),
        GenerationRequest((3,), 1, arrival=7),
        GenerationRequest((4,), 2, arrival=1),
    ]
    model = CountingModel()
    outputs, timeline = lab.serve(scheduler(lab, policy, 2), requests, model.run, choose)
    assert outputs == [alone(request) for request in requests], f"outputs are {outputs}"
    if policy == "StaticBatching":
        wanted = [[1, None], [1, None], [1, None], [3, 0], [3, 0], [None, None], [None, None], [2, None]]
    else:
        wanted = [[1, None], [1, 3], [1, 3], [0, None], [0, None], [None, None], [None, None], [2, None]]
    assert timeline == wanted, f"the timeline is {timeline}, should be {wanted}"
    assert len(model.steps) == 6, f"the model ran {len(model.steps)} times; in steps 5 and 6 there was nothing to run"


@pytest.mark.parametrize("seed", range(4))
def test_no_slot_idles_while_somebody_waits(lab: Any, seed: int) -> None:
    requests, slots = some_requests(100 + seed, arrivals=True), 1 + seed % 3
    _, timeline = lab.serve(scheduler(lab, "ContinuousBatching", slots), requests, CountingModel().run, choose)
    first: dict[int, int] = {}
    for number, step in enumerate(timeline):
        assert len(step) == slots, f"step {number} has {len(step)} slots, the scheduler {slots}"
        for slot, request_id in enumerate(step):
            if request_id is None:
                continue
            if request_id not in first:
                first[request_id] = number
            elif timeline[number - 1][slot] != request_id:
                raise AssertionError(f"request {request_id} moved to slot {slot} in step {number}: {timeline}")
    assert sorted(first) == list(range(len(requests))), f"{len(requests)} requests were served, these ran: {first}"
    for request_id, joined in first.items():
        for number in range(requests[request_id].arrival, joined):
            assert None not in timeline[number], (
                f"request {request_id} arrived in step {requests[request_id].arrival} and joined in step {joined}, but "
                f"in step {number} a slot idled: {timeline}"
            )
    order = sorted(first, key=lambda r: (requests[r].arrival, r))
    joins = [first[request_id] for request_id in order]
    assert joins == sorted(joins), f"requests in order of arrival {order} joined in steps {joins}"


def test_utilisation_counts_busy_slots(lab: Any) -> None:
    for timeline, right in (
        ([[0, 1], [0, None], [0, None]], 4 / 6),
        ([[3]], 1.0),
        ([[0, 0, 0, None]], 0.75),
        ([[None, None], [None, 5]], 0.25),
        ([[None]], 0.0),
    ):
        got = lab.slot_utilisation(timeline)
        assert type(got) is float and abs(got - right) < 1e-12, f"utilisation of {timeline} is {right}, got {got!r}"
    check_refused("no step", lambda: lab.slot_utilisation([]))


def test_one_long_answer_holds_up_a_static_batch(lab: Any) -> None:
    # Module section 2.1 in small: one answer of 40 tokens, seven of 1, and more such requests waiting.
    requests = [GenerationRequest((1,), 40 if i == 0 else 1) for i in range(16)]
    for policy, steps in (("StaticBatching", 41), ("ContinuousBatching", 40)):
        _, timeline = lab.serve(scheduler(lab, policy, 8), requests, CountingModel().run, choose)
        assert len(timeline) == steps, f"{policy} took {len(timeline)} steps, should take {steps}"
        share = lab.slot_utilisation(timeline)
        assert abs(share - 55 / (8 * steps)) < 1e-9, (
            f"{policy} uses {share:.4f} of its slots, not {55 / (8 * steps):.4f}"
        )


def test_a_scheduler_in_use_is_refused(lab: Any) -> None:
    model, batch = CountingModel(), scheduler(lab, "ContinuousBatching", 2)
    outputs, _ = lab.serve(batch, [GenerationRequest((1, 2), 2)], model.run, choose)
    assert outputs == [alone(GenerationRequest((1, 2), 2))], f"a good run comes first; it gave {outputs}"
    outputs, _ = lab.serve(batch, [GenerationRequest((3,), 1)], CountingModel().run, choose)
    assert outputs == [alone(GenerationRequest((3,), 1))], "after a run the scheduler is empty and can be used again"
    batch.add(5)
    calls = len(model.steps)
    check_refused("a scheduler with a request in it", lambda: lab.serve(batch, [], model.run, choose))
    assert len(model.steps) == calls, "the model ran although the scheduler was refused"


def greedy_alone(request: GenerationRequest) -> list[int]:
    """Greedy tokens of the real decoder in float64, one request by itself, recomputed for every token."""
    model = Decoder(CONFIG, random_weights(CONFIG, 1, torch.float64), torch.float64)
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0, -1]
        top = logits.topk(2).values
        assert float(top[0] - top[1]) > 1e-3, "choose other prompts: this one leads to a near-tie"
        tokens.append(int(logits.argmax()))
    return tokens[len(request.prompt) :]


@pytest.mark.integration
@pytest.mark.parametrize("policy", POLICIES)
def test_your_own_engine_serves_a_batch(lab: Any, policy: str) -> None:
    requests = [GenerationRequest((7, 0, 60), 5), GenerationRequest((31,), 2), GenerationRequest((2, 44, 19, 5), 4)]
    caches = [lab.KVCache(CONFIG, 16) for _ in requests]
    batch, outputs = scheduler(lab, policy, 2), [[] for _ in requests]  # type: tuple[Any, list[list[int]]]
    for request_id in range(len(requests)):
        batch.add(request_id)
    # The loop of `serve`, here: a function that the test gives can't call the lab from within a call of the lab.
    for _ in range(20):
        ids = [request_id for request_id in batch.schedule() if request_id is not None]
        if not ids:
            break
        tokens = [outputs[i][-1:] or list(requests[i].prompt) for i in ids]
        rows = lab.ragged_step(TinyLlama(CONFIG, 1), [caches[i] for i in ids], tokens)
        for i, logits in zip(ids, rows, strict=True):
            outputs[i].append(lab.greedy(logits[-1], len(outputs[i])))
            if len(outputs[i]) == requests[i].max_new_tokens:
                batch.remove(i)
    right = [greedy_alone(request) for request in requests]
    assert outputs == right, f"your caches, attention and scheduler gave {outputs}; each request alone gives {right}"
