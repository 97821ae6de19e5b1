"""Which replica gets a request, or that none does."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from .replica import Replica
from .workload import TimedRequest

Router = Callable[[TimedRequest, Sequence[Replica]], int | None]
"""The index of the replica that a request goes to; None refuses it."""


class RoundRobin:
    """Each in turn, whatever comes."""

    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, request: TimedRequest, replicas: Sequence[Replica]) -> int:
        return next(self._turns) % len(replicas)


def least_loaded(request: TimedRequest, replicas: Sequence[Replica]) -> int:
    """The replica with the fewest requests; of equals the first."""
    return min(range(len(replicas)), key=lambda index: replicas[index].num_alive)


@dataclass(frozen=True)
class PrefixAffinity:
    """Requests that begin alike go to the same replica, whose prefix cache then has what they share.

    Args:
        num_tokens: how much of the beginning counts.
        most: a replica with more than this many times the average number of requests is passed over, and the least
            loaded takes its place; None keeps to the rule whatever it costs.
    """

    num_tokens: int = 64
    most: float | None = None

    def __call__(self, request: TimedRequest, replicas: Sequence[Replica]) -> int:
        start = array("I", request.prompt[: self.num_tokens]).tobytes()
        # Rendezvous hashing: with a replica more or less, only its own requests move. A checksum such as CRC won't do:
        # it is linear, so that a few replicas win nearly always.
        home = max(range(len(replicas)), key=lambda index: hashlib.sha256(start + bytes([index])).digest())
        if self.most is not None:
            average = (1 + sum(one.num_alive for one in replicas)) / len(replicas)
            if replicas[home].num_alive > self.most * average:
                return least_loaded(request, replicas)
        return home


@dataclass(frozen=True)
class LongPromptsApart:
    """Long prompts have the last replica for themselves, all others share the rest.

    Args:
        limit: tokens above which a prompt is long.
    """

    limit: int

    def __call__(self, request: TimedRequest, replicas: Sequence[Replica]) -> int:
        if len(request.prompt) > self.limit:
            return len(replicas) - 1
        return least_loaded(request, replicas[:-1])


@dataclass(frozen=True)
class RefuseLongPrompts:
    """Admission control by length.

    Args:
        limit: tokens above which a prompt is refused.
        others: where all others go.
    """

    limit: int
    others: Router = least_loaded

    def __call__(self, request: TimedRequest, replicas: Sequence[Replica]) -> int | None:
        return None if len(request.prompt) > self.limit else self.others(request, replicas)


@dataclass(frozen=True)
class RefuseWhenFull:
    """Back-pressure: who would wait behind too many is told so at once (HTTP 429).

    Args:
        most_waiting: requests that may wait at a replica.
        others: where a request goes that is not refused.
    """

    most_waiting: int
    others: Router = least_loaded

    def __call__(self, request: TimedRequest, replicas: Sequence[Replica]) -> int | None:
        index = self.others(request, replicas)
        return None if index is None or replicas[index].num_waiting >= self.most_waiting else index
