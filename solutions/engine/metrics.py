"""What the engine has done, in numbers that a dashboard or a benchmark would ask for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .request import Request

KEPT_SAMPLES = 10_000
"""Latencies of the last so many requests are kept for percentiles."""


@dataclass
class Metrics:
    """Counters since the engine started, and latencies of the last requests.

    TTFT is the time from arrival to the first token, TPOT the mean time of a token after the first, E2E the whole; all
    in seconds, and E2E = TTFT + (tokens − 1) · TPOT.
    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_finished: int = 0
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    tpot: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    e2e: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache had."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafts that were accepted."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else 0.0

    def count_finished(self, request: Request) -> None:
        """Takes in a request that has ended."""
        times = request.times
        self.num_finished += 1
        self.num_prompt_tokens += len(request.prompt)
        self.num_cached_tokens += request.num_cached
        if times.first_token is None or times.last_token is None:
            return
        self.ttft.append(times.first_token - times.arrived)
        self.e2e.append(times.last_token - times.arrived)
        if request.num_output > 1:
            self.tpot.append((times.last_token - times.first_token) / (request.num_output - 1))
