"""Task 1: softmax in pieces. A row of any length is read block by block, and three numbers per row carry on.

The *state* of some of a row's scores s and the vectors v that belong to them is a tuple of tensors:

    maximum       m   = max s              [rows]             -inf where no score is above -inf
    total         l   = Σ exp(s − m)       [rows]             0 there
    accumulated   acc = Σ exp(s − m) · v   [rows, head_dim]   0 there

States of two disjoint sets of scores merge into that of their union. Softmax, FlashAttention and FlashDecoding are
three orders in which to do it.
"""

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
    # BEGIN SOLUTION
    compute = torch.promote_types(scores.dtype, torch.float32)
    scores, values = scores.to(compute), values.to(compute)
    # A column of -inf makes the maximum of an empty block -inf, where amax alone would refuse.
    maximum = torch.cat([scores, scores.new_full((scores.shape[0], 1), -math.inf)], dim=1).amax(dim=1)
    weights = torch.exp(scores - _finite(maximum).unsqueeze(1))
    return maximum, weights.sum(dim=1), weights @ values
    # END SOLUTION


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
    # BEGIN SOLUTION
    maximum = torch.maximum(first[0], second[0])
    # Each side was scaled by exp(−m) of its own; exp(m_side − m) brings it to the maximum of both. Where both are
    # empty, -inf − (-inf) would be NaN.
    shrink_first = torch.exp(first[0] - _finite(maximum))
    shrink_second = torch.exp(second[0] - _finite(maximum))
    total = first[1] * shrink_first + second[1] * shrink_second
    accumulated = first[2] * shrink_first.unsqueeze(1) + second[2] * shrink_second.unsqueeze(1)
    return maximum, total, accumulated
    # END SOLUTION


def finish_state(state: State) -> tuple[Tensor, Tensor]:
    """What a state was kept for: the weighted mean, and how much weight there was.

    Args:
        state: of all scores of each row.

    Returns:
        mean: Σ softmax(s) · v, `[rows, head_dim]`; 0 where every score was hidden.
        log_sum_exp: log Σ exp(s) = m + log l, `[rows]`; -inf there.
    """
    # BEGIN SOLUTION
    maximum, total, accumulated = state
    mean = accumulated / total.where(total > 0, 1.0).unsqueeze(1)
    return mean, maximum + total.log()
    # END SOLUTION


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
    # BEGIN SOLUTION
    state = block_state(*read_block(0))
    for number in range(1, num_blocks):
        state = merge_states(state, block_state(*read_block(number)))
    return finish_state(state)
    # END SOLUTION


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
    # BEGIN SOLUTION
    compute = torch.promote_types(scores.dtype, torch.float32)
    maximum = torch.full((scores.shape[0],), -math.inf, dtype=compute, device=scores.device)
    total = torch.zeros_like(maximum)
    for block in scores.split(block_size, dim=1):
        raised = torch.maximum(maximum, block.to(compute).amax(dim=1))
        weights = torch.exp(block.to(compute) - _finite(raised).unsqueeze(1))
        total = total * torch.exp(maximum - _finite(raised)) + weights.sum(dim=1)
        maximum = raised
    result = torch.empty_like(scores)
    for start in range(0, scores.shape[1], block_size):
        block = scores[:, start : start + block_size].to(compute)
        weights = torch.exp(block - _finite(maximum).unsqueeze(1)) / total.where(total > 0, 1.0).unsqueeze(1)
        result[:, start : start + block_size] = weights.to(scores.dtype)
    return result
    # END SOLUTION


# BEGIN SOLUTION
def _finite(maximum: Tensor) -> Tensor:
    """A maximum that can be subtracted: 0 in place of -inf, so that hidden scores stay -inf and their exp is 0."""
    return maximum.where(maximum > -math.inf, 0.0)


# END SOLUTION


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
