"""From a step's logits to tokens: every row with its own settings, seed and history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.randomness import uniform
from solutions.kv_cache.sampling import apply_temperature, draw, keep_min_p, keep_top_k, keep_top_p

from .request import Request, TokenLogprob


@dataclass(frozen=True)
class Row:
    """One row of a step's logits, and whose next token it is to give.

    Args:
        index: of the row.
        request: whose settings count. Several requests may read one row: samples of a prompt start from the same.
        drafts: tokens that stand between what is known of the request and this row.
    """

    index: int
    request: Request
    drafts: tuple[int, ...] = ()

    @property
    def step(self) -> int:
        """How many tokens the answer holds before the one that this row gives."""
        return self.request.num_output + len(self.drafts)


def adjust_logits(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits after biases and penalties.

    Args:
        logits: `[rows, vocab_size]`, one for each of `rows`; left as they are.
        rows: whose answers so far are penalised, drafts included.
    """
    changed = [place for place, row in enumerate(rows) if row.request.params.changes_logits]
    if not changed:
        return logits
    logits = logits.clone()
    for place in changed:
        _adjust(logits[place], rows[place])
    return logits


def _adjust(logits: Tensor, row: Row) -> None:
    """Changes one row in place."""
    params, request = row.request.params, row.request
    for token, bias in params.logit_bias:
        logits[token] += bias
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*request.tokens, *row.drafts}))
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    output = [*request.output, *row.drafts]
    if output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.tensor(output).unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)


def distribution(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """What the rows' tokens are drawn from, float64 `[rows, vocab_size]`, by lab 07's filters, each where it is in use.

    A filter sorts the vocabulary, which costs more than a small model's layer.

    Args:
        logits: `[rows, vocab_size]`, adjusted and masked already.
        rows: whose they are.
    """
    params = [row.request.params for row in rows]
    probs = apply_temperature(logits, [one.temperature for one in params])
    probs = _keep(probs, keep_top_k, [one.top_k for one in params], 0)
    probs = _keep(probs, keep_top_p, [one.top_p for one in params], 1.0)
    return _keep(probs, keep_min_p, [one.min_p for one in params], 0.0)


def _keep(probs: Tensor, keep: Callable[[Tensor, list[Any]], Tensor], settings: list[Any], off: float) -> Tensor:
    """Filters the rows whose setting isn't `off`: what one asks for costs the others nothing, and changes no bit."""
    used = [place for place, setting in enumerate(settings) if setting != off]
    if len(used) == len(settings):
        return keep(probs, settings)
    if used:
        probs[used] = keep(probs[used], [settings[place] for place in used])
    return probs


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """One token for each row.

    A greedy row takes the first of its largest logits; all others are drawn together. The random number of a token is
    that of its request's seed and of its place in the answer: neighbours, preemption and speculation don't change it.

    Args:
        logits: `[rows, vocab_size]`, adjusted and masked already.
        rows: whose they are.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [place for place, row in enumerate(rows) if row.request.params.temperature > 0]
    if drawn:
        probs = distribution(logits[drawn], [rows[place] for place in drawn])
        uniforms = [uniform(rows[place].request.params.seed, rows[place].step) for place in drawn]
        for place, token in zip(drawn, draw(probs, uniforms).tolist(), strict=True):
            tokens[place] = token
    return tokens


def logprob_of(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """What to report of a token: the model's own log-probabilities, before temperature and filters.

    Args:
        logits: `[vocab_size]`, as the model gave them.
        token: the one that was chosen.
        num_top: how many of the most likely ones to report.
    """
    logprobs = logits.double().log_softmax(dim=-1)
    values, ids = logprobs.topk(num_top)
    top = tuple((int(one), float(value)) for one, value in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
