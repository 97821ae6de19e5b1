"""What the engine costs: its speed beside its peers on the bundled model, and its bookkeeping as shares of a step.

Speed, in `single_request`: the engine with 4-bit weights as the bundled file stores them and a head in 8 bits, the
same with decode steps that torch has compiled, the engine in float32, transformers in float32, and llama.cpp on the
same file, in alternating rounds; what counts is the ratio within a round.
Bookkeeping: CPU time of scheduler and prefix cache in steps that really run, so that other work on the machine does not
count as theirs.

Run: ``python -m benchmarks.engine_costs --help``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.decode_beside_transformers import Timing
from benchmarks.reporting import spread
from benchmarks.single_request import (
    COMPILED,
    CONTENDERS,
    LLAMA_CPP,
    PACKED,
    PLAIN,
    TRANSFORMERS,
    Contender,
    make_engine,
)
from labkit.checkpoints import bundled_gguf
from labkit.machine import facts
from labkit.probing import machine_bounds
from solutions.engine import Engine, SamplingParams
from solutions.engine.graphs.compiled_step import compiler_fault
from solutions.engine.kv_manager import KVManager
from solutions.engine.request import Request
from solutions.engine.scheduler import Scheduler, SchedulerConfig
from solutions.engine.weights import packed_files
from solutions.engine.weights.packing import Packing

VOCAB = 40_000
"""Prompts are random ids below it, all of which the bundled model knows."""
TARGETS = {"prefill": {TRANSFORMERS: 1.1, LLAMA_CPP: 1.5}, "decode": {TRANSFORMERS: 5.0, LLAMA_CPP: 1.0}}
"""How many times as fast as a peer the packed engine is to be."""


def measure_speed(rounds: int, prompt_tokens: int, steps: int, cpu_time: bool) -> None:
    """Prefill and decode of one request, as ratios to every peer."""
    faults = {COMPILED: compiler_fault(torch.device("cpu"))}
    if importlib.util.find_spec("xllamacpp") is None:
        faults[LLAMA_CPP] = "xllamacpp is not installed"
    for name, fault in faults.items():
        if fault is not None:
            print(f"{name}: *not verified here*, {fault}")
    choose, found = random.Random(0), list[dict[str, Timing]]()
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(Contender(name, cpu_time)) for name in CONTENDERS if faults.get(name) is None
        }
        for number in range(rounds + 1):
            prompt = [choose.randrange(VOCAB) for _ in range(prompt_tokens)]
            timings = {name: side.run(prompt, steps) for name, side in sides.items()}
            found += [timings] if number else []  # the first warms up
    print(f"\none request, {prompt_tokens} prompt tokens, {steps} decode steps, {rounds} rounds; median (range)")
    for name in sides:
        prefill = [prompt_tokens / one[name].prefill_seconds for one in found]
        decode = [1 / one[name].seconds_per_token for one in found]
        print(f"  {name:18} prefill {spread(prefill)} tokens/s, decode {spread(decode)} tokens/s")
    for ours in (name for name in (PACKED, COMPILED) if name in sides):
        print(f"how many times as fast the engine is, {ours}:")
        for phase, time_of in (
            ("prefill", lambda one: one.prefill_seconds), ("decode", lambda one: one.seconds_per_token)
        ):  # fmt: skip
            for name in (name for name in sides if name != ours):
                ratios = [time_of(one[name]) / time_of(one[ours]) for one in found]
                wanted = TARGETS[phase].get(name)
                verdict = "" if wanted is None else f"   wanted {wanted}: {_met(statistics.median(ratios) >= wanted)}"
                print(f"  {phase:8} / {name:18} {spread(ratios)}{verdict}")
    num_bytes = packed_bytes()
    shares = [num_bytes / one[PACKED].seconds_per_token / machine_bounds("cpu", quick=True).read for one in found]
    print(f"a decode step reads {num_bytes / 1e6:.0f} MB of weights; share of the read bandwidth: {spread(shares)}")
    agree = [_agreement(one[PACKED].tokens, one[PLAIN].tokens) for one in found]
    print(f"tokens before the packed engine's text parts from the float32 engine's: {spread(agree)}")


def packed_bytes() -> int:
    """Bytes of packed weights that a decode step has to read, by what the engine keeps of the bundled file.

    Raises:
        RuntimeError: nothing is kept, since the cache of models can't be written to.
    """
    packing = Packing()
    found = packed_files.read(packed_files.entry_of(bundled_gguf(), packing), packing)
    if found is None:
        raise RuntimeError("the engine has kept no packed weights; make the cache of models writable")
    layers = [layer.tensors() for layer in found[1]._layers.values()]
    # Where torch has an order of its own, plain codes are kept for dense products alone.
    read = [one for layer in layers for name, one in layer.items() if name != "codes" or "packed" not in layer]
    return sum(one.numel() * one.element_size() for one in read)


class Clock:
    """CPU time spent within some methods of an object, the calls they make included."""

    def __init__(self, owner: Any, names: Iterable[str]) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - start

        return timed


def measure_scheduler(num_running: int, steps: int) -> None:
    """Share of scheduler and blocks in decode steps of many requests."""
    engine = make_engine("stored", prefix_cache="hash")
    fill(engine, num_running, 32, steps + 40)
    while engine.num_waiting or engine.step() == []:
        engine.step()
    for _ in range(3):
        engine.step()
    clock = Clock(engine._scheduler, ("schedule", "commit"))
    start = time.thread_time()
    for _ in range(steps):
        assert len(engine.step()) == num_running
    share = clock.seconds / (time.thread_time() - start)
    print(f"\nscheduler: {100 * share:.2f} % of a step with {num_running} running, {1000 * clock.seconds / steps:.2f} "
          f"ms of it; wanted under 3 %: {_met(share < 0.03)}")  # fmt: skip


def measure_waiting(counts: Iterable[int]) -> None:
    """Cost of a decision against the number of requests that wait for it."""
    print("\na decision with 64 running, by how many wait:")
    first = None
    for waiting in counts:
        memory = KVManager(4096, 16)
        scheduler = Scheduler(SchedulerConfig(max_running=64, token_budget=1024), memory)
        params = SamplingParams(temperature=0.0, max_tokens=500)
        for number in range(64 + waiting):
            scheduler.add(Request(str(number), (number % VOCAB,) * 8, params, memory.new_table()))
        times = []
        for number in range(120):
            start = time.thread_time()
            step = scheduler.schedule()
            times += [time.thread_time() - start] if number >= 20 else []
            scheduler.commit(step, {work.request: [5] for work in step.work if work.gives_token})
        assert scheduler.num_waiting == waiting
        cost = statistics.median(times)
        first = first or cost
        print(f"  {waiting:7} waiting: {1e6 * cost:6.0f} µs, {cost / first:.2f} of the first")


def measure_prefix_cache(kinds: Iterable[str], num_requests: int, prompt_tokens: int, steps: int) -> None:
    """What looking up and keeping prefixes costs where no prompt begins like another."""
    print(f"\nprefix cache, no hits: {num_requests} prompts of {prompt_tokens} tokens, {steps} tokens each")
    for kind in kinds:
        engine = make_engine("stored", prefix_cache=kind)
        clock = Clock(engine._memory, ("attach_prefix", "_insert"))
        start = time.thread_time()
        fill(engine, num_requests, prompt_tokens, steps)
        while engine.has_work:
            engine.step()
        share = clock.seconds / (time.thread_time() - start)
        print(f"  {kind:6} {100 * share:.2f} % of all CPU time; wanted under 1 %: {_met(share < 0.01)}")


def measure_loading(repeats: int) -> None:
    """The packed model in a process of its own, taken apart and from the cache, in turns."""
    code = """
