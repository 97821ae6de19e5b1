"""Task 4: from logits to a token: temperature, top-k, top-p, min-p and the draw itself.

All functions work on a batch whose rows have their own settings, and a row's result depends on that row alone.
Probabilities are float64 `[batch, vocab_size]`; every filter takes and returns distributions, so each one sees
the renormalised survivors of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams


def apply_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """softmax(logits / temperature), row by row, safe for tiny temperatures and half precision.

    Args:
        logits: `[batch, vocab_size]` of any floating point dtype; -inf means "impossible".
        temperatures: one per row, at least 0. 0 puts all probability on the largest logit, of equal ones on the
            lowest id. Small temperatures must neither overflow nor give NaN.

    Returns:
        Probabilities, float64 `[batch, vocab_size]`.

    Raises:
        ValueError: wrong shape, a negative or non-finite temperature; or a row, named in the message, holds NaN
            or +inf or nothing but -inf. (`_refuse_row` raises it for you.)
    """
    _check_rows("logits", logits)
    _check_settings("temperatures", temperatures, logits.shape[0])
    # BEGIN SOLUTION
    for broken, why in (
        (logits.isnan().any(dim=-1), "holds NaN"),
        ((logits == math.inf).any(dim=-1), "holds +inf"),
        ((logits == -math.inf).all(dim=-1), "allows no token: every logit is -inf"),
    ):
        if bool(broken.any()):
            _refuse_row("logits", int(broken.int().argmax()), why)

    temperature = _column(temperatures, logits)
    # The largest becomes 0 before the division, so that a division by 1e-5 can only run towards -inf.
    shifted = logits.double() - logits.double().max(dim=-1, keepdim=True).values
    probs = (shifted / temperature.where(temperature > 0, 1.0)).softmax(dim=-1)
    return torch.where(temperature > 0, probs, _one_hot_argmax(logits))
    # END SOLUTION


def keep_top_k(probs: Tensor, k: Sequence[int]) -> Tensor:
    """Keep the k most likely tokens of each row and renormalise.

    Args:
        probs: distributions `[batch, vocab_size]`.
        k: one per row. Exactly k tokens survive, of equally likely ones the lower ids; 0, or a k of at least the
            vocabulary size, switches the filter off.

    Returns:
        Distributions, float64 `[batch, vocab_size]`.

    Raises:
        ValueError: `probs` are no distributions, or a k is negative or no int.
    """
    probs = _check_distributions(probs)
    _check_settings("k", k, probs.shape[0], whole=True)
    # BEGIN SOLUTION
    limit = _column([probs.shape[1] if value == 0 else value for value in k], probs)
    return _renormalise(probs.where(_ranks(probs) < limit, 0.0))
    # END SOLUTION


def keep_top_p(probs: Tensor, p: Sequence[float]) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches p, and renormalise.

    Args:
        probs: distributions `[batch, vocab_size]`.
        p: one per row, at least 0. Tokens are taken in order of falling probability, equal ones by rising id,
            until their mass is at least p; the token that reaches p is kept. At least one token survives,
            whatever p; 1 or more switches the filter off.

    Returns:
        Distributions, float64 `[batch, vocab_size]`.

    Raises:
        ValueError: `probs` are no distributions, or a p is negative or not finite.

    Source: Holtzman et al. 2019 (1904.09751).
    """
    probs = _check_distributions(probs)
    _check_settings("p", p, probs.shape[0])
    # BEGIN SOLUTION
    mass = _column(p, probs)
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    # A token belongs to the set while those before it have not reached p: the token that crosses p included, and
    # the first one always, since nothing comes before it.
    kept = torch.ones_like(ordered, dtype=torch.bool)
    kept[:, 1:] = (ordered.cumsum(dim=-1)[:, :-1] < mass) | (mass >= 1.0)
    survives = torch.zeros_like(kept).scatter(1, ids, kept)
    return _renormalise(probs.where(survives, 0.0))
    # END SOLUTION


def keep_min_p(probs: Tensor, m: Sequence[float]) -> Tensor:
    """Keep the tokens at least m times as likely as the most likely one, and renormalise.

    Args:
        probs: distributions `[batch, vocab_size]`.
        m: one per row, at least 0; 0 keeps everything. The most likely token always survives: with m above 1
            it alone does, of equally likely ones the lowest id.

    Returns:
        Distributions, float64 `[batch, vocab_size]`.

    Raises:
        ValueError: `probs` are no distributions, or an m is negative or not finite.

    Source: Nguyen et al. 2024 (2407.01082).
    """
    probs = _check_distributions(probs)
    _check_settings("m", m, probs.shape[0])
    # BEGIN SOLUTION
    threshold = _column(m, probs) * probs.max(dim=-1, keepdim=True).values
    survives = (probs >= threshold) | (_one_hot_argmax(probs) > 0)
    return _renormalise(probs.where(survives, 0.0))
    # END SOLUTION


