"""One request through each contender, every one of them in a process of its own.

In one process they would meet each other's idle threads, which spin for a while before they sleep: beside llama.cpp's
the engine took one and a half times as long for a token.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch

from benchmarks.decode_beside_transformers import Timing, load_transformers, run_transformers
from benchmarks.turns import rest
from labkit.checkpoints import bundled_gguf
from solutions.engine import Engine, EngineConfig, SamplingParams
from solutions.engine.scheduler import SchedulerConfig

PACKED, COMPILED, PLAIN = "engine, 4 bits", "the same, compiled", "engine, float32"
TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"

Now = Callable[[], float]
"""A clock, in seconds."""
Run = Callable[[list[int], int], Timing]
"""Given a prompt and a number of decode steps."""


def make_engine(weights: str, prefix_cache: str = "none", compile: bool = False) -> Engine:
    """The bundled model, with room for everything that is measured of it."""
    limits = SchedulerConfig(max_running=256, token_budget=2048)
    config = EngineConfig(limits, num_blocks=2048, prefix_cache=prefix_cache, weights=weights, compile=compile)
    return Engine("smollm2", config)


def run_engine(engine: Engine, prompt: list[int], steps: int, now: Now) -> Timing:
    """One request alone: its first step reads the prompt, each other writes a token."""
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True))
    tokens, times = list[int](), [now()]
    while engine.has_work:
        (progress,) = engine.step()
        tokens += progress.tokens
        times.append(now())
    return Timing(times[1] - times[0], (times[-1] - times[1]) / steps, tokens)


def _engine(weights: str, compile: bool = False) -> Callable[[Now], Run]:
    def make(now: Now) -> Run:
        engine = make_engine(weights, compile=compile)
        return lambda prompt, steps: run_engine(engine, prompt, steps, now)

    return make


def _transformers(now: Now) -> Run:
    peer = load_transformers()
    return lambda prompt, steps: run_transformers(peer, prompt, steps, now, rows=1)


def _llama_cpp(now: Now) -> Run:
    """llama.cpp's server without HTTP: what one token costs, and how much more many cost."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(bundled_gguf())
    options.n_ctx, options.n_parallel, options.verbosity = 2048, 1, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(options)

    def seconds(prompt: list[int], tokens: int) -> float:
        start = now()
        server.handle_completions({
            "prompt": prompt, "n_predict": tokens, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True
        })  # fmt: skip
        return now() - start

    def run(prompt: list[int], steps: int) -> Timing:
        prefill = seconds(prompt, 1)
        return Timing(prefill, (seconds(prompt, steps + 1) - prefill) / steps, [])

    return run


CONTENDERS: dict[str, Callable[[Now], Run]] = {
    PACKED: _engine("stored"), COMPILED: _engine("stored", compile=True), PLAIN: _engine("fp32"),
    TRANSFORMERS: _transformers, LLAMA_CPP: _llama_cpp,
}  # fmt: skip


class Contender:
    """A contender's process; a context manager that ends it.

    Args:
        name: one of `CONTENDERS`.
        cpu_time: measure the time of its threads, in place of that on the wall.
    """

    def __init__(self, name: str, cpu_time: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(name, cpu_time, theirs), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._connection.recv()  # it is ready
        return self

    def run(self, prompt: list[int], steps: int) -> Timing:
        """Gives it a request once the last one's threads are at rest, and waits."""
        rest()
        self._connection.send((prompt, steps))
        timing: Timing = self._connection.recv()
        return timing

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.send(None)
        self._process.join()


def _work(name: str, cpu_time: bool, connection: Connection) -> None:
    run = CONTENDERS[name](time.process_time if cpu_time else time.perf_counter)
    connection.send("ready")
    with torch.inference_mode():
        while (work := connection.recv()) is not None:
            connection.send(run(*work))
