"""Task 6b: who runs in which step. Static batches wait for their slowest request, continuous ones don't."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from labkit.checks import check_count
from labkit.generation_request import GenerationRequest

from .generation import greedy

Choose = Callable[[Tensor, int], int]
RunStep = Callable[[list[int], list[list[int]]], Sequence[Tensor]]
Timeline = list[list[int | None]]


class SlotScheduler:
    """Places requests into a fixed number of slots, one request a slot.

    Requests wait in the order in which they were added. A request keeps its slot from the step in which it joins
    until it is removed. Between steps, `add` and `remove` may be called in any order.

    Args:
        num_slots: the most requests in one step.

    Raises:
        ValueError: `num_slots` is not an int of at least 1.
    """

    def __init__(self, num_slots: int) -> None:
        check_count("num_slots", num_slots, 1)
        self._slots: list[int | None] = [None] * num_slots
        self._waiting: deque[int] = deque()

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return sum(occupant is not None for occupant in self._slots)

    def add(self, request_id: int) -> None:
        """Put a request at the end of the waiting queue.

        Raises:
            ValueError: the id is no int of at least 0, or it waits or runs already.
        """
        check_count("request_id", request_id, 0)
        # BEGIN SOLUTION
        if request_id in self._waiting or request_id in self._slots:
            raise ValueError(f"request {request_id} waits or runs already; remove it before adding it again")
        self._waiting.append(request_id)
        # END SOLUTION

    def remove(self, request_id: int) -> None:
        """Forget a request, finished or aborted, whether it waits or runs; its slot is free in the next step.

        Raises:
            ValueError: the request neither waits nor runs.
        """
        # BEGIN SOLUTION
        if request_id in self._waiting:
            self._waiting.remove(request_id)
        elif request_id in self._slots:
            self._slots[self._slots.index(request_id)] = None
        else:
            raise ValueError(f"request {request_id!r} neither waits nor runs, so it can't be removed")
        # END SOLUTION

    def schedule(self) -> list[int | None]:
        """Let waiting requests join if the policy allows it, and say who runs in the next step.

        The first request waiting takes the first free slot.

        Returns:
            For each slot the id of its request, or None for a slot that idles in this step. All may idle.
        """
        # BEGIN SOLUTION
        if self._may_join():
            for slot, occupant in enumerate(self._slots):
                if occupant is None and self._waiting:
                    self._slots[slot] = self._waiting.popleft()
        return list(self._slots)
        # END SOLUTION

    def _may_join(self) -> bool:
        """Whether waiting requests may take free slots in the coming step."""
        raise NotImplementedError("choose StaticBatching or ContinuousBatching")


class StaticBatching(SlotScheduler):
    """Request-level batching: a batch is formed when every slot is free, and no request joins it later."""

    def _may_join(self) -> bool:
        # BEGIN SOLUTION
        return self.num_running == 0
        # END SOLUTION


class ContinuousBatching(SlotScheduler):
    """Iteration-level batching: a slot that became free is filled in the very next step.

    Source: Yu et al. 2022 (Orca, OSDI); module section 2.1.
    """

    def _may_join(self) -> bool:
        # BEGIN SOLUTION
        return True
        # END SOLUTION


def serve(
    scheduler: SlotScheduler, requests: Sequence[GenerationRequest], run: RunStep, choose: Choose = greedy
) -> tuple[list[list[int]], Timeline]:
    """Generate for many requests, step by step, until all are finished.

    A request is added to the scheduler when its step of arrival has come; its id is its index. In the first step it
    runs, its whole prompt goes into the model, afterwards its newest token; each step gives it one token. A request
    that has its last token is removed before the next step is scheduled. In a step in which nobody runs, because
    the next request has yet to arrive, the model isn't called.

    Args:
        scheduler: an empty scheduler, which decides who runs.
        requests: what is asked for; those that arrive together wait in this order.
        run: the model, called as `run(ids, tokens)` with the requests that run in this step, in the order of
            their slots, and the new tokens of each; returns for each the logits `[vocab_size]` after its last token.
        choose: called as `choose(logits, step)` with the number of tokens that this request has generated so far.

    Returns:
        The tokens generated for each request, and the timeline: for each step what `schedule` returned.

    Raises:
        ValueError: the scheduler isn't empty. Nothing has run then.
    """
    if scheduler.num_waiting or scheduler.num_running:
        raise ValueError(
            f"the scheduler must be empty, but {scheduler.num_waiting} requests wait and {scheduler.num_running} run"
        )
    # BEGIN SOLUTION
    outputs: list[list[int]] = [[] for _ in requests]
    timeline: Timeline = []
    to_come = deque(sorted(range(len(requests)), key=lambda index: requests[index].arrival))
    while to_come or scheduler.num_waiting or scheduler.num_running:
        while to_come and requests[to_come[0]].arrival <= len(timeline):
            scheduler.add(to_come.popleft())
        timeline.append(scheduler.schedule())
        ids = [request_id for request_id in timeline[-1] if request_id is not None]
        if not ids:
            continue
        # A list with the newest token, or the empty list of a request that has yet to read its prompt.
        tokens = [outputs[i][-1:] or list(requests[i].prompt) for i in ids]
        for i, logits in zip(ids, run(ids, tokens), strict=True):
            outputs[i].append(choose(logits, len(outputs[i])))
            if outputs[i][-1] in requests[i].stop_tokens or len(outputs[i]) == requests[i].max_new_tokens:
                scheduler.remove(i)
    return outputs, timeline
    # END SOLUTION


def slot_utilisation(timeline: Timeline) -> float:
    """The share of slots in which a request ran, over all steps.

    Args:
        timeline: for each step the request of each slot, None where it idled.

    Returns:
        From 0 to 1.

    Raises:
        ValueError: there is no step, or a step has no slots.
    """
    if not timeline or not all(timeline):
        raise ValueError("a timeline needs at least one step, and each step at least one slot")
    # BEGIN SOLUTION
    slots = [occupant for step in timeline for occupant in step]
    return sum(occupant is not None for occupant in slots) / len(slots)
    # END SOLUTION
