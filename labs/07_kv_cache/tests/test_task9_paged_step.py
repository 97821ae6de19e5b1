"""Task 9: plans run on paged memory with a real decoder; preempted or not, the tokens are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.specs import TinyLlama
from labkit.step_plan import Chunk, StepPlan

pytestmark = [pytest.mark.task(9), pytest.mark.integration]

CONFIG = ModelConfig.tiny(num_layers=2)
MODEL = TinyLlama(CONFIG, 1)
PROMPTS = [[7, 0, 60, 31, 9], [2, 44, 19], [5, 8, 33, 12]]


def whole_run(tokens: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits of all tokens in one uncached run, `[tokens, vocab]`."""
    model = Decoder(CONFIG, random_weights(CONFIG, 1, dtype), dtype)
    return model(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0]


def greedy_alone(prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of the real decoder in float64, recomputed for every token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = whole_run(tokens)[-1]
        top = logits.topk(2).values
        assert float(top[0] - top[1]) > 1e-3, "choose other prompts: this one leads to a near-tie"
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def check_logits(what: str, got: Tensor, tokens: list[int], start: int) -> None:
    """Compare with an uncached run in float64."""
    reference = whole_run(tokens)[start:]
    check_close(
        what, got, reference, scale=float(reference.abs().max()), dtype=torch.float32,
        plain=whole_run(tokens, torch.float32)[start:],
    )  # fmt: skip


def test_pieces_and_single_tokens_share_a_pass(lab: Any) -> None:
    memory = lab.PagedMemory(CONFIG, 9, 4)
    a, b = [7, 0, 60, 31, 9, 2, 50], [2, 44, 19, 5, 5, 30]
    first = lab.paged_step(
        MODEL, memory, [Chunk(0, 0, tuple(a[:3]), (8,), False), Chunk(1, 0, tuple(b[:5]), (2, 5), True)]
    )
    second = lab.paged_step(
        MODEL, memory, [Chunk(1, 5, (b[5],), (2, 5), True), Chunk(0, 3, tuple(a[3:]), (8, 0), True)]
    )
    for what, got, tokens, start, end in (
        ("the first piece of A", first[0], a, 0, 3),
        ("B's prompt", first[1], b, 0, 5),
        ("B's new token", second[0], b, 5, 6),
        ("the second piece of A", second[1], a, 3, 7),
    ):
        check_logits(what, got, tokens[:end], start)


def test_chunks_that_do_not_fit_their_blocks_are_refused(lab: Any) -> None:
    memory = lab.PagedMemory(CONFIG, 6, 4)
    good = Chunk(0, 0, (7, 0, 60), (1,), True)
    check_logits("a good chunk", lab.paged_step(MODEL, memory, [good])[0], [7, 0, 60], 0)
    for what, chunk in (
        ("5 tokens in one block of 4", Chunk(1, 0, (1,) * 5, (2,), True)),
        ("a block too many", Chunk(1, 0, (1,) * 4, (2, 3), True)),
        ("no tokens", Chunk(1, 4, (), (2,), True)),
        ("a token outside the vocabulary", Chunk(1, 0, (CONFIG.vocab_size,), (2,), True)),
    ):
        check_refused(what, lambda c=chunk: lab.paged_step(MODEL, memory, [Chunk(0, 3, (9,), (1,), True), c]))
    check_logits(
        "the token after refused passes", lab.paged_step(MODEL, memory, [Chunk(0, 3, (31,), (1,), True)])[0],
        [7, 0, 60, 31], 3,
    )  # fmt: skip


def test_swaps_move_keys_and_values_of_every_layer(lab: Any) -> None:
    config = ModelConfig.tiny(num_layers=3)
    memory, host = lab.PagedMemory(config, 3, 2), lab.PagedMemory(config, 5, 2)
    rng = torch.Generator().manual_seed(0)
    written = [torch.randn(2, 1, config.num_kv_heads, 6, config.head_dim, generator=rng) for _ in range(3)]
    for layer, (k, v) in enumerate(written):
        memory.write(layer, [0, 1, 2, 3, 4, 5], k, v)
    plan = StepPlan((), ((2, 4), (0, 1)))
    num_bytes = lab.run_swaps(plan, memory, host)
    right = 2 * 2 * 3 * 2 * config.num_kv_heads * config.head_dim * 4
    assert num_bytes == right, f"keys and values of 2 blocks in 3 layers are {right} bytes, got {num_bytes!r}"
    # The device's blocks are somebody else's now; out and in again in one step, through the block just given up.
    for layer in range(3):
        memory.write(layer, [0, 1, 4, 5], *torch.zeros(2, 1, config.num_kv_heads, 4, config.head_dim))
    lab.run_swaps(StepPlan((), ((1, 2),), ((4, 1), (1, 0))), memory, host)
    for layer, (k, v) in enumerate(written):
        for what, store, slots, positions in (
            ("swapped out and in", memory, [2, 3, 0, 1], [4, 5, 0, 1]),
            ("swapped out in the step in which others came in", host, [4, 5], [2, 3]),
        ):
            keys, values = store.gather(layer, slots)
            check_equal(f"layer {layer}, keys {what}", keys, k[:, :, positions])
            check_equal(f"layer {layer}, values {what}", values, v[:, :, positions])


@pytest.mark.parametrize("host_blocks", [0, 4])
def test_your_own_engine_hides_every_preemption(lab: Any, host_blocks: int) -> None:
    pool, memory = lab.BlockAllocator(4), lab.PagedMemory(CONFIG, 4, 3)
    host = [lab.BlockAllocator(host_blocks)] if host_blocks else []
    host_memory = lab.PagedMemory(CONFIG, max(1, host_blocks), 3)
    scheduler = lab.PreemptiveScheduler(pool, 3, *host)
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    for request_id, prompt in enumerate(PROMPTS):
        scheduler.add(request_id, prompt, 5)
    recomputed = swapped = 0
    # The loop of `serve_paged`, here: a function that the test gives can't call the lab from within a call of the lab.
    for _ in range(30):
        plan = scheduler.schedule()
        if not plan.chunks:
            break
        lab.run_swaps(plan, memory, host_memory)
        rows = lab.paged_step(MODEL, memory, list(plan.chunks))
        swapped += len(plan.swap_in)
        for chunk, logits in zip(plan.chunks, rows, strict=True):
            output = outputs[chunk.request_id]
            recomputed += chunk.start == 0 and len(output) > 0
            output.append(lab.greedy(logits[-1], len(output)))
            if len(output) == 5:
                scheduler.remove(chunk.request_id)
            else:
                scheduler.append(chunk.request_id, output[-1])
    right = [greedy_alone(prompt, 5) for prompt in PROMPTS]
    assert outputs == right, f"your engine gave {outputs}; each request alone gives {right}"
    assert (swapped > 0) is (host_blocks > 0), f"{swapped} blocks came back from a host of {host_blocks}"
    assert recomputed > 0 or host_blocks, "choose other prompts: nobody was preempted"
    assert pool.num_free == 4 and all(p.num_free == host_blocks for p in host), "the pools must be whole at the end"
