"""Trains drafters for a real model: EAGLE-3's and EAGLE's head, an MTP module, a small draft model, Medusa heads.

    python -m solutions.speculative.train
    python -m solutions.speculative.train eagle3 --steps 800

Texts, features and points to go on from lie in the cache; a run that was broken off continues where it was.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import safetensors
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from labkit.checkpoints import CheckpointError, Model, load
from labkit.decoder import Decoder
from labkit.paths import cache_dir
from labkit.trained_heads import loading

from .training.acceptance import measured_acceptance
from .training.corpus import Chunk, chunks
from .training.features import Features, feature_layers, make_features, read_features
from .training.fitting import Fit, Fitting, Plan
from .training.objectives import HEADS, objective
from .training.texts import make_texts
from .training.vocabulary import draft_vocabulary

app = typer.Typer(add_completion=False)

Stage = Callable[[str], Callable[..., object]]
"""Called with what is being done; what it returns is called with the parts done, all parts, and perhaps a word."""


@dataclass(frozen=True)
class Sizes:
    """What the texts and the heads measure.

    Args:
        rows: texts of a chunk.
        length: tokens of a text.
        vocabulary: tokens that heads draft; at most the target's.
        width: of the MLP in a head's layers; at most the target's.
        draws: drafts in a row that EAGLE's heads and the MTP module are trained for.
    """

    rows: int = 128
    length: int = 192
    vocabulary: int = 8192
    width: int = 1024
    draws: int = 3


def prepare(
    model: Model, work: list[Chunk], sizes: Sizes, seed: int, bfloat16: bool, cache: Path, stage: Stage
) -> Features:
    """Stages 1 and 2: the texts of all chunks and what the target thought while reading them."""
    decoder = model.decoder
    fast = Model(Decoder(decoder.config, decoder.weights, torch.bfloat16), model.tokenizer) if bfloat16 else model
    for chunk in work:
        make_texts(fast, chunk, cache, sizes.length, seed, stage(f"texts of {chunk.name}"))
    for chunk in work:
        make_features(decoder, chunk, cache, bfloat16, stage(f"features of {chunk.name}"))
    return read_features(cache, work)


def train_head(
    name: str, model: Model, features: Features, sizes: Sizes, plan: Plan, cache: Path, out: Path, stage: Stage
) -> Fit:
    """Stage 3: one head, trained, packed and described in the card."""
    decoder = model.decoder
    vocab_size = decoder.config.vocab_size
    target_ids = draft_vocabulary(features.tokens, vocab_size, min(sizes.vocabulary, vocab_size))
    goal = objective(name, decoder, sizes.width, sizes.draws, plan.seed)
    fitting = Fitting(goal, features, decoder, target_ids, plan, cache / "points" / f"{name}.safetensors")
    fit = fitting.run(stage(name))
    loading.save_head(
        name, fit.weights, target_ids, goal.config, layers_of(name, decoder), describe(fit, features, plan), out
    )
    return fit


def layers_of(name: str, decoder: Decoder) -> tuple[int, ...]:
    """The hidden states that a head reads."""
    *fused, last = feature_layers(decoder.config.num_layers)
    return {"draft": (), "eagle3": tuple(fused)}.get(name, (last,))


def describe(fit: Fit, features: Features, plan: Plan) -> dict[str, Any]:
    """What the card says of a training."""
    return {
        "held_out_agreement_by_step": {str(step): places for step, places in fit.agreement.items()},
        "accuracy_by_rank": fit.by_rank,
        "steps": plan.steps,
        "plans": [{"from_step": start, "steps": steps} for start, steps in fit.plans],
        "texts_a_step": plan.texts,
        "minutes": round(fit.seconds / 60, 1),
        "tokens_of_training_text": sum(map(len, features.tokens)),
        "seed": plan.seed,
        "bfloat16": plan.bfloat16,
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__.partition("+")[0],
            "safetensors": safetensors.__version__,
        },
    }  # fmt: skip


@app.command()
def main(
    heads: Annotated[list[str] | None, typer.Argument(help=f"which ones: {', '.join(HEADS)}; default: all")] = None,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps of each head")] = 400,
    texts: Annotated[int, typer.Option(min=1, help="texts of a step")] = 8,
    most_chunks: Annotated[int, typer.Option("--chunks", min=1, help="chunks of 128 texts to write")] = 8,
    seed: Annotated[int, typer.Option(help="of prompts, sampling, starting weights and order")] = 0,
    measured: Annotated[int, typer.Option(min=1, help="unseen texts of each kind to measure acceptance on")] = 4,
    bfloat16: Annotated[bool, typer.Option(help="several times faster, on processors with units for it")] = False,
    model: Annotated[str, typer.Option(help="'smollm2', a folder, a .gguf file or a hub id")] = "smollm2",
    cache: Annotated[Path | None, typer.Option(help="default: speculative/ in the workbook's cache")] = None,
    out: Annotated[Path | None, typer.Option(help="default: where the workbook looks for heads")] = None,
) -> None:
    """Train heads; each goes on from where an earlier run with the same options was broken off."""
    console = Console(stderr=True)
    try:
        chosen = list(heads or HEADS)
        if unknown := [name for name in chosen if name not in HEADS]:
            raise ValueError(f"there is no head {unknown[0]!r}; choose from {', '.join(HEADS)}")
        target, sizes = load(model), Sizes()
        where, folder = cache or cache_dir() / "speculative", out or loading.FOLDER
        work = chunks(target.tokenizer, sizes.rows, sizes.length, seed, most_chunks)
        with _progress(console) as bars:
            stage = _stages(bars)
            features = prepare(target, work, sizes, seed, bfloat16, where, stage)
            for name in chosen:
                plan = Plan(steps=steps, texts=texts, bfloat16=bfloat16, seed=seed)
                train_head(name, target, features, sizes, plan, where, folder, stage)
                shares = measured_acceptance(name, target, folder, measured, 32, stage(f"acceptance of {name}"))
                loading.describe_head(name, {"acceptance": shares}, folder)
    except (ValueError, CheckpointError, OSError) as error:
        console.print(f"error: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), TextColumn("{task.fields[word]}"),
    )  # fmt: skip
    return Progress(*columns, console=console)


def _stages(bars: Progress) -> Stage:
    """A bar for each thing that is done; nothing for what had been done before."""

    def stage(name: str) -> Callable[..., object]:
        task = bars.add_task(name, total=None, visible=False, word="")

        def update(done: int, total: int, word: str = "") -> None:
            bars.update(task, completed=done, total=total, visible=True, word=word)

        return update

    return stage


if __name__ == "__main__":
    app()
