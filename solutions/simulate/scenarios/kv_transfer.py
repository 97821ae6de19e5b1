"""Disaggregation: keys and values of every prompt cross the network, and a network can be too small."""

from __future__ import annotations

from dataclasses import replace

from solutions.planning.hardware import H100
from solutions.planning.model_shape import KNOWN
from solutions.planning.roofline import Serving

from ..disaggregation import Link, simulate_disaggregated
from ..lengths import Fixed
from ..report import SimulationReport
from ..step_time import ReceivedPrompts, RooflineTime
from ..workload import Stream, TimedRequest
from .scenario import BLOCK_SIZE, Case, Column, Role, Scenario, percentile, replica_config, replicas

LLAMA_70B = Serving(KNOWN["llama-3-70b"], H100, num_gpus=8, mfu=0.5, overhead=1e-3)
POOL = 400_000
RATE = 66.0
"""Requests per second and decode replica in the plan of section 6: 1,000 over 15 replicas."""


def workload(seed: int) -> list[TimedRequest]:
    """The plan's prompts for 8 seconds; answers are short, since only what comes before them is of interest."""
    return Stream(RATE, Fixed(1000), Fixed(30)).draw(8.0, seed)


def _case(name: str, role: Role, gigabytes: float, kv: str = "bf16") -> Case:
    serving = replace(LLAMA_70B, kv=kv)
    times = RooflineTime(serving, BLOCK_SIZE)
    config = replica_config(POOL)

    def run(seed: int) -> SimulationReport:
        link = Link(gigabytes * 1e9, serving.kv_bytes_per_token)
        prefill, decode = replicas(3, config, times), replicas(1, config, ReceivedPrompts(times))
        return simulate_disaggregated(prefill, decode, link, workload(seed)).whole

    return Case(name, role, run)


SCENARIO = Scenario(
    "kv-transfer",
    "keys and values arrive more slowly than prompts are computed",
    "320 KiB for each prompt token is 22 GB/s into each decode replica of the plan. A link below that queues without "
    "end, and no GPU is to blame: the first token is there, the second isn't. A port of 50 GB/s hardly shows; FP8 keys "
    "and values halve what has to cross.",
    (
        _case("12.5 GB/s (100 Gb/s Ethernet)", Role.FAILURE, 12.5),
        _case("50 GB/s (InfiniBand NDR)", Role.REMEDY, 50.0),
        _case("12.5 GB/s, FP8 keys and values", Role.REMEDY, 12.5, kv="fp8"),
    ),
    (
        Column("TTFT p95 (s)", percentile("ttft", 0.95)),
        Column("wait for the second token, p50 (s)", percentile("longest_gap", 0.5), ".3f"),
        Column("p95 (s)", percentile("longest_gap", 0.95), ".3f"),
        Column("E2E p95 (s)", percentile("e2e", 0.95)),
    ),
)
