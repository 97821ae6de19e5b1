"""The engine's command line: `python -m solutions.engine chat`, `generate`, `serve` or `bench`."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from labkit.checkpoints.errors import CheckpointError
from labkit.tokenizer import Message
from solutions.student_code import fault_line

from . import PARTS
from .async_engine import made_apart
from .bandwidth import decode_speed, where
from .beam_search import BeamSearchParams
from .drafting.speculation import DRAFTERS
from .engine import Engine, EngineConfig
from .load import random_load, run_load
from .memory.kv_formats import KV_DTYPES
from .sampling_params import SamplingParams
from .scheduler import SchedulerConfig

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The reference engine on a real model.")
# What models and users write is shown as it is: no mark-up, no emoji for `:name:`.
_console = Console(highlight=False, emoji=False)

Model = Annotated[str, typer.Option("--model", help="smollm2 (bundled), a folder, a .gguf file or a hub id")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 means the most likely token")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="the most tokens of an answer")]
Speculation = Annotated[str, typer.Option("--speculation", help=f"who drafts: none, {', '.join(DRAFTERS)}")]
Weights = Annotated[
    str, typer.Option("--weights", help="fp32, bf16, fp16, stored (a checkpoint's own codes), int4, int8, q4_1, nf4, …")
]
KVDtype = Annotated[str | None, typer.Option("--kv-dtype", help=f"{', '.join(KV_DTYPES)}; the model's if not given")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; a GPU if there is one")]
Attend = Annotated[str | None, typer.Option("--attention", help="torch or triton; kernels where they can be had")]
Graphs = Annotated[
    bool | None, typer.Option("--cuda-graphs/--no-cuda-graphs", help="replay decode steps; on a GPU where possible")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="let torch compile decode steps; the first ones wait a minute or two")
]
Blocks = Annotated[int, typer.Option("--blocks", min=1, help="blocks of 16 tokens in the KV pool")]


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="texts to continue, all at once")],
    model: Model = "smollm2",
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 64,
    speculation: Speculation = "none",
    weights: Weights = "fp32",
    kv_dtype: KVDtype = None,
    blocks: Blocks = 512,
    device: Device = None,
    attention: Attend = None,
    cuda_graphs: Graphs = None,
    compile: Compile = False,
    beams: Annotated[int | None, typer.Option("--beams", help="search with so many, instead of drawing")] = None,
) -> None:
    """Continue texts."""
    if beams is not None and temperature > 0:
        _refuse(ValueError(f"a beam search draws nothing: give --beams or a --temperature, got {temperature:g}"))
    engine = _engine(model, speculation, blocks, weights, kv_dtype, _on(device, attention, cuda_graphs, compile))
    try:
        if beams is None:
            answers = engine.generate(prompts, SamplingParams(temperature=temperature, max_tokens=max_tokens))
        else:
            answers = engine.beam_search(prompts, BeamSearchParams(beams, max_tokens))
    except ValueError as error:
        _refuse(error)
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        _console.print(Text.assemble((prompt, "bold"), answer.text, "\n"), soft_wrap=True)


@app.command()
def chat(
    model: Model = "smollm2",
    temperature: Temperature = 0.7,
    max_tokens: MaxTokens = 256,
    speculation: Speculation = "none",
    weights: Weights = "fp32",
    kv_dtype: KVDtype = None,
    blocks: Blocks = 512,
    device: Device = None,
    attention: Attend = None,
    cuda_graphs: Graphs = None,
    compile: Compile = False,
) -> None:
    """Talk to the model; an empty line or Ctrl-D ends it."""
    engine = _engine(model, speculation, blocks, weights, kv_dtype, _on(device, attention, cuda_graphs, compile))
    messages: list[Message] = []
    while True:
        try:
            words = _console.input("[bold green]you[/] ") if sys.stdin.isatty() else sys.stdin.readline().strip()
        except (EOFError, KeyboardInterrupt):
            words = ""
        except UnicodeDecodeError as error:
            _refuse(error)
        if not words:
            break
        messages.append({"role": "user", "content": words})
        try:
            text = _answer(engine, messages, SamplingParams(temperature=temperature, max_tokens=max_tokens))
        except ValueError as error:
            _refuse(error)
        messages.append({"role": "assistant", "content": text})


@app.command()
def serve(
    model: Model = "smollm2",
    host: Annotated[str, typer.Option("--host", help="0.0.0.0 to be reached from elsewhere")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="ENGINE_API_KEY", help="what clients must show")
    ] = None,
    max_concurrent: Annotated[int, typer.Option("--max-concurrent", min=1, help="requests at once")] = 256,
    patience: Annotated[
        float, typer.Option("--patience", min=0.0, max=86_400.0, help="seconds a shutdown waits for answers")
    ] = 10.0,
    speculation: Speculation = "none",
    weights: Weights = "fp32",
    kv_dtype: KVDtype = None,
    blocks: Blocks = 1024,
    device: Device = None,
    attention: Attend = None,
    cuda_graphs: Graphs = None,
    compile: Compile = False,
    adapter: Annotated[
        list[str] | None, typer.Option("--adapter", help="NAME=FOLDER: a LoRA adapter, served as the model MODEL:NAME")
    ] = None,
) -> None:
    """Serve the OpenAI API; Ctrl-C finishes what is being answered, then stops."""
    # Imported here: the other commands need no server.
    from .server.app import make_app
    from .server.server_config import ServerConfig
    from .server.shutdown import run

    if api_key == "":
        _refuse(ValueError("--api-key is empty, which everybody could show; give a key, or leave it out"))
    for given in adapter or ():
        if not all(given.partition("=")):
            _refuse(ValueError(f"--adapter must be NAME=FOLDER, got {given!r}"))
    adapters = {name: folder for name, _, folder in (given.partition("=") for given in adapter or ())}
    others = replace(_on(device, attention, cuda_graphs, compile), adapters=adapters)
    listener = _bound(host, port)
    engine = _engine(model, speculation, blocks, weights, kv_dtype, others)
    config = ServerConfig(model, api_key, max_concurrent=max_concurrent, patience=patience)
    name = f"[{host}]" if ":" in host else host
    _console.print(f"{model} at http://{name}:{listener.getsockname()[1]}/v1", markup=False, soft_wrap=True)
    run(make_app(engine, config), listener, config.patience)


@app.command()
def bench(
    model: Model = "smollm2",
    requests: Annotated[int, typer.Option("--requests", min=1, help="how many")] = 32,
    rate: Annotated[float | None, typer.Option("--rate", help="arrivals a second; all at once if not given")] = None,
    num_input: Annotated[int, typer.Option("--input", min=1, help="tokens of a prompt, on average")] = 64,
    num_output: Annotated[int, typer.Option("--output", min=1, help="tokens of an answer, on average")] = 32,
    shared: Annotated[float, typer.Option("--shared", min=0.0, max=1.0, help="share of a prompt that all have")] = 0.0,
    slo_ttft: Annotated[float, typer.Option("--slo-ttft", help="seconds that a first token may take")] = 1.0,
    slo_tpot: Annotated[float, typer.Option("--slo-tpot", help="seconds that a further token may take")] = 0.1,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    speculation: Speculation = "none",
    weights: Weights = "fp32",
    kv_dtype: KVDtype = None,
    blocks: Blocks = 1024,
    device: Device = None,
    attention: Attend = None,
    cuda_graphs: Graphs = None,
    compile: Compile = False,
) -> None:
    """Serve a random load, and tell what its requests waited for."""
    engine = _engine(model, speculation, blocks, weights, kv_dtype, _on(device, attention, cuda_graphs, compile))
    try:
        arrivals = random_load(requests, rate, num_input, num_output, shared, engine.tokenizer.vocab_size, seed)
        with _console.status(f"serving {requests} requests …"):
            report = run_load(engine, arrivals)
    except ValueError as error:
        _refuse(error)
    table = Table(title=f"{requests} requests, {report.seconds:.1f} s")
    for heading in ("seconds", "mean", "p50", "p95", "p99"):
        table.add_column(heading, justify="right")
    for name, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E")):
        shares = [report.percentile(name, share) for share in (0.5, 0.95, 0.99)]
        table.add_row(label, *(f"{value:.3f}" for value in (report.mean(name), *shares)))
    _console.print(table)
    metrics = engine.metrics
    kept = f", {metrics.acceptance_rate:.0%} of the drafts kept" if metrics.num_drafted_tokens else ""
    _console.print(
        f"throughput {report.throughput:.1f} tokens/s, goodput {report.goodput(slo_ttft, slo_tpot):.1f} tokens/s "
        f"(TTFT within {slo_ttft:g} s and TPOT within {slo_tpot:g} s), cache hits {metrics.cache_hit_rate:.0%}, "
        f"{metrics.num_preemptions} preemptions{kept}, {engine.kv_bytes_per_token:,.0f} bytes of KV pool a token"
    )
    if speculation == "none":
        _print_decode_speed(engine, num_input)


def _print_decode_speed(engine: Engine, num_prompt: int) -> None:
    """How near decoding of one request comes to what reading weights and keys allows."""
    try:
        with _console.status("decoding alone …"):
            speed = decode_speed(engine, num_prompt, num_steps=16)
    except ValueError as error:
        _console.print(f"decoding alone was not measured: {escape(str(error))}", soft_wrap=True)
        return
    if speed is None:
        _console.print("decoding alone: nobody can say how many bytes codes or experts take, so no share of a bound")
        return
    _console.print(
        f"decoding alone {1 / speed.seconds:.1f} tokens/s, {speed.share:.0%} of what the memory allows: a token reads "
        f"{speed.num_bytes / 1e6:.0f} MB, at {speed.bandwidth / 1e9:.1f} GB/s ({where(engine.device.type)})",
        soft_wrap=True,
    )


def _show_parts() -> None:
    """Which parts of the engine are the student's, and what keeps the others out."""
    used = [part for part in PARTS if part.name in sys.modules]
    if not used:
        return
    table = Table(title="whose code this is", title_justify="left", box=None, padding=(0, 2))
    for heading in ("lab", "file", "whose"):
        table.add_column(heading)
    for part in used:
        whose = "[green]yours[/]" if part.is_student else f"the reference's: yours {escape(part.why)}"
        table.add_row(part.lab, f"{part.module}.py", whose)
    _console.print(table)


