"""Task 10: a step has so many tokens to give, and whoever is being answered gets theirs first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grader.judge.refusal import check_refused
from grader.judge.scripted_pool import RecordingPool
from grader.judge.serving_schedules import BudgetSchedule
from grader.judge.slot_model import SlotModel, alone
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.generation_request import GenerationRequest
from labkit.specs import TinyLlama
from labkit.step_plan import StepPlan

pytestmark = pytest.mark.task(10)

CONFIG = ModelConfig.tiny(num_layers=2)


class Engine:
    """A scheduler on the judge's own pool, so that task 7 can't decide task 10; requests are named A, B, C, …"""

    def __init__(
        self, lab: Any, token_budget: int, num_blocks: int = 40, block_size: int = 4, max_chunk: int | None = None
    ) -> None:
        self.pool = RecordingPool(num_blocks)
        self.scheduler = lab.TokenBudgetScheduler(self.pool.spec(), block_size, token_budget, max_chunk)
        self.plan = StepPlan(())
        self.count = 0

    def add(self, *lengths: int, most: int = 9) -> None:
        """Requests with prompts of these lengths; request r's tokens are 100 r, 100 r + 1, …"""
        for length in lengths:
            self.scheduler.add(self.count, list(range(100 * self.count, 100 * self.count + length)), most)
            self.count += 1

    def step(self, *, budget: int | None = None, silent: tuple[int, ...] = ()) -> str:
        """Runs a step, then appends token 7 to whoever's logits give one. Returns who ran, as `A4+1 B0+3`."""
        self.plan = self.scheduler.schedule() if budget is None else self.scheduler.schedule(budget)
        for chunk in self.plan.chunks:
            if chunk.gives_token and chunk.request_id not in silent:
                self.scheduler.append(chunk.request_id, 7)
        return " ".join(f"{'ABCDEF'[c.request_id]}{c.start}+{len(c.tokens)}" for c in self.plan.chunks)

    def taken(self) -> int:
        """Blocks that somebody holds."""
        return len(self.pool.owners) - self.pool.num_free()


def check_steps(got: list[str], wanted: list[str], why: str) -> None:
    """Compare who ran in each step."""
    assert got == wanted, (
        f"steps (request, tokens computed before + tokens of the step) were {got}, not {wanted}: {why}"
    )


def test_a_long_prompt_stalls_nobody(lab: Any) -> None:
    engine = Engine(lab, 8)
    engine.add(3, 2)
    steps = [engine.step(), engine.step()]
    engine.add(20)
    steps += [engine.step() for _ in range(5)]
    wanted = ["A0+3 B0+2", "A3+1 B2+1", "A4+1 B3+1 C0+6", "A5+1 B4+1 C6+6", "A6+1 B5+1 C12+6", "A7+1 B6+1 C18+2"]
    check_steps(
        steps,
        [*wanted, "A8+1 B7+1 C20+1"],
        "A and B get their token in every step, and C's prompt is cut to what is left of the budget of 8",
    )


def test_a_chunk_is_the_next_piece_of_its_request(lab: Any) -> None:
    engine = Engine(lab, 5)
    engine.add(7)
    assert engine.step() == "A0+5" and engine.plan.chunks[0].tokens == (0, 1, 2, 3, 4), f"{engine.plan.chunks}"
    assert engine.plan.chunks[0].gives_token is False, "the prompt isn't read to its end: there is no token yet"
    assert engine.step() == "A5+2" and engine.plan.chunks[0].tokens == (5, 6), f"{engine.plan.chunks}"
    assert engine.plan.chunks[0].gives_token is True, "the prompt's last token gives the first of the answer"
    assert engine.step() == "A7+1" and engine.plan.chunks[0].tokens == (7,), f"{engine.plan.chunks}"
    assert engine.plan.chunks[0].gives_token is True, "so does every token after it"
    assert (engine.plan.swap_out, engine.plan.swap_in) == ((), ()), "this scheduler doesn't swap"


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 12])
def test_the_budget_is_used_and_kept(lab: Any, budget: int) -> None:
    engine = Engine(lab, budget)
    engine.add(4, 6, 1, most=1)
    steps = [engine.step(silent=(0, 1, 2)) for _ in range(11)]
    totals = [sum(int(part.split("+")[1]) for part in step.split()) for step in steps]
    full, rest = divmod(11, budget)
    wanted = [budget] * full + [rest] * (rest > 0)
    wanted += [0] * (11 - len(wanted))
    assert totals == wanted, f"prompts of 4, 6 and 1 tokens with a budget of {budget} took steps of {totals}, {steps}"


