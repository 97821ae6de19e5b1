"""Counts what is still wanted of each request, and looks for arrivals in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from labkit.generation_request import GenerationRequest
from labkit.step_plan import StepPlan

from .generation import greedy


def serve_paged(
    scheduler: Any,
    requests: Sequence[GenerationRequest],
    run: Callable[[StepPlan], Sequence[Tensor]],
    choose: Callable[[Tensor, int], int] = greedy,
) -> tuple[list[list[int] | None], list[StepPlan]]:
    """Until nobody is left who wants a token."""
    if scheduler.num_requests != 0:
        raise ValueError("somebody is being served here")
    answers: dict[int, list[int] | None] = {}
    open_ends: dict[int, int] = {}
    plans: list[StepPlan] = []
    while len(answers) < len(requests) or open_ends:
        for index, request in enumerate(requests):
            if index not in answers and request.arrival <= len(plans):
                try:
                    scheduler.add(index, request.prompt, request.max_new_tokens)
                except ValueError:
                    answers[index] = None
                else:
                    answers[index], open_ends[index] = [], request.max_new_tokens
        plan = scheduler.schedule()
        plans.append(plan)
        if open_ends and not plan.chunks:
            raise RuntimeError(f"{len(open_ends)} requests, and none of them moves")
        for chunk, logits in zip(plan.chunks, run(plan) if plan.chunks else (), strict=True):
            if not chunk.gives_token:
                continue
            index = chunk.request_id
            token = choose(logits, requests[index].max_new_tokens - open_ends[index])
            answers[index] = [*(answers[index] or []), token]
            open_ends[index] -= 1
            if open_ends[index] == 0 or token in requests[index].stop_tokens:
                del open_ends[index]
                scheduler.remove(index)
            else:
                scheduler.append(index, token)
    return [answers[index] for index in range(len(requests))], plans
