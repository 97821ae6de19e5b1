"""Random schedules for allocator, block tables and prefix cache, under the KV oracle and an account of all owners."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from grader.judge.kv_oracle import Ledger, Sequence
from grader.judge.refusal import check_refused

ALPHABET = 3
"""Few token ids, so that unrelated prompts share prefixes, too."""


class Schedule:
    """One random schedule: sequences start, grow, fork, shrink, are preempted and end, in any order.

    Args:
        lab: gives `BlockAllocator`, `BlockTable` and `PrefixCache`.
        seed: decides everything.
        cached: whether blocks come from a prefix cache in front of the allocator.
        make_cache: builds that cache from allocator and block size; None for `lab.PrefixCache`.
    """

    def __init__(self, lab: Any, seed: int, cached: bool, make_cache: Callable[[Any, int], Any] | None = None) -> None:
        self.random = random.Random(seed)
        self.block_size = self.random.choice([1, 2, 3, 4, 5, 8])
        self.num_blocks = self.random.randint(4, 20)
        self.lab = lab
        self.allocator = lab.BlockAllocator(self.num_blocks)
        self.cache: Any = (make_cache or lab.PrefixCache)(self.allocator, self.block_size) if cached else None
        self.pool: Any = self.cache if cached else self.allocator
        self.ledger = Ledger(self.num_blocks * self.block_size)
        self.live: list[Sequence] = []
        self.shared = [self._some_tokens(self.random.randint(1, 4 * self.block_size)) for _ in range(3)]
        self.collisions = False
        """Whether the cache's hash is so weak that a block may not get in; then it need not be found either."""
        self.started = self.grown = self.refused = self.hit_blocks = 0
        self.where = f"seed {seed}, {self.num_blocks} blocks of {self.block_size}"

    def run(self, num_operations: int) -> None:
        """Runs the schedule, then ends every sequence and checks that the pool is whole.

        Raises:
            AssertionError: at the first wrong read, count or refusal, with the operation that showed it.
        """
        choices = [self._start] * 3 + [self._grow] * 6 + [self._fork, self._shrink, self._preempt, self._end]
        choices += [self._misuse]
        for index in range(num_operations):
            operation = self.random.choice(choices) if self.live else self._start
            where = f"{self.where}, operation {index} ({operation.__name__.strip('_')})"
            try:
                operation()
                self._check_reads()
                if index % 8 == 0:
                    self._check_owners()
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from error
        self._check_owners()
        self._finish()

    def _some_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(ALPHABET) for _ in range(count)]

    def _names(self, sequence: Sequence) -> dict[str, str]:
        """The namespace of a sequence as arguments of the cache."""
        return [{}, {"salt": "a"}, {"adapter": "a"}][sequence.namespace]

    def _start(self) -> None:
        prompt = [*self.random.choice(self.shared)][: self.random.randint(1, 4 * self.block_size)]
        prompt += self._some_tokens(self.random.randint(0, self.block_size))
        sequence = Sequence(f"sequence {self.started}", self.lab.BlockTable(self.pool, self.block_size), [])
        self.started += 1
        if self.cache is not None:
            sequence.namespace = self.random.choice([0, 0, 0, 1, 2])
            self._take_prefix(sequence, prompt)
        self.live.append(sequence)
        self._prefill(sequence, prompt[len(sequence.tokens) :])

    def _take_prefix(self, sequence: Sequence, prompt: list[int]) -> None:
        blocks = self.cache.match(prompt, **self._names(sequence))
        most = (len(prompt) - 1) // self.block_size
        assert len(blocks) <= most, (
            f"match of {len(prompt)} tokens returned {len(blocks)} blocks of {self.block_size}; at least one token "
            f"must be left to compute, so {most} is the most"
        )
        sequence.table.adopt(blocks)
        sequence.tokens = prompt[: len(blocks) * self.block_size]
        sequence.slots = sequence.table.slots()
        self.hit_blocks += len(blocks)
        self._read(sequence)

    def _prefill(self, sequence: Sequence, tokens: list[int]) -> None:
        """Computes tokens in chunks and caches what is complete after each; gives up where the pool is exhausted."""
        while tokens:
            size = self.random.randint(1, len(tokens))
            if not self._append(sequence, tokens[:size]):
                self._release(sequence)
                return
            tokens = tokens[size:]
            if self.cache is not None and self.random.random() < 0.7:
                self._insert(sequence)

    def _grow(self) -> None:
        self._append(self.random.choice(self.live), self._some_tokens(self.random.choice([1, 1, 1, 2, 5])))

    def _append(self, sequence: Sequence, tokens: list[int]) -> bool:
        """Appends tokens, or checks that the refusal was due and changed nothing."""
        size, old = self.block_size, len(sequence.tokens)
        before = sequence.blocks(size)
        copies_due = old % size != 0 and self.pool.ref_count(before[-1]) > 1
        needed = -(-(old + len(tokens)) // size) - len(before) + copies_due
        free = self.pool.num_free
        if needed > free:
            check_refused(f"{needed} blocks where {free} are free", lambda: sequence.table.append(len(tokens)))
            self.refused += 1
            assert sequence.table.slots() == sequence.slots, f"{sequence.name} changed by a refused append"
            assert self.pool.num_free == free, f"a refused append left {self.pool.num_free} free blocks, not {free}"
            return False
        new, copies = sequence.table.append(len(tokens))
        assert len(copies) == copies_due, (
            f"{sequence.name}, {old} tokens, last block with {'other' if copies_due else 'no other'} owners: copies "
            f"to make are {copies}, should be {int(copies_due)}"
        )
        assert len(new) == len(tokens), f"append({len(tokens)}) returned the slots {new}"
        self.grown += len(tokens)
        sequence.tokens = sequence.tokens + tokens
        sequence.slots = sequence.table.slots()
        assert sequence.slots[old:] == new, f"{sequence.name}: append returned {new}, slots() ends {sequence.slots}"
        count = len(sequence.table.blocks)
        assert count == -(-len(sequence.tokens) // size), (
            f"{sequence.name}: {len(sequence.tokens)} tokens in {count} blocks of {size}"
        )
        if not copies_due and self.cache is None:
            left = self.pool.num_free
            assert left == free - needed, f"append took {free - left} blocks from the pool, should take {needed}"
        for source, target in copies:
            self.ledger.copy(source, target, size)
        self.ledger.write(new, self.ledger.numbers(sequence.tokens, sequence.namespace)[old:])
        return True

    def _insert(self, sequence: Sequence) -> None:
        names = self._names(sequence)
        self.cache.insert(sequence.tokens, sequence.table.blocks, **names)
        if self.random.random() < 0.3:
            probe = Sequence("a repeated prompt", self.lab.BlockTable(self.pool, self.block_size), [])
            probe.namespace = sequence.namespace
            self._take_prefix(probe, [*sequence.tokens, 0])
            most = len(sequence.tokens) // self.block_size
            assert self.collisions or len(probe.tokens) == most * self.block_size, (
                f"{most} full blocks were just cached, but match of the same tokens and one more found "
                f"{len(probe.tokens) // self.block_size}"
            )
            probe.table.free()

    def _fork(self) -> None:
        parent = self.random.choice(self.live)
        free = self.pool.num_free
        child = Sequence(f"{parent.name}'s fork", parent.table.fork(), list(parent.tokens), parent.namespace)
        child.slots = child.table.slots()
        assert self.pool.num_free == free, f"fork took {free - self.pool.num_free} blocks; it shares what is there"
        self.live.append(child)

    def _shrink(self) -> None:
        sequence = self.random.choice(self.live)
        length = self.random.randint(0, len(sequence.tokens))
        sequence.table.truncate(length)
        sequence.tokens = sequence.tokens[:length]
        sequence.slots = sequence.table.slots()
        count = len(sequence.table.blocks)
        assert count == -(-length // self.block_size), f"truncated to {length} tokens, {count} blocks are left"

    def _preempt(self) -> None:
        """Recompute: give everything up, then read prompt and generated tokens again."""
        sequence = self.random.choice(self.live)
        tokens = sequence.tokens
        sequence.table.free()
        sequence.tokens, sequence.slots = [], []
        if self.cache is not None and tokens:
            self._take_prefix(sequence, tokens)
        self._prefill(sequence, tokens[len(sequence.tokens) :])

    def _end(self) -> None:
        sequence = self.random.choice(self.live)
        if self.cache is not None and sequence.tokens:
            self._insert(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        sequence.table.free()
        self.live.remove(sequence)

    def _misuse(self) -> None:
        free = self.pool.num_free
        owned = {block for sequence in self.live for block in sequence.blocks(self.block_size)}
        check_refused("more blocks than can be free", lambda: self.pool.allocate(free + 1))
        check_refused("an unknown block freed", lambda: self.allocator.free(self.num_blocks))
        idle = [block for block in range(self.num_blocks) if block not in owned]
        if idle and self.cache is None:
            block = self.random.choice(idle)
            check_refused("a free block freed", lambda: self.allocator.free(block))
            check_refused("a free block shared", lambda: self.allocator.share(block))
        assert self.pool.num_free == free, f"refused calls changed the free blocks from {free} to {self.pool.num_free}"

    def _read(self, sequence: Sequence) -> None:
        numbers = self.ledger.numbers(sequence.tokens, sequence.namespace)
        assert len(sequence.slots) == len(numbers), f"{sequence.name}: {len(numbers)} tokens, slots {sequence.slots}"
        self.ledger.read(sequence.name, sequence.slots, numbers)

    def _check_reads(self) -> None:
        for sequence in self.live:
            self._read(sequence)

    def _check_owners(self) -> None:
        """Free, cached and owned blocks add up to the pool, and every block has as many owners as it should."""
        owners = Counter(block for sequence in self.live for block in sequence.blocks(self.block_size))
        cached = 0
        for block, count in owners.items():
            counted = self.allocator.ref_count(block)
            assert counted == count or (self.cache is not None and counted == count + 1), (
                f"block {block} is held by {count} sequences, but its ref_count is {counted}"
            )
            cached += counted - count
        kept = self.cache.num_cached if self.cache is not None else 0
        free = self.allocator.num_free
        assert free + len(owners) + kept - cached == self.num_blocks, (
            f"{free} blocks are free, {len(owners)} belong to sequences and {kept} are cached ({cached} of them both); "
            f"that doesn't add up to {self.num_blocks}"
        )
        if self.cache is not None:
            bound = self.num_blocks - len(owners)
            assert free <= self.cache.num_free <= bound, (
                f"the cache says {self.cache.num_free} blocks could be had; {free} are free and {bound} are not in use"
            )

    def _finish(self) -> None:
        assert self.grown > 0, f"{self.where}: no sequence ever got a token"
        while self.live:
            self._release(self.live[-1])
        assert self.pool.num_free == self.num_blocks, (
            f"{self.where}: every sequence has ended, but {self.pool.num_free} of {self.num_blocks} blocks can be had"
        )
        blocks = self.pool.allocate(self.num_blocks)
        assert sorted(blocks) == list(range(self.num_blocks)), f"{self.where}: the pool then holds {sorted(blocks)}"
        if self.cache is not None:
            assert self.cache.num_cached == 0, f"{self.cache.num_cached} blocks are cached though all are in use"
        for block in blocks:
            self.pool.free(block)
        assert self.allocator.num_free == self.num_blocks, f"{self.where}: blocks were lost at the very end"
