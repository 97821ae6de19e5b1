"""How one request wants its tokens drawn."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.checks import is_finite_number


@dataclass(frozen=True)
class SamplingParams:
    """Settings of the sampler for one sequence.

    Args:
        temperature: divides the logits; 0 means the most probable token, always.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens with at least this mass; 1 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        seed: chooses the stream of random numbers.

    Raises:
        ValueError: if a setting is outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (is_finite_number(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature!r}; give a finite number ≥ 0 (0 means greedy)")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k!r}; give an integer ≥ 0 (0 keeps all tokens)")
        if not (is_finite_number(self.top_p) and 0 <= self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r}; give a number from 0 to 1 (1 keeps all tokens)")
        if not (is_finite_number(self.min_p) and self.min_p >= 0):
            raise ValueError(f"min_p is {self.min_p!r}; give a finite number ≥ 0 (0 keeps all tokens)")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}; give an integer")
