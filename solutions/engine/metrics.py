"""What the engine has done, in numbers that a dashboard or a benchmark would ask for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .request import Request

KEPT_SAMPLES = 10_000
"""Latencies of the last so many requests are kept for percentiles."""


@dataclass(frozen=True)
class Served:
    """One answered request; section 1.1 of the module.

    Args:
        ttft: seconds from arrival to the first token.
        e2e: seconds from arrival to the last token.
        num_tokens: of the answer, at least 1.
    """

    ttft: float
    e2e: float
    num_tokens: int

    @property
    def tpot(self) -> float:
        """Mean seconds of a token after the first: E2E = TTFT + (n − 1) · TPOT; 0 for an answer of one token."""
        return (self.e2e - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


@dataclass
class Metrics:
    """Counters since the engine started, and latencies of the last requests."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_finished: int = 0
    served: deque[Served] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))

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
        if times.first_token is not None and times.last_token is not None:
            ttft, e2e = times.first_token - times.arrived, times.last_token - times.arrived
            self.served.append(Served(ttft, e2e, request.num_output))