def token_distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution that a token is drawn from: temperature, then top-k, then top-p, then min-p.

    Args:
        logits: `[batch, vocab_size]`.
        params: one per row.

    Returns:
        Distributions, float64 `[batch, vocab_size]`.

    Raises:
        ValueError: as `apply_temperature`, or the number of params is not the number of rows.
    """
    _check_rows("logits", logits)
    _check_params(params, logits.shape[0])
    # BEGIN SOLUTION
    probs = apply_temperature(logits, [row.temperature for row in params])
    probs = keep_top_k(probs, [row.top_k for row in params])
    probs = keep_top_p(probs, [row.top_p for row in params])
    return keep_min_p(probs, [row.min_p for row in params])
    # END SOLUTION


def draw(probs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Draw one token per row by inverting its cumulative distribution in the order of the ids.

    Args:
        probs: distributions `[batch, vocab_size]`.
        uniforms: one number in [0, 1) per row. The token drawn is the first whose cumulative probability exceeds
            it. A token of probability 0 is never drawn, however close to 0 or 1 the number is.

    Returns:
        Token ids, int64 `[batch]`.

    Raises:
        ValueError: `probs` are no distributions, or a uniform lies outside [0, 1).
    """
    probs = _check_distributions(probs)
    _check_settings("uniforms", uniforms, probs.shape[0])
    for row, value in enumerate(uniforms):
        if value >= 1.0:
            _refuse_row("uniforms", row, f"must be below 1, got {value!r}")
    # BEGIN SOLUTION
    cumulative = probs.cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, _column(uniforms, probs), right=True).squeeze(1)
    # Rounding can leave the total just below a uniform near 1; then the last possible token is meant.
    positions = torch.arange(probs.shape[1], device=probs.device).expand_as(probs)
    last_possible = positions.where(probs > 0, -1).max(dim=-1).values
    return tokens.minimum(last_possible)
    # END SOLUTION


def sample(logits: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> Tensor:
    """Draw one token per row, each with its own settings and its own random numbers.

    The random number of a row is `labkit.randomness.uniform(seed, step)` with that row's seed and step: the same
    request gives the same tokens whichever row it stands in and whatever else is in the batch.

    Args:
        logits: `[batch, vocab_size]`.
        params: one per row.
        steps: one per row: the number of tokens that this request has generated so far.

    Returns:
        Token ids, int64 `[batch]`.

    Raises:
        ValueError: as `token_distribution`, or a step is negative or no int.
    """
    _check_rows("logits", logits)
    _check_params(params, logits.shape[0])
    _check_settings("steps", steps, logits.shape[0], whole=True)
    # BEGIN SOLUTION
    uniforms = [uniform(row.seed, step) for row, step in zip(params, steps, strict=True)]
    return draw(token_distribution(logits, params), uniforms)
    # END SOLUTION


class Sampler:
    """`sample` for one request, in the form that `generate` and `stream` take as `choose`.

    Args:
        params: the settings of the request.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params

    def __call__(self, logits: Tensor, step: int) -> int:
        """Choose the next token.

        Args:
            logits: `[vocab_size]`.
            step: the number of tokens generated so far.

        Returns:
            A token id.

        Raises:
            ValueError: as `sample`.
        """
        if logits.dim() != 1:
            raise ValueError(f"logits must have shape [vocab_size], got {list(logits.shape)}")
        # BEGIN SOLUTION
        return int(sample(logits.unsqueeze(0), [self._params], [step])[0])
        # END SOLUTION


# BEGIN SOLUTION
def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Per-row settings as float64 `[batch, 1]`, ready to broadcast over the vocabulary."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)


def _ranks(probs: Tensor) -> Tensor:
    """Rank of each token in its row, 0 for the most likely; equal ones in the order of their ids."""
    order = probs.sort(dim=-1, descending=True, stable=True).indices
    return order.argsort(dim=-1)


def _one_hot_argmax(values: Tensor) -> Tensor:
    """float64 rows with 1 at the largest value, of equal ones at the lowest id."""
    hot = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    return hot.scatter(1, values.argmax(dim=-1, keepdim=True), 1.0)


def _renormalise(weights: Tensor) -> Tensor:
    """Rows scaled to sum to 1."""
    return weights / weights.sum(dim=-1, keepdim=True)


# END SOLUTION


def _refuse_row(name: str, row: int, why: str) -> None:
    """Raise the ValueError that names a row of the batch and what is wrong with it."""
    raise ValueError(f"{name} row {row} {why}")


def _check_rows(name: str, rows: Tensor) -> None:
    """Refuse anything but floating point `[batch >= 1, vocab_size >= 1]`."""
    if rows.dim() != 2 or rows.numel() == 0 or not rows.is_floating_point():
        raise ValueError(
            f"{name} must be floating point [batch >= 1, vocab_size >= 1], got {rows.dtype} {list(rows.shape)}"
        )


def _check_distributions(probs: Tensor) -> Tensor:
    """The distributions in float64; refuses rows that are none."""
    _check_rows("probs", probs)
    probs = probs.double()
    totals = probs.sum(dim=-1)
    broken = ~((probs >= 0).all(dim=-1) & ((totals - 1.0).abs() < 1e-3))
    if bool(broken.any()):
        row = int(broken.int().argmax())
        _refuse_row("probs", row, f"must be non-negative and sum to 1, got a sum of {float(totals[row])}")
    return probs


def _check_settings(name: str, values: Sequence[float], batch: int, whole: bool = False) -> None:
    """Refuse settings that are not one finite, non-negative number per row (ints where `whole`)."""
    if len(values) != batch:
        raise ValueError(f"{name} must have one value for each of the {batch} rows, got {len(values)}")
    for row, value in enumerate(values):
        allowed = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value) or value < 0:
            kind = "an int" if whole else "a finite number"
            _refuse_row(name, row, f"must be {kind} of at least 0, got {value!r}")


def _check_params(params: Sequence[SamplingParams], batch: int) -> None:
    """Refuse anything but one SamplingParams per row."""
    if len(params) != batch:
        raise ValueError(f"params must have one entry for each of the {batch} rows, got {len(params)}")
