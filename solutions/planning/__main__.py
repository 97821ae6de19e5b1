"""The planner's command line: `python -m solutions.planning plan --model llama-3-70b --gpu h100 --rps 1000 …`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from . import hardware, model_shape
from .capacity import Assumptions, Load, Plan, plan
from .hardware import Hardware
from .model_shape import ModelShape
from .roofline import Serving

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="What a model on a machine can do, and what it costs."
)
_console = Console(highlight=False, soft_wrap=True)

ModelName = Annotated[
    str, typer.Option("--model", help=f"{', '.join(model_shape.KNOWN)}, or the path of a config.json")
]
GpuName = Annotated[str, typer.Option("--gpu", help=", ".join(hardware.KNOWN))]


@app.callback()
def main() -> None:
    """Keeps `plan` and `bounds` as commands of their own."""


@app.command("plan")
def plan_command(
    model: ModelName = "llama-3-70b",
    gpu: GpuName = "h100",
    rps: Annotated[float, typer.Option("--rps", help="requests per second")] = 1000.0,
    input_tokens: Annotated[float, typer.Option("--input", help="tokens of a prompt, on average")] = 1000.0,
    output_tokens: Annotated[float, typer.Option("--output", help="tokens of an answer, on average")] = 300.0,
    ttft_p95: Annotated[float, typer.Option("--ttft-p95", help="seconds that the first token may take")] = 1.0,
    tpot: Annotated[float, typer.Option("--tpot", help="seconds that a further token may take")] = 0.05,
    batch: Annotated[
        int | None, typer.Option("--batch", help="sequences of a decode step; the largest that fits if not given")
    ] = 256,
    gpus_per_replica: Annotated[int, typer.Option("--tp", min=1, help="accelerators of a replica")] = 8,
    price: Annotated[float, typer.Option("--price", help="dollars of an accelerator for an hour")] = 2.5,
) -> None:
    """The seven steps of a capacity plan, and what each lever changes."""
    try:
        shape, machine = _model(model), _hardware(gpu)
        load = Load(rps, input_tokens, output_tokens)
        assumed = Assumptions(gpus_per_replica=gpus_per_replica, batch=batch, tpot=tpot, price_per_gpu_hour=price)
        base = Serving(shape, machine)
        plans = {"bf16": plan(base, load, assumed)}
        if "fp8" in machine.peak:
            plans["fp8"] = plan(replace(base, weights="fp8", compute="fp8"), load, assumed)
        plans["half cached"] = plan(base, replace(load, prefix_hit_rate=0.5), assumed)
        plans["speculation"] = plan(base, load, replace(assumed, acceptance_rate=0.7))
    except ValueError as error:
        _refuse(error)
    _console.print(_table(plans, ttft_p95))
    _console.print("Every number is an estimate: measure before you buy. Speculation keeps 0.7 of its drafts and")
    _console.print("verifies for free, which it is not at large batch; the pools are sized as if they never met.")


@app.command()
def bounds(
    model: ModelName = "llama-3-8b",
    gpu: GpuName = "h100",
    weights: Annotated[str, typer.Option("--weights", help=f"dtype: {', '.join(model_shape.BYTES)}")] = "bf16",
    context: Annotated[int, typer.Option("--context", min=0, help="cached tokens of a sequence")] = 2048,
) -> None:
    """What bandwidth and arithmetic allow, by batch size."""
    try:
        serving = Serving(_model(model), _hardware(gpu), weights=weights)
        per_token = serving.kv_bytes_per_token
        table = Table(title=f"{model} in {weights} on {serving.hardware.name}, {context} cached tokens a sequence")
        for heading in ("batch", "step (ms)", "limited by", "tokens/s", "KV (GB)"):
            table.add_column(heading, justify="right")
        for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            step = serving.decode_step(size, context)
            table.add_row(
                str(size), f"{step.seconds * 1e3:.2f}", "memory" if step.is_memory_bound else "compute",
                f"{serving.decode_rate(size, context):,.0f}", f"{size * context * per_token / 1e9:.1f}",
            )  # fmt: skip
    except ValueError as error:
        _refuse(error)
    _console.print(table)


def _table(plans: dict[str, Plan], ttft: float) -> Table:
    table = Table(title="capacity")
    table.add_column("", no_wrap=True)
    for name in plans:
        table.add_column(name, justify="right")
    rows = {
        "prefill: accelerators at peak use": lambda one: f"{one.prefill_gpus_at_peak:,.0f}",
        "prefill: with room for bursts": lambda one: f"{one.prefill_gpus:,.0f}",
        "one prompt, nothing queued (ms)": lambda one: f"{one.prompt_seconds * 1e3:.0f}",
        f"left of {ttft:g} s for queueing (ms)": lambda one: f"{(ttft - one.prompt_seconds) * 1e3:.0f}",
        "decode: tokens that a replica caches": lambda one: f"{one.kv_tokens:,.0f}",
        "decode: sequences that fit": lambda one: f"{one.max_sequences:,.0f}",
        "decode: batch": lambda one: f"{one.batch}",
        "decode: memory floor (ms)": lambda one: f"{one.step.memory * 1e3:.1f}",
        "decode: compute floor (ms)": lambda one: f"{one.step.compute * 1e3:.1f}",
        "TPOT (ms)": lambda one: f"{one.tpot * 1e3:.1f}",
        "decode: replicas": lambda one: f"{one.decode_replicas}",
        "decode: with room for bursts": lambda one: f"{one.decode_gpus:,.0f}",
        "accelerators in all": lambda one: f"{one.gpus:,.0f}",
        "dollars an hour": lambda one: f"{one.dollars_per_hour:,.0f}",
        "dollars for a million output tokens": lambda one: f"{one.dollars_per_million_output:.2f}",
        "dollars for a million tokens, input too": lambda one: f"{one.dollars_per_million_total:.2f}",
        "KV from prefill to decode (GB/s)": lambda one: f"{one.kv_transfer / 1e9:,.0f}",
    }
    for name, show in rows.items():
        table.add_row(name, *(show(one) for one in plans.values()))
    return table


def _model(name: str) -> ModelShape:
    if name in model_shape.KNOWN:
        return model_shape.KNOWN[name]
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        try:
            return ModelShape.from_config(path.stem, path)
        except OSError as error:
            raise ValueError(f"{name} can't be read: {error}") from error
    raise ValueError(f"there is no model {name!r}; known are {', '.join(model_shape.KNOWN)}, or give a config.json")


def _hardware(name: str) -> Hardware:
    if name not in hardware.KNOWN:
        raise ValueError(f"there is no machine {name!r}; known are {', '.join(hardware.KNOWN)}")
    return hardware.KNOWN[name]


def _refuse(error: Exception) -> NoReturn:
    _console.print(f"[red]error[/] {str(error).replace('[', chr(92) + '[')}")
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
