"""The simulator's command line: `python -m solutions.simulate scenarios`, `run` or `calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from labkit.checkpoints.errors import CheckpointError
from solutions.engine import Engine, EngineConfig
from solutions.engine.load import run_load
from solutions.engine.scheduler import PREEMPTIONS, SchedulerConfig
from solutions.planning import hardware, model_shape
from solutions.planning.roofline import Serving

from .calibration import Grid, compare, measure_steps, twin, workload_at
from .fitting import FittedTime, fit, relative_errors, typical_error
from .lengths import parse_lengths
from .replica import Replica, ReplicaConfig
from .report import SimulationReport
from .routing import PrefixAffinity, RoundRobin, Router, least_loaded
from .scenarios import SCENARIOS, Role, Scenario
from .simulation import simulate
from .step_time import RooflineTime, StepTimeModel
from .timeline import hit_rates, timeline
from .workload import Stream, TimedRequest, read_trace

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The engine's scheduler in simulated time.")
_console = Console(highlight=False)

ROUTERS: dict[str, Callable[[], Router]] = {
    "least-loaded": lambda: least_loaded,
    "in-turn": RoundRobin,
    "by-prefix": lambda: PrefixAffinity(most=2.0),
}
BARS = " ▁▂▃▄▅▆▇█"
T = TypeVar("T")
COLOURS = {Role.HEALTHY: "green", Role.FAILURE: "red", Role.REMEDY: "cyan"}

Seed = Annotated[int, typer.Option("--seed", help="the same seed gives the same arrivals")]
Rate = Annotated[float, typer.Option("--rate", help="arrivals per second")]


@app.command()
def scenarios(
    names: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(SCENARIOS)}; all if not given")] = None,
    seed: Seed = 0,
) -> None:
    """What goes wrong in production, and what helps: section 6, step 7."""
    for name in names or []:
        if name not in SCENARIOS:
            _refuse(ValueError(f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)}"))
    for scenario in (SCENARIOS[name] for name in names or SCENARIOS):
        with _progress(scenario.name, len(scenario.cases)) as tell:
            reports = scenario.run(seed, tell)
        _console.print(_scenario_table(scenario, reports))
        _console.print(f"{scenario.lesson}\n", style="dim")


@app.command()
def run(
    model: Annotated[str, typer.Option("--model", help=f"one of {', '.join(model_shape.KNOWN)}")] = "llama-3-8b",
    gpu: Annotated[str, typer.Option("--gpu", help=f"one of {', '.join(hardware.KNOWN)}")] = "h100",
    tp: Annotated[int, typer.Option("--tp", min=1, help="accelerators of a replica")] = 1,
    mfu: Annotated[float, typer.Option("--mfu", help="share of peak arithmetic that is reached")] = 0.5,
    bandwidth_share: Annotated[float, typer.Option("--bandwidth-share", help="share of the bandwidth")] = 0.8,
    overhead: Annotated[float, typer.Option("--overhead", min=0.0, help="milliseconds a step besides")] = 1.0,
    step_time: Annotated[
        Path | None, typer.Option("--step-time", help="what `calibrate --out` wrote, in place of model and gpu")
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", min=1)] = 1,
    router: Annotated[str, typer.Option("--router", help=f"one of {', '.join(ROUTERS)}")] = "least-loaded",
    rate: Rate = 10.0,
    seconds: Annotated[float, typer.Option("--seconds", help="how long requests arrive")] = 30.0,
    prompts: Annotated[str, typer.Option("--input", help="120, 50-150, or 300~900 for mean and p95")] = "200-800",
    outputs: Annotated[str, typer.Option("--output", help="likewise")] = "100~300",
    prefix: Annotated[int, typer.Option("--prefix", min=0, help="tokens that prompts begin with alike")] = 0,
    num_prefixes: Annotated[int, typer.Option("--prefixes", min=1, help="how many such beginnings there are")] = 1,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="a JSON object a line, in place of rate and lengths")
    ] = None,
    blocks: Annotated[int | None, typer.Option("--blocks", min=1, help="KV blocks; by default what fits")] = None,
    block_size: Annotated[int, typer.Option("--block-size", min=1)] = 64,
    max_running: Annotated[int, typer.Option("--max-running", min=1)] = 256,
    token_budget: Annotated[int, typer.Option("--token-budget", min=1, help="tokens of a step")] = 2048,
    max_chunk: Annotated[int | None, typer.Option("--max-chunk", min=1, help="tokens of one prefill a step")] = None,
    prefix_cache: Annotated[str, typer.Option("--prefix-cache", help="hash, radix or none")] = "hash",
    preemption: Annotated[str, typer.Option("--preemption", help=" or ".join(PREEMPTIONS))] = "recompute",
    host_blocks: Annotated[int, typer.Option("--host-blocks", min=0, help="for preemption by swap")] = 0,
    slo_ttft: Annotated[float, typer.Option("--slo-ttft", help="seconds that a first token may take")] = 1.0,
    slo_tpot: Annotated[float, typer.Option("--slo-tpot", help="seconds that a further token may take")] = 0.05,
    seed: Seed = 0,
) -> None:
    """Serve a workload in simulated time."""
    try:
        serving = Serving(
            _one_of("model", model, model_shape.KNOWN), _one_of("gpu", gpu, hardware.KNOWN), num_gpus=tp, mfu=mfu,
            bandwidth_share=bandwidth_share, overhead=overhead / 1e3,
        )  # fmt: skip
        times: StepTimeModel = RooflineTime(serving, block_size)
        if step_time is not None:
            times = FittedTime.read_file(step_time)
        if blocks is None:
            blocks = _blocks_that_fit(serving, block_size)
        limits = SchedulerConfig(max_running, token_budget, max_chunk, blocks * block_size, preemption)
        config = ReplicaConfig(limits, blocks, block_size, prefix_cache, host_blocks)
        pool = [Replica(config, times, index) for index in range(replicas)]
        requests = _requests(trace, rate, seconds, prompts, outputs, prefix, num_prefixes, seed)
        with _progress("serving", len(requests)) as tell:
            report = simulate(pool, requests, _one_of("router", router, ROUTERS)(), tell)
    except ValueError as error:
        _refuse(error)
    _console.print(_latency_table(f"{len(requests)} requests in {report.seconds:.1f} simulated seconds", report))
    _console.print(_curves_table(report))
    _console.print(
        f"throughput {report.throughput:,.1f} tokens/s, goodput {report.goodput(slo_ttft, slo_tpot):,.1f} tokens/s "
        f"(TTFT within {slo_ttft:g} s and TPOT within {slo_tpot:g} s), cache hits {report.hit_rate:.0%}, "
        f"{report.num_preemptions} preemptions, {report.recomputed:.2f} tokens computed for each needed"
    )


@app.command()
def calibrate(
    model: Annotated[str, typer.Option("--model", help="what the engine can load")] = "smollm2",
    weights: Annotated[str, typer.Option("--weights", help="how it holds them: fp32, int4, …")] = "fp32",
    requests: Annotated[int, typer.Option("--requests", min=1, help="of the workload that is compared")] = 24,
    load: Annotated[float, typer.Option("--load", help="share of the capacity that arrives")] = 0.6,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="measurements of each step")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="a coarse grid")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="file for the step times, read by `run`")] = None,
    seed: Seed = 0,
) -> None:
    """Measure the engine's steps on this machine, then foretell a workload and serve it."""
    grid = Grid(repeats=repeats)
    if quick:
        grid = Grid((0, 32, 128), (4, 1, 0), (16, 192), repeats)
    limits = SchedulerConfig(max_running=16, token_budget=288)
    try:
        with _console.status(f"loading {model} …"):
            engine = Engine(model, EngineConfig(limits, num_blocks=1024, weights=weights))
        with _progress("measuring steps", grid.num_points) as tell:
            demands, taken = measure_steps(engine, grid, tell)
        times = fit(demands, taken)
        workload = workload_at(load, twin(engine), times, requests, seed)
        predicted = simulate([Replica(twin(engine), times)], workload)
        with _console.status(f"serving {requests} requests, about {predicted.seconds:.0f} s …"):
            measured = run_load(engine, workload)
    except (CheckpointError, ValueError) as error:
        _refuse(error)
    _console.print(_fit_table(times))
    worst = max(abs(error) for error in relative_errors(times, demands, taken))
    _console.print(
        f"{len(taken)} kinds of steps: median error {typical_error(times, demands, taken):.0%}, largest {worst:.0%}"
    )
    table = Table(title=f"{requests} requests at {load:.0%} of this machine's capacity")
    for heading in ("", "predicted", "measured", "error"):
        table.add_column(heading, justify="right")
    for row in compare(predicted, measured):
        table.add_row(row.name, f"{row.predicted:.3f}", f"{row.measured:.3f}", f"{row.error:+.0%}")
    _console.print(table)
    if out is not None:
        try:
            times.save(out)
        except OSError as error:
            _refuse(error)
        _console.print(f"step times written to {out}")


