"""The engine's server beside llama.cpp's server and transformers' continuous batching, on the same requests.

Three loads: all requests at once (offline), a fixed number running (closed loop), and Poisson arrivals that wait for
nobody (open loop). All sides get the same token ids, write the same number of tokens (end-of-text tokens are passed
over), take the most likely token, hold the numbers of the same Q4_1 file and compute with the same number of threads.
Repeats alternate between the sides, with new prompts each time, so that no cache knows them; a ratio is of one repeat.
Run: ``python -m benchmarks.serving``; ``--quick`` for a short version, ``--help`` for the sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.reporting import bounds_line, load_line
from benchmarks.serving_contenders import continuous_batching, engine_server, llama_cpp_server, missing
from benchmarks.serving_load import Contender, closed_loop, open_loop
from benchmarks.serving_tables import Reports, latency_tables, throughput_head, throughput_rows
from benchmarks.turns import rest
from labkit.checkpoints import load_tokenizer
from labkit.machine import facts
from solutions.engine.load import Arrival, random_load

RESULTS = Path(__file__).parent / "results" / "serving.md"
WANTED = {8: 1.5, 32: 2.5}
"""Output tokens per second at so many at once, in those of llama.cpp's server."""
SLOTS = 32
"""Requests that llama.cpp's server runs at once."""
PROMPT_SHARE = 2
"""Offline and open loop: a prompt is so many times as long as its answer, on average."""
SHORTEST, LONGEST = 4, 128
"""Mean tokens of an answer in the offline run."""


@dataclass(frozen=True)
class Plan:
    """How much is run.

    Args:
        offline: requests of the offline run.
        repeats: of everything.
        seconds: that the slowest side should need for one run, as far as the number of requests allows.
        num_input: mean tokens of a prompt in the closed loop; the open loop has `PROMPT_SHARE` times `num_output`.
        num_output: mean tokens of an answer, but for the offline run.
        shared: share of each prompt in the open loop that is the same for all.
        utilisation: arrivals per second, as a share of what the slowest side gets through.
        slo_ttft: seconds that a first token may take.
        slo_tpot: seconds that a further token may take.
    """

    offline: int = 256
    repeats: int = 3
    seconds: float = 30.0
    num_input: int = 16
    num_output: int = 32
    shared: float = 0.5
    utilisation: float = 0.6
    slo_ttft: float = 1.0
    slo_tpot: float = 0.1

    @property
    def context(self) -> int:
        """Tokens of the longest text, prompt and answer: lengths go up to one and a half of their means."""
        longest = (PROMPT_SHARE + 1) * max(LONGEST, self.num_output) + self.num_input
        return 3 * longest // 2


QUICK = {"offline": 16, "repeats": 2, "seconds": 2.0, "num_output": 8}


class Bench:
    """Runs loads on all sides in turn.

    Args:
        contenders: the sides; the engine first.
        vocab_size: prompts are random ids below it.
        progress: shows what runs.
    """

    def __init__(self, contenders: Sequence[Contender], vocab_size: int, progress: Progress) -> None:
        self.contenders, self._vocab_size, self._progress = contenders, vocab_size, progress
        self._seed = 0

    def load(self, count: int, rate: float | None, num_input: int, num_output: int, shared: float) -> list[Arrival]:
        """Requests that were never sent before."""
        self._seed += 1
        return random_load(count, rate, num_input, num_output, shared, self._vocab_size, self._seed)

    async def closed(self, plan: Plan, concurrency: int, count: int, repeats: int) -> Reports:
        """So many requests at once."""
        reports: Reports = {}
        for _ in range(repeats):
            arrivals = self.load(count, None, plan.num_input, plan.num_output, 0.0)
            for one in self.contenders:
                with self._shown(f"{one.name}, {concurrency} at once", count) as done:
                    report = await closed_loop(one, arrivals, concurrency, done)
                reports.setdefault(one.name, []).append(report)
        return reports

    async def open(
        self, title: str, count: int, rate: float | None, num_output: int, shared: float, repeats: int
    ) -> Reports:
        """Arrivals at a rate, or all at once."""
        reports: Reports = {}
        for _ in range(repeats):
            arrivals = self.load(count, rate, PROMPT_SHARE * num_output, num_output, shared)
            for one in self.contenders:
                with self._shown(f"{one.name}, {title}", count) as done:
                    report = await open_loop(one, arrivals, done)
                reports.setdefault(one.name, []).append(report)
        return reports

    @contextlib.contextmanager
    def _shown(self, what: str, count: int) -> Iterator[Callable[[], object]]:
        rest()
        start, task = time.monotonic(), self._progress.add_task(what, total=count)
        yield lambda: self._progress.advance(task)
        self._progress.remove_task(task)
        self._progress.console.print(f"{what}: {count} requests in {time.monotonic() - start:.1f} s")


async def measure(bench: Bench, plan: Plan) -> list[str]:
    """Runs everything.

    Returns:
        The lines of the tables.
    """
    # The first round warms up, the second tells how fast this machine is.
    for count in (8, 16):
        trial = await bench.closed(plan, 8, count, 1)
    speed = min(several[0].throughput for several in trial.values())
    return [
        f"- in a trial the slowest side wrote {speed:.0f} tokens/s; sizes follow from that",
        *await offline(bench, plan, speed),
        *await closed(bench, plan, speed),
        *await open_(bench, plan, speed),
    ]


