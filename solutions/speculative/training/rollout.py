"""A head that reads its own outputs, as it will when it drafts: the training-time test of EAGLE-3."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.decoder import Attend

Step = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]


def rollout(step: Step, hidden: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
    """Let a head draft so many tokens from every place of a text at once.

    In the first step row i reads the target's feature of token i. In every later one it reads what the step before
    gave for the row before it; of the rows to its left it sees the last s as the steps before saw them, and the
    others as the target's features made them. That is what a drafter has before its eyes at its s-th draft.

    Args:
        step: the head's forward function, called as `step(hidden, tokens, positions, attend)`.
        hidden: row i of token i, `[batch, rows, hidden]`.
        tokens: row i the token i + 1, `[batch, rows]`.
        steps: drafts, at least 1.

    Returns:
        For each step `[batch, rows, hidden]`; row i is what the head says of token i + 2. The first s rows of step s
        mean nothing: no draft can be that far along there.

    Source: Li et al. 2025 (2503.01840), section 3.1.
    """
    positions = torch.arange(hidden.shape[1])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    given: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        return _attention(q, keys, values)

    for number in range(steps):
        if number:
            hidden = _moved(given[-1], 1)
        given.append(step(hidden, tokens, positions, attend))
    return given


def _attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention to the keys of step 0 and, of every later step, to the one key that lies in the draft's own past.

    What a step made of a row is seen by the row that lies as far behind it as there have been steps since, so those
    keys are no matrix but a line, which is why they are not masked but moved.
    """
    last, size = len(keys) - 1, q.shape[2]
    grouped = q.unflatten(1, (keys[0].shape[1], -1)) * q.shape[-1] ** -0.5
    behind = torch.arange(size)[:, None] - torch.arange(size)
    first = grouped @ keys[0][:, :, None].transpose(-1, -2)
    scores = [first.float().masked_fill(behind < last, -torch.inf)]
    later = [last - step for step in range(1, last + 1)]
    for key, since in zip(keys[1:], later, strict=True):
        scores.append((grouped * _moved(key, since)[:, :, None]).sum(-1, keepdim=True).float())
    weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
    read = weights[..., :size] @ values[0][:, :, None]
    for place, (value, since) in enumerate(zip(values[1:], later, strict=True)):
        read = read + weights[..., size + place, None] * _moved(value, since)[:, :, None]
    return read.flatten(1, 2)


def _moved(rows: Tensor, places: int) -> Tensor:
    """Rows moved down the last axis but one; zeros come in."""
    return F.pad(rows, (0, 0, places, 0))[..., : rows.shape[-2], :]
