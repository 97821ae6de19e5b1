"""Task 9d: the loop around a scheduler over blocks: schedule, run, choose, and again, until all have their answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from labkit.generation_request import GenerationRequest
from labkit.paged_scheduler import PagedScheduler
from labkit.step_plan import StepPlan

from .generation import greedy

Choose = Callable[[Tensor, int], int]
RunPlan = Callable[[StepPlan], Sequence[Tensor]]


def serve_paged(
    scheduler: PagedScheduler, requests: Sequence[GenerationRequest], run: RunPlan, choose: Choose = greedy
) -> tuple[list[list[int] | None], list[StepPlan]]:
    """Generate for many requests in paged memory, step by step, until all are finished.

    A request is added when its step of arrival has come; its id is its index. One that the scheduler refuses gets no
    answer, and the others are none the worse for it. In a step whose plan has no chunks the model isn't called.

    However often a request is preempted, each of its tokens is chosen once: what is read again was chosen before.

    Args:
        scheduler: an empty scheduler.
        requests: what is asked for; those that arrive together come in this order.
        run: the model, called as `run(plan)`; makes the plan's copies, computes its chunks, and returns for each
            chunk the logits `[vocab_size]` after its last token.
        choose: called as `choose(logits, step)` with the number of tokens that this request has generated so far.

    Returns:
        The tokens generated for each request, None for one that was refused; and the plans of all steps.

    Raises:
        ValueError: the scheduler isn't empty. Nothing has run then.
        RuntimeError: there are requests, but a plan has no chunks; every step would be like this one for ever.
    """
    if scheduler.num_requests:
        raise ValueError(f"the scheduler must be empty, but it has {scheduler.num_requests} requests")
    # BEGIN SOLUTION
    outputs: list[list[int] | None] = [[] for _ in requests]
    plans: list[StepPlan] = []
    to_come = deque(sorted(range(len(requests)), key=lambda index: requests[index].arrival))
    while to_come or scheduler.num_requests:
        while to_come and requests[to_come[0]].arrival <= len(plans):
            index = to_come.popleft()
            try:
                scheduler.add(index, requests[index].prompt, requests[index].max_new_tokens)
            except ValueError:
                outputs[index] = None
        plans.append(scheduler.schedule())
        if not plans[-1].chunks and scheduler.num_requests:
            raise RuntimeError(f"the scheduler has {scheduler.num_requests} requests, but runs none of them")
        if not plans[-1].chunks:
            continue
        for chunk, logits in zip(plans[-1].chunks, run(plans[-1]), strict=True):
            output, request = outputs[chunk.request_id], requests[chunk.request_id]
            if output is None or not chunk.gives_token:
                continue
            output.append(choose(logits, len(output)))
            if output[-1] in request.stop_tokens or len(output) == request.max_new_tokens:
                scheduler.remove(chunk.request_id)
            else:
                scheduler.append(chunk.request_id, output[-1])
    return outputs, plans
    # END SOLUTION
