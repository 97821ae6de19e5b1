"""Task 7: the block allocator and block tables; who owns which block, and where each token lies."""

from __future__ import annotations

from typing import Any

import pytest

from grader.judge.kv_schedules import Schedule
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(7)


def blocks_for(length: int, block_size: int) -> int:
    """Blocks that hold so many tokens, counted one by one."""
    return len({position // block_size for position in range(length)})


def grown(lab: Any, length: int, block_size: int = 4, num_blocks: int = 8) -> tuple[Any, Any]:
    """An allocator and a table of so many tokens."""
    pool = lab.BlockAllocator(num_blocks)
    table = lab.BlockTable(pool, block_size)
    if length:
        table.append(length)
    return pool, table


def test_blocks_handed_out_were_free_and_differ(lab: Any) -> None:
    pool = lab.BlockAllocator(7)
    assert (pool.num_blocks, pool.num_free) == (7, 7), "a new pool is free throughout"
    taken: list[int] = []
    for count in (1, 3, 0, 2):
        new = pool.allocate(count)
        assert isinstance(new, list) and len(new) == count, f"allocate({count}) returned {new!r}"
        taken += new
        assert len(set(taken)) == len(taken), f"a block was handed out twice: {taken}"
        assert pool.num_free == 7 - len(taken), f"{len(taken)} of 7 blocks are taken, num_free says {pool.num_free}"
    assert all(pool.ref_count(block) == 1 for block in taken), "a new block has one owner"
    last = pool.allocate()
    assert sorted(taken + last) == list(range(7)), f"the pool holds the blocks 0 … 6, all usable; got {taken + last}"


def test_an_exhausted_pool_gives_all_or_nothing(lab: Any) -> None:
    pool = lab.BlockAllocator(5)
    taken = pool.allocate(3)
    check_refused("3 blocks where 2 are free", lambda: pool.allocate(3))
    assert pool.num_free == 2, f"a refused allocate took blocks: {pool.num_free} are free, not 2"
    rest = pool.allocate(2)
    assert sorted(taken + rest) == list(range(5)), f"the two free blocks must still be there; got {rest}"
    check_refused("a block where none is free", lambda: pool.allocate(1))
    assert pool.allocate(0) == [], "no blocks can be had from an empty pool, too"


def test_a_block_is_free_without_its_last_owner(lab: Any) -> None:
    pool = lab.BlockAllocator(3)
    block, other, _ = pool.allocate(3)
    pool.share(block)
    pool.share(block)
    assert pool.ref_count(block) == 3 and pool.ref_count(other) == 1, "one owner at first, one more for each share"
    for owners in (2, 1):
        pool.free(block)
        assert pool.ref_count(block) == owners, f"ref_count is {pool.ref_count(block)}, {owners} owners are left"
        assert pool.num_free == 0, f"block {block} has {owners} owners left, but num_free is {pool.num_free}"
        check_refused("a block where none is free", lambda: pool.allocate(1))
    pool.free(block)
    assert (pool.ref_count(block), pool.num_free) == (0, 1), "the last owner gave the block up"
    assert pool.allocate(1) == [block], "the one free block must be handed out again"
    assert pool.ref_count(block) == 1, "a block that is used again has one owner again"


def test_double_frees_and_strangers_are_refused(lab: Any) -> None:
    pool = lab.BlockAllocator(4)
    kept, gone = pool.allocate(2)
    pool.free(gone)
    assert (pool.num_free, pool.ref_count(kept), pool.ref_count(gone)) == (3, 1, 0), "a good start comes first"
    check_refused("a block freed twice", lambda: pool.free(gone))
    check_refused("a free block shared", lambda: pool.share(gone))
    for stranger in (-1, 4, 99):
        check_refused(f"block {stranger} freed", lambda s=stranger: pool.free(s))
        check_refused(f"block {stranger} shared", lambda s=stranger: pool.share(s))
        check_refused(f"owners of block {stranger}", lambda s=stranger: pool.ref_count(s))
    check_refused("-1 blocks", lambda: pool.allocate(-1))
    check_refused("a pool of 0 blocks", lambda: lab.BlockAllocator(0))
    assert (pool.num_free, pool.ref_count(kept)) == (3, 1), "refused calls changed the pool"
    rest = pool.allocate(3)
    assert sorted([kept, *rest]) == list(range(4)), f"after refused calls the free list gave {rest} beside {kept}"


def test_a_pool_lasts_for_ever(lab: Any) -> None:
    pool = lab.BlockAllocator(3)
    for round_number in range(8):
        blocks = pool.allocate(3)
        assert sorted(blocks) == [0, 1, 2], f"round {round_number}: allocate(3) gave {blocks}"
        for block in blocks[::-1] if round_number % 2 else blocks:
            pool.free(block)
        assert pool.num_free == 3, f"round {round_number}: all was freed, num_free is {pool.num_free}"


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_new_block_exactly_at_multiples_of_the_block_size(lab: Any, block_size: int) -> None:
    pool, table = grown(lab, 0, block_size, 12)
    for position in range(9):
        before = pool.num_free
        slots, copies = table.append(1)
        taken = before - pool.num_free
        assert taken == (position % block_size == 0), (
            f"the token at position {position} with blocks of {block_size} took {taken} blocks; a new one is due "
            "exactly where position % block_size is 0"
        )
        assert copies == [] and len(slots) == 1, f"append(1) on a table of its own returned {(slots, copies)}"
    for length in range(14):
        pool, table = grown(lab, length, block_size, 14)
        used = 14 - pool.num_free
        assert used == len(table.blocks) == blocks_for(length, block_size), (
            f"{length} tokens at once in blocks of {block_size} took {used} blocks, {len(table.blocks)} are in it"
        )
        assert used * block_size - length < block_size, f"{length} tokens waste a whole block of {block_size}"


@pytest.mark.parametrize("pieces", [(1,) * 11, (11,), (4, 4, 3), (3, 5, 3), (5, 6)])
def test_slots_are_block_and_offset(lab: Any, pieces: tuple[int, ...]) -> None:
    pool = lab.BlockAllocator(9)
    # Holes in the free list, so that blocks come in no particular order.
    for block in (held := pool.allocate(9))[1::2]:
        pool.free(block)
    for block in held[0::2][::-1]:
        pool.free(block)
    table, other = lab.BlockTable(pool, 4), lab.BlockTable(pool, 4)
    end = 0
    for count in pieces:
        start, end = end, end + count
        slots, _ = table.append(count)
        if pool.num_free > 4:
            other.append(1)
        blocks = table.blocks
        wanted = [blocks[position // 4] * 4 + position % 4 for position in range(start, end)]
        assert slots == wanted, f"append({count}) at length {start} returned slots {slots}; blocks {blocks}: {wanted}"
        assert table.length == end, f"length is {table.length} after {end} tokens"
    whole = [blocks[position // 4] * 4 + position % 4 for position in range(end)]
    assert table.slots() == whole, f"slots() are {table.slots()}, should be {whole}"
    assert len(set(blocks)) == 3 and not set(blocks) & set(other.blocks), f"blocks {blocks} and {other.blocks}"


def test_a_refused_append_leaves_table_and_pool_whole(lab: Any) -> None:
    pool, table = grown(lab, 6, 4, 3)
    before = (table.blocks, table.slots(), table.length, pool.num_free)
    assert before[2:] == (6, 1) and len(before[0]) == 2, f"a good append comes first; it left {before}"
    check_refused("7 tokens where 6 fit", lambda: table.append(7))
    check_refused("0 tokens", lambda: table.append(0))
    check_refused("truncation to more than there is", lambda: table.truncate(7))
    check_refused("truncation to -1", lambda: table.truncate(-1))
    check_refused("a table in use that adopts", lambda: table.adopt([0]))
    check_refused("blocks of 0 tokens", lambda: lab.BlockTable(pool, 0))
    after = (table.blocks, table.slots(), table.length, pool.num_free)
    assert after == before, f"(blocks, slots, length, free) went from {before} to {after} by refused calls"
    slots, _ = table.append(6)
    assert len(slots) == 6 and pool.num_free == 0, "6 tokens fit exactly"


def test_forks_share_every_block(lab: Any) -> None:
    pool, table = grown(lab, 10)
    child = table.fork()
    grandchild = child.fork()
    assert child.blocks == grandchild.blocks == table.blocks, "a fork starts with the same blocks"
    assert (child.length, child.slots()) == (10, table.slots()), "and with the same tokens"
    assert pool.num_free == 5, f"forks take no block; {8 - pool.num_free} are in use, should be 3"
    assert [pool.ref_count(block) for block in table.blocks] == [3, 3, 3], "three tables own each of the blocks"
    blocks = table.blocks
    table.free()
    assert [pool.ref_count(block) for block in blocks] == [2, 2, 2] and pool.num_free == 5, "two owners are left"
    assert child.slots() == grandchild.slots() and child.length == 10, "a fork outlives its parent"
    child.free()
    grandchild.free()
    assert pool.num_free == 8, f"all tables are gone, but only {pool.num_free} of 8 blocks are free"


def test_a_shared_last_block_is_copied_before_it_is_written(lab: Any) -> None:
    pool, table = grown(lab, 10)
    child = table.fork()
    old = table.blocks
    slots, copies = child.append(1)
    new = child.blocks
    assert copies == [(old[2], new[2])], (
        f"the fork writes into the shared block {old[2]}: copies are {copies}, should be [({old[2]}, {new[2]})]"
    )
    assert new[:2] == old[:2] and new[2] not in old, f"only the last block is replaced: {old} became {new}"
    assert slots == [new[2] * 4 + 2], f"the new token lies at offset 2 of the copy, slot {new[2] * 4 + 2}; got {slots}"
    assert table.blocks == old and table.length == 10, "the parent keeps what it had"
    counts = [pool.ref_count(block) for block in (*old, new[2])]
    assert counts == [2, 2, 1, 1], f"owners of {[*old, new[2]]} are {counts}, should be [2, 2, 1, 1]"
    _, copies = table.append(1)
    assert copies == [] and table.blocks == old, f"the parent owns its last block alone now; it copied {copies}"
    _, copies = child.append(1)
    assert copies == [], f"the fork's copy is its own; it was copied again: {copies}"
    table.free()
    child.free()
    assert pool.num_free == 8, f"both tables are gone; {pool.num_free} of 8 blocks are free"


@pytest.mark.parametrize("count", [3, 5, 6])
def test_a_copy_and_new_blocks_in_one_append(lab: Any, count: int) -> None:
    pool, table = grown(lab, 6, 4, 8)
    child, old = table.fork(), table.blocks
    slots, copies = child.append(count)
    blocks = child.blocks
    assert copies == [(old[1], blocks[1])], f"copies are {copies}, should be [({old[1]}, {blocks[1]})]"
    assert slots == [blocks[p // 4] * 4 + p % 4 for p in range(6, 6 + count)], f"slots {slots} in blocks {blocks}"
    used = blocks_for(6 + count, 4) - 1 + 2
    assert 8 - pool.num_free == used, f"{8 - pool.num_free} blocks are in use, should be {used}"


def test_full_shared_blocks_are_never_copied(lab: Any) -> None:
    pool, table = grown(lab, 8)
    child, old = table.fork(), table.blocks
    _, copies = child.append(1)
    assert copies == [] and child.blocks[:2] == old, (
        f"8 tokens fill 2 blocks of 4; the next token needs a new block and no copy, got {copies}, {child.blocks}"
    )
    assert pool.num_free == 5, f"{8 - pool.num_free} blocks are in use, should be 3"


def test_an_append_without_a_block_for_the_copy_is_refused(lab: Any) -> None:
    pool, table = grown(lab, 6, 4, 3)
    child = table.fork()
    check_refused("3 tokens: one copy and one new block where 1 is free", lambda: child.append(3))
    assert (pool.num_free, child.blocks, child.length) == (1, table.blocks, 6), "a refused append changed something"
    assert [pool.ref_count(block) for block in table.blocks] == [2, 2], "a refused append changed owners"
    _, copies = child.append(2)
    assert len(copies) == 1 and pool.num_free == 0, "the copy alone fits"
    second = table.fork()
    check_refused("a copy where no block is free", lambda: second.append(1))
    second.free()
    assert table.append(2)[1] == [], "the parent owns its last block alone again and can fill it"


def test_truncation_frees_the_blocks_behind(lab: Any) -> None:
    for length in range(11):
        pool, table = grown(lab, 10)
        old = table.blocks
        table.truncate(length)
        wanted = old[: blocks_for(length, 4)]
        assert table.blocks == wanted and table.length == length, (
            f"10 tokens truncated to {length}: blocks {table.blocks} of {old} are left, should be {wanted}"
        )
        assert pool.num_free == 8 - len(wanted), f"truncated to {length}, {pool.num_free} blocks are free"
        slots, _ = table.append(1)
        assert slots == [table.blocks[length // 4] * 4 + length % 4], f"the next token came to slot {slots}"


def test_a_shared_block_cut_open_is_copied(lab: Any) -> None:
    pool, table = grown(lab, 8)
    child, old = table.fork(), table.blocks
    child.truncate(6)
    assert child.blocks == old and pool.num_free == 6, "a block that still holds tokens is kept"
    _, copies = child.append(1)
    assert copies == [(old[1], child.blocks[1])], (
        f"the block was full, is cut to 2 tokens and still the parent's, too: copies are {copies}"
    )
    assert table.blocks == old, "the parent keeps its block"


def test_adopted_blocks_are_owned(lab: Any) -> None:
    pool = lab.BlockAllocator(6)
    blocks = pool.allocate(2)
    table = lab.BlockTable(pool, 4)
    table.adopt(blocks)
    assert (table.length, table.blocks) == (8, blocks), f"two full blocks of 4: length {table.length}, {table.blocks}"
    assert [pool.ref_count(block) for block in blocks] == [1, 1], "the references are handed over, not doubled"
    slots, copies = table.append(1)
    assert copies == [] and slots == [table.blocks[2] * 4], f"the next token starts a block, got {slots} and {copies}"
    table.free()
    assert (pool.num_free, table.length, table.blocks) == (6, 0, []), "a freed table owns nothing"
    table.free()
    assert pool.num_free == 6, "an empty table has nothing to free"


def test_capacity_is_what_an_append_can_reach(lab: Any) -> None:
    pool, table = grown(lab, 6, 4, 5)
    other = table.fork()
    other.append(1)
    for name, candidate in (("its own last block", other), ("a last block of its own", table)):
        room = candidate.capacity - candidate.length
        check_refused(f"one token past the capacity, {name}", lambda c=candidate, r=room: c.append(r + 1))
        probe = candidate.length
        candidate.append(room)
        assert pool.num_free == 0, f"{room} tokens reach the capacity, but {pool.num_free} blocks are free"
        candidate.truncate(probe)
    child = table.fork()
    pool_left = pool.num_free
    assert child.capacity == 4 * (2 + pool_left - 1), (
        f"a shared last block costs one of the {pool_left} free blocks for the copy; capacity is {child.capacity}"
    )
    taken = pool.allocate(pool_left)
    assert child.capacity == child.length == 6, "without a block for the copy the sequence can't grow"
    for block in taken:
        pool.free(block)


@pytest.mark.parametrize("first_seed", [0, 8, 16])
def test_random_schedules_keep_blocks_whole(lab: Any, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 8):
        Schedule(lab, seed, cached=False).run(45)
