"""Stage 1: the texts of every chunk, written by the target or taken from the corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit.checkpoints import Model

from .corpus import WRITING, Chunk
from .store import read_tensors, write_tensors
from .writing import write

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Texts:
    """The texts of one chunk.

    Args:
        rows: token ids of each.
        prompt_lengths: tokens of each that the target was given rather than wrote.
    """

    rows: list[list[int]]
    prompt_lengths: list[int]


def make_texts(
    model: Model, chunk: Chunk, folder: Path, length: int, seed: int, progress: Callable[[int, int], object]
) -> None:
    """Make the texts of a chunk and keep them, unless that has been done.

    Args:
        model: the target; in bfloat16 it writes several times faster on processors that have it.
        chunk: what to do.
        folder: where the file goes.
        length: tokens of a text.
        seed: of the sampled ones.
        progress: called with tokens done and all.
    """
    path = texts_file(folder, chunk)
    if path.is_file():
        return
    given = [row[-(length - 1) :] for row in chunk.rows]
    if chunk.task == WRITING:
        rows = write(model.decoder, given, length, TEMPERATURE, model.tokenizer.stop_ids, seed, progress)
        prompts = [len(row) for row in given]
    else:
        rows, prompts = [list(row) for row in chunk.rows], [len(row) for row in chunk.rows]
    tensors = {
        "tokens": torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        "lengths": torch.tensor([len(row) for row in rows], dtype=torch.int32),
        "prompts": torch.tensor(prompts, dtype=torch.int32),
    }
    write_tensors(path, tensors, {"kind": chunk.name, "task": chunk.task})


def read_texts(folder: Path, chunk: Chunk) -> Texts:
    """The texts of a chunk.

    Raises:
        ValueError: they have not been made, or the file is damaged.
    """
    tensors, _ = read_tensors(texts_file(folder, chunk))
    rows = torch.split(tensors["tokens"], tensors["lengths"].tolist())
    return Texts([row.tolist() for row in rows], tensors["prompts"].tolist())


def texts_file(folder: Path, chunk: Chunk) -> Path:
    """Where a chunk's texts lie."""
    return folder / "texts" / f"{chunk.name}.safetensors"
