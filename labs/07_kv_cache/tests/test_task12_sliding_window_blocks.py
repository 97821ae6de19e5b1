"""Task 12, joined with task 7: blocks that have left the window go back, once each, and nothing else does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from grader.judge.kv_oracle import Ledger
from grader.judge.refusal import check_refused

# All of it stands on the student's own block table.
pytestmark = [pytest.mark.task(12), pytest.mark.integration]


def check_table(table: Any, start: int, length: int, num_blocks: int, when: str) -> None:
    """Where the table begins and ends, and how much it holds."""
    got = (table.start, table.length, len(table.blocks), len(table.slots()))
    right = (start, length, num_blocks, length - start)
    assert got == right, f"{when}: (start, length, blocks, slots) are {got}, right is {right}"


def test_blocks_that_left_the_window_go_back(lab: Any) -> None:
    pool = lab.BlockAllocator(10)
    table = lab.WindowedBlockTable(pool, 4, 6)
    for length in range(1, 40):
        slots, copies = table.append(1)
        # The newest token sees 6, its own included; the block before the first of them is of no use.
        start = max(0, length - 6) // 4 * 4
        num_blocks = -(-(length - start) // 4)
        check_table(table, start, length, num_blocks, f"window 6, blocks of 4, {length} tokens one by one")
        assert table.slots()[-1:] == slots and not copies, f"the new token's slot is {slots}, copies {copies}"
        assert pool.num_free + len(table.blocks) == 10, f"{length} tokens: {pool.num_free} of 10 blocks are free"
    table.free()
    assert pool.num_free == 10, f"a freed table leaves {pool.num_free} of 10 blocks free"
    table.append(3)
    check_table(table, 0, 3, 1, "used again")


def test_a_chunk_keeps_what_its_first_token_sees(lab: Any) -> None:
    pool = lab.BlockAllocator(10)
    table = lab.WindowedBlockTable(pool, 4, 6)
    for count, start, length, blocks in ((9, 0, 9, 3), (1, 4, 10, 2), (11, 4, 21, 5), (1, 16, 22, 2), (30, 16, 52, 9)):
        slots, _ = table.append(count)
        assert len(set(slots)) == count, f"{count} new tokens lie in the slots {slots}"
        check_table(table, start, length, blocks, f"window 6, blocks of 4, {count} new tokens")
    narrow = lab.WindowedBlockTable(lab.BlockAllocator(3), 2, 1)
    for length in range(1, 9):
        narrow.append(1)
        check_table(narrow, (length - 1) // 2 * 2, length, 1, "a window of 1 sees its own token only")


def test_windowed_tables_refuse_without_a_trace(lab: Any) -> None:
    pool = lab.BlockAllocator(4)
    table = lab.WindowedBlockTable(pool, 2, 4)
    table.append(5)
    table.append(2)
    check_table(table, 2, 7, 3, "5 and 2 tokens")
    before = table.slots()
    check_refused("6 tokens that need 3 blocks, 1 is free", lambda: table.append(6))
    check_refused("no tokens", lambda: table.append(0))
    for length in (8, 4, 3, 1, -1):
        check_refused(f"truncate({length})", lambda length=length: table.truncate(length))
    check_refused("a window of 0", lambda: lab.WindowedBlockTable(pool, 2, 0))
    check_refused("blocks of 0", lambda: lab.WindowedBlockTable(pool, 0, 4))
    check_table(table, 2, 7, 3, "after refused calls")
    assert table.slots() == before and pool.num_free == 1, f"refused calls left {pool.num_free} of 4 blocks free"
    table.truncate(5)
    check_table(table, 2, 5, 2, "truncate(5): the next token sees 2, 3 and 4, which are held")
    table.truncate(0)
    check_table(table, 0, 0, 0, "truncate(0) is always possible")
    table.append(3)
    table.truncate(1)
    check_table(table, 0, 1, 1, "nothing was given back yet")
    assert pool.num_free == 3, f"one block is in use, {pool.num_free} of 4 are free"


def test_forks_give_shared_blocks_back_once_each(lab: Any) -> None:
    pool = lab.BlockAllocator(8)
    table = lab.WindowedBlockTable(pool, 2, 3)
    table.append(5)
    fork = table.fork()
    check_table(fork, table.start, 5, 3, "a fork")
    assert fork.slots() == table.slots() and pool.num_free == 5, "a fork shares every block"
    first = table.blocks[0]
    _, copies = table.append(1)
    assert [source for source, _ in copies] == fork.blocks[-1:], f"the shared last block is copied, copies are {copies}"
    assert pool.ref_count(first) == 1 and table.start == 2, (
        f"one of two readers has left the first block; it has {pool.ref_count(first)} owners, should have 1"
    )
    _, copies = fork.append(1)
    assert not copies and pool.ref_count(first) == 0, f"both have left it; it has {pool.ref_count(first)} owners"
    for step in range(6):
        for sequence in (table, fork):
            sequence.append(1)
            check_table(sequence, (4 + step) // 2 * 2, 7 + step, 2, "forks that go on")
    table.free()
    fork.free()
    assert pool.num_free == 8, f"both are gone; {pool.num_free} of 8 blocks are free"


def test_random_windows_read_only_their_own_tokens(lab: Any) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        size, window, num_blocks = rng.choice([1, 2, 3, 4]), rng.randint(1, 9), rng.randint(8, 20)
        pool, ledger = lab.BlockAllocator(num_blocks), Ledger(num_blocks * size)
        live: list[tuple[Any, list[int]]] = [(lab.WindowedBlockTable(pool, size, window), [])]
        for step in range(40):
            where = f"seed {seed}, step {step}, {num_blocks} blocks of {size}, window {window}"
            index = rng.randrange(len(live))
            table, tokens = live[index]
            choice = rng.random()
            if choice < 0.1 and len(live) < 4:
                live.append((table.fork(), list(tokens)))
            elif choice < 0.2 and tokens:
                length = rng.choice([0, max(table.start + window - 1 if table.start else 0, len(tokens) - 2)])
                table.truncate(min(length, len(tokens)))
                live[index] = (table, tokens[: min(length, len(tokens))])
            else:
                new = [rng.randrange(3) for _ in range(rng.choice([1, 1, 1, 2, 5]))]
                if pool.num_free < len(new) + 2:
                    table.free()
                    live[index] = (table, [])
                    continue
                slots, copies = table.append(len(new))
                for source, target in copies:
                    ledger.copy(source, target, size)
                live[index] = (table, tokens + new)
                ledger.write(slots, ledger.numbers(tokens + new)[len(tokens) :])
                held = len(table.blocks)
                most = -(-(window - 1 + len(new)) // size) + 1
                assert held <= most, f"{where}: {held} blocks held, {most} do for the window and {len(new)} new tokens"
            for number, (other, its_tokens) in enumerate(live):
                assert other.length == len(its_tokens), f"{where}: length {other.length} of {len(its_tokens)} tokens"
                assert other.start <= max(0, len(its_tokens) - window + 1), f"{where}: what the next token sees is gone"
                try:
                    ledger.read(f"sequence {number}", other.slots(), ledger.numbers(its_tokens)[other.start :])
                except AssertionError as error:
                    raise AssertionError(f"{where}: {error}") from error
        for table, _ in live:
            table.free()
        assert pool.num_free == num_blocks, f"seed {seed}: {pool.num_free} of {num_blocks} blocks are free in the end"
