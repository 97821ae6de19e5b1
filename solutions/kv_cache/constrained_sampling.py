"""Task 13f: what the mask leaves is sampled."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .token_mask import TokenConstraint

Choose = Callable[[Tensor, int], int]


def mask_logits(logits: Tensor, masks: Tensor) -> Tensor:
    """Make tokens that aren't allowed impossible.

    Comes before temperature and filters, so that top-k counts k *allowed* tokens.

    Args:
        logits: floating point `[batch, vocab_size]`; stays as it is.
        masks: bool `[batch, vocab_size]`, True for what is allowed; each row has its own.

    Returns:
        Like `logits`, with -inf where the mask is False, whatever stood there.

    Raises:
        ValueError: shapes or dtypes don't fit; or in a row, named in the message, no token is left: the mask allows
            none, or only some that the model rules out itself.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point [batch, vocab_size], got {logits.dtype} {list(logits.shape)}")
    if masks.shape != logits.shape or masks.dtype != torch.bool:
        raise ValueError(f"masks must be bool {list(logits.shape)}, got {masks.dtype} {list(masks.shape)}")
    # BEGIN SOLUTION
    masked = logits.masked_fill(~masks, -math.inf)
    empty = (masked == -math.inf).all(dim=-1)
    if bool(empty.any()):
        row = int(empty.int().argmax())
        raise ValueError(f"logits row {row} has no token left: none that the constraint allows is possible")
    return masked
    # END SOLUTION


class ConstrainedSampler:
    """`choose` for `generate` and `stream`, for one request whose text must match a regex.

    Args:
        choose: how to choose among the allowed tokens: a `Sampler`, or `greedy`.
        constraint: of this request, at its beginning.
    """

    def __init__(self, choose: Choose, constraint: TokenConstraint) -> None:
        self._choose = choose
        self._constraint = constraint

    def __call__(self, logits: Tensor, step: int) -> int:
        """Choose the next token, and take it.

        Args:
            logits: `[vocab_size]`.
            step: the number of tokens generated so far, handed on to `choose`.

        Returns:
            A token id.

        Raises:
            ValueError: no token is left, `choose` fails, or it returns a token that isn't allowed. The constraint is
                as before.
        """
        if logits.dim() != 1:
            raise ValueError(f"logits must have shape [vocab_size], got {list(logits.shape)}")
        # BEGIN SOLUTION
        masked = mask_logits(logits.unsqueeze(0), self._constraint.mask().unsqueeze(0))[0]
        token = self._choose(masked, step)
        self._constraint.advance(token)
        return token
        # END SOLUTION
