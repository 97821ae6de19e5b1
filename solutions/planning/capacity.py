"""The seven steps from a load to a number of machines and a price; section 6."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from solutions.speculative.speedup import expected_tokens

from .roofline import Serving, StepTime


@dataclass(frozen=True)
class Load:
    """What is asked of the system.

    Args:
        requests_per_second: how many arrive.
        input_tokens: of a prompt, on average.
        output_tokens: of an answer, on average.
        prefix_hit_rate: share of prompt tokens that the prefix cache has.

    Raises:
        ValueError: a number that isn't positive, or a rate outside 0 to 1.
    """

    requests_per_second: float
    input_tokens: float
    output_tokens: float
    prefix_hit_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("requests_per_second", "input_tokens", "output_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.prefix_hit_rate < 1:
            raise ValueError(f"prefix_hit_rate must be at least 0 and below 1, got {self.prefix_hit_rate}")

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second that have to be computed."""
        return self.requests_per_second * self.input_tokens * (1 - self.prefix_hit_rate)

    @property
    def decode_rate(self) -> float:
        """Output tokens per second."""
        return self.requests_per_second * self.output_tokens

    @property
    def decode_context(self) -> float:
        """Cached tokens of a sequence, on average over its life: the prompt and half of the answer."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class Assumptions:
    """What the plan takes for granted, to be replaced by measurements.

    Args:
        gpus_per_replica: accelerators that serve as one.
        mfu: share of peak arithmetic that prefill reaches.
        utilization: share of its capacity that a pool is run at, so that bursts don't queue.
        memory_reserve: share of memory for activations, graphs and fragmentation.
        batch: sequences of a decode replica; None lets `plan` choose the largest of `BATCHES` within `tpot`.
        tpot: seconds that an output token may take.
        decode_overhead: share by which a real decode step is longer than its floor.
        price_per_gpu_hour: in dollars.
        acceptance_rate: chance of a draft to be kept; 0 for no speculation.
        num_drafts: drafts a round.
        draft_cost: time of a draft over that of a step.

    Raises:
        ValueError: a share outside 0 to 1, or a number that isn't positive.
    """

    gpus_per_replica: int = 8
    mfu: float = 0.5
    utilization: float = 0.8
    memory_reserve: float = 0.1
    batch: int | None = 256
    tpot: float = 0.05
    decode_overhead: float = 1 / 3
    price_per_gpu_hour: float = 2.5
    acceptance_rate: float = 0.0
    num_drafts: int = 4
    draft_cost: float = 0.05

    def __post_init__(self) -> None:
        for name in ("mfu", "utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        for name in ("memory_reserve", "acceptance_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("gpus_per_replica", "tpot", "price_per_gpu_hour"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Plan:
    """The answer, with every number on the way to it.

    Args:
        prefill_gpus_at_peak: accelerators of pure prefill compute.
        prefill_gpus: the same at the planned utilization.
        prompt_seconds: prefill of one prompt on one replica, without queueing.
        kv_tokens: cached tokens that a decode replica holds.
        max_sequences: sequences of average context that it holds.
        batch: sequences that it decodes at once.
        step: the floors of its decode step.
        tpot: seconds between two tokens of an answer.
        replica_rate: output tokens per second of a decode replica.
        decode_replicas: whole replicas at full load.
        decode_gpus: accelerators for decoding at the planned utilization.
        dollars_per_hour: of all of them.
        dollars_per_million_output: if output alone is charged.
        dollars_per_million_total: if input and output are charged alike.
        kv_transfer: bytes per second that move from prefill to decode if the two are apart.
    """

    prefill_gpus_at_peak: float
    prefill_gpus: float
    prompt_seconds: float
    kv_tokens: float
    max_sequences: float
    batch: int
    step: StepTime
    tpot: float
    replica_rate: float
    decode_replicas: int
    decode_gpus: float
    dollars_per_hour: float
    dollars_per_million_output: float
    dollars_per_million_total: float
    kv_transfer: float

    @property
    def gpus(self) -> float:
        """All of them."""
        return self.prefill_gpus + self.decode_gpus


def plan(serving: Serving, load: Load, assumptions: Assumptions | None = None) -> Plan:
    """Steps 2 to 5 for a disaggregated system, from bytes and FLOP to dollars.

    Args:
        serving: model, accelerator and dtypes; its number of accelerators and MFU are those of `assumptions`.
        load: what is asked.
        assumptions: what is taken for granted.

    Raises:
        ValueError: the weights don't fit a replica, the batch doesn't fit beside them, or no batch meets the TPOT.
    """
    assumed = assumptions or Assumptions()
    replica = replace(serving, num_gpus=assumed.gpus_per_replica, mfu=assumed.mfu)
    one = replace(replica, num_gpus=1)
    prefill_gpus = load.prefill_rate * serving.model.flops_per_token() / one.flops
    reserved = assumed.memory_reserve * replica.num_gpus * replica.hardware.memory
    kv_tokens = replica.tokens_that_fit(reserved)
    sequences = kv_tokens / load.decode_context
    if sequences < 1:
        memory = replica.num_gpus * replica.hardware.memory
        raise ValueError(
            f"{replica.num_gpus} × {replica.hardware.name} hold {memory / 1e9:.0f} GB; the weights take "
            f"{replica.weight_bytes / 1e9:.0f} GB and no sequence fits beside them: take more accelerators a replica, "
            f"or fewer bits"
        )
    batch = assumed.batch if assumed.batch is not None else _largest_batch(replica, load, assumed, sequences)
    if batch > sequences:
        raise ValueError(f"a batch of {batch} doesn't fit: a replica holds {sequences:.0f} sequences of this length")
    step = replica.decode_step(batch, load.decode_context)
    tokens, cost = _speculation(assumed)
    tpot = step.seconds * (1 + assumed.decode_overhead) * cost / tokens
    rate = batch / tpot
    replicas = math.ceil(load.decode_rate / rate)
    decode_gpus = replicas * replica.num_gpus / assumed.utilization
    dollars = (prefill_gpus / assumed.utilization + decode_gpus) * assumed.price_per_gpu_hour
    output = load.decode_rate * 3600 / 1e6
    total = (load.requests_per_second * load.input_tokens + load.decode_rate) * 3600 / 1e6
    return Plan(
        prefill_gpus_at_peak=prefill_gpus,
        prefill_gpus=prefill_gpus / assumed.utilization,
        prompt_seconds=replica.prefill(load.input_tokens * (1 - load.prefix_hit_rate)).compute,
        kv_tokens=kv_tokens,
        max_sequences=sequences,
        batch=batch,
        step=step,
        tpot=tpot,
        replica_rate=rate,
        decode_replicas=replicas,
        decode_gpus=decode_gpus,
        dollars_per_hour=dollars,
        dollars_per_million_output=dollars / output,
        dollars_per_million_total=dollars / total,
        kv_transfer=load.requests_per_second * load.input_tokens * replica.kv_bytes_per_token,
    )


def _largest_batch(replica: Serving, load: Load, assumed: Assumptions, sequences: float) -> int:
    tokens, cost = _speculation(assumed)
    fits = [
        batch
        for batch in BATCHES
        if batch <= sequences
        and replica.decode_step(batch, load.decode_context).seconds * (1 + assumed.decode_overhead) * cost / tokens
        <= assumed.tpot
    ]
    if not fits:
        floor = replica.decode_step(1, load.decode_context).seconds
        raise ValueError(f"no batch gives a token in {assumed.tpot * 1e3:.1f} ms; the floor is {floor * 1e3:.1f} ms")
    return fits[-1]


def _speculation(assumed: Assumptions) -> tuple[float, float]:
    """Tokens of a round, and its time in steps; 1 and 1 without speculation. Section 3.2."""
    if assumed.acceptance_rate == 0:
        return 1.0, 1.0
    tokens = float(expected_tokens(assumed.acceptance_rate, assumed.num_drafts))
    return tokens, 1 + assumed.num_drafts * assumed.draft_cost