def _on(device: str | None, attention: str | None, cuda_graphs: bool | None, compile: bool) -> EngineConfig:
    """A configuration that says by what steps are computed, and nothing else."""
    return EngineConfig(device=device, attention=attention, cuda_graphs=cuda_graphs, compile=compile)


def _engine(
    model: str, speculation: str, blocks: int, weights: str, kv_dtype: str | None, others: EngineConfig
) -> Engine:  # fmt: skip
    config = replace(
        others,
        scheduler=SchedulerConfig(max_context=8192),
        num_blocks=blocks,
        speculation=speculation,
        weights=weights,
        kv_dtype=kv_dtype,
    )
    try:
        with _console.status(f"loading {model} …"):
            # `serve` steps it in another thread.
            engine = made_apart(lambda: Engine(model, config))
    except (CheckpointError, ValueError) as error:
        _refuse(error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        _refuse(ValueError(f"there is no memory for {model} and {blocks} blocks; lower --blocks"))
    # Now all is imported that these settings need.
    _show_parts()
    return engine


def _answer(engine: Engine, messages: list[Message], params: SamplingParams) -> str:
    """Prints an answer as it comes."""
    engine.add_request(engine.tokenizer.chat(messages), params)
    text = ""
    while engine.has_work:
        for progress in engine.step():
            text += progress.text
            _console.print(progress.text, end="", markup=False, soft_wrap=True)
    _console.print()
    return text


def _bound(host: str, port: int) -> socket.socket:
    """A socket for the server, found before a model is loaded for nothing."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        _refuse(ValueError(f"nothing can be served at {host}, port {port}: {error.strerror}; give others"))
    return listener


def _refuse(error: Exception) -> NoReturn:
    _console.print(Text.assemble(("error", "red"), f" {error}"), soft_wrap=True)
    raise typer.Exit(2)


def main() -> None:
    """The command line; a fault of a student's code is told in a line."""
    try:
        app()
    except Exception as error:
        if not any(part.is_student for part in PARTS):
            raise
        _console.print(Text.assemble(("error", "red"), f" {fault_line(error, PARTS)}"), soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
