"""From a step's logits to tokens: every row with its own settings, seed and history."""

from __future__ import annotations

from collections import Counter
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
        node: which of the request's drafts is the last of them; -1 if there are none.
    """

    index: int
    request: Request
    drafts: tuple[int, ...] = ()
    node: int = -1

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
    biased, seen, written = list[_Entry](), list[_Entry](), list[_Entry]()
    for place, row in enumerate(rows):
        params, request = row.request.params, row.request
        if not params.changes_logits:
            continue
        biased += [(place, token, bias) for token, bias in params.logit_bias]
        if params.repetition_penalty != 1.0:
            seen += [(place, token, params.repetition_penalty) for token in {*request.tokens, *row.drafts}]
        if params.presence_penalty or params.frequency_penalty:
            counts = Counter([*request.output, *row.drafts])
            written += [
                (place, token, params.presence_penalty + params.frequency_penalty * count)
                for token, count in counts.items()
            ]
    if not (biased or seen or written):
        return logits
    logits = logits.clone()
    if biased:
        *where, bias = _on_device(biased, logits)
        logits.index_put_(tuple(where), bias, accumulate=True)  # a token may be named twice
    if seen:
        *where, penalty = _on_device(seen, logits)
        values = logits[tuple(where)]
        logits[tuple(where)] = torch.where(values > 0, values / penalty, values * penalty)
    if written:
        *where, penalty = _on_device(written, logits)
        logits[tuple(where)] -= penalty
    return logits


_Entry = tuple[int, int, float]
"""A row of the logits, a token, and a number that changes what stands there."""


def _on_device(entries: Sequence[_Entry], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, tokens and numbers of all entries, where the logits lie."""
    places, tokens, values = zip(*entries, strict=True)
    where = torch.tensor([places, tokens], device=logits.device)
    return where[0], where[1], torch.tensor(values, dtype=logits.dtype, device=logits.device)


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
        where = torch.tensor(used, device=probs.device)
        probs[where] = keep(probs[where], [settings[place] for place in used])
    return probs


Draw = Callable[[Tensor, Sequence[Row], Sequence[float]], Tensor]
"""One token for each row of logits, by the row's settings and its uniform; −1 for a row without a distribution."""


def draw_filtered(logits: Tensor, rows: Sequence[Row], uniforms: Sequence[float]) -> Tensor:
    """See `Draw`: lab 07's way, which refuses rows without a distribution."""
    return draw(distribution(logits, rows), uniforms)


def sample(logits: Tensor, rows: Sequence[Row], draw_rows: Draw = draw_filtered) -> list[int]:
    """One token for each row.

    A greedy row takes the first of its largest logits; all others are drawn together. The random number of a token is
    that of its request's seed and of its place in the answer: neighbours, preemption and speculation don't change it.
    Tokens are chosen where the logits lie, and leave that device together.

    Args:
        logits: `[rows, vocab_size]`, adjusted and masked already.
        rows: whose they are.
        draw_rows: how those that are not greedy are drawn.

    Raises:
        ValueError: a row that is drawn holds NaN or +inf, or allows no token.
    """
    tokens = logits.argmax(dim=-1)
    drawn = [place for place, row in enumerate(rows) if row.request.params.temperature > 0]
    if drawn:
        where = torch.tensor(drawn, device=logits.device)
        uniforms = [uniform(rows[place].request.params.seed, rows[place].step) for place in drawn]
        tokens[where] = draw_rows(logits[where], [rows[place] for place in drawn], uniforms)
    chosen: list[int] = tokens.tolist()
    if min(chosen, default=0) < 0:
        raise ValueError(f"logits row {chosen.index(min(chosen))} holds NaN or +inf, or allows no token")
    return chosen


def logprobs_of(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """What to report of tokens: the model's own log-probabilities, before temperature and filters.

    Args:
        logits: `[rows, vocab_size]`, as the model gave them.
        tokens: those that were chosen, one for each row.
        num_top: how many of the most likely ones to report, likewise.
    """
    logprobs = logits.double().log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    values, ids = logprobs.topk(max(num_top))
    # Side by side, so that all leave the device at once; float64 holds an id exactly.
    rows = torch.cat((own, values, ids.double()), dim=1).tolist()
    width = max(num_top)
    return [
        TokenLogprob(token, row[0], tuple((int(row[1 + width + i]), row[1 + i]) for i in range(count)))
        for token, count, row in zip(tokens, num_top, rows, strict=True)
    ]
