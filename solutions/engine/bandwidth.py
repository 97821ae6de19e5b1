"""How near decoding comes to its bound: a token costs the reading of every weight, and of what is kept so far."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from labkit import machine
from labkit.probing import machine_bounds

from .engine import Engine
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class DecodeSpeed:
    """Decoding of one request alone.

    Args:
        seconds: of a step, the median.
        num_bytes: that a step has to read.
        bandwidth: bytes a second that the device reads.
    """

    seconds: float
    num_bytes: int
    bandwidth: float

    @property
    def share(self) -> float:
        """Of the bound: what the bytes would take if nothing else did, by what a step takes."""
        return self.num_bytes / self.bandwidth / self.seconds


def decode_speed(engine: Engine, num_prompt: int, num_steps: int) -> DecodeSpeed | None:
    """Measures an engine with nothing to do.

    Args:
        engine: without speculation, whose steps are passes over more than one token.
        num_prompt: tokens that are there when decoding begins.
        num_steps: that are timed.

    Returns:
        None if nobody can say what a step reads: a router chooses it, or weights are codes.

    Raises:
        ValueError: a text that the engine can't hold.
    """
    length = num_prompt + num_steps // 2
    num_bytes = engine.decode_bytes(length)
    if num_bytes is None:
        return None
    params = SamplingParams(temperature=0.0, max_tokens=1 + num_steps, ignore_eos=True)
    engine.add_request([0] * num_prompt, params)
    while not any(one.tokens for one in engine.step()):
        pass
    seconds = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()  # ends when its tokens are here, so that a GPU is waited for
        seconds.append(time.perf_counter() - start)
    return DecodeSpeed(statistics.median(seconds), num_bytes, machine_bounds(engine.device.type, quick=True).read)


def where(device: str) -> str:
    """The hardware that a measurement on a device is about."""
    facts = machine.facts()
    if device == "cuda" and facts.gpu is not None:
        return f"{facts.gpu.name}, torch {facts.torch}"
    return f"{facts.cpu}, torch {facts.torch}; kernels and CUDA graphs not verified on a GPU"
