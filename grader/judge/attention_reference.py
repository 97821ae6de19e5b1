"""Reference attention for kernels: in float64 over an explicit table of who sees whom, with its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_form

LAYOUTS = ("contiguous", "tokens first", "channels first", "side by side")
"""Row-major; `[batch, tokens, heads, head_dim]` in memory; channels apart; each row beside a row of another tensor."""


def who_sees_whom(num_queries: int, num_keys: int, *, causal: bool = True, window: int | None = None) -> Tensor:
    """Which keys each query sees, the queries being the last tokens of the sequence: bool `[num_queries, num_keys]`."""
    table = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for query in range(num_queries):
        position = query + num_keys - num_queries
        first = 0 if window is None else max(0, position - window + 1)
        last = position + 1 if causal else num_keys
        table[query, first : max(first, last)] = True
    return table


def seen_attention64(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64.

    Args:
        q: `[batch, heads, num_queries, head_dim]`.
        k: `[batch, kv_heads, num_keys, head_dim]`.
        v: as `k`.
        seen: bool `[num_queries, num_keys]`.
        scale: factor on the scores; None means 1 / sqrt(head_dim).

    Returns:
        The output, 0 where a query sees no key, and the log-sum-exp `[batch, heads, num_queries]`, -inf there.
    """
    return _attention(q.double(), k.double(), v.double(), seen, scale)


def seen_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    """The output by the textbook's formula in the inputs' own dtype, for bounds."""
    return _attention(q, k, v, seen, scale)[0]


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, seen: Tensor, scale: float | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by torch's autograd of the textbook's formula, computed in a dtype."""
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v))
    out, _ = _attention(q, k, v, seen, scale)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out.to(dtype))
    return dq, dk, dv


def forward_results(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What a right forward pass hands to the backward pass, output and log-sum-exp, and a gradient of the output."""
    out, lse = seen_attention64(q, k, v, seen, scale)
    grad_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(100)).to(q.dtype)
    return out.to(q.dtype), lse.float(), grad_out


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    owner = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    scores = (q @ k[:, owner].transpose(-1, -2) * factor).masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # A row that sees nothing would turn its gradients into NaN: it is given another log-sum-exp, and no weight.
    safe = torch.where(seen.any(-1), lse, torch.zeros_like(lse))
    weights = torch.where(seen, scores - safe[..., None], torch.full_like(scores, -math.inf)).exp()
    return weights @ v[:, owner], lse


def check_attention(
    what: str,
    got: object,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    *,
    score_size: float = 1.0,
    advice: str = "",
) -> tuple[Tensor, Tensor]:
    """Fail unless a pair of output and log-sum-exp is right.

    The output is a weighted mean, whose size is that of the largest value. A score that is rounded where it is large
    moves its weight by as much as the rounding: `score_size` says how large, where a test makes it so.

    Returns:
        The two, as tensors.

    Raises:
        AssertionError: it is no pair, or one of the two is wrong.
    """
    assert isinstance(got, (tuple, list)) and len(got) == 2, f"{what} must return output and log-sum-exp, got {got!r}"
    out, lse = seen_attention64(q, k, v, seen, scale)
    largest = score_size * float(v.abs().max()) if v.numel() else 1.0
    plain = seen_attention(q, k, v, seen, scale)
    check_close(
        f"{what}: the output", got[0], out, scale=largest, dtype=q.dtype, plain=plain, inputs=(q, k, v), advice=advice
    )
    check_lse(f"{what}: the log-sum-exp", got[1], lse, largest_products(q, k, scale), advice)
    return got[0], got[1]


FAR = 100_000 / 8
"""`score_size` for scores near 100,000 in fp32: one rounding of a score, not eight, may move a weight."""


