"""Decides by counting who runs and who gives way, before a single block is touched; requests stand in a plain list."""

from __future__ import annotations

from typing import Any

from labkit.checks import check_count, check_tokens
from labkit.step_plan import Chunk, StepPlan


class _Job:
    """A request; `done` tokens lie in `home`, which is the device's blocks or, when `out`, the host's."""

    def __init__(self, name: int, known: list[int], limit: int) -> None:
        self.name, self.known, self.limit = name, known, limit
        self.done = 0
        self.home: list[int] = []
        self.out = False


class PreemptiveScheduler:
    """One list in order of arrival."""

    def __init__(self, pool: Any, block_size: int, host_pool: Any = None) -> None:
        check_count("block_size", block_size, 1)
        self.pool, self.size, self.host_pool, self.all_blocks = pool, block_size, host_pool, pool.num_free
        self.jobs: list[_Job] = []

    @property
    def num_requests(self) -> int:
        """Everybody."""
        return len(self.jobs)

    def add(self, request_id: int, prompt: Any, max_new_tokens: int) -> None:
        """To the end of the list."""
        check_count("request_id", request_id, 0)
        check_count("max_new_tokens", max_new_tokens, 1)
        job = _Job(request_id, check_tokens("prompt", prompt), len(prompt) + max_new_tokens - 1)
        if self.table_length(job.limit) > self.all_blocks or any(other.name == request_id for other in self.jobs):
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
        """Out of the list, and out of whatever memory it is in."""
        job = self.job(request_id)
        self.jobs.remove(job)
        for block in job.home:
            (self.host_pool if job.out else self.pool).free(block)

    def schedule(self) -> StepPlan:
        """Copies out, then copies in, then chunks; host blocks last."""
        run, victims = self.decide()
        out: list[tuple[int, int]] = []
        into: list[tuple[int, int]] = []
        for job in victims:
            out += self.push_out(job)
        for job in run:
            blocks = self.pool.allocate(self.table_length(len(job.known)) - (0 if job.out else len(job.home)))
            if job.out:
                into += [(host_block, blocks[place]) for place, host_block in enumerate(job.home)]
                job.home, job.out = [], False
            job.home = job.home + blocks
        for host_block, _ in into:
            self.host_pool.free(host_block)
        return StepPlan(tuple(self.chunk(job) for job in run), tuple(out), tuple(into))

    def decide(self) -> tuple[list[_Job], list[_Job]]:
        """Who runs and who gives way, by numbers of blocks alone; nothing is taken or given yet."""
        free = self.pool.num_free
        held = {job: 0 if job.out else len(job.home) for job in self.jobs}
        run: list[_Job] = []
        victims: list[_Job] = []
        for place, job in enumerate(self.jobs):
            if job.done == len(job.known):
                continue
            total = self.table_length(len(job.known))
            behind = [other for other in self.jobs[place:] if held[other]]
            while total - held[job] > free and behind:
                victim = behind.pop()
                free, held[victim] = free + held[victim], 0
                victims.append(victim)
            if total - held[job] > free:
                break
            free, held[job] = free - total + held[job], total
            run.append(job)
        return run, victims

    def push_out(self, job: _Job) -> list[tuple[int, int]]:
        """To the host if it has room, otherwise into oblivion."""
        pairs: list[tuple[int, int]] = []
        old, job.home = job.home, []
        if self.host_pool is not None and self.host_pool.num_free >= len(old):
            job.home, job.out = self.host_pool.allocate(len(old)), True
            pairs = [(old[place], job.home[place]) for place in range(len(old))]
        else:
            job.done = 0
        for block in old:
            self.pool.free(block)
        return pairs

    def chunk(self, job: _Job) -> Chunk:
        """All that is known and not done."""
        start, job.done = job.done, len(job.known)
        return Chunk(job.name, start, tuple(job.known[start:]), tuple(job.home), True)

    def table_length(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return (tokens + self.size - 1) // self.size

    def job(self, request_id: int) -> _Job:
        """By name."""
        for job in self.jobs:
            if job.name == request_id:
                return job
        raise ValueError(f"nobody is called {request_id!r}")
