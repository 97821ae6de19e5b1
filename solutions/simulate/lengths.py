"""How long prompts and answers are: distributions of whole numbers of tokens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from labkit.checks import check_count


class Lengths(Protocol):
    """A distribution of lengths in tokens, all at least 1."""

    @property
    def mean(self) -> float:
        """Tokens on average."""

    def quantile(self, share: float) -> float:
        """The length that this share does not exceed."""

    def draw(self, choose: random.Random) -> int:
        """One length."""


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    tokens: int

    def __post_init__(self) -> None:
        check_count("tokens", self.tokens, 1)

    @property
    def mean(self) -> float:
        """See `Lengths`."""
        return float(self.tokens)

    def quantile(self, share: float) -> float:
        """See `Lengths`."""
        return float(self.tokens)

    def draw(self, choose: random.Random) -> int:
        """See `Lengths`."""
        return self.tokens


@dataclass(frozen=True)
class Uniform:
    """Any length from `low` to `high`, all alike."""

    low: int
    high: int

    def __post_init__(self) -> None:
        check_count("low", self.low, 1)
        check_count("high", self.high, self.low)

    @property
    def mean(self) -> float:
        """See `Lengths`."""
        return (self.low + self.high) / 2

    def quantile(self, share: float) -> float:
        """See `Lengths`."""
        return float(self.low + max(0, math.ceil(share * (self.high - self.low + 1)) - 1))

    def draw(self, choose: random.Random) -> int:
        """See `Lengths`."""
        return choose.randint(self.low, self.high)


@dataclass(frozen=True)
class LogNormal:
    """Many short, few long: what output lengths look like.

    Args:
        mean: tokens on average.
        p95: tokens that 95 % do not exceed; from 1 to 3.86 times the mean, since no log-normal goes further.
        longest: where a length is cut; the mean is that of uncut lengths.

    Raises:
        ValueError: a mean or p95 that can't be.
    """

    mean: float
    p95: float
    longest: int = 10**6

    def __post_init__(self) -> None:
        check_count("longest", self.longest, 1)
        most = math.exp(_Z95**2 / 2)
        if not (self.mean >= 1 and 1 < self.p95 / self.mean < most):
            raise ValueError(
                f"p95 must lie above the mean, itself at least 1, and below {most:.2f} times it; got a mean of "
                f"{self.mean} and a p95 of {self.p95}"
            )

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm: ln(p95 / mean) = z σ − σ² / 2, of which the smaller root."""
        return _Z95 - math.sqrt(_Z95**2 - 2 * math.log(self.p95 / self.mean))

    def quantile(self, share: float) -> float:
        """See `Lengths`."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(float(self.longest), math.exp(mu + self.sigma * NormalDist().inv_cdf(share)))

    def draw(self, choose: random.Random) -> int:
        """See `Lengths`."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(self.longest, max(1, round(choose.lognormvariate(mu, self.sigma))))


_Z95 = NormalDist().inv_cdf(0.95)


def parse_lengths(text: str) -> Lengths:
    """Reads "120", "50-150" or "300~900" (mean and p95 of a log-normal).

    Raises:
        ValueError: anything else.
    """
    for sign, make in (("-", lambda low, high: Uniform(low, high)), ("~", lambda mean, p95: LogNormal(mean, p95))):
        left, found, right = text.partition(sign)
        if found and left.isdigit() and right.isdigit():
            return make(int(left), int(right))
    if text.isdigit():
        return Fixed(int(text))
    raise ValueError(f"lengths are written 120, 50-150 or 300~900 (mean and p95 of a log-normal), got {text!r}")