def check_gradients(
    what: str,
    got: object,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    seen: Tensor,
    scale: float | None = None,
    *,
    score_size: float = 1.0,
    advice: str = "",
) -> None:
    """Fail unless dq, dk and dv are those of float64 autograd.

    A gradient's size is that of the products it sums: dP times K, dP times Q, and dO; see `check_attention` for
    `score_size`.

    Raises:
        AssertionError: these are no three gradients, or one is wrong.
    """
    assert isinstance(got, (tuple, list)) and len(got) == 3, f"{what} must return dq, dk and dv, got {got!r}"
    right = attention_gradients(q, k, v, grad_out, seen, scale, torch.float64)
    plain = attention_gradients(q, k, v, grad_out, seen, scale, q.dtype)
    # √D without the scale's 1/√D, as dP is a sum over channels.
    factor = q.shape[-1] ** 0.5 * (1.0 if scale is None else abs(scale) * q.shape[-1] ** 0.5)
    grad, values, keys, queries = (float(t.abs().max()) if t.numel() else 1.0 for t in (grad_out, v, k, q))
    sizes = {"dq": grad * values * keys * factor, "dk": grad * values * queries * factor, "dv": grad}
    for (name, size), one, reference, ordinary in zip(sizes.items(), got, right, plain, strict=True):
        check_close(
            f"{what}: {name}",
            one,
            reference,
            scale=score_size * size,
            dtype=q.dtype,
            plain=ordinary,
            inputs=(q, k, v),
            advice=advice,
        )


def check_right_or_refused(call: Callable[[], object], check: Callable[[object], object]) -> None:
    """Fail unless a call in bf16 is right, as on a GPU, or refused by name, as in the interpreter, where it is garbage.

    Raises:
        AssertionError: it gives something wrong, or a refusal that doesn't say why.
    """
    try:
        got = call()
    except ValueError as error:
        assert "bfloat16" in str(error), f"a refusal of bf16 should name bfloat16, it says {error}"
    else:
        check(got)


def largest_products(q: Tensor, k: Tensor, scale: float | None) -> float:
    """The largest Σ |q · k| · |scale| over queries and keys: the size of what a score is the sum of, at least 1."""
    if q.numel() == 0 or k.numel() == 0:
        return 1.0
    factor = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    owner = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    return max(1.0, float((q.double().abs() @ k[:, owner].double().abs().transpose(-1, -2)).max()) * factor)


def check_lse(what: str, got: object, right: Tensor, scale: float, advice: str = "") -> None:
    """Fail unless log-sum-exps in fp32 are right: -inf exactly where no key is seen, and close to it elsewhere.

    Args:
        what: name of the result, which starts every message.
        got: what the code under test returned.
        right: in float64.
        scale: size of the scores.
        advice: ends every message.

    Raises:
        AssertionError: naming the first place that is wrong.
    """
    tensor = check_form(what, got, tuple(right.shape), torch.float32)
    empty = right == -math.inf
    wrong = (tensor == -math.inf) != empty
    if bool(wrong.any()):
        place = [int(i) for i in wrong.nonzero()[0]]
        found, wanted = float(tensor[tuple(place)]), float(right[tuple(place)])
        raise AssertionError(
            f"{what} is {found:.6g} at {place}, where it must be {wanted:.6g}: "
            f"-inf for rows without keys, and for no other. {advice}"
        )
    actual, reference = (torch.where(empty, torch.zeros_like(t), t) for t in (tensor, right))
    check_close(what, actual, reference, scale=scale, dtype=torch.float32, advice=advice)


def qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    outliers: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values of both signs; outliers make one channel of each much larger."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, num_queries, head_dim), *[(batch, kv_heads, num_keys, head_dim)] * 2]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    for tensor in tensors:
        if outliers:
            tensor[..., head_dim // 3] *= 8
    q, k, v = (tensor.to(dtype) for tensor in tensors)
    return q, k, v


def laid_out(layout: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of tensors of one shape, with the same values in another memory layout.

    Args:
        layout: one of `LAYOUTS`. Side by side, the two of a pair share rows of a buffer: who reads beyond a row's end
            meets the other.
        pairs: tensors `[batch, heads, tokens, head_dim]`.
    """
    if layout == "side by side":
        rooms = [torch.cat(pair, dim=-1).transpose(1, 2).contiguous().transpose(1, 2) for pair in pairs]
        return [(room[..., : room.shape[-1] // 2], room[..., room.shape[-1] // 2 :]) for room in rooms]
    return [(_single(layout, first), _single(layout, second)) for first, second in pairs]


def _single(layout: str, tensor: Tensor) -> Tensor:
    if layout == "tokens first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "channels first":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor.contiguous()
