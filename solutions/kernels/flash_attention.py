"""Task 7b: FlashAttention as one differentiable function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labkit.attention_checks import check_attention

from .flash_backward import flash_attention_backward
from .flash_forward import flash_attention_forward


class FlashAttention(torch.autograd.Function):
    """Forward and backward kernels, joined so that autograd finds them.

    Between the two it keeps q, k, v, the output and the log-sum-exp: memory that grows with T, where keeping the
    weights would take T².
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float | None,
        block_q: int | None,
        block_k: int | None,
    ) -> Tensor:
        """The output of attention; see `flash_attention`."""
        # BEGIN SOLUTION
        ctx.options = dict(causal=causal, scale=scale, block_q=block_q, block_k=block_k)
        out, log_sum_exp = flash_attention_forward(q, k, v, **ctx.options)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        return out
        # END SOLUTION

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by the seven arguments of `forward`, in their order; None for those that are no tensors."""
        # BEGIN SOLUTION
        (grad_out,) = grads
        q, k, v, out, log_sum_exp = ctx.saved_tensors
        dq, dk, dv = flash_attention_backward(q, k, v, out, log_sum_exp, grad_out, **ctx.options)
        return dq, dk, dv, None, None, None, None
        # END SOLUTION


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Tensor:
    """Exact attention that can be differentiated by q, k and v.

    Arguments and errors as for `flash_attention_forward`.

    Returns:
        The output, of q's shape and dtype.
    """
    check_attention(q, k, v)
    # BEGIN SOLUTION
    return FlashAttention.apply(q, k, v, causal, scale, block_q, block_k)
    # END SOLUTION
