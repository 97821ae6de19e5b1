"""Stage 2: what the target thought while reading the texts, kept once for all heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit.decoder import Decoder, full_attention

from .corpus import Chunk
from .store import read_tensors, write_tensors
from .texts import read_texts

ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class Features:
    """Texts with hidden states.

    Args:
        tokens: ids of each text, int64 `[tokens]`.
        hidden: of each text float16 `[tokens, layers, hidden]`.
    """

    tokens: list[Tensor]
    hidden: list[Tensor]


def feature_layers(num_layers: int) -> tuple[int, int, int, int]:
    """The hidden states that are kept: low, middle and high for EAGLE-3, and what the output matrix reads.

    Args:
        num_layers: of the target, at least 8.

    Raises:
        ValueError: fewer layers.
    """
    if num_layers < 8:
        raise ValueError(f"the target needs at least 8 layers to tell low, middle and high ones, got {num_layers}")
    return 2, num_layers // 2, num_layers - 3, num_layers


def make_features(
    decoder: Decoder, chunk: Chunk, folder: Path, bfloat16: bool, progress: Callable[[int, int], object]
) -> None:
    """Run the target over a chunk's texts and keep its hidden states, unless that has been done.

    Args:
        decoder: the target in float32.
        chunk: its texts have been made.
        folder: where the files are.
        bfloat16: matrix products in bfloat16; the residual stream stays float32.
        progress: called with texts done and all.

    Raises:
        ValueError: there are no texts of this chunk.
    """
    path = features_file(folder, chunk)
    if path.is_file():
        return
    rows = read_texts(folder, chunk).rows
    kept = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        batch = rows[start : start + ROWS_AT_ONCE]
        hidden = _hidden(decoder, batch, bfloat16)
        kept += [one[: len(row)].to(torch.float16) for one, row in zip(hidden, batch, strict=True)]
        progress(min(start + ROWS_AT_ONCE, len(rows)), len(rows))
    tensors = {
        "tokens": torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        "lengths": torch.tensor([len(row) for row in rows], dtype=torch.int32),
        "hidden": torch.cat(kept),
    }
    if not bool(tensors["hidden"].isfinite().all()):
        raise ValueError(f"{chunk.name}: hidden states of this target exceed what float16 can hold")
    write_tensors(path, tensors, {"kind": chunk.name, "layers": feature_layers(decoder.config.num_layers)})


def read_features(folder: Path, chunks: list[Chunk]) -> Features:
    """The features of chunks.

    Raises:
        ValueError: some have not been made, or a file is damaged.
    """
    tokens: list[Tensor] = []
    hidden: list[Tensor] = []
    for chunk in chunks:
        tensors, _ = read_tensors(features_file(folder, chunk))
        lengths = tensors["lengths"].tolist()
        tokens += torch.split(tensors["tokens"].to(torch.int64), lengths)
        hidden += torch.split(tensors["hidden"], lengths)
    return Features(tokens, hidden)


def features_file(folder: Path, chunk: Chunk) -> Path:
    """Where a chunk's features lie."""
    return folder / "features" / f"{chunk.name}.safetensors"


@torch.inference_mode()
def _hidden(decoder: Decoder, rows: list[list[int]], bfloat16: bool) -> Tensor:
    """Hidden states `[rows, tokens, layers, hidden]`; behind the end of a row they mean nothing."""
    length = max(len(row) for row in rows)
    # Causal attention looks back only, so what stands behind a row changes nothing in it.
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    wanted = feature_layers(decoder.config.num_layers)
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        return torch.stack(list(_chosen(decoder, tokens, wanted)), 2)


def _chosen(decoder: Decoder, tokens: Tensor, wanted: tuple[int, ...]) -> Iterator[Tensor]:
    states = decoder.hidden_states(tokens, torch.arange(tokens.shape[1]), full_attention)
    return (hidden.float() for number, hidden in enumerate(states) if number in wanted)
