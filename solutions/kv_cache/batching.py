"""Task 6a: sequences of different lengths in one forward pass, packed one behind the other, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.decoder import Decoder
from labkit.protocols import KVStore

from .attention import cached_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
RaggedAttention = Callable[[Tensor, Tensor, Tensor, list[int], list[int]], Tensor]


def ragged_positions(lengths: Sequence[int], new_tokens: Sequence[int]) -> Tensor:
    """Positions of the new tokens of several sequences, each counted in its own sequence.

    Args:
        lengths: tokens that each sequence holds already.
        new_tokens: tokens that each sequence adds in this step, at least 1.

    Returns:
        int64 `[sum(new_tokens)]`, sequence after sequence.

    Raises:
        ValueError: there is no sequence, the two differ in length, or a count is no int or too small.
    """
    _check_counts("lengths", lengths, 0)
    _check_counts("new_tokens", new_tokens, 1)
    if len(lengths) != len(new_tokens):
        raise ValueError(f"lengths names {len(lengths)} sequences and new_tokens {len(new_tokens)}; they must agree")
    # BEGIN SOLUTION
    return torch.cat([torch.arange(held, held + new) for held, new in zip(lengths, new_tokens, strict=True)])
    # END SOLUTION


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_queries: Sequence[int],
    num_keys: Sequence[int],
    attention: Attention = cached_attention,
) -> Tensor:
    """Causal attention of several packed sequences, none of which sees another.

    Args:
        q: queries of the new tokens `[1, heads, sum(num_queries), head_dim]`, sequence after sequence.
        k: keys of all tokens `[1, kv_heads, sum(num_keys), head_dim]`, sequence after sequence.
        v: values, same shape as `k`.
        num_queries: new tokens of each sequence, at least 1.
        num_keys: all tokens of each sequence; the new ones come last among them.
        attention: attention of one sequence, called as `attention(q, k, v)`.

    Returns:
        `[1, heads, sum(num_queries), head_dim]` in the order of the queries. What a sequence gets depends on
        nothing of the others.

    Raises:
        ValueError: the counts don't agree with each other or with the tensors.
    """
    _check_counts("num_queries", num_queries, 1)
    _check_counts("num_keys", num_keys, 1)
    if len(num_queries) != len(num_keys):
        raise ValueError(f"{len(num_queries)} counts of queries and {len(num_keys)} of keys; they must agree")
    for name, tensor, counts in (("q", q, num_queries), ("k", k, num_keys), ("v", v, num_keys)):
        if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != sum(counts):
            raise ValueError(
                f"{name} must have shape [1, heads, {sum(counts)} tokens, head_dim] for counts {list(counts)}, "
                f"got {list(tensor.shape)}"
            )
    # BEGIN SOLUTION
    queries, keys, values = q.split(list(num_queries), 2), k.split(list(num_keys), 2), v.split(list(num_keys), 2)
    return torch.cat([attention(*one) for one in zip(queries, keys, values, strict=True)], dim=2)
    # END SOLUTION


def ragged_step(
    decoder: Decoder,
    stores: Sequence[KVStore],
    tokens: Sequence[Sequence[int]],
    attention: RaggedAttention = ragged_attention,
) -> list[Tensor]:
    """Run the decoder once on the new tokens of several sequences, whatever their lengths.

    A sequence that has just arrived brings its whole prompt, one that decodes brings one token; both go into the
    same pass. The weights are read once for all of them, which is what batching is for.

    Args:
        decoder: the given decoder; called once, as `decoder(tokens, positions, attend)` with a batch of 1.
        stores: where each sequence keeps its keys and values.
        tokens: the new token ids of each sequence, at least one each.
        attention: called once a layer with packed queries, keys and values and the counts of `ragged_attention`.

    Returns:
        For each sequence its logits `[new tokens, vocab_size]`.

    Raises:
        ValueError: no sequence, not one list of tokens per store, an empty list, an id outside the vocabulary,
            a store given twice, or more tokens than a store has room for. Nothing has run then. If the pass
            fails half-way, every store is truncated to the length it had before, and the error goes on.
    """
    if not stores or len(stores) != len(tokens) or len({id(store) for store in stores}) < len(stores):
        raise ValueError(
            f"each sequence needs one list of tokens and a store of its own, got {len(tokens)} lists for "
            f"{len(stores)} stores"
        )
    for index, row in enumerate(tokens):
        check_tokens(f"tokens[{index}]", row, decoder.config.vocab_size)
    # BEGIN SOLUTION
    lengths, counts = [store.length for store in stores], [len(row) for row in tokens]
    totals = [length + count for length, count in zip(lengths, counts, strict=True)]
    for index, (store, total) in enumerate(zip(stores, totals, strict=True)):
        if total > store.capacity:
            raise ValueError(f"sequence {index} would hold {total} tokens, but its capacity is {store.capacity}")

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        new = zip(stores, k.split(counts, 2), v.split(counts, 2), strict=True)
        held = [store.append(layer, keys, values) for store, keys, values in new]
        keys, values = (torch.cat(tensors, dim=2) for tensors in zip(*held, strict=True))
        return attention(q, keys, values, counts, totals)

    packed = torch.tensor([[token for row in tokens for token in row]])
    try:
        with torch.no_grad():
            logits = decoder(packed, ragged_positions(lengths, counts), attend)
    except BaseException:
        for store, length in zip(stores, lengths, strict=True):
            store.truncate(length)
        raise
    return list(logits[0].split(counts))
    # END SOLUTION


def _check_counts(name: str, counts: Sequence[int], least: int) -> None:
    """Refuse an empty list, and anything in it but ints of at least `least`."""
    if not counts:
        raise ValueError(f"{name} must name at least one sequence, got none")
    for index, count in enumerate(counts):
        check_count(f"{name}[{index}]", count, least)
