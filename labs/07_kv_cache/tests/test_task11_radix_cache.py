"""Task 11b: the cache: hits to the token, tails with owners, and nothing evicted that somebody reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close
from grader.judge.radix_schedules import RadixSchedule
from grader.judge.refusal import check_refused
from grader.judge.scripted_pool import RecordingPool
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.specs import TinyLlama

pytestmark = pytest.mark.task(11)

CONFIG = ModelConfig.tiny(num_layers=2)
PROMPT = [7, 0, 60, 31, 31, 2, 44, 19, 5, 8]


class Cache:
    """A radix cache on the judge's own allocator, so that task 7 can't decide task 11."""

    def __init__(self, lab: Any, num_blocks: int = 12, block_size: int = 4) -> None:
        self.pool = RecordingPool(num_blocks)
        self.handle = lab.RadixCache(self.pool.spec(), block_size)
        self.block_size = block_size

    def fill(self, tokens: list[int], **names: str) -> list[int]:
        """A sequence comes, is computed, cached, and goes; returns its blocks."""
        blocks = self.pool.allocate(-(-len(tokens) // self.block_size))
        self.handle.insert(tokens, blocks, **names)
        self.drop(blocks)
        return blocks

    def look(self, tokens: list[int], **names: str) -> tuple[list[int], int]:
        """What a prompt would hit; the references are given back at once."""
        hit = self.handle.match(tokens, **names)
        assert isinstance(hit, tuple) and len(hit) == 2, f"match must return blocks and a length, got {hit!r}"
        self.drop(hit[0])
        return hit

    def drop(self, blocks: list[int]) -> None:
        """A sequence gives its references up."""
        for block in blocks:
            self.pool.free(block)

    def owners(self, blocks: list[int]) -> list[int]:
        """How many owners each block has."""
        return [self.pool.owners[block] for block in blocks]


def test_a_shared_prefix_hits_to_the_token(lab: Any) -> None:
    cache = Cache(lab)
    blocks = cache.fill(PROMPT)
    for shared in range(len(PROMPT) + 1):
        hit = cache.look([*PROMPT[:shared], 50, 51])
        right = (blocks[: -(-shared // 4)], shared)
        assert hit == right, (
            f"a prompt that shares {shared} tokens with a cached one of 10 hit {hit}, right is {right}: the last block "
            "may be used in part, and a tail is cached, too"
        )


def test_one_token_of_a_prompt_is_left_to_compute(lab: Any) -> None:
    cache = Cache(lab)
    blocks = cache.fill(PROMPT)
    for length in (10, 9, 8, 5, 4, 2, 1):
        hit = cache.look(PROMPT[:length])
        right = (blocks[: -(-(length - 1) // 4)], length - 1)
        assert hit == right, (
            f"of a prompt of {length} tokens, all cached, {hit} was hit, right is {right}: the last token is computed, "
            "since its logits are wanted, and no reference is taken to a block that holds nothing else"
        )
    assert cache.look([*PROMPT, 1]) == (blocks, 10), "with one token more all of the ten are hit"


def test_a_hit_is_owned_until_it_is_given_back(lab: Any) -> None:
    cache = Cache(lab)
    blocks = cache.fill(PROMPT)
    assert cache.owners(blocks) == [1, 1, 1], f"the cache owns its blocks, the tail too; owners {cache.owners(blocks)}"
    first, second = cache.handle.match([*PROMPT, 1]), cache.handle.match(PROMPT[:7])
    assert (first, second) == ((blocks, 10), (blocks[:2], 6)), f"two prompts hit {first} and {second}"
    assert cache.owners(blocks) == [3, 3, 2], (
        f"each hit takes a reference to each of its blocks, the partly used one too; owners {cache.owners(blocks)}"
    )
    assert cache.handle.evict(9) == 0, "nothing may go: all of it is being read"
    cache.drop(first[0])
    assert cache.handle.num_free == 10 and cache.handle.evict(9) == 1, "the tail is nobody's now, the rest is read"
    cache.drop(second[0])
    assert cache.handle.evict(9) == 2 and cache.pool.num_free() == 12, "without readers all can go, and is free then"
    assert cache.look(PROMPT) == ([], 0), "an evicted block must not be found: somebody else writes to it"
    assert cache.handle.num_cached == 0, f"{cache.handle.num_cached} blocks are said to be cached"


def test_the_cache_owns_what_it_took_and_nothing_else(lab: Any) -> None:
    cache = Cache(lab)
    own = cache.pool.allocate(3)
    took = cache.handle.insert(PROMPT, own)
    assert (took, cache.handle.num_cached) == (3, 3), f"10 tokens lie in 3 blocks of 4; insert took {took}"
    assert cache.owners(own) == [2, 2, 2], f"the sequence and the cache own each block; owners {cache.owners(own)}"
    for again in (PROMPT, PROMPT[:9], PROMPT[:4]):
        took = cache.handle.insert(again, own)
        assert (took, cache.owners(own)) == (0, [2, 2, 2]), f"cached again, {took} blocks were taken: {again}"
    twin = cache.pool.allocate(3)
    took = cache.handle.insert([*PROMPT[:8], 1, 2], twin)
    assert (took, cache.owners(twin)) == (1, [1, 1, 2]), (
        f"the first two blocks are cached already, so the cache takes the third only; it took {took}, owners "
        f"{cache.owners(twin)}"
    )
    cache.drop(twin)
    assert cache.owners(twin) == [0, 0, 1], "the duplicates are back in the pool when their sequence has gone"
    assert cache.look([*PROMPT[:8], 1, 2, 3]) == ([*own[:2], twin[2]], 10), "the newcomer's tail hangs behind them"


def test_a_tail_that_is_continued_goes_back_to_the_pool(lab: Any) -> None:
    cache = Cache(lab, num_blocks=6)
    short = cache.fill(PROMPT[:6])
    reader = cache.handle.match(PROMPT[:7])
    assert reader == (short, 6), f"a prompt hit {reader}, right is {(short, 6)}"
    own = cache.pool.allocate(3)
    took = cache.handle.insert(PROMPT, own)
    assert (took, cache.handle.num_cached) == (2, 3), (
        f"one whole block is cached, the tail of 2 tokens is continued: 2 blocks are new and 3 cached; insert took "
        f"{took}, num_cached is {cache.handle.num_cached}"
    )
    assert cache.owners(short) == [2, 1], "the old tail belongs to its reader alone, the cache has given it up"
    cache.drop(reader[0])
    cache.drop(own)
    assert cache.pool.num_free() == 3, f"3 of 6 blocks are cached, {cache.pool.num_free()} are free"
    assert cache.look([*PROMPT, 1]) == ([short[0], *own[1:]], 10), "the fuller blocks are found"
    assert cache.handle.evict(9) == 3 and cache.pool.num_free() == 6, "everything can be evicted"


def test_a_tail_can_grow_in_its_own_block(lab: Any) -> None:
    cache = Cache(lab, num_blocks=4)
    own = cache.pool.allocate(2)
    for block in own:
        cache.pool.share(block)
    # A fork of 8 tokens was truncated to 6, cached and freed; the sequence itself knows the rest of the last block.
    assert cache.handle.insert(PROMPT[:6], own) == 2, "the fork's whole block and its tail are new"
    cache.drop(own)
    took = cache.handle.insert(PROMPT[:8], own)
    assert (took, cache.handle.num_cached, cache.owners(own)) == (1, 2, [2, 2]), (
        f"the tail's block is taken for 4 tokens instead of 2: insert took {took}, {cache.handle.num_cached} are "
        f"cached, owners are {cache.owners(own)}; sequence and cache own each block once"
    )
    assert cache.look([*PROMPT[:8], 1]) == (own, 8), "all of the block can be found now"
    cache.drop(own)
    assert cache.handle.evict(9) == 2 and cache.pool.num_free() == 4, "both blocks can be evicted"


def test_adapters_and_salts_share_nothing(lab: Any) -> None:
    cache = Cache(lab, num_blocks=20)
    names: list[dict[str, str]] = [{}, {"salt": "x"}, {"adapter": "x"}, {"salt": ""}, {"adapter": "x", "salt": "x"}]
    blocks = []
    for index, name in enumerate(names):
        assert cache.look(PROMPT, **name) == ([], 0), f"{name} hit blocks of {names[:index]}"
        blocks.append(cache.fill(PROMPT, **name))
    for name, own in zip(names, blocks, strict=True):
        hit = cache.look([*PROMPT, 1], **name)
        assert hit == (own, 10), f"{name} found {hit}, right is {(own, 10)}"


def test_leaves_go_before_what_they_are_built_on(lab: Any) -> None:
    cache = Cache(lab, block_size=2)
    chain = cache.fill([1, 2, 3, 4, 5])
    branch = cache.fill([1, 2, 3, 4, 9, 9])
    cache.look([1, 2, 3, 4, 5, 6])
    for left, hit in ((3, (chain, 5)), (2, (chain[:2], 4)), (1, (chain[:1], 2)), (0, ([], 0))):
        assert cache.handle.evict(1) == 1, "one block was to be evicted"
        assert cache.handle.num_cached == left, f"{cache.handle.num_cached} blocks are cached, should be {left}"
        found = cache.handle.match([1, 2, 3, 4, 5, 6])
        cache.drop(found[0])
        assert found == hit, (
            f"a chain {chain} and a branch {branch[2:]} behind its second block, older: {found} is left of the chain, "
            f"right is {hit}"
        )
    assert cache.pool.num_free() == 12, "all blocks are free"


def test_a_reader_protects_what_its_block_is_built_on(lab: Any) -> None:
    cache = Cache(lab, num_blocks=6, block_size=2)
    chain = cache.fill([1, 2, 3, 4, 5])
    held = cache.handle.match([1, 2, 3, 9])
    assert held == (chain[:2], 3), f"the prompt hit {held}, right is {(chain[:2], 3)}"
    cache.pool.free(chain[0])  # a sequence that computed [1, 2] itself holds its own copy of that block
    assert cache.handle.num_free == 4, (
        f"3 blocks are free, and the tail can be evicted; num_free is {cache.handle.num_free}: the first block has no "
        "reader, but a block in use is built on it"
    )
    assert cache.handle.evict(5) == 1 and cache.look([1, 2, 3, 4, 7]) == (chain[:2], 4), "the chain stays whole"
    cache.pool.free(chain[1])
    assert cache.handle.num_free == 6 and cache.handle.evict(5) == 2, "now both can go"


def test_allocation_takes_free_blocks_first(lab: Any) -> None:
    cache = Cache(lab, num_blocks=6, block_size=2)
    chain = cache.fill([1, 2, 3, 4, 5])
    assert cache.handle.num_free == 6, f"all can be had, num_free is {cache.handle.num_free}"
    taken = cache.handle.allocate(2)
    assert len(set(taken)) == 2 and not set(taken) & set(chain), f"3 blocks are free, but {taken} were taken"
    assert cache.handle.num_cached == 3, "nothing had to be evicted for two blocks"
    taken += cache.handle.allocate(2)
    assert len(set(taken)) == 4 and cache.handle.num_cached == 2, (
        f"one block had to be evicted for the fourth; {cache.handle.num_cached} of 3 are cached, taken are {taken}"
    )
    check_refused("3 blocks where 2 can be had", lambda: cache.handle.allocate(3))
    assert cache.look([1, 2, 3, 4, 5, 6]) == (chain[:2], 4), "a refused allocate evicts nothing"
    taken += cache.handle.allocate(2)
    assert sorted(taken) == list(range(6)), f"every block was handed out once: {taken}"
    assert cache.handle.num_cached == 0 and cache.look([1, 2, 3, 4, 7]) == ([], 0), "what was given away is not found"
    assert all(cache.pool.owners[block] == 1 for block in taken), "a block handed out has one owner"


def test_refused_calls_leave_cache_and_pool_whole(lab: Any) -> None:
    cache = Cache(lab)
    own = cache.pool.allocate(4)
    assert cache.handle.insert(PROMPT[:6], own[:2]) == 2, "a good insert comes first"
    assert cache.handle.insert([3, 3], own[3:]) == 1, "and another"
    before = dict(cache.pool.owners)
    free = next(block for block, owners in cache.pool.owners.items() if owners == 0)
    for what, tokens, bad in (
        ("10 tokens in 2 blocks", PROMPT, own[:2]),
        ("a free block", PROMPT[:7], [own[0], free]),
        ("a free block behind a good one", [9, 9, 9, 9, 1], [own[2], free]),
        ("a block cached for other tokens", [9, 9], own[1:2]),
        ("a cached tail for other tokens", [*PROMPT[:5], 9, 9], own[:2]),
        ("a cached tail for the next block", [*PROMPT[:6], 9, 9, 9], [own[0], own[2], own[1]]),
        ("one block twice", [9, 9, 9, 9, 8], [own[2], own[2]]),
        ("no tokens", [], []),
        ("a token -1", [1, 2, 3, -1], [own[2]]),
    ):
        check_refused(what, lambda t=tokens, b=bad: cache.handle.insert(t, b))
        assert cache.pool.owners == before, f"insert of {what} was refused, but owners changed"
        assert cache.handle.num_cached == 3, f"insert of {what} was refused, but num_cached changed"
    check_refused("an empty prompt", lambda: cache.handle.match([]))
    check_refused("a prompt with a token -1", lambda: cache.handle.match([*PROMPT[:6], -1]))
    check_refused("evict(-1)", lambda: cache.handle.evict(-1))
    check_refused("allocate(-1)", lambda: cache.handle.allocate(-1))
    check_refused("blocks of 0 tokens", lambda: lab.RadixCache(cache.pool.spec(), 0))
    assert cache.pool.owners == before, "refused calls changed owners"
    cache.drop(own)
    assert cache.handle.evict(1) == 1 and cache.look([3, 3, 1])[1] == 2, "refused calls are no uses of older blocks"
    assert cache.look([9, 9, 9, 9, 1, 2]) == ([], 0), "a refused insert is found"
    assert cache.look(PROMPT) == (own[:1], 4), "what was cached before is still found"


@pytest.mark.integration
@pytest.mark.parametrize("first_seed", [0, 8])
def test_random_schedules_read_only_their_own_prefix(lab: Any, first_seed: int) -> None:
    hits = tails = 0
    for seed in range(first_seed, first_seed + 8):
        schedule = RadixSchedule(lab, seed)
        schedule.run(40)
        hits, tails = hits + schedule.hit_blocks, tails + schedule.hit_tails
    assert hits > 100 and tails > 20, f"{hits} blocks were hit, and {tails} times one in part: match finds too little"


@pytest.mark.integration
def test_the_owner_of_a_cached_tail_copies_it_before_it_goes_on(lab: Any) -> None:
    pool = lab.BlockAllocator(8)
    cache = lab.RadixCache(pool, 4)
    first = lab.BlockTable(cache, 4)
    first.append(6)
    cache.insert(PROMPT[:6], first.blocks)
    old = first.blocks
    slots, copies = first.append(1)
    assert copies == [(old[1], first.blocks[1])] and slots == [first.blocks[1] * 4 + 2], (
        f"the tail is cached, so its first owner copies it, too: copies {copies}, blocks {old} became {first.blocks}"
    )
    second = lab.BlockTable(cache, 4)
    blocks, length = cache.match([*PROMPT[:5], 50, 51])
    assert (blocks, length) == (old, 5), f"a hit inside the tail found {(blocks, length)}, right is {(old, 5)}"
    second.adopt(blocks)
    second.truncate(length)
    slots, copies = second.append(2)
    assert copies == [(old[1], second.blocks[1])] and slots == [second.blocks[1] * 4 + 1, second.blocks[1] * 4 + 2], (
        f"the reader copies the tail before it writes its own token: copies {copies}, slots {slots}"
    )
    assert cache.match([*PROMPT[:6], 9]) == (old, 6), "the tail is still found, as it was"
    for block in old:
        cache.free(block)
    first.free()
    second.free()
    assert (pool.num_free, cache.num_free) == (6, 8), f"free, and to be had: {(pool.num_free, cache.num_free)}"


def whole_run(tokens: list[int], dtype: torch.dtype) -> Tensor:
    """Logits of all tokens in one uncached run, `[tokens, vocab]`."""
    model = Decoder(CONFIG, random_weights(CONFIG, 1, dtype), dtype)
    return model(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0]


@pytest.mark.integration
def test_a_hit_inside_a_block_leaves_the_logits_as_they_are(lab: Any) -> None:
    pool, memory = lab.BlockAllocator(10), lab.PagedMemory(CONFIG, 10, 4)
    cache = lab.RadixCache(pool, 4)
    for prompt, hits in (
        (PROMPT, 0),
        (PROMPT, 9),
        ([*PROMPT[:6], 1, 2, 3], 6),
        ([*PROMPT, 4, 4, 4], 10),
        ([1, *PROMPT[1:]], 0),
        ([*PROMPT[:6], 1, 2, 9], 8),
        ([*PROMPT, 4, 5], 11),
    ):
        blocks, length = cache.match(prompt)
        assert length == hits, f"prompt {prompt} hit {length} tokens, should hit {hits}"
        store = lab.PagedSequence(memory, cache, blocks)
        store.truncate(length)
        got = lab.CachedDecoder(TinyLlama(CONFIG, 1), store).append(prompt[length:])
        reference = whole_run(prompt, torch.float64)[length:]
        check_close(
            f"logits behind a hit of {length} tokens",
            got,
            reference,
            scale=float(reference.abs().max()),
            dtype=torch.float32,
            plain=whole_run(prompt, torch.float32)[length:],
            advice="Somebody wrote into a block that others read, or a block was found under another's tokens.",
        )
        cache.insert(prompt, store.blocks)
        store.free()
    assert cache.num_free == 10, f"all sequences are gone; {cache.num_free} of 10 blocks can be had"
