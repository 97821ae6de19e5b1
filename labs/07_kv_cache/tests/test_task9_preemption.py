"""Task 9: who gives way when blocks run out, and that nobody can tell afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.refusal import check_refused
from grader.judge.scripted_pool import RecordingPool
from grader.judge.serving_schedules import PreemptionSchedule
from grader.judge.slot_model import VOCAB, SlotModel, alone
from labkit.errors import StudentError
from labkit.generation_request import GenerationRequest
from labkit.step_plan import StepPlan

pytestmark = pytest.mark.task(9)


class Engine:
    """A scheduler on the judge's own pools, so that task 7 can't decide task 9; requests are named A, B, C, …"""

    def __init__(self, lab: Any, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self.pool = RecordingPool(num_blocks)
        self.host = RecordingPool(host_blocks) if host_blocks else None
        host = [] if self.host is None else [self.host.spec()]
        self.scheduler = lab.PreemptiveScheduler(self.pool.spec(), block_size, *host)
        self.plan = StepPlan(())

    def add(self, *lengths: int, most: int = 9) -> None:
        """Requests with prompts of these lengths; request r's tokens are 10 r, 10 r + 1, …"""
        for length in lengths:
            request_id = self.scheduler.num_requests
            self.scheduler.add(request_id, list(range(10 * request_id, 10 * request_id + length)), most)

    def step(self, *answer: int) -> str:
        """Runs a step, then appends token 7 to the requests given. Returns who ran, as `A0+3 B4+1`."""
        self.plan = self.scheduler.schedule()
        for request_id in answer:
            self.scheduler.append(request_id, 7)
        return " ".join(f"{'ABCDE'[c.request_id]}{c.start}+{len(c.tokens)}" for c in self.plan.chunks)

    def taken(self) -> int:
        """Blocks that somebody holds."""
        return len(self.pool.owners) - self.pool.num_free()


def check_steps(got: list[str], wanted: list[str], why: str) -> None:
    """Compare who ran in each step."""
    assert got == wanted, (
        f"steps (request, tokens computed before + tokens of the step) were {got}, not {wanted}: {why}"
    )


