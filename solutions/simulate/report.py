"""What a simulation shows: each request's times, and how queue and memory stood meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace

from solutions.engine.load import LoadReport, Served


@dataclass(frozen=True, kw_only=True)
class Outcome(Served):
    """One answered request, with what the engine's own load runs do not see.

    Args:
        number: its place in the order of arrival.
        arrived: seconds after the start.
        kind: its stream.
        replica: who answered it.
        num_prompt: tokens of its prompt.
        num_cached: those of them that the prefix cache had.
        num_preemptions: how often it lost its blocks.
        longest_gap: the longest wait for a token after the first, in seconds: what a reader sees as a stall.
    """

    number: int
    arrived: float
    kind: str
    replica: int
    num_prompt: int
    num_cached: int
    num_preemptions: int
    longest_gap: float


@dataclass(frozen=True)
class Sample:
    """How a replica stood at one moment.

    Args:
        seconds: after the start.
        replica: whose state it is.
        waiting: requests without blocks.
        running: requests with blocks.
        occupancy: share of the pool's blocks that requests hold, 0 to 1.
        cached: share of the pool's blocks that a prompt could hit, held or not.
        tokens: of the step under way; 0 if there is none.
        preemptions: since the start.
    """

    seconds: float
    replica: int
    waiting: int
    running: int
    occupancy: float
    cached: float
    tokens: int
    preemptions: int


@dataclass(frozen=True, kw_only=True)
class SimulationReport(LoadReport):
    """A load run in simulated time.

    Args:
        outcomes: all answered requests, in the order of their arrival; `served` is the same.
        samples: before each step and at each arrival.
        num_refused: requests that were turned away.
        num_steps: of all replicas.
        num_computed_tokens: of all replicas, those computed twice included.
        num_preemptions: of all replicas.
        utilization: share of the time in which each replica was at work.
    """

    outcomes: tuple[Outcome, ...]
    samples: tuple[Sample, ...]
    num_refused: int
    num_steps: int
    num_computed_tokens: int
    num_preemptions: int
    utilization: tuple[float, ...]

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache had."""
        prompts = sum(one.num_prompt for one in self.outcomes)
        return sum(one.num_cached for one in self.outcomes) / prompts if prompts else 0.0

    @property
    def recomputed(self) -> float:
        """Tokens computed for each that had to be: 1 without preemptions, more with them."""
        # The last token of an answer is never computed: nothing comes after it.
        needed = sum(one.num_prompt - one.num_cached + one.num_tokens - 1 for one in self.outcomes)
        return self.num_computed_tokens / needed if needed else 1.0

    def only(self, kind: str) -> SimulationReport:
        """The requests of one stream; what is counted over all replicas stays.

        Raises:
            ValueError: no request of that stream was answered.
        """
        chosen = tuple(one for one in self.outcomes if one.kind == kind)
        if not chosen:
            kinds = ", ".join(sorted({one.kind for one in self.outcomes}))
            raise ValueError(f"no request of kind {kind!r} was answered; there are {kinds or 'none at all'}")
        return replace(self, served=chosen, outcomes=chosen)
