"""The loop: from one arrival or end of a step to the next, in simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise

from .replica import Replica
from .report import Outcome, Sample, SimulationReport
from .routing import Router, least_loaded
from .workload import TimedRequest


def simulate(
    replicas: Sequence[Replica],
    requests: Sequence[TimedRequest],
    route: Router = least_loaded,
    tell: Callable[[int], None] = lambda done: None,
) -> SimulationReport:
    """Serves a workload to its end.

    As in the engine, a request that arrives while a step runs waits for its end, and a token is there when its step
    ends. All replicas run side by side; nothing but the router knows more than one of them.

    Args:
        replicas: with nothing to do.
        requests: what arrives, in the order of arrival.
        route: which replica gets a request.
        tell: called now and then with the number of requests that are done.

    Raises:
        ValueError: no request, requests out of order, or one that its replica could never run.
    """
    if not replicas or not requests:
        raise ValueError(f"{len(replicas)} replicas and {len(requests)} requests: at least one of each is needed")
    if any(later.seconds < earlier.seconds for earlier, later in pairwise(requests)):
        raise ValueError("requests must come in the order of their arrival; `merge` sorts them")
    ends = list[tuple[float, int]]()
    outcomes, samples = list[Outcome](), list[Sample]()
    now, arrived, refused = 0.0, 0, 0
    while ends or arrived < len(requests):
        now = min([one[0] for one in ends[:1]] + [one.seconds for one in requests[arrived : arrived + 1]])
        changed = dict[int, None]()  # a set that keeps its order
        while ends and ends[0][0] == now:
            index = heapq.heappop(ends)[1]
            outcomes += replicas[index].end_step(now)
            changed[index] = None
            tell(len(outcomes))
        while arrived < len(requests) and requests[arrived].seconds == now:
            chosen = route(requests[arrived], replicas)
            if chosen is None:
                refused += 1
            else:
                replicas[chosen].accept(requests[arrived], arrived)
                changed[chosen] = None
            arrived += 1
        for index in changed:
            replica = replicas[index]
            if replica.has_work and not replica.is_busy:
                heapq.heappush(ends, (replica.start_step(now), index))
            samples.append(replica.sample(now))
    # The clock of a load starts with its first request.
    seconds = now - requests[0].seconds
    outcomes.sort(key=lambda one: one.number)
    return SimulationReport(
        served=tuple(outcomes),
        seconds=seconds,
        outcomes=tuple(outcomes),
        samples=tuple(samples),
        num_refused=refused,
        num_steps=sum(one.metrics.num_steps for one in replicas),
        num_computed_tokens=sum(one.metrics.num_computed_tokens for one in replicas),
        num_preemptions=sum(one.metrics.num_preemptions for one in replicas),
        utilization=tuple(one.busy_seconds / seconds if seconds > 0 else 0.0 for one in replicas),
    )
