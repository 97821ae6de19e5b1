"""Prefill here, decode there: two pools, and a network between them that keys and values must cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .replica import Replica
from .report import Outcome, SimulationReport
from .simulation import simulate
from .workload import TimedRequest


@dataclass(frozen=True)
class Link:
    """What lies between the pools; one transfer after the other.

    Args:
        bandwidth: bytes per second.
        bytes_per_token: of keys and values.

    Raises:
        ValueError: a number that isn't positive.
    """

    bandwidth: float
    bytes_per_token: float

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.bytes_per_token > 0):
            raise ValueError(
                f"bandwidth and bytes_per_token must be positive, got {self.bandwidth} and {self.bytes_per_token}"
            )

    def arrivals(self, sent: Sequence[tuple[float, int]]) -> list[float]:
        """When transfers end.

        Args:
            sent: pairs (seconds at which it could begin, tokens), in order.
        """
        ends, free = list[float](), 0.0
        for ready, tokens in sent:
            free = max(free, ready) + tokens * self.bytes_per_token / self.bandwidth
            ends.append(free)
        return ends


@dataclass(frozen=True)
class DisaggregatedReport:
    """Both pools together.

    Args:
        whole: each request from its arrival to its last token; steps and tokens are those of the decode pool.
        prefill: the prefill pool alone, in which every answer has one token.
        transfers: seconds that each request's keys and values took, their queueing included.
    """

    whole: SimulationReport
    prefill: SimulationReport
    transfers: tuple[float, ...]


def simulate_disaggregated(
    prefill: Sequence[Replica], decode: Sequence[Replica], link: Link, requests: Sequence[TimedRequest]
) -> DisaggregatedReport:
    """Serves a workload in two pools.

    The prefill pool gives the first token and never waits for the other, so it is simulated first; what it sends is
    the decode pool's workload.

    Args:
        prefill: replicas that compute prompts.
        decode: replicas whose step time is a `ReceivedPrompts`.
        link: the network.
        requests: what arrives, in order; each asks for at least 2 tokens.

    Raises:
        ValueError: an answer of one token, which no decode pool is needed for, or what `simulate` refuses.
    """
    if any(one.params.max_tokens < 2 for one in requests):
        raise ValueError("with two pools every answer needs at least 2 tokens: the first comes from the prefill pool")
    first = simulate(prefill, [replace(one, params=replace(one.params, max_tokens=1)) for one in requests])
    sent = sorted(first.outcomes, key=lambda one: one.arrived + one.ttft)
    ready = [one.arrived + one.ttft for one in sent]
    received = link.arrivals([(start, one.num_prompt) for start, one in zip(ready, sent, strict=True)])
    second = simulate(decode, [_rest(requests[one.number], at) for one, at in zip(sent, received, strict=True)])
    lives = [
        (_joined(one, then, at), at - start)
        for one, then, at, start in zip(sent, second.outcomes, received, ready, strict=True)
    ]
    lives.sort(key=lambda life: life[0].number)
    outcomes, transfers = (tuple(column) for column in zip(*lives, strict=True))
    seconds = max(one.arrived + one.e2e for one in outcomes) - requests[0].seconds
    return DisaggregatedReport(replace(second, served=outcomes, outcomes=outcomes, seconds=seconds), first, transfers)


def _rest(request: TimedRequest, received: float) -> TimedRequest:
    """What is left for the decode pool: the first token is the last of what it knows."""
    params = replace(request.params, max_tokens=request.params.max_tokens - 1)
    return replace(request, seconds=received, prompt=(*request.prompt, request.params.seed), params=params)


def _joined(first: Outcome, then: Outcome, received: float) -> Outcome:
    """A request's whole life."""
    last = received + then.e2e
    second_token = received + then.ttft - (first.arrived + first.ttft)
    return replace(
        first, e2e=last - first.arrived, num_tokens=1 + then.num_tokens, replica=then.replica,
        num_preemptions=then.num_preemptions, longest_gap=max(second_token, then.longest_gap),
    )  # fmt: skip
