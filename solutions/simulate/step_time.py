"""How long a step takes: the one part of the engine that a simulation replaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from solutions.engine.step import Step, Work
from solutions.planning.roofline import Serving

from .demand import Demand

StepTimeModel = Callable[[Step], float]
"""From what the scheduler decided to the seconds that it takes."""

PCIE_BANDWIDTH = 50e9
"""Bytes per second between an accelerator and its host: PCIe 5.0 x16 moves 63 GB/s at most, each way."""


@dataclass(frozen=True)
class ConstantTime:
    """Every step takes the same time; for closed forms.

    Raises:
        ValueError: a time that isn't positive.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds of a step must be a positive number, got {self.seconds}")

    def __call__(self, step: Step) -> float:
        return self.seconds


@dataclass(frozen=True)
class RooflineTime:
    """The planner's roofline, for steps that mix prefills and decodes.

    The longer of arithmetic and reads, blocks that move to and from the host, and the overhead. Attention's arithmetic
    is counted, which the planner leaves out: of a prompt of 100,000 tokens it is the larger part.

    Args:
        serving: model and accelerators, with the shares of their peaks that real kernels reach.
        block_size: tokens in a block, for blocks that move.
        host_bandwidth: bytes per second to and from host memory.

    Source: module section 1.2.
    """

    serving: Serving
    block_size: int = 16
    host_bandwidth: float = PCIE_BANDWIDTH

    def __call__(self, step: Step) -> float:
        return self.seconds(Demand.of(step))

    def seconds(self, demand: Demand) -> float:
        """The time of a step with this demand."""
        serving, model = self.serving, self.serving.model
        per_pair = model.flops_per_token(1) - model.flops_per_token()
        compute = (model.flops_per_token() * demand.tokens + per_pair * demand.pairs) / serving.flops
        per_token = serving.kv_bytes_per_token
        # A copy reads a block and writes it.
        num_bytes = serving.weight_bytes + per_token * (demand.read + 2 * demand.copied * self.block_size)
        swaps = per_token * demand.swapped * self.block_size / self.host_bandwidth
        return max(compute, num_bytes / serving.bandwidth) + swaps + serving.overhead


@dataclass(frozen=True)
class ReceivedPrompts:
    """A decode replica of a disaggregated system: keys and values of prompts came over the network.

    Of a request that has written nothing here, all but its newest token are free; a request that was preempted here
    must be computed again like any other.

    Args:
        base: the time of what is left to compute.
    """

    base: StepTimeModel

    def __call__(self, step: Step) -> float:
        return self.base(replace(step, work=tuple(map(_newest, step.work))))


def _newest(work: Work) -> Work:
    """The newest token of a work, if the others were received."""
    if work.request.num_output > 0:
        return work
    return replace(work, start=work.end - 1, tokens=work.tokens[-1:], slots=work.slots[-1:])
