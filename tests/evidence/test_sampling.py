"""The sampler draws from the distribution that its settings define, for settings and seeds that nobody chose."""

from __future__ import annotations

import random

import torch

from grader.judge.distributions import chi_square
from grader.judge.reference import filtered, softmax64
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams
from solutions.kv_cache.sampling import sample
from tests.evidence.conftest import Length

# All tests of a run together raise a false alarm less than once in a million runs: a bound by the sum over tests.
FALSE_ALARM_PER_RUN = 1e-6
VOCABULARY = 13


def random_settings(fresh: random.Random) -> tuple[list[float], SamplingParams]:
    """Logits for a small vocabulary, and settings of which each may be off."""
    logits = [fresh.gauss(0, 2) for _ in range(VOCABULARY)]
    params = SamplingParams(
        temperature=fresh.choice([0.5, 0.8, 1.0, 1.7]),
        top_k=fresh.choice([0, 2, 5, VOCABULARY]),
        top_p=fresh.choice([1.0, 0.95, 0.7, 0.3]),
        min_p=fresh.choice([0.0, 0.02, 0.2]),
        seed=fresh.getrandbits(32),
    )
    return logits, params


def draws(logits: list[float], params: SamplingParams, count: int) -> torch.Tensor:
    """Tokens `[count]` of one request, steps 0 to count − 1."""
    rows = torch.tensor(logits, dtype=torch.float64).expand(count, -1)
    return sample(rows, [params] * count, range(count))


def exact_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """The distribution by the definitions, in Python floats."""
    return filtered(softmax64(logits, params.temperature), params.top_k, params.top_p, params.min_p)


def test_draws_follow_the_exact_distribution(length: Length, fresh: random.Random) -> None:
    alpha = FALSE_ALARM_PER_RUN / length.distributions
    least = 1.0
    for _ in range(length.distributions):
        logits, params = random_settings(fresh)
        result = chi_square(draws(logits, params, length.draws), exact_probabilities(logits, params))
        assert result.p_value >= alpha, f"{params} on {logits}: {result}, alpha {alpha:.1e}"
        least = min(least, result.p_value)
    print(f"{length.distributions} settings, {length.draws} draws each, least p-value {least:.1e}, alpha {alpha:.1e}")


def test_the_proof_has_power(length: Length, fresh: random.Random) -> None:
    """A sampler that is 30 % too hot must fail at the same alpha, or passing would mean nothing.

    With 4,000 draws its statistic lies 7 standard deviations above the threshold, so this test hardly ever errs.
    """
    alpha = FALSE_ALARM_PER_RUN / length.distributions
    logits = [step / 2 for step in range(-6, 7)]
    result = chi_square(
        draws(logits, SamplingParams(temperature=1.3, seed=fresh.getrandbits(32)), length.draws),
        exact_probabilities(logits, SamplingParams()),
    )
    assert result.p_value < alpha, result


def test_random_numbers_are_uniform_along_steps_and_across_seeds(length: Length, fresh: random.Random) -> None:
    bins = 64
    start = fresh.getrandbits(32)
    along = [uniform(start, step) for step in range(length.draws)]
    across = [uniform(start + seed, 0) for seed in range(length.draws)]
    for name, numbers in (("along steps", along), ("across seeds", across)):
        result = chi_square([int(u * bins) for u in numbers], [1 / bins] * bins)
        assert result.p_value >= FALSE_ALARM_PER_RUN / 2, f"{name}: {result}"
