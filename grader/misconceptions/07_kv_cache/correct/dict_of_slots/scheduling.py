"""Requests know their slots, not slots their requests; one dict in order of arrival holds everybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from labkit.generation_request import GenerationRequest

from .generation import greedy


class SlotScheduler:
    """A dict from request to slot; None is for those who wait."""

    def __init__(self, num_slots: int) -> None:
        if type(num_slots) is not int or num_slots < 1:
            raise ValueError(f"there is at least one slot, not {num_slots!r}")
        self.num_slots = num_slots
        self.slot_of: dict[int, int | None] = {}

    @property
    def num_waiting(self) -> int:
        """Those without a slot."""
        return list(self.slot_of.values()).count(None)

    @property
    def num_running(self) -> int:
        """Those with one."""
        return len(self.slot_of) - self.num_waiting

    def add(self, request_id: int) -> None:
        """At the end of the dict."""
        if request_id in self.slot_of:
            raise ValueError(f"{request_id} is here already")
        self.slot_of[request_id] = None

    def remove(self, request_id: int) -> None:
        """Out of the dict, and so out of its slot."""
        if request_id not in self.slot_of:
            raise ValueError(f"{request_id} isn't here")
        del self.slot_of[request_id]

    def joins(self) -> bool:
        """Whether the queue moves."""
        raise NotImplementedError

    def schedule(self) -> list[int | None]:
        """Pairs free slots with those who wait."""
        if self.joins():
            free = sorted(set(range(self.num_slots)) - set(self.slot_of.values()))
            waiting = [request_id for request_id, slot in self.slot_of.items() if slot is None]
            self.slot_of.update(zip(waiting, free, strict=False))
        at = {slot: request_id for request_id, slot in self.slot_of.items() if slot is not None}
        return [at.get(slot) for slot in range(self.num_slots)]


class StaticBatching(SlotScheduler):
    """Whole batches."""

    def joins(self) -> bool:
        """When nobody runs."""
        return all(slot is None for slot in self.slot_of.values())


class ContinuousBatching(SlotScheduler):
    """Slot by slot."""

    def joins(self) -> bool:
        """Always."""
        return True


def serve(
    scheduler: SlotScheduler,
    requests: Sequence[GenerationRequest],
    run: Callable[[list[int], list[list[int]]], Sequence[Tensor]],
    choose: Callable[[Tensor, int], int] = greedy,
) -> tuple[list[list[int]], list[list[int | None]]]:
    """Counts who is left instead of asking the scheduler."""
    if scheduler.num_waiting + scheduler.num_running:
        raise ValueError("somebody is in the scheduler")
    outputs: dict[int, list[int]] = {index: [] for index in range(len(requests))}
    feed = {index: list(request.prompt) for index, request in enumerate(requests)}
    timeline: list[list[int | None]] = []
    left = set(outputs)
    while left:
        for index, request in enumerate(requests):
            if request.arrival == len(timeline):
                scheduler.add(index)
        slots = scheduler.schedule()
        timeline.append(slots)
        running = [index for index in slots if index is not None]
        rows = run(running, [feed[index] for index in running]) if running else []
        for index, row in zip(running, rows, strict=True):
            token = choose(row, len(outputs[index]))
            outputs[index].append(token)
            feed[index] = [token]
            if len(outputs[index]) >= requests[index].max_new_tokens or token in requests[index].stop_tokens:
                left.remove(index)
                scheduler.remove(index)
    return list(outputs.values()), timeline


def slot_utilisation(timeline: list[list[int | None]]) -> float:
    """One minus the idle share."""
    total = sum(map(len, timeline))
    if not timeline or any(len(step) == 0 for step in timeline):
        raise ValueError("nothing to count")
    return 1.0 - sum(step.count(None) for step in timeline) / total