def test_prompts_are_read_in_order_of_arrival(lab: Any) -> None:
    engine = Engine(lab, 6)
    engine.add(4, 5, 3)
    check_steps(
        [engine.step(), engine.step(), engine.step()],
        ["A0+4 B0+2", "A4+1 B2+3 C0+2", "A5+1 B5+1 C2+1"],
        "A first, B as far as the budget goes; then A's token, the rest of B, and C with what is left",
    )


def test_short_prompts_pass_a_long_one_by_chunks(lab: Any) -> None:
    engine = Engine(lab, 6, max_chunk=4)
    engine.add(14, 2)
    check_steps(
        [engine.step(), engine.step(), engine.step(), engine.step(), engine.step()],
        ["A0+4 B0+2", "B2+1 A4+4", "B3+1 A8+4", "B4+1 A12+2", "B5+1 A14+1"],
        "a chunk has at most 4 tokens, so B gets its turn at once; and then B decodes, which comes before A's prompt",
    )
    engine = Engine(lab, 4, max_chunk=4)
    engine.add(3, 9, 2)
    check_steps(
        [engine.step(), engine.step(), engine.step(), engine.step()],
        ["A0+3 B0+1", "A3+1 B1+3", "A4+1 B4+3", "A5+1 B7+2 C0+1"],
        "a budget that is no larger than a chunk still has room for A's token",
    )