import time; start = time.perf_counter()
import solutions.engine.weights.quantized as quantized, solutions.engine.weights.packed_files as files
imported = time.perf_counter()
if {cold}: files.read = lambda *_: None; files.write = lambda *_: None
cpu = time.process_time()
quantized.load("smollm2", "stored", quantized.Packing())
print(imported - start, time.perf_counter() - imported, time.process_time() - cpu)
"""
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(repeats + 1):
        for cold in (True, False):
            done = subprocess.run([sys.executable, "-c", code.format(cold=cold)], capture_output=True, check=True)
            found[cold].append([float(value) for value in done.stdout.split()])
    print("\nloading the packed model, after imports; median (range) in seconds")
    for cold, name in ((True, "taken apart"), (False, "from the cache")):
        imports, wall, cpu = (list(column) for column in zip(*found[cold][1:], strict=True))
        met = "" if cold else f"; wanted under 2 s: {_met(statistics.median(cpu) < 2)}"
        print(f"  {name:14} {spread(wall)}, CPU time {spread(cpu)}{met}; imports {spread(imports)}")


def fill(engine: Engine, num_requests: int, prompt_tokens: int, steps: int) -> None:
    """Requests that have nothing in common."""
    choose = random.Random(1)
    for _ in range(num_requests):
        prompt = [choose.randrange(VOCAB) for _ in range(prompt_tokens)]
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True))


def _agreement(some: list[int], others: list[int]) -> float:
    return float(next((i for i, (a, b) in enumerate(zip(some, others, strict=True)) if a != b), len(some)))


def _met(reached: bool) -> str:
    return "reached" if reached else "NOT REACHED"


@dataclass(frozen=True)
class Part:
    """A part of the benchmark by name."""

    name: str
    run: Callable[[argparse.Namespace], None]


PARTS = (
    Part("waiting", lambda given: measure_waiting([10, 1000, 10_000, 100_000][: 2 if given.quick else 4])),
    Part("scheduler", lambda given: measure_scheduler(256, 4 if given.quick else 20)),
    Part("prefix", lambda given: measure_prefix_cache(("hash", "radix"), 8, 256, 32 if given.quick else 128)),
    Part("loading", lambda given: measure_loading(1 if given.quick else 5)),
    Part(
        "speed",
        lambda given: measure_speed(given.rounds, given.prompt_tokens, given.steps, given.cpu_time),
    ),
)


def main() -> None:
    """Measure, and print ratios with their spread, the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--cpu-time", action="store_true",
                        help="compare CPU time, for a machine that has other work; best with one thread")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=48)
    given = parser.parse_args()
    machine = facts()
    print(f"{machine.cpu}, {machine.logical_cores} cores, {torch.get_num_threads()} threads, "
          f"load {os.getloadavg()[0]:.1f}; torch {machine.torch}, Python {machine.python}")  # fmt: skip
    print(f"speeds in {'CPU' if given.cpu_time else 'wall'} time; "
          f"packed product up to {Packing().num_packed} tokens, dense product in {Packing().dense_dtype}")  # fmt: skip
    for part in PARTS:
        if given.only is None or part.name in given.only:
            part.run(given)
    print("\non a GPU: *not verified here*")


if __name__ == "__main__":
    main()
