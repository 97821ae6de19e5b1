"""What bookkeeping costs, by counting: not more for long texts, full caches or many that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from solutions.engine.attention.paged_attention import PagedAttention
from solutions.engine.kv_manager import KVManager
from solutions.engine.memory.kv_pool import KVPool
from solutions.engine.models.kv_shape import KVShape
from solutions.engine.request import FinishReason, Request
from solutions.engine.sampling_params import SamplingParams
from solutions.engine.scheduler import Scheduler, SchedulerConfig
from solutions.engine.step import Step, Work
from solutions.kv_cache.block_table import BlockTable
from solutions.kv_cache.blocks import BlockAllocator

SIZE = 4


class CountingList(list[int]):
    """Blocks of a table that count how often one of them is looked at."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.reads += len(self)
        return super().__iter__()


@pytest.mark.parametrize("length", [10, 10_001])
def test_a_new_token_touches_no_older_blocks(length: int) -> None:
    table = BlockTable(BlockAllocator(4000), SIZE)
    table.append(length)
    table._blocks = blocks = CountingList(table._blocks)
    for _ in range(2 * SIZE):
        table.append(1)
    # The block of the new token, and the last block when it is asked who else owns it.
    assert blocks.reads <= 2 * 2 * SIZE


class Asked:
    """Counts how often a pool is asked about one of its blocks."""

    def __init__(self, memory: KVManager) -> None:
        self.count = 0
        allocator = memory._pool._allocator
        asked = allocator.ref_count

        def ref_count(block: int) -> int:
            self.count += 1
            return asked(block)

        allocator.ref_count = ref_count  # type: ignore[method-assign]


def request_of(memory: KVManager, number: int, length: int, max_tokens: int = 50) -> Request:
    """Prompts that have nothing in common."""
    prompt = tuple(1000 * number + place for place in range(length))
    return Request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), memory.new_table())


def run(scheduler: Scheduler, steps: int) -> Step:
    """Steps of a model that always writes token 5; the last of them."""
    for _ in range(steps):
        step = scheduler.schedule()
        scheduler.commit(step, {work.request: [5] for work in step.work if work.gives_token})
    return step


def full_of_old_texts(cache: str, num_blocks: int) -> KVManager:
    """Memory in which every block is cached, and none is held."""
    memory = KVManager(num_blocks, SIZE, cache)
    scheduler = Scheduler(SchedulerConfig(max_running=1, token_budget=40 * SIZE), memory)
    for number in range(num_blocks // 40):
        request = request_of(memory, number, 40 * SIZE - 1)
        scheduler.add(request)
        run(scheduler, 2)
        scheduler.finish(request, FinishReason.STOP)
    assert memory.num_cached == num_blocks == memory.num_free
    return memory


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_nobody_looks_for_blocks_that_could_be_had(cache: str) -> None:
    memory = full_of_old_texts(cache, 400)
    asked = Asked(memory)
    assert memory.num_free == 400 and memory.fits(request_of(memory, 99, 8), 8)
    assert asked.count == 0


def test_eviction_looks_at_few_blocks_for_each_that_it_gives() -> None:
    looked = []
    for num_blocks in (640, 6400):
        memory = full_of_old_texts("hash", num_blocks)
        table, asked = memory.new_table(), Asked(memory)
        table.append(num_blocks * SIZE // 2)
        asked.count = 0
        for _ in range(100):
            table.append(SIZE)
        looked.append(asked.count / 100)
    # Taking a block asks about the last one; the rest is what eviction looked at.
    assert max(looked) <= 4, f"{looked} blocks were looked at for one"


class Watched(Request):
    """A request that counts how often anything about it is looked at."""

    looks: Counter[str]

    def __getattribute__(self, name: str) -> Any:
        if name != "looks" and not name.startswith("__"):
            looks = object.__getattribute__(self, "__dict__").get("looks")
            if looks is not None:
                looks["all"] += 1
        return super().__getattribute__(name)


def test_a_step_costs_the_same_however_many_wait() -> None:
    counts = []
    for num_waiting in (10, 3000):
        memory = KVManager(400, SIZE)
        scheduler = Scheduler(SchedulerConfig(max_running=8, token_budget=64), memory)
        for number in range(8):
            scheduler.add(request_of(memory, number, 5))
        run(scheduler, 4)
        looks: Counter[str] = Counter()
        for number in range(8, 8 + num_waiting):
            plain = request_of(memory, number, 5)
            watched = Watched(plain.request_id, plain.prompt, plain.params, plain.table)
            scheduler.add(watched)
            watched.looks = looks
        looks.clear()
        step = run(scheduler, 20)
        assert len(step.work) == 8 and scheduler.num_waiting == num_waiting
        counts.append(looks["all"])
    assert counts[0] == counts[1] <= 20 * 5, f"{counts} looks at waiting requests in 20 steps"


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_writing_does_not_search_the_cache(cache: str) -> None:
    """A text goes to the cache when its prompt is read and when it ends, not with every block that it fills."""
    memory = KVManager(400, SIZE, cache)
    inserted: list[int] = []
    insert = memory._cache.insert  # type: ignore[union-attr]

    def counting(tokens: Sequence[int], *more: Any, **names: Any) -> int:
        inserted.append(len(tokens))
        return insert(tokens, *more, **names)

    memory._cache.insert = counting  # type: ignore[union-attr, method-assign]
    scheduler = Scheduler(SchedulerConfig(max_running=2, token_budget=200), memory)
    request = request_of(memory, 1, 10 * SIZE, max_tokens=300)
    scheduler.add(request)
    run(scheduler, 1)
    assert inserted == [SIZE, 10 * SIZE]
    run(scheduler, 200)
    assert len(inserted) == 2
    scheduler.finish(request, FinishReason.STOP)
    assert inserted[2:] == [60 * SIZE] and memory.num_cached == 60


def test_a_long_text_does_not_make_its_neighbours_long() -> None:
    shape = KVShape(num_layers=1, num_parts=2, num_heads=1, head_dim=2)
    pool, read = KVPool(shape, 1000, SIZE), list[int]()
    plain = pool.read

    def counting(layer: int, blocks: Tensor | slice) -> tuple[Tensor, ...]:
        parts = plain(layer, blocks)
        read.append(parts[0].numel() // 2)
        return parts

    pool.read = counting  # type: ignore[method-assign]
    memory, work = KVManager(1000, SIZE), list[Work]()
    lengths = [5, 11, 1999, 6, 12, 9, 40]
    for number, length in enumerate(lengths):
        request = request_of(memory, number, length)
        slots, _ = memory.reserve(request, length)
        work.append(Work(request, length - 1, (1,), 0, (slots[-1],), tuple(request.table.blocks), True))
    row = torch.ones(len(work), 1, 2)
    PagedAttention(pool, tuple(work))(0, row, row, row)
    assert sum(lengths) <= sum(read) <= 4 * sum(lengths)