def test_blocks_are_taken_for_the_tokens_given(lab: Any) -> None:
    engine = Engine(lab, 3, num_blocks=9, block_size=4)
    engine.add(10, most=9)
    for end in (3, 6, 9, 10, 11, 12, 13):
        engine.step()
        needed = len({position // 4 for position in range(end)})
        assert engine.taken() == needed == len(engine.plan.chunks[0].blocks), (
            f"{end} tokens are computed and need {needed} blocks of 4; {engine.taken()} are taken, the plan has "
            f"{engine.plan.chunks[0].blocks}: blocks for tokens of later steps may go to others meanwhile"
        )
    assert engine.plan.chunks[0].blocks[:3] == engine.plan.chunks[0].blocks[:-1], "a new block goes to the end"


def test_more_decodes_than_tokens_take_turns(lab: Any) -> None:
    engine = Engine(lab, 10)
    engine.add(2, 2, 2, 2, 2)
    engine.step()
    engine.add(3)
    steps = [engine.step(budget=2) for _ in range(6)]
    check_steps(
        steps,
        ["A2+1 B2+1", "C2+1 D2+1", "E2+1 A3+1", "B3+1 C3+1", "D3+1 E3+1", "A4+1 B4+1"],
        "5 requests decode and a step has 2 tokens: who has waited longest goes first, and F's prompt waits",
    )
    check_steps([engine.step()], ["C4+1 D4+1 E4+1 A5+1 B5+1 F0+3"], "with the usual budget of 10 all get theirs")


def test_who_came_last_is_recomputed(lab: Any) -> None:
    engine = Engine(lab, 8, num_blocks=6, block_size=2)
    engine.add(3, 3, 3, most=4)
    check_steps(
        [engine.step(silent=(0, 1)[: 2 * (i == 3)]) for i in range(4)],
        ["A0+3 B0+3 C0+2", "A3+1 B3+1 C2+1", "A4+1 B4+1", "A5+1 B5+1"],
        "the fifth tokens of A and B need a block each; C came last and gives both of its blocks up",
    )
    engine.scheduler.remove(0)
    engine.scheduler.remove(1)
    check_steps([engine.step(), engine.step(silent=(2,))], ["C0+4", "C4+1"], "C has generated one token")
    engine = Engine(lab, 3, num_blocks=4, block_size=2)
    engine.add(4, 2, most=5)
    check_steps(
        [engine.step() for _ in range(5)],
        ["A0+3", "A3+1 B0+2", "A4+1", "A5+1 B0+2", "A6+1"],
        "A takes the last block, B has none for its third token and gives way; it starts again as far as there is "
        "room, and A's next block drives it out once more",
    )
    engine.scheduler.remove(0)
    check_steps(
        [engine.step(), engine.step()],
        ["B0+3", "B3+1"],
        "B reads its prompt of 2 and the first token of its answer again, within the budget of 3",
    )
    assert engine.plan.chunks[0].tokens == (7,), f"B's tokens are 100 101 7 7; the last chunk has {engine.plan.chunks}"


def test_who_was_given_tokens_can_still_give_way(lab: Any) -> None:
    engine = Engine(lab, 3, num_blocks=5, block_size=1, max_chunk=2)
    engine.add(4, 1, most=2)
    check_steps(
        [engine.step(), engine.step()],
        ["A0+2 B0+1", "A2+2"],
        "B decodes and is given its token first; then A needs 2 blocks and B, which came last, holds them, so B must "
        "be taken out of the step again",
    )
    assert engine.taken() == 4, f"A holds 4 blocks and B none; {engine.taken()} are taken"
    engine.scheduler.remove(0)
    check_steps([engine.step(silent=(1,))], ["B0+2"], "B reads its prompt and its first token again")


def test_given_up_tokens_go_back_to_the_budget(lab: Any) -> None:
    engine = Engine(lab, 6, num_blocks=3, block_size=4, max_chunk=2)
    engine.add(8, 7, 2, most=3)
    check_steps(
        [engine.step(), engine.step(budget=3), engine.step(budget=4)],
        ["A0+2 B0+2 C0+2", "C2+1 A2+2", "A4+2 B2+2"],
        "in the last step C was given 1 of 4 tokens; A drives it out for a second block and takes 2, so that 2 are "
        "left for B, which needs no block",
    )


def test_nobody_starts_in_a_step_that_preempts(lab: Any) -> None:
    engine = Engine(lab, 8, num_blocks=8, block_size=1)
    engine.add(2, 5, 1, most=2)
    check_steps([engine.step()], ["A0+2 B0+5 C0+1"], "all 8 blocks are taken")
    engine.add(1, most=1)
    check_steps(
        [engine.step(silent=(0,))],
        ["A2+1"],
        "C gives its block to A, then B finds none and gives up 5; now C and D would fit, but who gave way is not to "
        "start again at once, nor may D overtake it",
    )
    assert engine.taken() == 3, f"A holds 3 blocks and nobody else any; {engine.taken()} are taken"
    engine.scheduler.remove(0)
    check_steps([engine.step(silent=(1, 2))], ["B0+6 C0+2"], "B and C read everything again; D has to wait for budget")


def test_nobody_without_blocks_takes_any_from_others(lab: Any) -> None:
    engine = Engine(lab, 8, num_blocks=6, block_size=1)
    engine.add(4, 5, 1, most=2)
    check_steps(
        [engine.step(), engine.step(silent=(0,))],
        ["A0+4", "A4+1"],
        "B is given 4 tokens, for which there are 2 blocks: it waits, nobody is preempted, and C doesn't overtake it",
    )
    engine.scheduler.remove(0)
    check_steps([engine.step()], ["B0+5 C0+1"], "then both start")


def test_a_step_may_have_a_budget_of_its_own(lab: Any) -> None:
    engine = Engine(lab, 4)
    engine.add(20)
    check_steps(
        [engine.step(budget=6), engine.step(), engine.step(budget=1), engine.step()],
        ["A0+6", "A6+4", "A10+1", "A11+4"],
        "budgets 6, the usual 4, 1, and 4 again",
    )
    for wrong in (0, -1):
        check_refused(f"a budget of {wrong}", lambda w=wrong: engine.scheduler.schedule(w))
        check_refused(f"a usual budget of {wrong}", lambda w=wrong: Engine(lab, w))
        check_refused(f"chunks of {wrong}", lambda w=wrong: Engine(lab, 4, max_chunk=w))
    assert engine.taken() == 4, "refused calls changed the pool"
    check_steps([engine.step()], ["A15+4"], "refused calls computed nothing")


def test_aborts_at_any_time_free_everything(lab: Any) -> None:
    engine = Engine(lab, 6, num_blocks=10, block_size=2)
    engine.add(3, 9, 4)
    check_steps([engine.step(), engine.step()], ["A0+3 B0+3", "A3+1 B3+5"], "C has no tokens yet")
    engine.scheduler.remove(2)
    engine.scheduler.remove(1)
    assert engine.taken() == 2, f"B was aborted within its prompt, A holds 2 blocks; {engine.taken()} are taken"
    engine.add(2)
    check_steps([engine.step()], ["A4+1 D0+2"], "the others are none the worse for it")
    engine.scheduler.remove(0)
    engine.scheduler.remove(3)
    assert (engine.taken(), engine.scheduler.num_requests) == (0, 0), "all were aborted; the pool is whole"
    assert engine.step() == "" and engine.plan.chunks == (), "an empty step is legal"
    engine.add(1)
    assert engine.step() == "E0+1", "and the next request is served"


def test_a_request_without_a_new_token_is_passed_over(lab: Any) -> None:
    engine = Engine(lab, 3)
    engine.add(2, 4)
    check_steps(
        [engine.step(silent=(0,)), engine.step(), engine.step()],
        ["A0+2 B0+1", "B1+3", "B4+1"],
        "A's next token was not appended: there is nothing to compute for it, and the budget is for others",
    )
    engine.scheduler.append(0, 7)
    check_steps([engine.step()], ["A2+1 B5+1"], "now it is known; A has waited longest")


@pytest.mark.parametrize("first_seed", [0, 25])
def test_random_schedules_keep_budget_and_blocks(lab: Any, first_seed: int) -> None:
    def make(pool: Any, block_size: int, budget: int, max_chunk: int | None) -> Any:
        return lab.TokenBudgetScheduler(pool, block_size, budget, max_chunk)

    preempted = 0
    for seed in range(first_seed, first_seed + 25):
        schedule = BudgetSchedule(make, seed)
        schedule.run(8)
        preempted += schedule.num_preempted
    assert preempted > 0, "choose other seeds: nobody was preempted"


@pytest.mark.integration
@pytest.mark.parametrize(("budget", "max_chunk", "num_blocks"), [(30, None, 30), (4, None, 5), (3, 2, 6), (1, None, 5)])
def test_your_own_loop_serves_within_a_budget(lab: Any, budget: int, max_chunk: int | None, num_blocks: int) -> None:
    requests = [
        GenerationRequest((1, 2, 3, 4, 0), 5),
        GenerationRequest((2,), 6),
        GenerationRequest((0,) * 12, 1),
        GenerationRequest((4, 1, 1), 4, (), 2),
        GenerationRequest((3, 3, 3, 3, 3, 3), 4, (), 3),
    ]
    engine, model = Engine(lab, budget, num_blocks, 2, max_chunk), SlotModel(2)
    outputs, plans = lab.serve_paged(engine.scheduler, requests, model.run, lambda logits, step: int(logits.argmax()))
    right = [None if num_blocks < 6 and i == 2 else alone(request) for i, request in enumerate(requests)]
    assert outputs == right, f"answers are {outputs}, alone they are {right}"
    most = max(sum(len(chunk.tokens) for chunk in plan.chunks) for plan in plans)
    assert most <= budget, f"a step had {most} tokens, the budget is {budget}"
    assert engine.taken() == 0, f"{engine.taken()} blocks are still taken at the end"


def greedy_alone(prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of the real decoder in float64, recomputed for every token."""
    model = Decoder(CONFIG, random_weights(CONFIG, 1, torch.float64), torch.float64)
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0, -1]
        top = logits.topk(2).values
        assert float(top[0] - top[1]) > 1e-3, "choose other prompts: this one leads to a near-tie"
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.integration
def test_your_own_engine_mixes_prefills_and_decodes(lab: Any) -> None:
    prompts, count = [[7, 0, 60], [31, 9, 2, 44, 19, 5, 8, 33, 12], [5, 8]], 5
    pool, memory = lab.BlockAllocator(6), lab.PagedMemory(CONFIG, 6, 3)
    scheduler = lab.TokenBudgetScheduler(pool, 3, 4, 3)
    outputs: list[list[int]] = [[] for _ in prompts]
    for request_id, prompt in enumerate(prompts):
        scheduler.add(request_id, prompt, count)
    mixed = 0
    for _ in range(40):
        plan = scheduler.schedule()
        if not plan.chunks:
            break
        mixed += len({len(chunk.tokens) > 1 for chunk in plan.chunks}) == 2
        rows = lab.paged_step(TinyLlama(CONFIG, 1), memory, list(plan.chunks))
        for chunk, logits in zip(plan.chunks, rows, strict=True):
            if chunk.gives_token:
                output = outputs[chunk.request_id]
                output.append(lab.greedy(logits[-1], len(output)))
                if len(output) == count:
                    scheduler.remove(chunk.request_id)
                else:
                    scheduler.append(chunk.request_id, output[-1])
    right = [greedy_alone(prompt, count) for prompt in prompts]
    assert outputs == right, f"your engine gave {outputs}; each request alone gives {right}"
    assert mixed > 0 and pool.num_free == 6, f"{mixed} steps mixed prefill and decode; {pool.num_free} blocks are free"
