"""Task 7: keys and values in blocks; whatever lies in other blocks, attention reads the sequence's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from grader.judge.reference import attention64, plain_attention
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.specs import TinyLlama

pytestmark = pytest.mark.task(7)

CONFIG = ModelConfig.tiny(num_layers=3)
NAN = float("nan")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The judge's attention of one sequence, so that task 2 can't decide task 7."""
    return attention64(q, k, v).to(q.dtype)


def some_kv(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random keys and values of new tokens, strided as the decoder hands them over."""
    rng = torch.Generator().manual_seed(seed)
    shape = (1, tokens, CONFIG.num_kv_heads, CONFIG.head_dim)
    k, v = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    return k.transpose(1, 2), v.transpose(1, 2)


def test_written_tokens_are_gathered_in_order(lab: Any) -> None:
    memory = lab.PagedMemory(CONFIG, 5, 4)
    written = {}
    for layer in range(CONFIG.num_layers):
        for part, slots in enumerate(([9, 2, 17], [0], [19, 3, 8, 10, 1])):
            k, v = some_kv(len(slots), 10 * layer + part)
            memory.write(layer, slots, k, v)
            written[layer, part] = (slots, k, v)
    for (layer, part), (slots, k, v) in written.items():
        for order in (list(range(len(slots))), list(range(len(slots)))[::-1]):
            keys, values = memory.gather(layer, [slots[i] for i in order])
            check_equal(f"keys of write {part} in layer {layer}", keys, k[:, :, order], "Slot by slot, as asked for.")
            check_equal(f"values of write {part} in layer {layer}", values, v[:, :, order], "Slot by slot.")


def test_a_slot_is_an_offset_in_a_block(lab: Any) -> None:
    memory = lab.PagedMemory(CONFIG, 5, 4)
    k, v = some_kv(3, 1)
    memory.write(1, [9, 4, 19], k, v)
    for name, blocks, right in (("keys", memory.keys(1), k), ("values", memory.values(1), v)):
        wanted = torch.zeros(5, 4, CONFIG.num_kv_heads, CONFIG.head_dim)
        for index, (block, offset) in enumerate([(2, 1), (1, 0), (4, 3)]):
            wanted[block, offset] = right[0, :, index]
        check_equal(
            f"{name} of the layer after writing slots 9, 4 and 19", blocks, wanted, "Slot 9: block 2, offset 1."
        )


def test_copying_a_block_copies_every_layer(lab: Any) -> None:
    memory = lab.PagedMemory(CONFIG, 3, 2)
    kept = []
    for layer in range(CONFIG.num_layers):
        k, v = some_kv(6, layer)
        memory.write(layer, list(range(6)), k, v)
        kept.append((k, v))
    memory.copy_block(0, 2)
    for layer, (k, v) in enumerate(kept):
        keys, values = memory.gather(layer, [0, 1, 2, 3, 4, 5])
        for name, got, old in (("keys", keys, k), ("values", values, v)):
            right = old[:, :, [0, 1, 2, 3, 0, 1]]
            check_equal(f"{name} of layer {layer} after copying block 0 to 2", got, right, "Source and others stay.")
    k, v = some_kv(1, 99)
    memory.write(0, [4], k, v)
    check_equal("keys of the source", memory.gather(0, [0])[0], kept[0][0][:, :, :1], "A copy is independent.")


def test_writes_that_do_not_fit_are_refused(lab: Any) -> None:
    memory = lab.PagedMemory(CONFIG, 2, 2)
    k, v = some_kv(2, 3)
    memory.write(0, [3, 1], k, v)
    check_equal("keys of a good write", memory.gather(0, [3, 1])[0], k)
    before = memory.keys(0), memory.values(0)
    other_k, other_v = some_kv(2, 4)
    for what, layer, slots, keys in (
        ("slot -1", 0, [-1, 0], other_k),
        ("slot 4 of 0 … 3", 0, [0, 4], other_k),
        (f"layer {CONFIG.num_layers}", CONFIG.num_layers, [0, 2], other_k),
        ("3 slots for 2 tokens", 0, [0, 1, 2], other_k),
        ("keys of another dtype", 0, [0, 2], other_k.double()),
        ("keys with another number of heads", 0, [0, 2], other_k[:, :1]),
    ):
        check_refused(what, lambda la=layer, s=slots, kk=keys: memory.write(la, s, kk, other_v))
    check_refused("slot 4, read", lambda: memory.gather(0, [4]))
    check_refused("a copy to block 2 of 0 … 1", lambda: memory.copy_block(0, 2))
    check_refused("a copy from block -1", lambda: memory.copy_block(-1, 0))
    check_equal("keys after refused writes", memory.keys(0), before[0])
    check_equal("values after refused writes", memory.values(0), before[1])


def paged_case(num_queries: int) -> tuple[Tensor, Tensor, Tensor, list[list[int]], list[int]]:
    """q, blocks filled with NaN where no token lies, tables and lengths of four rows."""
    rng = torch.Generator().manual_seed(num_queries)
    lengths, tables = [5, 8, 3, 13], [[6, 2], [9, 0], [4], [1, 11, 7, 3]]
    blocks = torch.full((2, 12, 4, CONFIG.num_kv_heads, CONFIG.head_dim), NAN)
    for length, table in zip(lengths, tables, strict=True):
        for position in range(length):
            blocks[:, table[position // 4], position % 4] = torch.randn(2, *blocks.shape[3:], generator=rng)
    q = torch.randn(4, CONFIG.num_heads, num_queries, CONFIG.head_dim, generator=rng)
    return q, blocks[0], blocks[1], tables, lengths


def contiguous(blocks: Tensor, table: list[int], length: int) -> Tensor:
    """The tokens of one row side by side, `[1, kv_heads, length, head_dim]`."""
    rows = [blocks[table[position // 4], position % 4] for position in range(length)]
    return torch.stack(rows, dim=1).unsqueeze(0)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_paged_attention_reads_through_the_table(lab: Any, num_queries: int) -> None:
    q, key_blocks, value_blocks, tables, lengths = paged_case(num_queries)
    got = lab.paged_attention(q, key_blocks, value_blocks, tables, lengths, attention)
    rows = [
        (q[i : i + 1], contiguous(key_blocks, tables[i], lengths[i]), contiguous(value_blocks, tables[i], lengths[i]))
        for i in range(4)
    ]
    check_close(
        f"attention of {num_queries} queries over rows of {lengths} tokens",
        got,
        torch.cat([attention64(*row) for row in rows]),
        scale=max(float(v.abs().max()) for _, _, v in rows),
        dtype=torch.float32,
        plain=torch.cat([plain_attention(*row) for row in rows]),
        inputs=[q],
        advice="Free slots hold NaN here: what lies behind a row's last token must not even be multiplied by 0.",
    )


def test_tables_that_do_not_fit_are_refused(lab: Any) -> None:
    q, k, v, tables, lengths = paged_case(1)
    good = lab.paged_attention(q, k, v, tables, lengths, attention)
    assert bool(good.isfinite().all()) and bool(good.any()), "a good call comes first"
    assert not torch.equal(good, q), "a good call comes first; it must not give the queries back"
    for what, bad_tables, bad_lengths in (
        ("a table too short", [[6], *tables[1:]], lengths),
        ("a table too long", [[6, 2, 5], *tables[1:]], lengths),
        ("block 12 of 0 … 11", [[6, 12], *tables[1:]], lengths),
        ("block -1", [[6, -1], *tables[1:]], lengths),
        ("a missing length", tables, lengths[:3]),
        ("a row without tokens", [[], *tables[1:]], [0, *lengths[1:]]),
    ):
        check_refused(what, lambda t=bad_tables, n=bad_lengths: lab.paged_attention(q, k, v, t, n, attention))


class Twin:
    """A paged sequence, and beside it all that was ever appended to it."""

    def __init__(self, handle: Any, keys: list[Tensor] | None = None, values: list[Tensor] | None = None) -> None:
        empty = torch.zeros(1, CONFIG.num_kv_heads, 0, CONFIG.head_dim)
        self.handle = handle
        self.keys = keys or [empty] * CONFIG.num_layers
        self.values = values or [empty] * CONFIG.num_layers

    def grow(self, what: str, count: int, seed: int) -> None:
        """One pass over all layers; what each append returns is compared."""
        for layer in range(CONFIG.num_layers):
            k, v = some_kv(count, 100 * seed + layer)
            self.keys[layer] = torch.cat((self.keys[layer], k), dim=2)
            self.values[layer] = torch.cat((self.values[layer], v), dim=2)
            keys, values = self.handle.append(layer, k, v)
            check_equal(f"{what}, keys of layer {layer}", keys, self.keys[layer], "All tokens, oldest first.")
            check_equal(f"{what}, values of layer {layer}", values, self.values[layer], "All tokens, oldest first.")

    def cut(self, length: int) -> None:
        """Truncates both."""
        self.handle.truncate(length)
        self.keys = [t[:, :, :length] for t in self.keys]
        self.values = [t[:, :, :length] for t in self.values]

    def fork(self) -> Twin:
        """Forks both."""
        return Twin(self.handle.fork(), list(self.keys), list(self.values))


def sequence(lab: Any, num_blocks: int, block_size: int = 4) -> tuple[Any, Any, Twin]:
    """A memory, its pool, and an empty sequence."""
    memory, pool = lab.PagedMemory(CONFIG, num_blocks, block_size), lab.BlockAllocator(num_blocks)
    return memory, pool, Twin(lab.PagedSequence(memory, pool))


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_paged_sequence_gives_back_what_was_appended(lab: Any, block_size: int) -> None:
    _, pool, own = sequence(lab, 20, block_size)
    length = 0
    for index, count in enumerate((5, 1, 1, 1, 3, 1)):
        own.grow(f"append {index} of {count} tokens in blocks of {block_size}", count, index)
        length += count
        assert own.handle.length == length, f"length is {own.handle.length} after {length} tokens"
        used = len({position // block_size for position in range(length)})
        assert 20 - pool.num_free == used == len(own.handle.blocks), (
            f"{length} tokens in blocks of {block_size}: {20 - pool.num_free} blocks are taken, should be {used}; one "
            "block serves all layers"
        )


def test_length_waits_for_the_last_layer(lab: Any) -> None:
    _, pool, own = sequence(lab, 8)
    own.grow("a first pass", 3, 0)
    k, v = some_kv(2, 7)
    lengths = []
    for layer in range(CONFIG.num_layers):
        own.handle.append(layer, k, v)
        lengths.append((own.handle.length, pool.num_free))
    assert lengths == [(3, 6), (3, 6), (5, 6)], (
        f"(length, free blocks) after each layer of a pass are {lengths}, should be [(3, 6), (3, 6), (5, 6)]: the "
        "first layer takes the blocks for all, and a token counts when every layer holds it"
    )


def test_a_broken_pass_is_undone(lab: Any) -> None:
    _, pool, own = sequence(lab, 8)
    own.grow("a first pass", 3, 0)
    k, v = some_kv(6, 7)
    own.handle.append(0, k, v)
    own.handle.append(1, k, v)
    own.cut(3)
    assert (own.handle.length, pool.num_free) == (3, 7), (
        f"truncate(length) evens out a broken pass; length is {own.handle.length}, {8 - pool.num_free} blocks are held"
    )
    own.grow("the pass repeated", 6, 1)


def test_forked_sequences_go_separate_ways(lab: Any) -> None:
    _, pool, parent = sequence(lab, 12)
    parent.grow("the prompt", 6, 0)
    child, third = parent.fork(), parent.fork()
    assert pool.num_free == 10, f"forks share the prompt's 2 blocks; {12 - pool.num_free} are in use"
    child.grow("the first fork", 1, 1)
    parent.grow("the parent, after its fork wrote", 1, 2)
    third.grow("the second fork", 3, 3)
    child.grow("the first fork again", 2, 4)
    parent.grow("the parent again", 1, 5)
    assert 12 - pool.num_free == 1 + 3 + 2, (
        f"{12 - pool.num_free} blocks are in use: the prompt's first is shared by three, each has its own second and "
        "two have a third, which makes 6"
    )
    parent.handle.free()
    child.grow("the first fork without its parent", 1, 6)
    third.cut(5)
    third.grow("the second fork, cut into the prompt", 2, 7)
    child.handle.free()
    third.handle.free()
    assert pool.num_free == 12, f"all sequences are gone; {pool.num_free} of 12 blocks are free"


def test_truncated_tokens_make_room(lab: Any) -> None:
    _, pool, own = sequence(lab, 4)
    own.grow("a prompt", 10, 0)
    for length, blocks in ((8, 2), (5, 2), (4, 1)):
        own.cut(length)
        assert (own.handle.length, 4 - pool.num_free) == (length, blocks), (
            f"truncated to {length}: length {own.handle.length}, {4 - pool.num_free} blocks held, should be {blocks}"
        )
    own.grow("tokens after a truncation", 3, 1)
    check_refused("truncation to more than there is", lambda: own.handle.truncate(8))
    check_refused("truncation to -1", lambda: own.handle.truncate(-1))
    own.grow("tokens after refused truncations", 1, 2)


def test_a_refused_pass_changes_nothing(lab: Any) -> None:
    _, pool, own = sequence(lab, 3)
    own.grow("a prompt", 6, 0)
    child = own.fork()
    assert child.handle.capacity == 8, (
        f"one block is free and the copy of the shared last block takes it: 8 tokens can be held, got "
        f"{child.handle.capacity}"
    )
    k, v = some_kv(3, 9)
    check_refused("a copy and a new block where one is free", lambda: child.handle.append(0, k, v))
    check_refused("values of another shape", lambda: child.handle.append(0, k, v[:, :, :2]))
    check_refused("layer 3 of 0 … 2", lambda: child.handle.append(3, k[:, :, :1], v[:, :, :1]))
    check_refused("another dtype", lambda: child.handle.append(0, k[:, :, :1].double(), v[:, :, :1].double()))
    assert (child.handle.length, pool.num_free, child.handle.blocks) == (6, 1, own.handle.blocks), (
        "refused appends changed the sequence or took a block"
    )
    child.grow("two tokens, which fit", 2, 1)
    own.grow("the parent's own two", 2, 2)


def test_a_prefix_in_full_blocks_is_taken_over(lab: Any) -> None:
    memory, pool, first = sequence(lab, 6)
    first.grow("the first sequence", 9, 0)
    prefix = first.handle.blocks[:2]
    for block in prefix:
        pool.share(block)
    second = Twin(
        lab.PagedSequence(memory, pool, prefix), [t[:, :, :8] for t in first.keys], [t[:, :, :8] for t in first.values]
    )
    assert second.handle.length == 8, f"two full blocks of 4 are 8 tokens, length is {second.handle.length}"
    second.grow("a sequence that starts behind a prefix", 3, 1)
    second.handle.free()
    assert pool.num_free == 3, f"the first sequence's 3 blocks stay; {pool.num_free} of 6 are free"
    first.grow("the first sequence, after the other has gone", 1, 2)


def whole_run(tokens: list[int], dtype: torch.dtype) -> Tensor:
    """Logits of all tokens in one uncached run, `[tokens, vocab]`."""
    model = Decoder(CONFIG, random_weights(CONFIG, 1, dtype), dtype)
    return model(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0]


def check_logits(what: str, got: object, tokens: list[int], first: int) -> None:
    """Logits of tokens[first:] against the float64 run of the whole sequence."""
    reference = whole_run(tokens, torch.float64)[first:]
    plain = whole_run(tokens, torch.float32)[first:]
    scale = float(reference.abs().max())
    check_close(what, got, reference, scale=scale, dtype=torch.float32, plain=plain)


@pytest.mark.integration
def test_your_own_decoder_runs_on_paged_memory(lab: Any) -> None:
    memory, pool = lab.PagedMemory(CONFIG, 6, 4), lab.BlockAllocator(6)
    store = lab.PagedSequence(memory, pool)
    model = lab.CachedDecoder(TinyLlama(CONFIG, 1), store)
    tokens = [7, 0, 60, 31, 31, 2]
    check_logits("logits of a prompt", model.append(tokens), tokens, 0)
    samples = [(store, model)]
    for _ in range(2):
        fork = store.fork()
        samples.append((fork, lab.CachedDecoder(TinyLlama(CONFIG, 1), fork)))
    for index, (_, sample) in enumerate(samples):
        grown = [*tokens, 40 + index]
        check_logits(f"logits of sample {index}", sample.append([40 + index]), grown, 6)
    for index, (_, sample) in enumerate(samples):
        check_logits(f"the next logits of sample {index}", sample.append([9]), [*tokens, 40 + index, 9], 7)
    assert 6 - pool.num_free == 4, f"3 samples of 8 tokens on a shared block take 4 blocks, not {6 - pool.num_free}"
    check_refused("a pass that needs more blocks than are free", lambda: model.append([1] * 9))
    check_logits("logits after a refused pass", model.append([5]), [*tokens, 40, 9, 5], 8)
    for fork, _ in samples:
        fork.free()
    assert pool.num_free == 6, f"all samples are gone; {pool.num_free} of 6 blocks are free"