def _requests(
    trace: Path | None, rate: float, seconds: float, prompts: str, outputs: str, prefix: int, num_prefixes: int,
    seed: int,
) -> list[TimedRequest]:  # fmt: skip
    if trace is not None:
        try:
            return read_trace(trace, seed)
        except OSError as error:
            raise ValueError(f"{trace} can't be read: {error}") from error
    stream = Stream(
        rate, parse_lengths(prompts), parse_lengths(outputs), prefix=prefix, num_prefixes=num_prefixes
    )  # fmt: skip
    return stream.draw(seconds, seed)


def _one_of(what: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}; known are {', '.join(known)}")
    return known[name]


def _blocks_that_fit(serving: Serving, block_size: int) -> int:
    """Blocks beside the weights, with a tenth of the memory kept for everything else."""
    fits = serving.tokens_that_fit(0.1 * serving.num_gpus * serving.hardware.memory)
    if fits < block_size:
        raise ValueError(
            f"the weights take {serving.weight_bytes / 1e9:.0f} GB and leave no room on {serving.num_gpus} × "
            f"{serving.hardware.name}: take more accelerators (--tp), or set --blocks"
        )
    return int(fits) // block_size


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that goes when the work is done."""
    columns = (TextColumn(f"{what} …"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _scenario_table(scenario: Scenario, reports: dict[str, SimulationReport]) -> Table:
    table = Table(title=f"{scenario.name}: {scenario.title}", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in scenario.columns:
        table.add_column(column.title, justify="right")
    for case in scenario.cases:
        cells = (format(column.value(reports[case.name]), column.form) for column in scenario.columns)
        # NaN is the format's word for a stream of which nothing was served.
        table.add_row(f"[{COLOURS[case.role]}]{case.name}[/]", *("–" if cell == "nan" else cell for cell in cells))
    return table


def _latency_table(title: str, report: SimulationReport) -> Table:
    table = Table(title=title)
    for heading in ("seconds", "mean", "p50", "p95", "p99"):
        table.add_column(heading, justify="right")
    for name, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("longest_gap", "longest stall"), ("e2e", "E2E")):
        shares = [report.percentile(name, share) for share in (0.5, 0.95, 0.99)]
        table.add_row(label, *(f"{value:.3f}" for value in (report.mean(name), *shares)))
    return table


def _curves_table(report: SimulationReport) -> Table:
    """How things went over time, each row scaled to its own largest value."""
    table = Table(title="over time", box=None, padding=(0, 1))
    for heading in ("", "from the first arrival to the last token", "most"):
        table.add_column(heading)
    rows = {
        "waiting": (timeline(report, "waiting"), ".0f"),
        "running": (timeline(report, "running"), ".0f"),
        "KV occupancy": (timeline(report, "occupancy"), ".0%"),
        "cache hits": (hit_rates(report), ".0%"),
        "preemptions": (timeline(report, "preemptions"), ".0f"),
    }
    for name, (values, form) in rows.items():
        most = max(values)
        bars = "".join(BARS[round(value / most * (len(BARS) - 1)) if most else 0] for value in values)
        table.add_row(name, bars, format(most, form))
    return table


def _fit_table(times: FittedTime) -> Table:
    table = Table(title="what a step costs on this machine")
    table.add_column("of")
    table.add_column("µs", justify="right")
    for label, value in (
        ("a step", times.step), (f"a token, up to {times.knee}", times.token), ("a further token", times.further_token),
        ("a sequence", times.sequence), ("a token that is read", times.read), ("a query and a key", times.pair),
    ):  # fmt: skip
        table.add_row(label, f"{value * 1e6:,.2f}")
    return table


def _refuse(error: Exception) -> NoReturn:
    _console.print(f"[red]error[/] {escape(str(error))}", soft_wrap=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
