"""Stretch task 14: from logits to a token in one kernel, with settings of its own for every row.

Nothing is sorted. Each filter keeps what lies above a threshold, and thresholds are found by halving the range of a
row's *keys*: fp32 numbers read as whole numbers of the same order. What survives is told by two numbers:

    threshold, ties     keys above the threshold survive, and of those equal to it the first `ties` by token id
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import DTYPES
from labkit.launch import backend, launch
from labkit.row_checks import check_axes, check_power_of_two

MAX_BLOCK = 16384


@triton.jit
def load_keys(rows_ptr, stride, row_mask, start, vocab_size, BLOCK: tl.constexpr):
    """A tile of logits of BLOCK_ROWS rows.

    Returns:
        ids `[1, BLOCK]`; and `[BLOCK_ROWS, BLOCK]` logits in fp32 with -inf in place of what is no logit, their keys,
        and whether a NaN or +inf stood there.
    """
    ids = (start + tl.arange(0, BLOCK).to(tl.int64))[None, :]
    mask = row_mask[:, None] & (ids < vocab_size)
    logits = tl.load(rows_ptr[:, None] + ids * stride, mask=mask, other=float("-inf")).to(tl.float32)
    broken = (logits != logits) | (logits == float("inf"))
    logits = tl.where(broken, float("-inf"), logits)
    # -0.0 and 0.0 are equal and differ in their bits.
    logits = tl.where(logits == 0.0, 0.0, logits)
    bits = logits.to(tl.int32, bitcast=True)
    # The bits of negative numbers rise as the numbers fall: turn all but the sign around.
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ids, logits, keys.to(tl.int64), broken


@triton.jit
def weigh(logits, top, temperature):
    """exp((logits − top) / temperature) with top and temperature of each row: the likeliest token weighs 1."""
    return tl.exp((logits - top[:, None]) / temperature[:, None])


@triton.jit
def at_or_above(bound, rows_ptr, stride, row_mask, vocab_size, top, temperature, BLOCK: tl.constexpr):
    """How many tokens of each row have a key of at least its `bound`, and what they weigh together."""
    count = tl.zeros_like(bound).to(tl.int32)
    mass = tl.zeros_like(top)
    # BEGIN SOLUTION
    for start in range(0, vocab_size, BLOCK):
        ids, logits, keys, _ = load_keys(rows_ptr, stride, row_mask, start, vocab_size, BLOCK)
        above = (keys >= bound[:, None]) & (ids < vocab_size)
        count += tl.sum(above.to(tl.int32), axis=1)
        mass += tl.sum(tl.where(above, weigh(logits, top, temperature), 0.0), axis=1)
    # END SOLUTION
    return count, mass


@triton.jit
def sample_kernel(
    logits_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniforms_ptr,
    tokens_ptr,
    logits_stride_row,
    stride,
    tokens_stride,
    num_rows,
    vocab_size,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK_ROWS rows, BLOCK tokens of each at a time: program (tile of rows). The settings are contiguous."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < num_rows
    rows_ptr = logits_ptr + rows * logits_stride_row
    temperature = tl.load(temperatures_ptr + rows, mask=row_mask, other=1.0)
    top_k = tl.load(top_k_ptr + rows, mask=row_mask, other=0)
    top_p = tl.load(top_p_ptr + rows, mask=row_mask, other=1.0)
    min_p = tl.load(min_p_ptr + rows, mask=row_mask, other=0.0)
    uniform = tl.load(uniforms_ptr + rows, mask=row_mask, other=0.0)
    # BEGIN SOLUTION
    # Greedy is top-1: of the largest logits the lowest id.
    top_k = tl.where(temperature == 0.0, 1, top_k)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    top_k = tl.where((top_k == 0) | (top_k > vocab_size), vocab_size, top_k)

    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    top_key = tl.full([BLOCK_ROWS], -(2**31), tl.int64)
    num_broken = tl.zeros([BLOCK_ROWS], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids, logits, keys, broken = load_keys(rows_ptr, stride, row_mask, start, vocab_size, BLOCK)
        top = tl.maximum(top, tl.max(logits, axis=1))
        top_key = tl.maximum(top_key, tl.max(keys, axis=1))
        num_broken += tl.sum(broken.to(tl.int32), axis=1)
    has_distribution = (num_broken == 0) & (top > float("-inf"))
    # A row without a distribution goes through with harmless numbers, and is marked at the end.
    top = tl.where(has_distribution, top, 0.0)

    threshold = tl.full([BLOCK_ROWS], -(2**31), tl.int64)
    ties = tl.zeros([BLOCK_ROWS], tl.int32) + vocab_size
    if tl.min(top_k, axis=0) < vocab_size:
        # The largest bound with at least top_k keys at or above it.
        high = tl.full([BLOCK_ROWS], 2**31, tl.int64)
        for _ in range(32):
            middle = (threshold + high) >> 1
            count, mass = at_or_above(middle, rows_ptr, stride, row_mask, vocab_size, top, temperature, BLOCK)
            threshold = tl.where(count >= top_k, middle, threshold)
            high = tl.where(count >= top_k, high, middle)
        above, mass = at_or_above(threshold + 1, rows_ptr, stride, row_mask, vocab_size, top, temperature, BLOCK)
        ties = top_k - above

    if tl.min(top_p, axis=0) < 1.0:
        count, mass = at_or_above(threshold, rows_ptr, stride, row_mask, vocab_size, top, temperature, BLOCK)
        above, heavier = at_or_above(threshold + 1, rows_ptr, stride, row_mask, vocab_size, top, temperature, BLOCK)
        one = (mass - heavier) / tl.maximum(count - above, 1)
        # The mass to reach is a share of what survived so far, not of all tokens.
        wanted = top_p * (heavier + one * tl.minimum(ties, count - above))
        low = threshold
        high = top_key + 1
        for _ in range(32):
            middle = (low + high) >> 1
            count, mass = at_or_above(middle, rows_ptr, stride, row_mask, vocab_size, top, temperature, BLOCK)
            low = tl.where(mass >= wanted, middle, low)
            high = tl.where(mass >= wanted, high, middle)
        count, mass = at_or_above(low, rows_ptr, stride, row_mask, vocab_size, top, temperature, BLOCK)
        above, heavier = at_or_above(low + 1, rows_ptr, stride, row_mask, vocab_size, top, temperature, BLOCK)
        one = (mass - heavier) / tl.maximum(count - above, 1)
        # Of the tokens that cross the mass together, as many as it takes, and one at least.
        missing = tl.maximum(tl.ceil((wanted - heavier) / tl.where(one > 0.0, one, 1.0)), 1.0)
        available = tl.where(low == threshold, ties, count - above)
        ties = tl.where(top_p < 1.0, tl.minimum(missing, available.to(tl.float32)).to(tl.int32), ties)
        threshold = tl.where(top_p < 1.0, low, threshold)

    # Twice through the survivors in the order of ids: for their total, then for the first whose running sum exceeds
    # its share. Both sums round alike.
    target = tl.zeros([BLOCK_ROWS], tl.float32)
    token = tl.full([BLOCK_ROWS], 2**62, tl.int64)
    last = tl.full([BLOCK_ROWS], -1, tl.int64)
    for drawing in range(2):
        running = tl.zeros([BLOCK_ROWS], tl.float32)
        equals_before = tl.zeros([BLOCK_ROWS], tl.int32)
        tops_before = tl.zeros([BLOCK_ROWS], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            ids, logits, keys, _ = load_keys(rows_ptr, stride, row_mask, start, vocab_size, BLOCK)
            is_equal = (keys == threshold[:, None]).to(tl.int32)
            rank = equals_before[:, None] + tl.cumsum(is_equal, axis=1) - is_equal
            survives = (keys > threshold[:, None]) | ((is_equal == 1) & (rank < ties[:, None]))
            # min-p never takes the first of the likeliest.
            is_top = (keys == top_key[:, None]).to(tl.int32)
            is_first = (is_top == 1) & (tops_before[:, None] + tl.cumsum(is_top, axis=1) == 1)
            weights = weigh(logits, top, temperature)
            weights = tl.where(survives & ((weights >= min_p[:, None]) | is_first), weights, 0.0)
            exceeds = (weights > 0.0) & (running[:, None] + tl.cumsum(weights, axis=1) > target[:, None])
            found = tl.min(tl.where(exceeds, ids, 2**62), axis=1)
            token = tl.where(drawing == 1, tl.minimum(token, found), token)
            last = tl.maximum(last, tl.max(tl.where(weights > 0.0, ids, -1), axis=1))
            running += tl.sum(weights, axis=1)
            equals_before += tl.sum(is_equal, axis=1)
            tops_before += tl.sum(is_top, axis=1)
        target = uniform * running
    # Rounding can leave the running sum at a uniform near 1: then the last survivor is meant.
    token = tl.where(has_distribution, tl.minimum(token, last), -1)
    tl.store(tokens_ptr + rows * tokens_stride, token, mask=row_mask)
    # END SOLUTION


def fused_sample_torch(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """The same draw in plain torch, in float64 and by sorting.

    Arguments, result and errors as for `fused_sample`.
    """
    _check_sampling(logits, temperatures, top_k, top_p, min_p, uniforms)
    # BEGIN SOLUTION
    vocab_size = logits.shape[1]
    scores = logits.double()
    has_distribution = (scores < math.inf).all(dim=1) & (scores > -math.inf).any(dim=1)
    scores = torch.where(has_distribution.unsqueeze(1), scores, 0.0)
    greedy = temperatures == 0
    limit = torch.where(greedy, 1, torch.where(top_k == 0, vocab_size, top_k)).unsqueeze(1)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    weights = ((scores - scores[:, :1]) / torch.where(greedy, 1.0, temperatures.double()).unsqueeze(1)).exp()
    ranks = torch.arange(vocab_size, device=logits.device)
    weights = weights.where(ranks < limit, 0.0)
    # What lies before a token decides: the one that crosses top_p stays, and so does the first.
    before = weights.cumsum(dim=1) - weights
    mass = top_p.double().unsqueeze(1)
    weights = weights.where((before < mass * weights.sum(dim=1, keepdim=True)) | (mass >= 1) | (ranks == 0), 0.0)
    weights = weights.where((weights >= min_p.double().unsqueeze(1)) | (ranks == 0), 0.0)
    weights = torch.zeros_like(weights).scatter(1, order, weights)
    sums = weights.cumsum(dim=1)
    exceeds = (weights > 0) & (sums > uniforms.double().unsqueeze(1) * sums[:, -1:])
    # Rounding can leave the running sum at a uniform near 1: then the last survivor is meant.
    tokens = torch.where(exceeds, ranks, vocab_size).amin(dim=1).minimum(ranks.where(weights > 0, -1).amax(dim=1))
    return torch.where(has_distribution, tokens, -1)
    # END SOLUTION


def fused_sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    *,
    block_rows: int = 1,
    block_size: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw a token per row: temperature, top-k, top-p, min-p in that order, each on what survived the one before.

    Nothing leaves the device, and a result never lies outside the vocabulary. Masses are summed in fp32, so that a
    token within a few roundings of a filter's edge may fall on either side of it.

    Args:
        logits: `[batch, vocab_size]` in fp32, fp16 or bf16, any strides; -inf means "impossible".
        temperatures: fp32 `[batch]`, at least 0; 0 takes the largest logit, of equal ones the lowest id.
        top_k: int32 `[batch]`, at least 0; 0 keeps all. Exactly k survive, of equal logits the lower ids.
        top_p: fp32 `[batch]`, at least 0; the smallest set of likeliest tokens with this share, at least one token.
        min_p: fp32 `[batch]`, at least 0; keeps tokens this many times as likely as the likeliest, which always stays.
        uniforms: fp32 `[batch]` in [0, 1); token t is drawn where the running share of the survivors, in the order of
            their ids, first exceeds it.
        block_rows: rows in a tile, a power of two up to 64. One row a program keeps most of a GPU busy.
        block_size: tokens in a tile, a power of two from 16 to 16,384; None chooses.
        out: int64 `[batch]` to write to; None takes new memory.

    Returns:
        Token ids, int64 `[batch]`; −1 for a row without a distribution (NaN, +inf, or nothing but -inf). Only looking
        at them could raise, and would make the GPU wait.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, a setting on a CPU is out of range, or the block size
            is not allowed.
    """
    _check_sampling(logits, temperatures, top_k, top_p, min_p, uniforms)
    batch, vocab_size = logits.shape
    if block_size is None:
        block_size = min(4096, max(16, triton.next_power_of_2(vocab_size)))
    check_power_of_two("block_rows", block_rows, 1, 64)
    check_power_of_two("block_size", block_size, 16, MAX_BLOCK)
    if out is None:
        out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if tuple(out.shape) != (batch,) or out.dtype != torch.int64:
        raise ValueError(f"out must be int64 [{batch}], got {out.dtype} {list(out.shape)}")
    settings = [setting.contiguous() for setting in (temperatures, top_k, top_p, min_p, uniforms)]
    if backend(logits, *settings, out) == "twin":
        return out.copy_(fused_sample_torch(logits, temperatures, top_k, top_p, min_p, uniforms))
    launch(
        *(sample_kernel, (triton.cdiv(batch, block_rows),), logits, *settings, out),
        *(*logits.stride(), *out.stride(), batch, vocab_size),
        BLOCK_ROWS=block_rows,
        BLOCK=block_size,
    )
    return out


def _check_sampling(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> None:
    """Refuse logits and settings that don't fit together, and on a CPU settings out of range."""
    check_axes("logits", logits, "batch", "vocab_size")
    if logits.dtype not in DTYPES or logits.numel() == 0:
        raise ValueError(
            f"logits must be floating point [batch >= 1, vocab_size >= 1], got {logits.dtype} {list(logits.shape)}"
        )
    settings = dict(temperatures=temperatures, top_k=top_k, top_p=top_p, min_p=min_p, uniforms=uniforms)
    for name, values in settings.items():
        dtype = torch.int32 if name == "top_k" else torch.float32
        if tuple(values.shape) != (logits.shape[0],) or values.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} [{logits.shape[0]}], got {values.dtype} {list(values.shape)}")
    if backend(logits, *settings.values()) == "cuda":
        return
    for name, values in settings.items():
        below = 1.0 if name == "uniforms" else math.inf
        bad = ~((values >= 0) & (values < below))
        if bool(bad.any()):
            row = int(bad.int().argmax())
            limits = "from 0 to below 1" if name == "uniforms" else "a finite number of at least 0"
            raise ValueError(f"{name}[{row}] must be {limits}, got {values[row].item()!r}")
