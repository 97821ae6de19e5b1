"""A replica: the engine's scheduler and blocks, with a model of time in the place of the model."""

from __future__ import annotations

from dataclasses import dataclass, field

from solutions.engine.kv_manager import KVManager
from solutions.engine.metrics import Metrics
from solutions.engine.request import FinishReason, Request, Times
from solutions.engine.scheduler import Scheduler, SchedulerConfig
from solutions.engine.step import Step

from .report import Outcome, Sample
from .step_time import StepTimeModel
from .workload import TimedRequest


@dataclass(frozen=True)
class ReplicaConfig:
    """How large a replica is.

    Args:
        scheduler: limits of a step.
        num_blocks: blocks of the pool.
        block_size: tokens in a block.
        prefix_cache: "hash", "radix" or "none".
        num_host_blocks: blocks in host memory, for preemption by swap.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_blocks: int = 1024
    block_size: int = 16
    prefix_cache: str = "hash"
    num_host_blocks: int = 0


@dataclass
class _Life:
    """What a report will tell of a request that is alive."""

    arrival: TimedRequest
    number: int
    longest_gap: float = 0.0
    num_preemptions: int = 0


class Replica:
    """One engine in simulated time.

    Everything that an engine decides is decided here by its own code: who waits, who runs, which tokens a step
    computes, which blocks they lie in, who is preempted. Only how long a step takes is said by `step_time`, and what
    an answer says is made up.

    Args:
        config: its size.
        step_time: seconds of a step.
        index: its place among the replicas.
    """

    def __init__(self, config: ReplicaConfig, step_time: StepTimeModel, index: int = 0) -> None:
        self.config = config
        self.index = index
        self.metrics = Metrics()
        self.busy_seconds = 0.0
        self._step_time = step_time
        self._memory = KVManager(
            config.num_blocks, config.block_size, config.prefix_cache, config.num_host_blocks
        )  # fmt: skip
        self._scheduler = Scheduler(config.scheduler, self._memory)
        self._step: Step | None = None
        self._alive: dict[Request, _Life] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not self._scheduler.is_idle

    @property
    def num_alive(self) -> int:
        """Requests that wait or run."""
        return len(self._alive)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return self._scheduler.num_waiting

    def accept(self, arrival: TimedRequest, number: int) -> None:
        """Takes in a request that arrives now.

        Raises:
            ValueError: it could never run.
        """
        request = Request(
            str(number), arrival.prompt, arrival.params, self._memory.new_table(), priority=arrival.priority,
            times=Times(arrival.seconds),
        )  # fmt: skip
        self._scheduler.add(request)
        self._alive[request] = _Life(arrival, number)

    def start_step(self, now: float) -> float:
        """Decides the next step; returns when it will end."""
        assert self._step is None, "a step is under way"
        step = self._step = self._scheduler.schedule()
        self.metrics.num_steps += 1
        self.metrics.num_computed_tokens += step.num_tokens
        self.metrics.num_preemptions += len(step.preempted)
        for request in step.preempted:
            self._alive[request].num_preemptions += 1
        # As in the engine, a step that only preempts takes no time.
        seconds = self._step_time(step) if step.work else 0.0
        self.busy_seconds += seconds
        return now + seconds

    def end_step(self, now: float) -> list[Outcome]:
        """Takes over what the step has computed; returns the requests that are done."""
        step = self._step
        assert step is not None, "no step is under way"
        self._step = None
        emitted = {work.request: [work.request.params.seed] for work in step.work if work.gives_token}
        self._scheduler.commit(step, emitted)
        self.metrics.num_generated_tokens += len(emitted)
        return [done for request in emitted if (done := self._advance(request, now)) is not None]

    def sample(self, now: float) -> Sample:
        """How things stand."""
        step = self._step
        return Sample(
            now, self.index, self._scheduler.num_waiting, len(self._scheduler.running),
            1 - self._memory.num_free / self._memory.num_blocks, self._memory.num_cached / self._memory.num_blocks,
            step.num_tokens if step is not None else 0, self.metrics.num_preemptions,
        )  # fmt: skip

    def check_idle(self) -> None:
        """With nothing to do, every block must be free or cached.

        Raises:
            AssertionError: blocks have leaked.
        """
        assert not self.has_work and not self._alive, "the replica is at work"
        self._memory.check_idle()

    def _advance(self, request: Request, now: float) -> Outcome | None:
        """Notes the time of a request's new token, and ends it with its last."""
        life, times = self._alive[request], request.times
        if times.last_token is None:
            times.first_token = now
        else:
            life.longest_gap = max(life.longest_gap, now - times.last_token)
        times.last_token = now
        if request.num_output < request.params.max_tokens:
            return None
        self._scheduler.finish(request, FinishReason.LENGTH)
        self.metrics.count_finished(request)
        del self._alive[request]
        assert times.first_token is not None
        return Outcome(
            times.first_token - times.arrived, now - times.arrived, request.num_output, number=life.number,
            arrived=times.arrived, kind=life.arrival.kind, replica=self.index, num_prompt=len(request.prompt),
            num_cached=request.num_cached, num_preemptions=life.num_preemptions, longest_gap=life.longest_gap,
        )  # fmt: skip
