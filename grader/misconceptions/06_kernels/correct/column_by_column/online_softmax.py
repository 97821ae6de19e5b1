"""Online softmax that takes scores one by one, and merges the states of blocks in a tree."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]
"""maximum `[rows]`, total `[rows]`, accumulated `[rows, head_dim]`, all in fp32 or float64."""


def block_state(scores: Tensor, values: Tensor) -> State:
    """The state of one block.

    Args:
        scores: `[rows, block]`, finite or -inf, which means "hidden". The block may be empty.
        values: `[block, head_dim]`.

    Returns:
        maximum, total and accumulated of each row, in fp32 (in float64 for float64 scores).

    Raises:
        ValueError: shapes or dtypes don't fit together.
    """
    _check_block(scores, values)
    wide = torch.promote_types(scores.dtype, torch.float32)
    rows = scores.shape[0]
    maximum = torch.full((rows,), -math.inf, dtype=wide)
    total = torch.zeros(rows, dtype=wide)
    accumulated = torch.zeros(rows, values.shape[1], dtype=wide)
    # One column at a time: each is a set of a single score.
    for column in range(scores.shape[1]):
        score = scores[:, column].to(wide)
        higher = score > maximum
        shrink = torch.where(higher, (maximum - score).exp(), torch.ones_like(score))
        weight = torch.where(higher, torch.ones_like(score), (score - maximum).exp())
        weight = weight.where(score > -math.inf, 0.0)
        maximum = torch.where(higher, score, maximum)
        total = total * shrink + weight
        accumulated = accumulated * shrink[:, None] + weight[:, None] * values[column].to(wide)
    return maximum, total, accumulated


def merge_states(first: State, second: State) -> State:
    """The state of the union of two disjoint sets of scores of the same rows.

    Args:
        first: state of one set.
        second: state of the other. Either may be that of no scores at all, in any row.

    Returns:
        The state of both together; the order of the two doesn't matter.

    Raises:
        ValueError: the two states differ in shape or dtype.
    """
    _check_states(first, second)
    both = torch.stack([first[0], second[0]])
    maximum = both.amax(dim=0)
    # An empty side has the factor 0; its NaN of -inf − (-inf) is replaced before it is used.
    factors = (both - maximum).exp().nan_to_num(0.0)
    total = factors[0] * first[1] + factors[1] * second[1]
    accumulated = factors[0, :, None] * first[2] + factors[1, :, None] * second[2]
    return maximum, total, accumulated


def finish_state(state: State) -> tuple[Tensor, Tensor]:
    """What a state was kept for: the weighted mean, and how much weight there was.

    Args:
        state: of all scores of each row.

    Returns:
        mean: Σ softmax(s) · v, `[rows, head_dim]`; 0 where every score was hidden.
        log_sum_exp: log Σ exp(s) = m + log l, `[rows]`; -inf there.
    """
    maximum, total, accumulated = state
    seen = total > 0
    mean = torch.zeros_like(accumulated)
    mean[seen] = accumulated[seen] / total[seen].unsqueeze(1)
    log_sum_exp = torch.full_like(maximum, -math.inf)
    log_sum_exp[seen] = maximum[seen] + total[seen].log()
    return mean, log_sum_exp


def online_mean(read_block: Callable[[int], tuple[Tensor, Tensor]], num_blocks: int) -> tuple[Tensor, Tensor]:
    """Attention in one pass: the softmax-weighted mean of values that are seen once, a block at a time.

    Args:
        read_block: given the number of a block, returns its scores `[rows, block]` and values `[block, head_dim]`.
            Reading is what costs time: each block is to be read exactly once.
        num_blocks: blocks 0 to num_blocks − 1 hold the whole of each row; their lengths may differ.

    Returns:
        mean `[rows, head_dim]` and log_sum_exp `[rows]`, as `finish_state`.

    Raises:
        ValueError: there is no block; nothing has been read then.
    """
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
        raise ValueError(f"num_blocks must be an int of at least 1, got {num_blocks!r}")
    # Pairs of neighbours, then pairs of pairs: any order of merging will do.
    states = [block_state(*read_block(number)) for number in range(num_blocks)]
    while len(states) > 1:
        merged = [merge_states(a, b) for a, b in zip(states[::2], states[1::2], strict=False)]
        states = merged + states[2 * len(merged) :]
    return finish_state(states[0])


def online_softmax(scores: Tensor, block_size: int) -> Tensor:
    """The softmax of rows too long to be held: one pass for maximum and total, a second for the weights.

    Args:
        scores: `[rows, columns]`, finite or -inf.
        block_size: columns that may be looked at together; the last block may be shorter.

    Returns:
        `[rows, columns]` in the dtype of the scores; a row whose scores are all -inf gives 0.

    Raises:
        ValueError: the scores are no floating point `[rows, columns]`, or the block size is below 1.
    """
    if scores.dim() != 2 or not scores.is_floating_point():
        raise ValueError(f"scores must be floating point [rows, columns], got {scores.dtype} {list(scores.shape)}")
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size must be an int of at least 1, got {block_size!r}")
    wide = torch.promote_types(scores.dtype, torch.float32)
    state = (
        torch.full((scores.shape[0],), -math.inf, dtype=wide),
        torch.zeros(scores.shape[0], dtype=wide),
        torch.zeros(scores.shape[0], 1, dtype=wide),
    )
    for block in scores.to(wide).split(block_size, dim=1):
        state = merge_states(state, block_state(block, torch.ones(block.shape[1], 1, dtype=wide)))
    maximum, total, _ = (part.reshape(scores.shape[0], 1) for part in state)
    pieces = []
    for block in scores.to(wide).split(block_size, dim=1):
        hidden = block == -math.inf
        pieces.append(torch.where(hidden, 0.0, (block - maximum).exp() / total))
    return torch.cat(pieces, dim=1).to(scores.dtype)


def _check_block(scores: Tensor, values: Tensor) -> None:
    """Refuse scores and values that don't fit together."""
    if scores.dim() != 2 or values.dim() != 2 or scores.shape[1] != values.shape[0]:
        raise ValueError(
            "scores must be [rows, block] and values [block, head_dim], got shapes "
            f"{list(scores.shape)} and {list(values.shape)}"
        )
    if not scores.is_floating_point() or values.dtype != scores.dtype:
        raise ValueError(f"scores and values must share a floating point dtype, got {scores.dtype}, {values.dtype}")


def _check_states(first: State, second: State) -> None:
    """Refuse states of different rows."""
    for name, a, b in zip(("maximum", "total", "accumulated"), first, second, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"two states of the same rows must agree in {name}, got {a.dtype} {list(a.shape)} "
                f"and {b.dtype} {list(b.shape)}"
            )
