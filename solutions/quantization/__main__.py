"""Quantize a model and write a checkpoint; compare methods; audit what somebody else has quantized.

python -m solutions.quantization quantize smollm2 --method gptq --bits 4 --group-size 64 --out DIR
python -m solutions.quantization compare
python -m solutions.quantization audit DIR
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Quantize a model into checkpoints that other engines read; compare methods; audit a checkpoint.",
)  # fmt: skip
EXIT_MISTAKE, EXIT_INTERRUPTED = 2, 130

_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="smollm2, a Hugging Face folder, a .gguf file or a hub id")],
    out: Annotated[Path, typer.Option(help="folder of the new checkpoint")],
    method: Annotated[str, typer.Option(help="rtn, gptq, awq, smoothquant, fp8, or a GGUF type such as q4_k")] = "gptq",
    bits: Annotated[int, typer.Option(help="of a code, for rtn, gptq and awq")] = 4,
    group_size: Annotated[int, typer.Option(help="columns that share a scale; GGUF needs 32")] = 64,
    zero_point: Annotated[bool, typer.Option("--zero-point", help="codes with a zero point, not symmetric")] = False,
    calibration: Annotated[str, typer.Option(help="a UTF-8 text file, 'prose' or 'code'")] = "prose",
    sequences: Annotated[int, typer.Option(min=1, help="of calibration text")] = 32,
    length: Annotated[int, typer.Option(min=2, help="tokens of each sequence")] = 512,
    format: Annotated[
        str | None, typer.Option(help="compressed-tensors, gptq, gptq_v2, awq or gguf; default: by the method")
    ] = None,
    head_bits: Annotated[int, typer.Option(help="of embedding and head: 16, or 8 in GGUF")] = 16,
    damping: Annotated[float, typer.Option(help="of GPTQ's Hessian, a share of its mean diagonal")] = 0.01,
    act_order: Annotated[bool, typer.Option("--act-order", help="GPTQ takes the busiest columns first")] = False,
    alpha: Annotated[float, typer.Option(help="how much SmoothQuant moves to the weights, 0 to 1")] = 0.5,
) -> None:
    """Quantize MODEL. Interrupted, the same command goes on where it was."""
    with _mistakes_explained():
        # Imported here, so that --help and mistakes answer at once.
        from solutions.quantization.methods import Settings
        from solutions.quantization.work import Job, run

        settings = Settings(bits, group_size, not zero_point, damping, act_order, alpha)
        job = Job(model, method, settings, calibration, sequences, length, format, head_bits, out)
        with _bar() as bar:
            task = bar.add_task("loading the model", total=None)

            def progress(done: int, total: int) -> None:
                bar.update(task, description="quantizing blocks", completed=done, total=total)

            report = run(job, progress)
        _out.print(report)


@app.command()
def compare(
    model: Annotated[str, typer.Option(help="smollm2, a Hugging Face folder, a .gguf file or a hub id")] = "smollm2",
    methods: Annotated[str, typer.Option(help="names, with commas between; default: all that fit")] = "",
    tokens: Annotated[int, typer.Option(min=256, help="of evaluation text, half prose and half code")] = 4096,
    window: Annotated[int, typer.Option(min=32, help="tokens that the model reads at once")] = 512,
    sequences: Annotated[int, typer.Option(min=1, help="of calibration text")] = 8,
    length: Annotated[int, typer.Option(min=2, help="tokens of each sequence")] = 256,
    group_size: Annotated[int, typer.Option(help="columns that share a scale")] = 64,
    seed: Annotated[int, typer.Option(help="of the bootstrap")] = 0,
    against: Annotated[str, typer.Option(help="another model, to compare with at the memory that it takes")] = "",
    out: Annotated[Path | None, typer.Option(help="also write the table to this file")] = None,
) -> None:
    """Bits, bytes, perplexity with paired intervals and speed of every method; calibration on prose and on code."""
    with _mistakes_explained():
        from solutions.quantization.comparison import Measurement, compare_methods

        names = tuple(name.strip() for name in methods.split(",") if name.strip())
        measurement = Measurement(tokens, window, sequences, length, group_size, seed)
        with _bar() as bar:
            task = bar.add_task("loading the model", total=None)

            def progress(done: int, total: int, name: str) -> None:
                bar.update(task, description=name, completed=done, total=total)

            table = compare_methods(model, names, measurement, progress, against or None)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(table, encoding="utf-8")
        sys.stdout.write(table)


@app.command()
def audit(
    checkpoint: Annotated[Path, typer.Argument(help="a folder in Hugging Face's layout, or a .gguf file")],
) -> None:
    """What a checkpoint says of itself, what its tensors say, and what nobody can tell from it."""
    with _mistakes_explained():
        from solutions.quantization.checkpoint_facts import audit_checkpoint

        _out.print(audit_checkpoint(checkpoint).text(), markup=False)


@contextmanager
def _mistakes_explained() -> Iterator[None]:
    """A user's mistake ends in one line and an exit code, not in a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        _err.print(f"error: {error}", markup=False)
        raise typer.Exit(EXIT_MISTAKE) from None
    except KeyboardInterrupt:
        _err.print("interrupted; finished blocks are kept, and the same command goes on with the next")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=_err,
    )  # fmt: skip


if __name__ == "__main__":
    app(prog_name="python -m solutions.quantization")
