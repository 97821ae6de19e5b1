"""One list in order of arrival, and a deque that says whose turn it is."""

from __future__ import annotations

from collections import deque
from typing import Any

from labkit.checks import check_count, check_tokens
from labkit.step_plan import Chunk, StepPlan


class _Job:
    """A request, with the tokens that this step has given it."""

    def __init__(self, name: int, known: list[int], limit: int) -> None:
        self.name, self.known, self.limit = name, known, limit
        self.done = self.granted = 0
        self.table: list[int] = []


class TokenBudgetScheduler:
    """`jobs` in order of arrival; `turns` has those with blocks, the one in front has waited longest."""

    def __init__(self, pool: Any, block_size: int, token_budget: int, max_chunk: int | None = None) -> None:
        for name, value in (("block_size", block_size), ("token_budget", token_budget), ("max_chunk", max_chunk or 1)):
            check_count(name, value, 1)
        if max_chunk is not None:
            check_count("max_chunk", max_chunk, 1)
        self.pool, self.size, self.budget = pool, block_size, token_budget
        self.chunk_limit = float("inf") if max_chunk is None else max_chunk
        self.all_blocks = pool.num_free
        self.jobs: list[_Job] = []
        self.turns: deque[_Job] = deque()

    @property
    def num_requests(self) -> int:
        """Everybody."""
        return len(self.jobs)

    def add(self, request_id: int, prompt: Any, max_new_tokens: int) -> None:
        """To the end of the list."""
        check_count("request_id", request_id, 0)
        check_count("max_new_tokens", max_new_tokens, 1)
        job = _Job(request_id, check_tokens("prompt", prompt), len(prompt) + max_new_tokens - 1)
        if self.blocks(job.limit) > self.all_blocks or any(other.name == request_id for other in self.jobs):
            raise ValueError(f"request {request_id} is here already, or too large for {self.all_blocks} blocks")
        self.jobs.append(job)

    def append(self, request_id: int, token: int) -> None:
        """Only behind what is computed, and only while something follows."""
        job = self.job(request_id)
        check_tokens("token", [token])
        if job.done < len(job.known) or len(job.known) >= job.limit:
            raise ValueError(f"request {request_id} doesn't wait for a token")
        job.known.append(token)

    def remove(self, request_id: int) -> None:
        """Out of everything."""
        job = self.job(request_id)
        self.jobs.remove(job)
        self.give_up(job)

    def schedule(self, token_budget: int | None = None) -> StepPlan:
        """Grants tokens, then makes chunks of what was granted."""
        if token_budget is not None:
            check_count("token_budget", token_budget, 1)
        self.left = token_budget or self.budget
        self.short = False
        granted: list[_Job] = []
        for job in [job for job in self.turns if len(job.known) - job.done == 1]:
            if self.left and job.table and self.grant(job):
                granted.append(job)
        for job in [job for job in self.jobs if len(job.known) > job.done and not job.granted]:
            if len(job.known) - job.done == 1 and job.table:
                continue  # a decode for which the budget was too small
            if not self.left or (self.short and not job.table):
                break
            if self.grant(job):
                granted.append(job)
            elif not self.short:
                break
        granted = [job for job in granted if job.granted]
        return StepPlan(tuple(self.chunk(job) for job in granted))

    def grant(self, job: _Job) -> bool:
        """Gives a request its tokens, and the blocks for them, if need be at the expense of the last ones."""
        count = int(min(len(job.known) - job.done, self.left, self.chunk_limit))
        newcomer = not job.table
        while (wanted := self.blocks(job.done + count) - len(job.table)) > self.pool.num_free:
            if newcomer:
                return False
            victim = [other for other in self.jobs if other.table][-1]
            self.short = True
            self.left += victim.granted
            self.give_up(victim)
            if victim is job:
                return False
        job.table += self.pool.allocate(wanted)
        job.granted = count
        self.left -= count
        return True

    def give_up(self, job: _Job) -> None:
        """All blocks, all that was computed, and what this step had granted."""
        for block in job.table:
            self.pool.free(block)
        job.table, job.done, job.granted = [], 0, 0
        if job in self.turns:
            self.turns.remove(job)

    def chunk(self, job: _Job) -> Chunk:
        """What was granted; the request goes to the end of the turns."""
        start, job.done, job.granted = job.done, job.done + job.granted, 0
        if job in self.turns:
            self.turns.remove(job)
        self.turns.append(job)
        new = tuple(job.known[start : job.done])
        return Chunk(job.name, start, new, tuple(job.table), job.done == len(job.known))

    def blocks(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return (tokens + self.size - 1) // self.size

    def job(self, request_id: int) -> _Job:
        """By name."""
        for job in self.jobs:
            if job.name == request_id:
                return job
        raise ValueError(f"nobody is called {request_id!r}")
