"""Requests that wait, the most urgent first, and none of them for ever."""

from __future__ import annotations

import heapq

from .request import Request, Status

STEPS_PER_PRIORITY = 256
"""So many steps of waiting weigh as much as one level of priority: a low one comes late, and comes."""


class WaitingQueue:
    """A queue whose cost depends on the logarithm of its length alone.

    A request that arrived in step s with priority p has the rank s + p · 256. Ranks never change, and yet they age:
    whoever arrives long after it ranks behind it, however urgent.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._gone

    def push(self, request: Request) -> None:
        """Adds a request; one that was preempted has its old place."""
        heapq.heappush(self._heap, (*rank(request), request))

    def peek(self) -> Request | None:
        """The most urgent request, or None."""
        while self._heap and self._heap[0][-1].status is Status.FINISHED:
            heapq.heappop(self._heap)
            self._gone -= 1
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Request:
        """Takes out the request that `peek` shows."""
        request = self.peek()
        if request is None:
            raise IndexError("no request is waiting")
        heapq.heappop(self._heap)
        return request

    def forget_one(self) -> None:
        """A waiting request has ended where it stood; it is dropped when it comes to the front."""
        self._gone += 1


def rank(request: Request) -> tuple[int, int]:
    """Orders requests by urgency, smaller first; no two are equal."""
    return (request.waiting_since + request.priority * STEPS_PER_PRIORITY, request.arrival)
