"""Task 9: perplexity by a sliding window, and the loss of every token, which paired comparisons need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens

Logits = Callable[[list[int]], Tensor]
"""A model: maps n token ids to logits `[n, vocab_size]`, row i for the token after the first i + 1."""


def windows(num_tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """The windows in which a long text is read, so that each token is scored once.

    Windows start at 0, stride, 2 stride, … and end after `window` tokens or where the text ends; the first one that
    reaches the end is the last. A window scores the tokens that no window before it has read. Beyond the first window
    every token so has at least `window - stride` tokens of context. Token 0 has none and is never scored.

    Args:
        num_tokens: of the text, at least 2.
        window: tokens that the model reads at once, at least 2.
        stride: how far a window stands behind the one before it, from 1 to `window - 1`.

    Returns:
        `(start, end, first)` of each window: it reads the tokens from `start` to `end - 1` and scores those from
        `first` on.

    Raises:
        ValueError: a number out of range.
    """
    check_count("num_tokens", num_tokens, 2)
    check_count("window", window, 2)
    check_count("stride", stride, 1)
    if stride >= window:
        raise ValueError(
            f"stride must be below the window of {window} tokens, got {stride}: the first token of a window has no "
            "context in it, so windows must overlap by at least one token"
        )
    # BEGIN SOLUTION
    found = []
    start, first = 0, 1
    while first < num_tokens:
        end = min(start + window, num_tokens)
        found.append((start, end, first))
        start, first = start + stride, end
    return found
    # END SOLUTION


def next_token_losses(logits: Logits, tokens: Sequence[int], first: int) -> Tensor:
    """How unlikely a model finds the tokens of one window, each after all tokens before it.

    Args:
        logits: the model.
        tokens: what it reads, at least two ids.
        first: index of the first token to score, from 1.

    Returns:
        -ln p of the tokens from `first` on, float64 `[len(tokens) - first]`, in nats. Logits of any float type are
        brought to float64 before the exponentials are summed.

    Raises:
        ValueError: `first` out of range; or logits of the wrong shape, too narrow for a token, or not finite: a model
            that yields NaN has no perplexity.
    """
    ids = check_tokens("tokens", tokens)
    check_count("first", first, 1)
    if first >= len(ids):
        raise ValueError(f"first must be below the {len(ids)} tokens, got {first}: there is nothing to score")
    rows = logits(list(ids))
    if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != len(ids) or not rows.is_floating_point():
        given = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"logits of {len(ids)} tokens must be a float tensor [{len(ids)}, vocab_size], got {given}")
    if max(ids) >= rows.shape[1]:
        raise ValueError(f"the model knows {rows.shape[1]} tokens, but the text holds id {max(ids)}")
    if not bool(rows.isfinite().all()):
        row = int((~rows.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"logits are not finite in row {row} of {len(ids)}; a model that overflows has no perplexity")
    # BEGIN SOLUTION
    # Row i speaks of token i + 1.
    scored = rows[first - 1 : -1].double()
    targets = torch.tensor(ids[first:], device=rows.device)[:, None]
    return scored.logsumexp(1) - scored.gather(1, targets)[:, 0]
    # END SOLUTION


def token_losses(logits: Logits, tokens: Sequence[int], window: int, stride: int) -> Tensor:
    """The loss of every token of a text but the first, read window by window.

    Args:
        logits: the model; called once for each window, with that window's tokens.
        tokens: the text, at least two ids.
        window: as in `windows`.
        stride: as in `windows`.

    Returns:
        -ln p of tokens 1, 2, …, float64 `[len(tokens) - 1]`, in the order of the text.

    Raises:
        ValueError: see `windows` and `next_token_losses`.

    Source: module section 4.5.
    """
    ids = check_tokens("tokens", tokens)
    # BEGIN SOLUTION
    losses = [
        next_token_losses(logits, ids[start:end], first - start)
        for start, end, first in windows(len(ids), window, stride)
    ]
    return torch.cat(losses)
    # END SOLUTION


def perplexity(losses: Sequence[Tensor]) -> float:
    """exp of the mean loss: among how many equally likely tokens the model hesitates.

    Args:
        losses: of one or more documents, one tensor `[tokens]` each. Every token weighs the same, whichever document
            or window it stands in.

    Raises:
        ValueError: no losses, or one that isn't finite.
    """
    every = check_losses("losses", losses)
    # BEGIN SOLUTION
    return float(torch.cat(every).mean().exp())
    # END SOLUTION


def bits_per_byte(losses: Sequence[Tensor], num_bytes: int) -> float:
    """The loss by byte of text, in bits: the measure for models that cut text into different tokens.

    A tokenizer with longer tokens has fewer of them and a larger loss on each, so perplexities of two tokenizers
    can't be compared; the likelihood of the whole text can.

    Args:
        losses: as for `perplexity`.
        num_bytes: of the scored text in UTF-8, at least 1.

    Raises:
        ValueError: no losses, or one that isn't finite, or `num_bytes` no int of at least 1.
    """
    every = check_losses("losses", losses)
    check_count("num_bytes", num_bytes, 1)
    # BEGIN SOLUTION
    nats = torch.cat(every).sum()
    return float(nats / torch.tensor(2.0, dtype=torch.float64).log() / num_bytes)
    # END SOLUTION


def check_losses(name: str, losses: Sequence[Tensor]) -> list[Tensor]:
    """The losses in float64; refuses what is no list of finite vectors that hold at least one number each."""
    if isinstance(losses, Tensor) or not losses:
        raise ValueError(f"{name} must be a list of tensors, one a document, and not be empty")
    for index, part in enumerate(losses):
        if not isinstance(part, Tensor) or part.dim() != 1 or not part.numel():
            given = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f"{name}[{index}] must be a tensor [tokens] with at least one number, got {given}")
        if not bool(part.isfinite().all()):
            raise ValueError(f"{name}[{index}] holds a number that is not finite")
    return [part.double() for part in losses]
