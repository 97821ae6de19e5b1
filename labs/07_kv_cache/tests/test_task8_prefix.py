"""Task 8: prefix caching: what is found is right, what is kept has owners, what is needed is given up in order."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.kv_schedules import Schedule
from grader.judge.numerics import check_close
from grader.judge.refusal import check_refused
from grader.judge.scripted_pool import RecordingPool
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.specs import TinyLlama

pytestmark = pytest.mark.task(8)

CONFIG = ModelConfig.tiny(num_layers=2)
PROMPT = [7, 0, 60, 31, 31, 2, 44, 19, 5, 8]


class Cache:
    """A prefix cache on the judge's own allocator, so that task 7 can't decide task 8."""

    def __init__(self, lab: Any, num_blocks: int = 12, block_size: int = 4, hash_block: Any = None) -> None:
        self.pool = RecordingPool(num_blocks)
        more = [] if hash_block is None else [hash_block]
        self.handle = lab.PrefixCache(self.pool.spec(), block_size, *more)
        self.block_size = block_size

    def fill(self, tokens: list[int], **names: str) -> list[int]:
        """A sequence comes, is computed, cached, and goes; returns its blocks."""
        blocks = self.pool.allocate(-(-len(tokens) // self.block_size))
        self.handle.insert(tokens, blocks, **names)
        self.drop(blocks)
        return blocks

    def look(self, tokens: list[int], **names: str) -> list[int]:
        """What a prompt would hit; the references are given back at once."""
        blocks = self.handle.match(tokens, **names)
        assert isinstance(blocks, list), f"match must return a list of blocks, got {blocks!r}"
        self.drop(blocks)
        return blocks

    def drop(self, blocks: list[int]) -> None:
        """A sequence gives its references up."""
        for block in blocks:
            self.pool.free(block)


def one_hash(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """The worst hash of all."""
    return b"same"


def sum_hash(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """A hash that knows no order, and of the parent only its last byte."""
    return bytes([(sum(tokens) + parent[-1]) % 4])


def test_a_block_s_hash_depends_on_all_before_it(lab: Any) -> None:
    root = lab.root_hash(None, None)
    assert isinstance(root, bytes) and root, f"a hash is bytes, got {root!r}"
    cases = {}
    chains: list[list[tuple[int, ...]]] = [
        [(1, 23)], [(12, 3)], [(23, 1)], [(1, 2, 3)], [(1, 2), (3,)], [(1,), (2, 3)], [(123,)], [(1,), (23,)],
        [(256, 1)], [(0, 1)], [(1, 0)], [(1,)], [(0, 0, 1)], [(2**40, 1)], [(1, 2**40)], [(2, 2), (1, 23)],
    ]  # fmt: skip
    for chain in chains:
        key = root
        for tokens in chain:
            key = lab.block_hash(key, tokens)
        assert isinstance(key, bytes), f"block_hash must return bytes, got {key!r}"
        assert key not in cases, f"the chains {cases[key]} and {chain} have one hash"
        cases[key] = chain
    assert lab.block_hash(root, (1, 23)) == lab.block_hash(lab.root_hash(None, None), (1, 23)), "equal, hence found"


def test_the_root_tells_adapters_from_salts(lab: Any) -> None:
    names = [None, "", "a", "b", "None", "ab", "a', 'salt', 'b"]
    seen: dict[bytes, tuple[str | None, str | None]] = {}
    for pair in product(names, names):
        root = lab.root_hash(*pair)
        assert isinstance(root, bytes), f"root_hash must return bytes, got {root!r}"
        assert root not in seen, f"(adapter, salt) = {seen[root]} and {pair} have one root: they would share blocks"
        seen[root] = pair
    assert lab.root_hash("a", "b") in seen, "equal names must give equal roots"


def test_a_shared_prefix_is_found_block_by_block(lab: Any) -> None:
    cache = Cache(lab)
    blocks = cache.fill(PROMPT)
    for shared in range(len(PROMPT) + 1):
        hit = cache.look([*PROMPT[:shared], 50, 51, 52, 53, 54])
        assert hit == blocks[: shared // 4], (
            f"a prompt that shares {shared} tokens with a cached one hit blocks {hit}, should hit "
            f"{blocks[: shared // 4]}: full blocks of 4 in order, as far as everything is equal"
        )


def test_one_token_is_always_left_to_compute(lab: Any) -> None:
    cache = Cache(lab)
    blocks = cache.fill(PROMPT[:8])
    for length, hits in ((8, 1), (9, 2), (7, 1), (5, 1), (4, 0), (3, 0), (1, 0)):
        prompt = [*PROMPT[:8], 50][:length]
        hit = cache.look(prompt)
        assert hit == blocks[:hits], (
            f"a prompt of {length} tokens, all cached, hit {len(hit)} blocks of 4, should hit {hits}: without a token "
            "to compute there are no logits, and only whole blocks can hit"
        )
    cache = Cache(lab, block_size=1)
    blocks = cache.fill(PROMPT[:3])
    assert cache.look(PROMPT[:3]) == blocks[:2], "blocks of one token: all but the last can hit"


def test_only_full_blocks_are_cached(lab: Any) -> None:
    cache = Cache(lab)
    for length in range(1, 10):
        tokens = [length, *PROMPT[: length - 1]]
        blocks = cache.pool.allocate(-(-length // 4))
        before = cache.handle.num_cached
        new = cache.handle.insert(tokens, blocks)
        assert new == cache.handle.num_cached - before == length // 4, (
            f"{length} tokens fill {length // 4} blocks of 4; insert returned {new} and num_cached grew by "
            f"{cache.handle.num_cached - before}"
        )
        counts = [cache.pool.owners[block] for block in blocks]
        wanted = [2] * (length // 4) + [1] * (len(blocks) - length // 4)
        assert counts == wanted, f"owners are {counts}, should be {wanted}: the cache owns what it keeps, nothing else"
        cache.drop(blocks)
        cache.handle.evict(9)


def test_equal_tokens_behind_another_start_are_a_miss(lab: Any) -> None:
    cache = Cache(lab)
    blocks = cache.fill([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.look([1, 2, 3, 4, 5, 6, 7, 8, 9]) == blocks, "the cached prompt itself must hit"
    assert cache.look([9, 2, 3, 4, 5, 6, 7, 8, 9]) == [], "one changed token at the start ruins every block behind it"
    assert cache.look([5, 6, 7, 8, 1, 2, 3, 4, 9]) == [], "blocks in another order are another prefix"
    assert cache.look([5, 6, 7, 8, 9]) == [], "a block from the middle is no prefix"
    other = cache.fill([9, 9, 9, 9, 5, 6, 7, 8])
    assert cache.look([9, 9, 9, 9, 5, 6, 7, 8, 1]) == other, "the same tokens behind another start have their own block"
    assert cache.look([1, 2, 3, 4, 5, 6, 7, 8, 9]) == blocks, "and leave the first one alone"


@pytest.mark.parametrize("hash_block", [one_hash, sum_hash])
def test_a_collision_is_a_miss(lab: Any, hash_block: Any) -> None:
    cache = Cache(lab, block_size=2, hash_block=hash_block)
    first = cache.fill([1, 3])
    assert cache.look([1, 3, 9]) == first, "a lone block with any hash must hit"
    assert cache.look([3, 1, 9]) == [], "other tokens with the same hash must miss: compare the tokens"
    assert cache.look([1, 3, 1, 3, 9])[:1] == first, "what is right in front of a collision still hits"
    other = cache.pool.allocate(1)
    new = cache.handle.insert([3, 1], other)
    found = cache.look([3, 1, 9])
    assert (new, found) in ((0, []), (1, other)), f"insert of a colliding block said {new}, match then found {found}"
    hit = cache.look([1, 3, 9])
    assert hit in (first, []), f"after a colliding insert [1, 3] found {hit}, which isn't its block {first}"
    kept = cache.pool.owners[other[0]] - 1 + cache.pool.owners[first[0]]
    assert kept == cache.handle.num_cached, f"{cache.handle.num_cached} blocks are cached, but the cache owns {kept}"


def test_a_collision_of_parents_is_a_miss(lab: Any) -> None:
    # [1, 3] and [2, 2] have one hash, so have their children; only what stands before tells them apart.
    cache = Cache(lab, block_size=2, hash_block=sum_hash)
    blocks = cache.fill([1, 3, 5, 6])
    assert cache.look([1, 3, 5, 6, 9]) == blocks, "the cached prompt itself must hit"
    assert cache.look([2, 2, 5, 6, 9]) == [], "another first block, and so nothing behind it can hit"
    cache.handle.evict(2)
    assert cache.handle.num_cached == 0, "both blocks could be evicted"
    chain = cache.fill([1, 3, 5, 6])
    # The first block is in use, so that only its child may go; then the other way round.
    held = cache.handle.match([1, 3, 9])
    cache.handle.evict(2)
    cache.drop(held)
    assert cache.look([1, 3, 5, 6, 9]) == chain[:1], "the second block was evicted, the first was in use"
    second = cache.pool.allocate(2)
    cache.handle.insert([2, 2, 5, 6], second)
    for prompt in ([2, 2, 5, 6, 9], [1, 3, 5, 6, 9]):
        hit = cache.look(prompt)
        right = {(2, 2): second, (1, 3): chain[:1]}[tuple(prompt[:2])]  # type: ignore[index]
        assert hit == right[: len(hit)], f"{prompt} found {hit}, which holds another prefix than its own"


def test_a_child_never_outlives_its_parent_in_another_s_name(lab: Any) -> None:
    # X = [1, 3] and Y = [2, 2] collide. If X could be evicted while its child stays, Y would inherit the child.
    cache = Cache(lab, num_blocks=6, block_size=2, hash_block=sum_hash)
    whole = cache.pool.allocate(2)
    cache.handle.insert([1, 3, 5, 6], whole)
    assert cache.look([1, 3, 5, 6, 9]) == whole, "a good start comes first"
    cache.pool.free(whole[0])  # somebody holds on to the child only
    cache.handle.evict(6)
    other = cache.pool.allocate(1)
    cache.handle.insert([2, 2], other)
    assert whole[1] not in cache.look([2, 2, 5, 6, 9]), (
        f"[2, 2, 5, 6] was given block {whole[1]}, which was computed behind [1, 3]"
    )


def test_namespaces_share_nothing(lab: Any) -> None:
    cache = Cache(lab, num_blocks=20)
    names: list[dict[str, str]] = [{}, {"salt": "x"}, {"adapter": "x"}, {"salt": "y"}, {"adapter": "x", "salt": "x"}]
    blocks = []
    for index, name in enumerate(names):
        assert cache.look(PROMPT, **name) == [], f"{name} hit blocks of {names[:index]}"
        blocks.append(cache.fill(PROMPT, **name))
    for name, own in zip(names, blocks, strict=True):
        hit = cache.look(PROMPT, **name)
        assert hit == own[:2], f"{name} found {hit}, should find {own[:2]}"
    cache = Cache(lab, hash_block=one_hash)
    own = cache.fill(PROMPT[:4], salt="x")
    assert cache.look(PROMPT, salt="x") == own, "a salted prompt must hit its own block"
    assert cache.look(PROMPT, adapter="x") == [] and cache.look(PROMPT) == [], "not even with equal hashes"


def test_a_hit_belongs_to_its_caller(lab: Any) -> None:
    cache = Cache(lab)
    blocks = cache.fill(PROMPT)
    assert [cache.pool.owners[block] for block in blocks] == [1, 1, 0], "the cache keeps its two full blocks alive"
    first = cache.handle.match(PROMPT)
    second = cache.handle.match(PROMPT)
    assert first == second == blocks[:2], f"two prompts hit {first} and {second}, should hit {blocks[:2]} both"
    assert [cache.pool.owners[block] for block in blocks[:2]] == [3, 3], "each match takes a reference to each block"
    assert cache.handle.evict(9) == 0, "what a sequence uses can't be evicted"
    cache.drop(first)
    cache.drop(second)
    assert cache.handle.evict(9) == 2 and cache.pool.num_free() == 12, "without sequences the blocks can go"
    assert cache.look(PROMPT) == [], "an evicted block must not be found: somebody else writes to it"


def test_of_two_equal_blocks_the_first_is_kept(lab: Any) -> None:
    cache = Cache(lab)
    first = cache.fill(PROMPT[:4])
    own = cache.pool.allocate(2)
    new = cache.handle.insert(PROMPT[:8], own)
    assert new == 1, f"the first block was cached before; insert of two blocks added 1, not {new}"
    assert cache.look([*PROMPT[:8], 1]) == [first[0], own[1]], "the chain continues with the newcomer's second block"
    assert [cache.pool.owners[block] for block in own] == [1, 2], "the newcomer's copy of the first is not the cache's"
    assert cache.handle.insert(PROMPT[:8], own) == 0, "inserting again adds nothing"
    assert [cache.pool.owners[block] for block in own] == [1, 2], "inserting again adds no reference"
    cache.drop(own)
    assert cache.pool.num_free() == 10, f"2 of 12 blocks are cached; {cache.pool.num_free()} are free"


def test_the_least_recently_used_goes_first(lab: Any) -> None:
    cache = Cache(lab, block_size=2)
    prompts = [[10 + i, 20 + i] for i in range(4)]
    blocks = [cache.fill(prompt)[0] for prompt in prompts]
    cache.look([*prompts[0], 1])
    cache.fill(prompts[2])
    assert cache.handle.num_cached == 4, f"{cache.handle.num_cached} blocks are cached, should be 4"
    for gone in (1, 3, 0, 2):
        assert cache.handle.evict(1) == 1, "one block was to be evicted"
        assert cache.pool.owners[blocks[gone]] == 0, (
            f"prompts 0 to 3 were cached in this order, then 0 matched and 2 inserted again; {prompts[gone]} should go "
            f"now, but free are {[i for i in range(4) if cache.pool.owners[blocks[i]] == 0]}"
        )


def test_a_chain_is_given_up_from_its_end(lab: Any) -> None:
    cache = Cache(lab, block_size=2)
    long = cache.fill([1, 2, 3, 4, 5, 6])
    cache.fill([1, 2, 3, 4, 9, 9])
    for left in (2, 2, 1, 0):
        assert cache.handle.evict(1) == 1, "one block was to be evicted"
        hit = cache.look([1, 2, 3, 4, 5, 6, 7])
        assert hit == long[:left], (
            f"of a chain of blocks {long} and a branch behind its second, {hit} is left to be found, should be "
            f"{long[:left]}: a block without those before it is of no use"
        )


def test_blocks_in_use_keep_their_parents(lab: Any) -> None:
    cache = Cache(lab, num_blocks=6, block_size=2)
    chain = cache.fill([1, 2, 3, 4, 5, 6])
    held = cache.handle.match([1, 2, 3, 4, 7])
    assert held == chain[:2], f"the prompt hit {held}, should hit {chain[:2]}"
    assert cache.handle.num_free == 4, f"3 blocks are free and 1 can be evicted; num_free is {cache.handle.num_free}"
    assert cache.handle.evict(5) == 1, "only the last block is nobody's"
    # A sequence that computed [1, 2] itself holds a copy of that block, and of the cached ones only the second.
    cache.pool.free(chain[0])
    assert cache.handle.num_free == 4, (
        "the first block has no sequence, but a cached block in use is built on it; num_free is "
        f"{cache.handle.num_free}"
    )
    assert cache.handle.evict(5) == 0 and cache.look([1, 2, 3, 4, 7]) == chain[:2], "the chain must stay whole"
    cache.pool.free(chain[1])
    assert cache.handle.num_free == 6 and cache.handle.evict(5) == 2, "now both can go"


def test_allocation_evicts_what_is_missing_and_no_more(lab: Any) -> None:
    cache = Cache(lab, num_blocks=6, block_size=2)
    chain = cache.fill([1, 2, 3, 4, 5, 6])
    assert cache.handle.num_free == 6, f"all can be had, num_free is {cache.handle.num_free}"
    taken = cache.handle.allocate(2)
    assert len(set(taken)) == 2 and not set(taken) & set(chain), f"3 blocks are free, but {taken} were taken"
    assert cache.handle.num_cached == 3, "nothing had to be evicted for two blocks"
    taken += cache.handle.allocate(2)
    assert len(set(taken)) == 4 and cache.handle.num_cached == 2, (
        f"one block had to be evicted for the fourth; {cache.handle.num_cached} of 3 are cached, taken are {taken}"
    )
    assert cache.look([1, 2, 3, 4, 5, 6, 7]) == chain[:2], "the rest of the chain is still found"
    check_refused("3 blocks where 2 can be had", lambda: cache.handle.allocate(3))
    assert cache.handle.num_cached == 2 and cache.look([1, 2, 3, 4, 7]) == chain[:2], "a refused allocate evicted"
    taken += cache.handle.allocate(2)
    assert sorted(taken) == list(range(6)), f"every block was handed out once: {taken}"
    assert cache.handle.num_cached == 0 and cache.look([1, 2, 3, 4, 7]) == [], "what was given away is not found"
    assert all(cache.pool.owners[block] == 1 for block in taken), "a block handed out has one owner"


def test_a_refused_insert_changes_nothing(lab: Any) -> None:
    cache = Cache(lab)
    blocks = cache.pool.allocate(3)
    assert cache.handle.insert(PROMPT[:4], blocks[:1]) == 1, "a good insert comes first"
    before = dict(cache.pool.owners)
    free = next(block for block, owners in cache.pool.owners.items() if owners == 0)
    for what, tokens, bad in (
        ("8 tokens and 1 block", PROMPT[:8], blocks[:1]),
        ("a free block", [*PROMPT[:4], 1, 2, 3, 4], [blocks[0], free]),
        ("a free block behind a good one", [9, 9, 9, 9, 1, 2, 3, 4], [blocks[1], free]),
        ("a block cached for other tokens", [9, 9, 9, 9], [blocks[0]]),
        ("one block twice", [9, 9, 9, 9, 8, 8, 8, 8], [blocks[1], blocks[1]]),
        ("no tokens", [], []),
        ("a token -1", [1, 2, 3, -1], [blocks[1]]),
    ):
        check_refused(what, lambda t=tokens, b=bad: cache.handle.insert(t, b))
        assert cache.pool.owners == before, f"insert of {what} was refused, but owners changed"
        assert cache.handle.num_cached == 1, f"insert of {what} was refused, but num_cached changed"
    check_refused("an empty prompt", lambda: cache.handle.match([]))
    check_refused("evict(-1)", lambda: cache.handle.evict(-1))
    check_refused("allocate(-1)", lambda: cache.handle.allocate(-1))
    assert cache.look([9, 9, 9, 9, 1, 2, 3, 4, 5]) == [], "a refused insert is found"
    assert cache.look([*PROMPT[:4], 1]) == blocks[:1], "what was cached before is still found"


@pytest.mark.integration
@pytest.mark.parametrize("first_seed", [0, 8])
def test_random_schedules_hit_only_their_own_prefix(lab: Any, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 8):
        Schedule(lab, seed, cached=True).run(40)


@pytest.mark.integration
def test_random_schedules_survive_collisions(lab: Any) -> None:
    def weak(allocator: Any, block_size: int) -> Any:
        return lab.PrefixCache(allocator, block_size, sum_hash)

    for seed in range(50, 54):
        schedule = Schedule(lab, seed, cached=True, make_cache=weak)
        schedule.collisions = True
        schedule.run(25)


@pytest.mark.integration
def test_a_shared_tail_is_copied_before_it_is_written(lab: Any) -> None:
    pool = lab.BlockAllocator(8)
    cache = lab.PrefixCache(pool, 4)
    first = lab.BlockTable(cache, 4)
    first.append(8)
    cache.insert(PROMPT[:8], first.blocks)
    old = first.blocks
    first.truncate(6)
    slots, copies = first.append(1)
    assert copies == [(old[1], first.blocks[1])] and slots == [first.blocks[1] * 4 + 2], (
        f"the second block is cached, so it isn't the sequence's to change: copies {copies}, blocks {old} became "
        f"{first.blocks}"
    )
    second = lab.BlockTable(cache, 4)
    second.adopt(cache.match([*PROMPT[:8], 50]))
    assert second.blocks == old, "the cached prefix is still found, in its old blocks"
    first.free()
    second.free()
    assert (pool.num_free, cache.num_free) == (6, 8), f"free, and to be had: {(pool.num_free, cache.num_free)}"


def whole_run(tokens: list[int], dtype: torch.dtype) -> Tensor:
    """Logits of all tokens in one uncached run, `[tokens, vocab]`."""
    model = Decoder(CONFIG, random_weights(CONFIG, 1, dtype), dtype)
    return model(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0]


@pytest.mark.integration
def test_a_hit_leaves_the_logits_as_they_are(lab: Any) -> None:
    pool, memory = lab.BlockAllocator(10), lab.PagedMemory(CONFIG, 10, 4)
    cache = lab.PrefixCache(pool, 4)
    for prompt, hits in ((PROMPT, 0), (PROMPT, 2), ([*PROMPT[:6], 1, 2, 3], 1), ([1, *PROMPT[1:]], 0), (PROMPT[:8], 1)):
        blocks = cache.match(prompt)
        assert len(blocks) == hits, f"prompt {prompt} hit {len(blocks)} blocks, should hit {hits}"
        store = lab.PagedSequence(memory, cache, blocks)
        got = lab.CachedDecoder(TinyLlama(CONFIG, 1), store).append(prompt[4 * hits :])
        reference = whole_run(prompt, torch.float64)[4 * hits :]
        check_close(
            f"logits behind a hit of {hits} blocks",
            got,
            reference,
            scale=float(reference.abs().max()),
            dtype=torch.float32,
            plain=whole_run(prompt, torch.float32)[4 * hits :],
        )
        cache.insert(prompt, store.blocks)
        store.free()
    assert cache.num_free == 10, f"all sequences are gone; {cache.num_free} of 10 blocks can be had"
