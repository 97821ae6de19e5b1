"""From a step's logits to tokens: every row with its own settings, seed and history."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.randomness import uniform
from solutions.kv_cache.sampling import draw, token_distribution

from .request import Request, TokenLogprob


def adjust_logits(logits: Tensor, request: Request) -> Tensor:
    """Logits after biases and penalties.

    Args:
        logits: `[vocab_size]`, left as they are.
        request: whose answer so far is penalised.
    """
    params = request.params
    if not params.changes_logits:
        return logits
    logits = logits.clone()
    for token, bias in params.logit_bias:
        logits[token] += bias
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(request.tokens)))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if request.num_output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.tensor(request.output).unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)
    return logits


def sample(logits: Tensor, requests: list[Request]) -> list[int]:
    """One token for each request, from its own row.

    A greedy row takes the first of its largest logits; all others are drawn together. A request's random number is that
    of its seed and the number of its tokens so far: neighbours, preemption and batch size don't change it.

    Args:
        logits: `[requests, vocab_size]`, adjusted and masked already.
        requests: one for each row.
    """
    tokens = logits.argmax(dim=-1).tolist()
    drawn = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if drawn:
        params = [requests[row].params for row in drawn]
        probs = token_distribution(logits[drawn], params)
        uniforms = [uniform(requests[row].params.seed, requests[row].num_output) for row in drawn]
        for row, token in zip(drawn, draw(probs, uniforms).tolist(), strict=True):
            tokens[row] = token
    return [int(token) for token in tokens]


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