async def offline(bench: Bench, plan: Plan, speed: float) -> list[str]:
    """All requests at once.

    Args:
        bench: the sides.
        plan: how much.
        speed: output tokens per second of the slowest side.
    """
    length = min(LONGEST, max(SHORTEST, round(plan.seconds * speed / plan.offline)))
    reports = await bench.open("offline", plan.offline, None, length, 0.0, plan.repeats)
    return [
        "",
        f"## Offline: {plan.offline} requests at once",
        "",
        f"Answers of {length} tokens on average, prompts of {PROMPT_SHARE * length}, each from half to one and a half",
        f"of that. Scaled to the machine: what the slowest side writes in {plan.seconds:g} s, by the number of",
        f"requests, is the length of an answer (at least {SHORTEST}, at most {LONGEST}).",
        *throughput_head(),
        *throughput_rows(reports),
    ]


async def closed(bench: Bench, plan: Plan, speed: float) -> list[str]:
    """So many requests running; arguments as `offline`."""
    wanted = " and ".join(f"{times} times llama.cpp's at {at}" for at, times in WANTED.items())
    lines = [
        "",
        "## Closed loop: so many requests running",
        "",
        f"Prompts of {plan.num_input} tokens and answers of {plan.num_output} on average. Wanted of the engine are",
        f"{wanted}.",
        *throughput_head(),
    ]
    for at in WANTED:
        count = max(at, round(plan.seconds * speed / plan.num_output))
        lines += throughput_rows(await bench.closed(plan, at, count, plan.repeats), f"{at} at once, ")
    return lines


async def open_(bench: Bench, plan: Plan, speed: float) -> list[str]:
    """Poisson arrivals; arguments as `offline`."""
    rate = plan.utilisation * speed / plan.num_output
    count = max(8, round(rate * plan.seconds))
    reports = await bench.open("open loop", count, rate, plan.num_output, plan.shared, plan.repeats)
    return [
        "",
        "## Open loop: Poisson arrivals",
        "",
        f"{count} requests, {rate:.2f} a second: {plan.utilisation:.0%} of what the slowest side wrote in the trial.",
        f"Prompts of {PROMPT_SHARE * plan.num_output} tokens, {plan.shared:.0%} of them the same for all, and answers",
        f"of {plan.num_output}, on average. Times in seconds from when a request was due; rates in output tokens per",
        f"second, where goodput counts requests with a TTFT within {plan.slo_ttft:g} s and a TPOT within",
        f"{plan.slo_tpot:g} s. Ratios of times below 1 mean that the engine's requests wait less.",
        *latency_tables(reports, plan.slo_ttft, plan.slo_tpot),
    ]


async def run(plan: Plan, threads: int, compile: bool, note: str) -> list[str]:
    """Starts all sides, measures, and ends them.

    Args:
        plan: how much.
        threads: of each side.
        compile: whether the engine's decode steps are compiled.
        note: what readers of the results should know besides.

    Returns:
        The lines of the report.
    """
    machine, absent = facts(), missing()
    lines = [
        "# The engine's server beside llama.cpp's and transformers' continuous batching",
        "",
        *([note, ""] if note else []),
        f"{machine.cpu}, {machine.logical_cores} cores, threads a side: {threads}, Python {machine.python}, torch "
        f"{machine.torch}, transformers {transformers.__version__}"
        + ("" if absent else f", xllamacpp {version('xllamacpp')}")
        + ".",
        "The engine and llama.cpp hold the bundled model's Q4_1 codes (the engine's head in 8 bits), transformers the "
        "same numbers in float32. The two servers are asked over HTTP by one client; transformers runs in the client's "
        f"process and is spared that. The engine's decode steps are {'' if compile else 'not '}compiled. Medians over "
        f"{plan.repeats} alternating repeats, (range).",
        "",
        *(f"- {line}" for line in absent),
        "- transformers' own server: *not verified here*, it needs `accelerate`, which the workbook does not install",
        "- on a GPU: *not verified here*" if machine.gpu is None else "- there is a GPU, not used by this benchmark",
        f"- {bounds_line()}",
        f"- {load_line('at the start')}",
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # A request has a connection of its own: llama.cpp's server closes those that it has answered now and then.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(Progress(*columns, console=console, refresh_per_second=2))
            starting = progress.add_task("starting all sides", total=None)
            sides: list[Contender] = [stack.enter_context(engine_server(client, threads, compile))]
            if not absent:
                sides.append(stack.enter_context(llama_cpp_server(client, threads, SLOTS, plan.context)))
            sides.append(stack.enter_context(continuous_batching(threads)))
            progress.remove_task(starting)
            tables = await measure(Bench(sides, load_tokenizer("smollm2").vocab_size, progress), plan)
    return [*lines, f"- {load_line('at the end')}", *tables]


def main() -> int:
    """Measure, print, and keep the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"in place of the defaults: {QUICK}")
    parser.add_argument("--threads", type=int, default=facts().logical_cores, help="of each side (default: all cores)")
    for name, value in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"default {value}; see `Plan`")
    parser.add_argument("--compile", action="store_true", help="let torch compile the engine's decode steps")
    parser.add_argument("--note", default="", help="a sentence for the results, such as what else ran")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(RESULTS.parents[2])}")
    arguments = parser.parse_args()

    # Ended from outside, it still ends the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given = {name: getattr(arguments, name) for name in vars(Plan()) if getattr(arguments, name) is not None}
    plan = Plan(**{**(QUICK if arguments.quick else {}), **given})
    try:
        lines = asyncio.run(run(plan, arguments.threads, arguments.compile, arguments.note))
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    if arguments.write:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