def test_each_request_computes_all_that_it_knows(lab: Any) -> None:
    engine = Engine(lab, 9, 4)
    engine.add(5, 3)
    check_steps([engine.step(0, 1), engine.step(0, 1), engine.step(0)], ["A0+5 B0+3", "A5+1 B3+1", "A6+1 B4+1"], "")
    first, second = engine.plan.chunks
    assert (first.tokens, second.tokens) == ((7,), (7,)), (
        f"the newest tokens are 7, the chunks hold {engine.plan.chunks}"
    )
    assert first.gives_token is True and second.gives_token is True, "the newest token's logits give the next one"
    assert (len(first.blocks), len(second.blocks)) == (2, 2), (
        f"7 and 5 tokens need 2 blocks of 4 each; the plan has {first.blocks} and {second.blocks}"
    )
    assert engine.step() == "A7+1", "request B has no new token: nothing is left to compute for it"
    assert engine.step() == "" and engine.plan.chunks == (), "nobody has a new token: the step is empty"
    engine.scheduler.append(1, 7)
    assert engine.step() == "B5+1" and engine.taken() == 4, f"B has its token now; {engine.taken()} blocks are taken"


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_blocks_are_taken_as_tokens_need_them(lab: Any, block_size: int) -> None:
    engine = Engine(lab, 12, block_size)
    engine.add(1, most=11)
    for length in range(1, 12):
        assert engine.step(*([0] if length < 11 else [])) == f"A{length - 1}+1", f"token {length} alone is computed"
        needed = len({position // block_size for position in range(length)})
        assert engine.taken() == needed == len(engine.plan.chunks[0].blocks), (
            f"{length} tokens need {needed} blocks of {block_size}; {engine.taken()} are taken, the plan has "
            f"{engine.plan.chunks[0].blocks}"
        )


def test_who_came_last_gives_way(lab: Any) -> None:
    engine = Engine(lab, 6, 2)
    engine.add(3, 3, 3, most=4)
    steps = [engine.step(0, 1, 2), engine.step(0, 1, 2), engine.step(0, 1)]
    assert engine.taken() == 6, f"A and B hold all 6 blocks, {engine.taken()} are taken"
    check_steps(
        steps,
        ["A0+3 B0+3 C0+3", "A3+1 B3+1 C3+1", "A4+1 B4+1"],
        "the fifth tokens of A and B need a block each; C came last and gives both of its blocks up",
    )
    check_steps([engine.step()], ["A5+1 B5+1"], "A and B go on, there is no room for C")
    engine.scheduler.remove(0)
    check_steps([engine.step(2)], ["C0+5"], "A has ended: C reads its prompt of 3 and both tokens of its answer again")
    assert engine.plan.chunks[0].tokens == (20, 21, 22, 7, 7), f"C knows 20 21 22 7 7, it read {engine.plan.chunks}"
    assert (engine.plan.swap_out, engine.plan.swap_in) == ((), ()), "without host memory nothing is copied"
    check_steps([engine.step()], ["C5+1"], "and then it goes on as if nothing had happened")


def test_no_more_give_way_than_needed(lab: Any) -> None:
    engine = Engine(lab, 8, 1)
    engine.add(2, 2, 2, 2, most=3)
    engine.step(0, 1, 2, 3)
    check_steps([engine.step()], ["A2+1 B2+1"], "D gives 2 blocks up, which is enough for A and B; C finds none")
    assert engine.taken() == 6, f"C gave up as well, being last when it asked; taken are {engine.taken()} blocks, not 6"
    engine = Engine(lab, 8, 1)
    engine.add(2, 2, 2, 2, most=3)
    engine.step(0)
    check_steps([engine.step()], ["A2+1"], "one block is missing")
    assert engine.taken() == 7, f"D alone gives way for it: 3 + 2 + 2 blocks are taken, got {engine.taken()}"
    engine = Engine(lab, 8, 1)
    engine.add(2, 1, 1, most=3)
    engine.step(0, 1, 2)
    engine.add(2, most=3)
    check_steps(
        [engine.step(0, 1, 2)], ["A2+1 B1+1 C1+1"], "7 blocks for those that run, too few for a new prompt of 2"
    )
    check_steps([engine.step()], ["A3+1 B2+1"], "4 + 3 blocks; C asks for its third, came last, and gives way itself")


def test_nobody_is_overtaken(lab: Any) -> None:
    engine = Engine(lab, 6, 2)
    engine.add(4, 10, 1, most=2)
    check_steps(
        [engine.step(0), engine.step()],
        ["A0+4", "A4+1"],
        "B needs 5 blocks and has to wait; C would fit, but it came after B",
    )
    engine.scheduler.remove(0)
    check_steps([engine.step(1, 2), engine.step()], ["B0+10 C0+1", "B10+1"], "B first, then C; B grows at C's expense")
    engine.scheduler.remove(1)
    check_steps([engine.step()], ["C0+2"], "C is alone")


def test_blocks_are_swapped_out_and_in(lab: Any) -> None:
    engine = Engine(lab, 4, 2, host_blocks=5)
    engine.add(3, 3, most=5)
    engine.step(0, 1)
    lost = engine.scheduler.schedule().chunks[1].blocks
    engine.scheduler.append(0, 7)
    engine.scheduler.append(1, 7)
    assert engine.step(0) == "A4+1", "A's fifth token needs a third block, B gives way"
    out = engine.plan.swap_out
    assert [block for block, _ in out] == list(lost), f"B's blocks {lost} are copied out, in order; the plan has {out}"
    host = [host_block for _, host_block in out]
    assert all(engine.host.owners[block] == 1 for block in host) and len(set(host)) == 2, f"host blocks are {host}"  # type: ignore[union-attr]
    assert engine.plan.swap_in == () and engine.taken() == 3, f"B holds no block; {engine.taken()} are taken, 3 by A"
    assert engine.step() == "A5+1" and engine.plan.swap_out == (), "A goes on; what is out is not copied again"
    engine.scheduler.remove(0)
    assert engine.step(1) == "B4+1", "B's 4 tokens come back from the host, only the fifth is computed"
    blocks = engine.plan.chunks[0].blocks
    assert engine.plan.swap_in == tuple(zip(host, blocks[:2], strict=True)), (
        f"the host blocks {host} go to B's first blocks of {blocks}, in order; the plan has {engine.plan.swap_in}"
    )
    assert len(blocks) == 3 and engine.host.num_free() == 5, "3 blocks for 5 tokens; the host blocks are free again"  # type: ignore[union-attr]
    assert engine.plan.chunks[0].tokens == (7,), f"B's newest token is 7; the chunk has {engine.plan.chunks[0].tokens}"
    assert engine.step() == "B5+1" and engine.plan.swap_in == (), "and then B goes on; nothing is copied twice"


def test_a_full_host_means_recompute(lab: Any) -> None:
    engine = Engine(lab, 9, 1, host_blocks=4)
    engine.add(3, 3, 3, most=4)
    engine.step(0, 1, 2)
    check_steps([engine.step(0, 1)], ["A3+1 B3+1"], "C gives way")
    assert len(engine.plan.swap_out) == 3, f"the host has room for C's 3 blocks; copied out are {engine.plan.swap_out}"
    check_steps([engine.step(0)], ["A4+1"], "A takes its fifth block, B has no room for its own and gives way")
    assert engine.plan.swap_out == (), f"1 host block is free, B has 4: all or nothing; got {engine.plan.swap_out}"
    engine.scheduler.remove(0)
    check_steps([engine.step(2)], ["B0+5 C3+1"], "B was recomputed, C comes back from the host")
    assert engine.plan.chunks[0].tokens == (10, 11, 12, 7, 7), f"B knows 10 11 12 7 7, it read {engine.plan.chunks[0]}"
    engine = Engine(lab, 6, 1, host_blocks=3)
    engine.add(3, 3, most=2)
    engine.step(0)
    engine.step()
    assert len(engine.plan.swap_out) == 3, "3 host blocks are just enough for 3 blocks"


def test_host_blocks_are_read_before_they_are_free(lab: Any) -> None:
    engine = Engine(lab, 7, 1, host_blocks=2)
    engine.add(5, 2, most=3)
    engine.step(0)
    assert engine.step() == "A5+1" and len(engine.plan.swap_out) == 2, "B, which waits for its token, is swapped out"
    engine.scheduler.remove(0)
    engine.scheduler.add(2, [20, 21], 3)
    engine.scheduler.add(3, [30, 31], 3)
    assert engine.step(2, 1) == "C0+2 D0+2", "B still waits for its token, and the others run"
    check_steps([engine.step()], ["B2+1 C2+1"], "B takes the 3 blocks that are free, C grows, D gives way")
    assert len(engine.plan.swap_in) == 2 and engine.plan.swap_out == (), (
        "copies out are made before copies in, so B's host blocks can't take D's in the same step: "
        f"out {engine.plan.swap_out}, in {engine.plan.swap_in}"
    )


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_an_abort_frees_everything(lab: Any, host_blocks: int) -> None:
    engine = Engine(lab, 6, 2, host_blocks)
    engine.add(3, 3, 3, most=4)
    engine.step(0, 1, 2)
    engine.step(0, 1, 2)
    assert engine.step(0, 1) == "A4+1 B4+1", "C was preempted"
    assert engine.host is None or engine.host.num_free() == 6, "C's 2 blocks lie in host memory"
    engine.scheduler.remove(2)
    assert engine.host is None or engine.host.num_free() == 8, "C was aborted: its host blocks are free"
    engine.scheduler.remove(0)
    assert engine.taken() == 3, f"A was aborted: only B's 3 blocks are taken, got {engine.taken()}"
    engine.scheduler.add(4, [1, 2], 1)
    engine.scheduler.remove(4)
    assert engine.step() == "B5+1" and engine.scheduler.num_requests == 1, "B is alone"
    engine.scheduler.remove(1)
    assert engine.taken() == 0 and engine.scheduler.num_requests == 0, "everybody has left; the pool is whole"
    assert engine.step() == "", "an empty step is legal"
    engine.add(3)
    assert engine.step() == "A0+3", "an id can be used again"


def test_confused_callers_change_nothing(lab: Any) -> None:
    engine = Engine(lab, 4, 2)
    engine.add(3, 3, most=2)
    assert engine.step(0) == "A0+3 B0+3", "a good start comes first"
    scheduler = engine.scheduler
    for what, call in (
        ("a request of 10 tokens in 4 blocks of 2", lambda: scheduler.add(7, [1] * 8, 3)),
        ("an id in use", lambda: scheduler.add(1, [1], 1)),
        ("no prompt", lambda: scheduler.add(7, [], 1)),
        ("a token for a request with tokens to compute", lambda: scheduler.append(0, 7)),
        ("a token -1", lambda: scheduler.append(1, -1)),
        ("a token for nobody", lambda: scheduler.append(5, 7)),
        ("a request removed that isn't there", lambda: scheduler.remove(5)),
        ("blocks of 0 tokens", lambda: lab.PreemptiveScheduler(engine.pool.spec(), 0)),
    ):
        check_refused(what, call)
        assert (scheduler.num_requests, engine.taken()) == (2, 4), f"{what}: was refused, but something changed"
    scheduler.add(2, [1] * 7, 2)
    assert engine.step() == "A3+1", "a request that just fits was added; nothing else has changed"
    scheduler.remove(0)
    scheduler.remove(1)
    assert engine.step() == "C0+7", "8 tokens in 4 blocks of 2: the last token is never computed"


@pytest.mark.parametrize("first_seed", [0, 15])
def test_random_schedules_preempt_by_the_rules(lab: Any, first_seed: int) -> None:
    preempted = swapped = 0
    for seed in range(first_seed, first_seed + 15):
        schedule = PreemptionSchedule(lab_scheduler(lab), seed)
        schedule.run(8)
        preempted, swapped = preempted + schedule.num_preempted, swapped + schedule.num_swapped
    assert preempted > swapped > 0, f"choose other seeds: {preempted} requests were preempted, {swapped} by swap"


def lab_scheduler(lab: Any) -> Any:
    """Builds the scheduler under test."""

    def make(pool: Any, block_size: int, host: Any) -> Any:
        return lab.PreemptiveScheduler(pool, block_size, host)

    return make


def some_memory(num_blocks: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A memory of blocks of 3 tokens, full of numbers that no rounding leaves alone, with a NaN and an infinity."""
    memory = torch.randn(num_blocks, 3, 2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    memory = (memory * 1e5).to(dtype)
    memory[:, 0, 0, 0], memory[:, 0, 0, 1] = float("nan"), -float("inf")
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_copied_byte_for_byte(lab: Any, dtype: torch.dtype) -> None:
    for pairs in ([(4, 0), (1, 7), (0, 3), (4, 5)], [(2, 2)], []):
        source, target = some_memory(5, dtype, 1), some_memory(9, dtype, 2)
        wanted, kept = target.clone(), source.clone()
        for block, copy in pairs:
            wanted[copy] = source[block]
        num_bytes = lab.copy_blocks(source, target, pairs)
        right = len(pairs) * 30 * (4 if dtype is torch.float32 else 2)
        assert num_bytes == right, f"{len(pairs)} blocks of 30 numbers of {dtype} are {right} bytes, got {num_bytes!r}"
        wrong = [i for i in range(9) if not torch.equal(target[i].view(torch.uint8), wanted[i].view(torch.uint8))]
        assert not wrong, f"after the copies {pairs} (source, target) the target's blocks {wrong} are wrong"
        assert torch.equal(source.view(torch.uint8), kept.view(torch.uint8)), f"{pairs}: the source was written to"
    back = some_memory(5, dtype, 3)
    lab.copy_blocks(target, back, [(8, 1)])
    assert torch.equal(back[1].view(torch.uint8), target[8].view(torch.uint8)), "block 8 of the larger memory came back"


def test_copies_that_make_no_sense_are_refused(lab: Any) -> None:
    source, target = some_memory(3, torch.float32, 1), some_memory(4, torch.float32, 2)
    assert lab.copy_blocks(source, target, [(2, 3)]) == 120, "a good copy comes first: 30 numbers of 4 bytes"
    assert torch.equal(target[3].view(torch.uint8), source[2].view(torch.uint8)), "a good copy comes first"
    before = target.clone()
    for what, pairs in (
        ("block 3 of 3", [(0, 0), (3, 1)]),
        ("target 4 of 4", [(0, 0), (1, 4)]),
        ("block -1", [(0, 0), (-1, 1)]),
        ("one target twice", [(0, 1), (2, 1)]),
    ):
        check_refused(what, lambda p=pairs: lab.copy_blocks(source, target, p))
        assert torch.equal(target.view(torch.uint8), before.view(torch.uint8)), (
            f"{what}: refused, but something changed"
        )
    check_refused("two dtypes", lambda: lab.copy_blocks(source.double(), target, [(0, 0)]))


def shifted(logits: Tensor, step: int) -> int:
    """A choice that shows with which step it was made."""
    return (int(logits.argmax()) + step) % VOCAB


def some_requests() -> list[GenerationRequest]:
    """Requests that don't fit into 7 blocks of 2 all at once."""
    lengths = [(3, 6, 0), (5, 1, 0), (2, 7, 1), (4, 5, 1), (1, 9, 4)]
    return [
        GenerationRequest(tuple((3 * i + j) % VOCAB for j in range(n)), m, (), a) for i, (n, m, a) in enumerate(lengths)
    ]


@pytest.mark.parametrize("host_blocks", [0, 3, 20])
def test_answers_are_those_of_a_pool_that_never_fills(lab: Any, host_blocks: int) -> None:
    requests = some_requests()
    for num_blocks in (40, 7, 6, 5):
        engine, model = Engine(lab, num_blocks, 2, host_blocks), SlotModel(2)
        outputs, plans = lab.serve_paged(engine.scheduler, requests, model.run, shifted)
        right = [alone(request, shift=1) for request in requests]
        assert outputs == right, f"with {num_blocks} blocks the answers are {outputs}, alone they are {right}"
        assert plans == model.plans and engine.taken() == 0, "the plans are returned, and the pool is whole"
        resumed = sum(len(chunk.tokens) > 1 and chunk.start == 0 for plan in plans for chunk in plan.chunks) - 4
        swaps = sum(len(plan.swap_out) for plan in plans)
        assert num_blocks == 40 or resumed + swaps > 0, "choose other requests: nobody was preempted"
        assert (swaps > 0) is (num_blocks < 40 and host_blocks > 0), f"{swaps} blocks were swapped out"


def test_each_token_is_chosen_once(lab: Any) -> None:
    seen: list[int] = []

    def noting(logits: Tensor, step: int) -> int:
        seen.append(step)
        return shifted(logits, step)

    requests = some_requests()
    engine = Engine(lab, 5, 2)
    outputs, _ = lab.serve_paged(engine.scheduler, requests, SlotModel(2).run, noting)
    assert outputs == [alone(request, shift=1) for request in requests], f"answers are {outputs}"
    wanted = sorted(step for request in requests for step in range(request.max_new_tokens))
    assert sorted(seen) == wanted, (
        f"choose was called with steps {sorted(seen)}, should be {wanted}: a request that is read again has its tokens "
        "already; drawing them again with its seed would give it other random numbers"
    )


def test_requests_come_stop_and_are_refused(lab: Any) -> None:
    stopping = GenerationRequest((4, 4, 2), 5, (alone(GenerationRequest((4, 4, 2), 5))[2],))
    assert len(alone(stopping)) <= 3, "choose another prompt"
    requests = [
        GenerationRequest((1, 2), 3),
        GenerationRequest((1,) * 9, 1),
        stopping,
        GenerationRequest((3,), 2, (), 9),
        GenerationRequest((2, 2), 7, (), 9),
        GenerationRequest((0, 1), 2),
    ]
    engine, model = Engine(lab, 4, 2), SlotModel(2)
    outputs, plans = lab.serve_paged(engine.scheduler, requests, model.run, lambda logits, step: int(logits.argmax()))
    right = [None if i == 1 else alone(request) for i, request in enumerate(requests)]
    assert outputs == right, (
        f"answers are {outputs}, should be {right}: request 1 can never fit into 4 blocks of 2 and has none, request 2 "
        "ends with its stop token"
    )
    firsts = {chunk.request_id: i for i, plan in reversed(list(enumerate(plans))) for chunk in plan.chunks}
    assert firsts[3] == 9 and firsts[0] == 0, f"requests ran first in steps {firsts}; request 3 arrives in step 9"
    assert model.plans == [plan for plan in plans if plan.chunks] and len(plans) > len(model.plans), (
        "the model is called for each plan with chunks, and for no other"
    )
    check_refused("a scheduler in use", lambda: (engine.add(2), lab.serve_paged(engine.scheduler, [], model.run)))


def test_a_standstill_is_reported(lab: Any) -> None:
    engine, model = Engine(lab, 4, 2), SlotModel(2)
    outputs, _ = lab.serve_paged(engine.scheduler, [GenerationRequest((1, 2), 2)], model.run, shifted)
    assert outputs == [alone(GenerationRequest((1, 2), 2), shift=1)], f"a good run comes first; it gave {outputs}"
    model.plans.clear()
    asked = 0

    def num_free() -> int:
        nonlocal asked
        asked += 1
        assert asked < 500, "serve_paged goes round and round: there is a request, but no plan has a chunk"
        # After the first step somebody else has taken all that was free.
        return 0 if model.plans else engine.pool.num_free()

    scheduler = lab.PreemptiveScheduler(replace(engine.pool.spec(), num_free=num_free), 2)
    with pytest.raises(StudentError) as failure:
        lab.serve_paged(scheduler, [GenerationRequest((1, 2), 3)], model.run, shifted)
    assert failure.value.type_name == "RuntimeError" and len(model.plans) == 1, (
        f"a scheduler that runs nobody, for ever, is a RuntimeError after the one step that ran; got {failure.value}"
    )
