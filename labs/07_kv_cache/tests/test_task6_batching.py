"""Task 6: one forward pass for sequences of different lengths, none of which notices the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from grader.judge.reference import attention64, plain_attention
from grader.judge.refusal import check_refused
from grader.judge.scripted import RecordingStore
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.specs import TinyLlama

pytestmark = pytest.mark.task(6)

CONFIG = ModelConfig.tiny(num_layers=2)
SPEC = TinyLlama(CONFIG, 1)
# A prompt that arrives, a sequence that decodes, a chunk of a prompt, and again single tokens.
STEPS = [
    ([7, 0, 60, 31], [44], [19, 5, 2]),
    ([1], [58], [33]),
    ([9], [9, 12, 30], [6]),
]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The judge's attention of one sequence, so that task 2 can't decide task 6."""
    return attention64(q, k, v).to(q.dtype)


def ragged(q: Tensor, k: Tensor, v: Tensor, num_queries: list[int], num_keys: list[int]) -> Tensor:
    """The judge's packed attention."""
    parts = zip(q.split(num_queries, 2), k.split(num_keys, 2), v.split(num_keys, 2), strict=True)
    return torch.cat([attention(*part) for part in parts], dim=2)


def run_alone(tokens: list[int], dtype: torch.dtype, keys: list[Tensor] | None = None) -> Tensor:
    """Logits of one sequence by itself, uncached, `[tokens, vocab]`; its keys by layer are added to `keys`."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        if keys is not None:
            keys.append(k)
        return full_attention(layer, q, k, v, positions)

    model = Decoder(CONFIG, random_weights(CONFIG, 1, dtype), dtype)
    return model(torch.tensor([tokens]), torch.arange(len(tokens)), attend)[0]


def check_logits(what: str, got: object, tokens: list[int], first: int) -> None:
    """Logits of tokens[first:] against the float64 run of that sequence alone."""
    reference = run_alone(tokens, torch.float64)[first:]
    check_close(
        what,
        got,
        reference,
        scale=float(reference.abs().max()),
        dtype=torch.float32,
        plain=run_alone(tokens, torch.float32)[first:],
        advice="It must be what this sequence gives alone: own positions, own keys, own rows of the result.",
    )


def packed_inputs(num_queries: list[int], num_keys: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Random packed q, k and v with 6 query heads on 2 kv heads."""
    rng = torch.Generator().manual_seed(5)
    q = torch.randn(1, 6, sum(num_queries), 8, generator=rng)
    k, v = (torch.randn(1, 2, sum(num_keys), 8, generator=rng) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize(
    ("lengths", "new", "positions"),
    [
        ([0], [3], [0, 1, 2]),
        ([5, 0, 2], [1, 3, 2], [5, 0, 1, 2, 2, 3]),
        ([7, 7, 3, 0], [1, 1, 1, 1], [7, 7, 3, 0]),
        ([0, 4], [2, 2], [0, 1, 4, 5]),
    ],
)
def test_positions_count_in_each_sequence(lab: Any, lengths: list[int], new: list[int], positions: list[int]) -> None:
    got = lab.ragged_positions(lengths, new)
    check_equal(f"positions for {lengths} tokens held and {new} new", got, torch.tensor(positions))


@pytest.mark.parametrize(
    ("num_queries", "num_keys"),
    [([1, 5, 2, 1], [7, 5, 9, 1]), ([3], [8]), ([1, 1, 1], [4, 11, 2]), ([4, 1], [4, 6])],
)
def test_ragged_attention_matches_each_alone(lab: Any, num_queries: list[int], num_keys: list[int]) -> None:
    q, k, v = packed_inputs(num_queries, num_keys)
    got = lab.ragged_attention(q, k, v, num_queries, num_keys, attention)
    parts = list(zip(q.split(num_queries, 2), k.split(num_keys, 2), v.split(num_keys, 2), strict=True))
    check_close(
        f"attention of sequences with {num_queries} queries and {num_keys} keys",
        got,
        torch.cat([attention64(*part) for part in parts], dim=2),
        scale=float(v.abs().max()),
        dtype=torch.float32,
        plain=torch.cat([plain_attention(*part) for part in parts], dim=2),
        inputs=[q],
        advice="Each query sees keys of its own sequence only, up to its own position, counted from that one's end.",
    )


def test_nothing_leaks_between_sequences(lab: Any) -> None:
    num_queries, num_keys = [2, 3, 1], [5, 3, 6]
    q, k, v = packed_inputs(num_queries, num_keys)
    before = lab.ragged_attention(q, k, v, num_queries, num_keys, attention)
    right = ragged(q.double(), k.double(), v.double(), num_queries, num_keys)
    check_close("the result", before, right, scale=float(v.abs().max()), dtype=torch.float32, inputs=[q])
    first, last = (0, 2), (5, 6)
    for name, poison in (("1e4", 1e4), ("NaN", float("nan"))):
        for tensor in (k, v):
            tensor[:, :, 5:8] = poison
        q[:, :, 2:5] = poison
        after = lab.ragged_attention(q, k, v, num_queries, num_keys, attention)
        for start, end in (first, last):
            check_equal(
                f"rows {start}..{end - 1}, with the second of three sequences set to {name},",
                after[:, :, start:end],
                before[:, :, start:end],
                "What a sequence gets depends on nothing of the others; a weight of 0 won't do, 0 times NaN is NaN.",
            )
        assert not torch.equal(after[:, :, 2:5], before[:, :, 2:5]), "the second sequence must see its own keys"


def test_counts_that_disagree_are_refused(lab: Any) -> None:
    q, k, v = packed_inputs([2, 1], [3, 4])
    check_close(
        "a good call",
        lab.ragged_attention(q, k, v, [2, 1], [3, 4], attention),
        ragged(q.double(), k.double(), v.double(), [2, 1], [3, 4]),
        scale=float(v.abs().max()),
        dtype=torch.float32,
    )
    check_refused("too many queries", lambda: lab.ragged_attention(q, k, v, [2, 2], [3, 4], attention))
    check_refused("too few keys", lambda: lab.ragged_attention(q, k, v, [2, 1], [3, 3], attention))
    check_refused("another number of sequences", lambda: lab.ragged_attention(q, k, v, [2, 1], [7], attention))
    check_refused("positions of no sequence", lambda: lab.ragged_positions([], []))
    check_refused("a sequence without new tokens", lambda: lab.ragged_positions([4, 4], [1, 0]))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_ragged_step_equals_each_sequence_alone(lab: Any, order: tuple[int, ...]) -> None:
    stores = [RecordingStore(CONFIG.num_layers, 32) for _ in range(3)]
    sequences: list[list[int]] = [[], [], []]
    for number, step in enumerate(STEPS):
        got = lab.ragged_step(SPEC, [stores[i].spec() for i in order], [step[i] for i in order], ragged)
        assert isinstance(got, list) and len(got) == 3, f"a step of 3 sequences must return 3 tensors, got {got!r}"
        for i, logits in zip(order, got, strict=True):
            first = len(sequences[i])
            sequences[i] += step[i]
            check_logits(f"step {number}, logits of sequence {i} (batch order {order})", logits, sequences[i], first)


def test_sequences_join_and_leave_between_steps(lab: Any) -> None:
    a, b, c = (RecordingStore(CONFIG.num_layers, 32) for _ in range(3))
    lab.ragged_step(SPEC, [a.spec(), b.spec()], [[3, 4], [5, 6, 7]], ragged)
    got = lab.ragged_step(SPEC, [c.spec(), b.spec()], [[11, 12, 13, 14], [8]], ragged)
    check_logits("a sequence in its first step", got[0], [11, 12, 13, 14], 0)
    check_logits("its neighbour in the second", got[1], [5, 6, 7, 8], 3)
    got = lab.ragged_step(SPEC, [a.spec()], [[9]], ragged)
    check_logits("a sequence alone, after a step without it", got[0], [3, 4, 9], 2)


def test_one_pass_serves_all_sequences(lab: Any) -> None:
    stores, seen = [RecordingStore(CONFIG.num_layers, 32) for _ in range(3)], []

    def counting(q: Tensor, k: Tensor, v: Tensor, num_queries: list[int], num_keys: list[int]) -> Tensor:
        seen.append((q.shape[2], k.shape[2], num_queries, num_keys))
        return ragged(q, k, v, num_queries, num_keys)

    totals = [0, 0, 0]
    sequence: list[list[int]] = [[], [], []]
    for step in STEPS:
        counts = [len(tokens) for tokens in step]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        seen.clear()
        for store in stores:
            store.appends.clear()
        got = lab.ragged_step(SPEC, [store.spec() for store in stores], list(step), counting)
        sequence = [sequence[0] + step[0], sequence[1] + step[1], sequence[2] + step[2]]
        check_logits("logits of the last sequence", got[2], sequence[2], len(sequence[2]) - len(step[2]))
        wanted = [(sum(counts), sum(totals), counts, totals)] * CONFIG.num_layers
        assert seen == wanted, (
            f"new tokens {counts}: attention was called with (queries, keys, counts of queries, of keys) = {seen}, "
            f"should be {wanted}: once a layer for all sequences, without padding"
        )
        for index, store in enumerate(stores):
            wanted_appends = [(layer, counts[index], counts[index]) for layer in range(CONFIG.num_layers)]
            assert store.appends == wanted_appends, (
                f"the store of sequence {index} was given (layer, keys, values) = {store.appends}, should be "
                f"{wanted_appends}"
            )


def test_stored_keys_carry_the_sequence_s_own_positions(lab: Any) -> None:
    # RoPE looks at differences only: positions shifted alike leave the logits right and the stored keys wrong.
    stores = [RecordingStore(CONFIG.num_layers, 32) for _ in range(3)]
    for step in STEPS:
        got = lab.ragged_step(SPEC, [store.spec() for store in stores], list(step), ragged)
    whole = [token for step in STEPS for token in step[0]]
    check_logits("logits of the first sequence in the last step", got[0], whole, len(whole) - len(STEPS[-1][0]))
    for index, store in enumerate(stores):
        right: list[Tensor] = []
        run_alone([token for step in STEPS for token in step[index]], torch.float64, right)
        for layer, keys in enumerate(right):
            check_close(
                f"keys of sequence {index} in layer {layer}",
                store.keys[layer],
                keys,
                scale=32 * float(keys.abs().max()),
                dtype=torch.float32,
                advice="Positions start at 0 in every sequence and continue at its own length.",
            )


def test_a_step_that_cannot_run_touches_no_store(lab: Any) -> None:
    a, b = RecordingStore(CONFIG.num_layers, 5), RecordingStore(CONFIG.num_layers, 32)
    got = lab.ragged_step(SPEC, [a.spec(), b.spec()], [[3, 4, 5], [6]], ragged)
    check_logits("a good step comes first", got[0], [3, 4, 5], 0)
    a.appends.clear()
    b.appends.clear()
    for what, tokens in (
        ("3 tokens where 2 fit", [[7, 8, 9], [1]]),
        ("a sequence without tokens", [[7], []]),
        ("an id of -1", [[7], [-1]]),
        (f"an id of {CONFIG.vocab_size}", [[CONFIG.vocab_size], [1]]),
        ("one list for two stores", [[7]]),
    ):
        check_refused(what, lambda t=tokens: lab.ragged_step(SPEC, [a.spec(), b.spec()], t, ragged))
        swapped = tokens[::-1]
        check_refused(f"{what}, last", lambda t=swapped: lab.ragged_step(SPEC, [b.spec(), a.spec()], t, ragged))
    assert not a.appends and not b.appends, f"refused steps wrote to the stores: {a.appends}, {b.appends}"
    got = lab.ragged_step(SPEC, [a.spec(), b.spec()], [[7, 8], [1]], ragged)
    check_logits("a step that fits exactly", got[0], [3, 4, 5, 7, 8], 3)


def test_a_failed_step_is_rolled_back_everywhere(lab: Any) -> None:
    class Broken(RuntimeError):
        """Raised by this test's attention."""

    calls: list[int] = []

    def failing(q: Tensor, k: Tensor, v: Tensor, num_queries: list[int], num_keys: list[int]) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise Broken
        return ragged(q, k, v, num_queries, num_keys)

    a, b = RecordingStore(CONFIG.num_layers, 32), RecordingStore(CONFIG.num_layers, 32)
    lab.ragged_step(SPEC, [a.spec(), b.spec()], [[3, 4, 5], [6]], ragged)
    with pytest.raises(Broken):
        lab.ragged_step(SPEC, [a.spec(), b.spec()], [[7], [8, 9]], failing)
    for name, store, held in (("first", a, 3), ("second", b, 1)):
        got = [0 if keys is None else keys.shape[2] for keys in store.keys]
        assert got == [held] * CONFIG.num_layers, (
            f"the pass failed in its second layer; the {name} store held {held} tokens before and now {got} by layer"
        )
    got = lab.ragged_step(SPEC, [a.spec(), b.spec()], [[7], [8, 9]], ragged)
    check_logits("the step repeated", got[1], [6, 8, 9], 1)


@pytest.mark.integration
def test_your_own_caches_share_a_pass(lab: Any) -> None:
    caches = [lab.KVCache(CONFIG, 16) for _ in range(3)]
    sequences: list[list[int]] = [[], [], []]
    for step in STEPS:
        got = lab.ragged_step(SPEC, caches, list(step))
        for i, logits in enumerate(got):
            first = len(sequences[i])
            sequences[i] += step[i]
            check_logits(f"logits of sequence {i} on your own cache and attention", logits, sequences[i], first)
    check_refused("one cache for two sequences", lambda: lab.ragged_step(SPEC, [caches[0]] * 2, [[1], [2]]))
