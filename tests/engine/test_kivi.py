"""KIVI in blocks: codes are lab 13's, and what a query sees depends on its place alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from labkit.checkpoints import load
from labkit.checkpoints.loading import Model
from solutions.engine import Engine, EngineConfig, SamplingParams
from solutions.engine.attention.kivi_attention import KiviAttention
from solutions.engine.beam_search import BeamSearchParams
from solutions.engine.drafting.speculation import SpeculationConfig
from solutions.engine.kv_manager import Move, MoveKind
from solutions.engine.memory.kivi_pool import KiviPool
from solutions.engine.memory.kv_memory import kv_memory
from solutions.engine.models.kv_shape import KVShape
from solutions.engine.request import Request
from solutions.engine.scheduler import SchedulerConfig
from solutions.engine.step import Work
from solutions.kv_cache.block_table import BlockTable
from solutions.kv_cache.blocks import BlockAllocator
from solutions.quantization.kivi import KiviCache
from tests.engine.test_speculation import Bushy, Oracle

SIZE, HEADS, DIM = 4, 2, 32
SHAPE = KVShape(num_layers=2, num_parts=2, num_heads=HEADS, head_dim=DIM)
PARAMS = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=2)
PROMPTS = [[7, 400, 31, 31, 2000, 9], [5], list(range(100, 137)), [7, 400, 31, 31, 2000, 9, 11, 12]]
BITS = (4, 2)
FORMATS = ("kivi4", "kivi2")


def pool_of(bits: int, num_blocks: int = 12, max_requests: int = 3, max_drafts: int = 0) -> KiviPool:
    pool = KiviPool(SHAPE, bits, num_blocks, SIZE, max_requests, num_host_blocks=4, max_drafts=max_drafts)
    planes = [tensor for plane in pool._planes for tensor in plane.tensors]
    for tensor in (*planes, pool._pages):  # whatever is read that nobody wrote shows
        tensor.fill_(torch.nan if tensor.is_floating_point() else 255)
    return pool


def numbers(tokens: int, seed: int) -> Tensor:
    """Queries, keys and values of a text, `[3, tokens, heads, head_dim]`, keys with a channel far from 0."""
    made = torch.randn(3, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    made[1, :, :, 4] += 9
    return made


def work_of(start: int, end: int, blocks: tuple[int, ...], num_drafts: int = 0) -> Work:
    request = Request("0", (1,), SamplingParams(), BlockTable(BlockAllocator(1), 1))
    return Work(request, start, (0,) * (end - start), num_drafts, (), blocks[: -(-end // SIZE)], True)


def attend(pool: KiviPool, pieces: list[tuple[Tensor, Work]], window: int | None = None) -> list[Tensor]:
    """What the queries of each piece read in one pass; `[3, tokens, heads, head_dim]` of the whole text is given."""
    q, k, v = torch.cat([text[:, work.start : work.end] for text, work in pieces], 1)
    read = KiviAttention(pool, tuple(work for _, work in pieces))(1, q, k, v, window)
    return list(read.split([len(work.tokens) for _, work in pieces]))


def lab_13(bits: int, text: Tensor, window: int | None = None) -> Tensor:
    """Token by token, through lab 13's caches: its keys wait for a full group, its values are quantized one by one."""
    batch = text.transpose(1, 2)[:, None]
    keys, values = KiviCache(bits, SIZE, 1), KiviCache(bits, DIM, 0)
    rows = []
    for place in range(text.shape[1]):
        q, k, v = (part[:, :, place : place + 1] for part in batch)
        # Its group is one number for tokens and for channels, so that a cache serves for keys and one for values.
        (seen_keys, _), (_, coded) = keys.append(k, k), values.append(v, v)
        own = place // SIZE * SIZE
        seen_values = torch.cat((coded[:, :, :own], batch[2][:, :, own : place + 1]), 2)
        first = 0 if window is None else max(0, place + 1 - window)
        rows.append(F.scaled_dot_product_attention(q, seen_keys[:, :, first:], seen_values[:, :, first:])[0, :, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("bits", BITS)
def test_queries_read_what_lab_13s_cache_holds(bits: int, window: int | None) -> None:
    text = numbers(19, seed=1)
    expected = lab_13(bits, text, window)
    blocks = (7, 2, 9, 0, 5)
    for cuts in ([19], list(range(1, 20)), [3, 4, 9, 10, 16, 19], [8, 12, 13, 19]):
        pool, got, start = pool_of(bits), [], 0
        for end in cuts:
            pool.move([], {blocks[start // SIZE]} if start % SIZE else set())
            got += attend(pool, [(text, work_of(start, end, blocks))], window=window)
            start = end
        check_close(f"cut at {cuts}", torch.cat(got), expected.double(), scale=4.0, dtype=torch.float32)


@pytest.mark.parametrize("bits", BITS)
def test_requests_of_one_pass_read_their_own(bits: int) -> None:
    texts = [numbers(10, 2), numbers(7, 3), numbers(14, 4)]
    tables = [(4, 1, 8), (3, 11), (0, 6, 10, 2)]
    expected = [lab_13(bits, text) for text in texts]
    pool = pool_of(bits)
    first = [9, 6, 12]
    attend(pool, [(text, work_of(0, end, table)) for text, end, table in zip(texts, first, tables, strict=True)])
    pool.move([], {8, 11})
    pieces = [(text, work_of(end, text.shape[1], table)) for text, end, table in zip(texts, first, tables, strict=True)]
    for place, got in enumerate(attend(pool, pieces)):
        want = expected[place][first[place] :].double()
        check_close(f"request {place}", got, want, scale=4.0, dtype=torch.float32)


@pytest.mark.parametrize("kept", range(1, 7))
def test_rejected_drafts_leave_nothing_behind(kept: int) -> None:
    """A token at position 3 and five drafts fill a block and begin the next; as many stay as `kept` says."""
    text, wrong = numbers(14, 5), numbers(14, 6)
    drafted = torch.cat((text[:, : 3 + kept], wrong[:, 3 + kept :]), 1)
    pool, blocks = pool_of(2, max_drafts=5), (6, 1, 8, 3)
    attend(pool, [(text, work_of(0, 3, blocks))])
    pool.move([], {6})
    attend(pool, [(drafted, work_of(3, 9, blocks, num_drafts=5))])
    start, got = 3 + kept, []
    for end in range(start + 1, 15):
        pool.move([], {blocks[(end - 1) // SIZE]} if (end - 1) % SIZE else set())
        got += attend(pool, [(text, work_of(end - 1, end, blocks))])
    check_close("after the drafts", torch.cat(got), lab_13(2, text)[start:].double(), scale=4.0, dtype=torch.float32)


def test_moves_take_pages_along() -> None:
    text, other = numbers(9, 7), numbers(9, 8)
    pool, expected = pool_of(4, max_requests=2), lab_13(4, text)
    attend(pool, [(text, work_of(0, 6, (1, 2)))])
    # A fork: its partly filled block is copied; then the first of them goes to host memory, and comes back elsewhere.
    pool.move([Move(MoveKind.COPY, 2, 3), Move(MoveKind.OUT, 1, 0), Move(MoveKind.OUT, 2, 1)], {3})
    pool._pages[:, :, pool._free_pages] = torch.nan
    forked = attend(pool, [(text, work_of(6, 9, (1, 3, 5)))])
    attend(pool, [(other, work_of(0, 6, (2, 6)))])
    pool.move([Move(MoveKind.IN, 0, 7), Move(MoveKind.IN, 1, 8)], {8})
    pool._pages[:, :, pool._free_pages] = torch.nan
    back = attend(pool, [(text, work_of(6, 9, (7, 8, 9)))])
    for name, got in (("fork", forked), ("back from host memory", back)):
        check_close(name, got[0], expected[6:].double(), scale=4.0, dtype=torch.float32)
    # A full block takes the place of an open one in host memory, and comes back without its page.
    pool.move([Move(MoveKind.OUT, 7, 1), Move(MoveKind.IN, 1, 10)], set())
    assert not pool._page_of


def test_pages_are_given_back() -> None:
    pool, text = pool_of(4, max_requests=1), numbers(12, 9)
    for number in range(20):  # as many texts as there is room for, one after the other, none of them to its block's end
        blocks = (number % 12, (number + 1) % 12)
        pool.move([], set())
        attend(pool, [(text, work_of(0, 6, blocks))])
        pool.move([], {blocks[1]})
        attend(pool, [(text, work_of(6, 7, blocks))])
    assert len(pool._page_of) + len(pool._free_pages) == 1


def test_bytes() -> None:
    layers, tokens, ranges = 2, 12 * SIZE * HEADS, 2 * 2
    pages = layers * 2 * 3 * SIZE * HEADS * DIM * 4
    for bits in BITS:
        codes = 2 * tokens * DIM * bits // 8
        # A range for each channel of a block's keys, and one for the 32 channels of a token's values.
        expected = layers * (codes + 12 * HEADS * DIM * ranges + tokens * ranges)
        assert pool_of(bits).num_bytes == expected + pages
        assert pool_of(bits).num_bytes_per_token == expected / (12 * SIZE)
    assert pool_of(4, max_drafts=5).num_bytes - pool_of(4).num_bytes == 2 * pages  # drafts may reach two blocks more


def test_the_engine_tells_its_bytes(make_engine: Any) -> None:
    limits = dict(max_running=3, token_budget=64, num_blocks=96, block_size=32)
    plain = make_engine(**limits).kv_bytes_per_token * 96 / 97  # without the block that rows of nobody write to
    for name, bits in (("kivi4", 4), ("kivi2", 2)):
        # A range of 32 bits for 32 keys of a channel, and one for the 8 values of a token's head; three pages.
        expected = plain * ((bits + (1 + 4) / 2) / 32 + 3 / 96)
        assert make_engine(kv_dtype=name, **limits).kv_bytes_per_token == pytest.approx(expected)


def served(engine: Engine, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[tuple[int, ...]]:
    answers = engine.generate(prompts, params)
    engine.check_idle()
    return [several[0].tokens for several in answers]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(dict(max_running=1, token_budget=64), id="one at a time"),
        pytest.param(dict(token_budget=5, max_running=4), id="prompts in pieces"),
        pytest.param(dict(max_chunk=3), id="small chunks"),
        pytest.param(dict(num_blocks=13, max_running=4, token_budget=64), id="preempted by recompute"),
        pytest.param(
            dict(num_blocks=13, num_host_blocks=40, preemption="swap", max_running=4, token_budget=64),
            id="preempted by swap",
        ),
        pytest.param(dict(prefix_cache="radix"), id="radix cache"),
        pytest.param(dict(num_drafts=3), id="speculative"),
        pytest.param(dict(num_drafts=11, token_budget=64, max_running=4), id="drafts beyond a block"),
        pytest.param(
            dict(num_drafts=3, num_blocks=13, num_host_blocks=40, preemption="swap", max_running=4, token_budget=64),
            id="speculative, preempted by swap",
        ),
    ],
)
def test_how_it_is_served_changes_nothing(make_engine: Any, name: str, limits: dict[str, Any]) -> None:
    limits = dict(limits)
    alone = [served(make_engine(prefix_cache="none", kv_dtype=name, block_size=4), [one])[0] for one in PROMPTS]
    if num_drafts := limits.pop("num_drafts", None):
        texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, alone, strict=True)]
        limits["speculation"] = SpeculationConfig(lambda: Oracle(texts), num_drafts)
    engine = make_engine(kv_dtype=name, block_size=4, **limits)
    for _ in range(2):  # the second time with whatever the cache has kept
        assert served(engine) == alone
    if "num_blocks" in limits:
        assert engine.metrics.num_preemptions > 0
    if num_drafts:
        assert 0 < engine.metrics.num_accepted_tokens < engine.metrics.num_drafted_tokens


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_only_whole_blocks_are_found_again(make_engine: Any, prefix_cache: str) -> None:
    engine = make_engine(prefix_cache=prefix_cache, block_size=4, kv_dtype="kivi4")
    served(engine, [PROMPTS[2]])
    assert engine.generate([PROMPTS[2][:35]], PARAMS)[0][0].num_cached_tokens == 32
    alone = make_engine(block_size=4, kv_dtype="kivi4", prefix_cache="none")
    assert served(engine, [PROMPTS[2][:35]]) == served(alone, [PROMPTS[2][:35]])


@pytest.mark.parametrize("name", FORMATS)
def test_samples_and_beams_copy_what_they_write_to(make_engine: Any, name: str) -> None:
    params = replace(PARAMS, temperature=1.0, seed=4, n=3)
    answers = make_engine(block_size=4, kv_dtype=name).generate([PROMPTS[2]], params)[0]
    for index, answer in enumerate(answers):
        alone = replace(params, n=1, seed=4 + index)
        assert answer.tokens == served(make_engine(block_size=4, kv_dtype=name), [PROMPTS[2]], alone)[0]
    wanted = BeamSearchParams(3, 9, num_answers=3, ignore_eos=True)
    roomy, tight = make_engine(block_size=4, kv_dtype=name), make_engine(
        block_size=4, kv_dtype=name, num_blocks=13, max_running=3, token_budget=64, num_host_blocks=20,
        preemption="swap", prefix_cache="none",
    )  # fmt: skip
    found = [[one.tokens for one in engine.beam_search([PROMPTS[2]], wanted)[0]] for engine in (roomy, tight)]
    assert found[0] == found[1]
    assert tight.metrics.num_preemptions > 0


def test_what_does_not_suit_is_refused(tiny_model: Model) -> None:
    config = EngineConfig(SchedulerConfig(), num_blocks=4, kv_dtype="kivi4")
    assert not Engine(tiny_model, config).has_work
    with pytest.raises(ValueError, match="this model keeps a latent"):
        KiviPool(KVShape(2, 1, 1, 16), 4, 4, SIZE, 1)
    with pytest.raises(ValueError, match="head_dim 18 is no multiple"):
        KiviPool(KVShape(2, 2, 1, 18), 2, 4, SIZE, 1)
    for wanted in (dict(cuda_graphs=True), dict(compile=True)):
        with pytest.raises(ValueError, match="leave them off with keys and values in codes"):
            Engine(tiny_model, replace(config, **wanted))
    with pytest.raises(ValueError, match="attention 'triton' can't be had for KIVI"):
        Engine(tiny_model, replace(config, attention="triton"))
    with pytest.raises(ValueError, match="'kivi2' runs on device 'cpu' only, got 'cuda'"):
        kv_memory("kivi2", SHAPE, 4, SIZE, 0, torch.float32, torch.device("cuda"), 1, 0)


@pytest.mark.parametrize("drafter", ["lookahead", "medusa", "eagle-2", lambda: Bushy([])])
def test_drafts_that_branch_are_refused(tiny_model: Model, drafter: Any) -> None:
    config = EngineConfig(num_blocks=4, speculation=SpeculationConfig(drafter))
    with pytest.raises(ValueError, match=r"drafts of .* may branch, and KIVI.*take a drafter of lines, such as n-gram"):
        Engine(tiny_model, replace(config, kv_dtype="kivi4"))


def test_drafters_read_hidden_states_beside_codes() -> None:
    """They lie in blocks of their own, which are written to wherever the codes go."""
    model, texts = load("smollm2"), ["1, 2, 3, 4, 5, 6,", "def add(a, b):"]
    engine, plain = (
        Engine(model, EngineConfig(num_blocks=32, kv_dtype="kivi4", speculation=drafter)) for drafter in ("mtp", None)
    )
    assert [one[0].tokens for one in engine.generate(texts, PARAMS)] == [
        one[0].tokens for one in plain.generate(texts, PARAMS)
    ]
    assert engine.metrics.num_accepted_tokens > 0


def test_numbers_too_large_for_a_range_are_the_largest_it_has() -> None:
    pool = pool_of(4)
    k = torch.linspace(-1e6, 1e6, SIZE * HEADS * DIM).reshape(1, SIZE, HEADS, DIM)
    pool.seal(0, torch.tensor([3]), k, k)
    keys, values = pool.read(0, torch.tensor([3]))
    assert bool(keys.isfinite().all()) and bool(values.isfinite().all())
    check_equal("signs", keys.sign()[0], k[0].sign()[0])
