"""Sampling that compares every token with every other: ranks and masses by counting instead of a search."""

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
    for start in range(0, vocab_size, BLOCK):
        ids, logits, keys, _ = load_keys(rows_ptr, stride, row_mask, start, vocab_size, BLOCK)
        above = (keys >= bound[:, None]) & (ids < vocab_size)
        count += tl.sum(above.to(tl.int32), axis=1)
        mass += tl.sum(tl.where(above, weigh(logits, top, temperature), 0.0), axis=1)
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
    # For vocabularies that fit into a tile; longer ones are searched tile by tile against all others.
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    top_k = tl.where(greedy, 1, tl.where(top_k == 0, vocab_size, top_k))
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    num_broken = tl.zeros([BLOCK_ROWS], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids, logits, keys, broken = load_keys(rows_ptr, stride, row_mask, start, vocab_size, BLOCK)
        top = tl.maximum(top, tl.max(logits, axis=1))
        num_broken += tl.sum(broken.to(tl.int32), axis=1)
    has_distribution = (num_broken == 0) & (top > float("-inf"))
    top = tl.where(has_distribution, top, 0.0)

    # First the mass that top-k leaves.
    mass_k = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids, logits, keys, _ = load_keys(rows_ptr, stride, row_mask, start, vocab_size, BLOCK)
        rank = tl.zeros([BLOCK_ROWS, BLOCK], tl.int32)
        for other in range(0, vocab_size, BLOCK):
            ids_2, logits_2, keys_2, _ = load_keys(rows_ptr, stride, row_mask, other, vocab_size, BLOCK)
            ahead = keys_2[:, None, :] > keys[:, :, None]
            ahead = ahead | ((keys_2[:, None, :] == keys[:, :, None]) & (ids_2[:, None, :] < ids[:, :, None]))
            rank += tl.sum((ahead & (ids_2 < vocab_size)[:, None, :]).to(tl.int32), axis=2)
        weights = tl.where((rank < top_k[:, None]) & (ids < vocab_size), weigh(logits, top, temperature), 0.0)
        mass_k += tl.sum(weights, axis=1)

    target = tl.zeros([BLOCK_ROWS], tl.float32)
    token = tl.full([BLOCK_ROWS], -1, tl.int64)
    last = tl.full([BLOCK_ROWS], -1, tl.int64)
    for drawing in range(2):
        running = tl.zeros([BLOCK_ROWS], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            ids, logits, keys, _ = load_keys(rows_ptr, stride, row_mask, start, vocab_size, BLOCK)
            rank = tl.zeros([BLOCK_ROWS, BLOCK], tl.int32)
            before = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
            for other in range(0, vocab_size, BLOCK):
                ids_2, logits_2, keys_2, _ = load_keys(rows_ptr, stride, row_mask, other, vocab_size, BLOCK)
                ahead = keys_2[:, None, :] > keys[:, :, None]
                ahead = ahead | ((keys_2[:, None, :] == keys[:, :, None]) & (ids_2[:, None, :] < ids[:, :, None]))
                ahead = ahead & (ids_2 < vocab_size)[:, None, :]
                rank += tl.sum(ahead.to(tl.int32), axis=2)
                weights_2 = weigh(logits_2, top, temperature)
                before += tl.sum(tl.where(ahead, weights_2[:, None, :], 0.0), axis=2)
            weights = weigh(logits, top, temperature)
            keep = (ids < vocab_size) & (rank < top_k[:, None])
            keep = keep & ((before < top_p[:, None] * mass_k[:, None]) | (rank == 0) | (top_p >= 1.0)[:, None])
            keep = keep & ((weights >= min_p[:, None]) | (rank == 0))
            weights = tl.where(keep, weights, 0.0)
            sums = running[:, None] + tl.cumsum(weights, axis=1)
            exceeds = (weights > 0.0) & (sums > target[:, None])
            found = tl.min(tl.where(exceeds, ids, 2**62), axis=1)
            takes = (drawing == 1) & (token < 0) & (found < 2**62)
            token = tl.where(takes, found, token)
            last = tl.maximum(last, tl.max(tl.where(weights > 0.0, ids, -1), axis=1))
            running += tl.sum(weights, axis=1)
        target = uniform * running
    token = tl.where(has_distribution, tl.where(token < 0, last, token), -1)
    tl.store(tokens_ptr + rows * tokens_stride, token, mask=row_mask)


def fused_sample_torch(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """The same draw in plain torch, in float64 and by sorting.

    Arguments, result and errors as for `fused_sample`.
    """
    _check_sampling(logits, temperatures, top_k, top_p, min_p, uniforms)
    tokens = []
    for row in range(logits.shape[0]):
        scores = logits[row].double()
        if bool((scores.isnan() | (scores == math.inf)).any()) or bool((scores == -math.inf).all()):
            tokens.append(-1)
            continue
        greedy = float(temperatures[row]) == 0
        order = sorted(range(scores.shape[0]), key=lambda i: (-float(scores[i]), i))
        kept = order[: 1 if greedy else int(top_k[row]) or len(order)]
        heat = 1.0 if greedy else float(temperatures[row])
        weights = {i: math.exp((float(scores[i]) - float(scores[order[0]])) / heat) for i in kept}
        if float(top_p[row]) < 1:
            wanted, mass, chosen = float(top_p[row]) * math.fsum(weights.values()), 0.0, {}
            for i in kept:
                if chosen and mass >= wanted:
                    break
                chosen[i] = weights[i]
                mass += weights[i]
            weights = chosen
        weights = {i: w for i, w in weights.items() if i == order[0] or w >= float(min_p[row])}
        target, running = float(uniforms[row]) * math.fsum(weights.values()), 0.0
        alive = sorted(i for i, w in weights.items() if w > 0)
        token = alive[-1]
        for i in alive:
            running += weights[i]
            if running > target:
                token = i
                break
        tokens.append(token)
    return torch.tensor(tokens, device=logits.device)


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
