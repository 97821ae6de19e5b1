"""Models whose projections are quantized: rounded when they are loaded, or as a checkpoint stores them."""

from __future__ import annotations

from pathlib import Path

import torch

from labkit.checkpoints import bundled, load_tokenizer
from labkit.checkpoints.errors import CheckpointError
from labkit.checkpoints.loading import Model
from solutions.quantization.loading import load_quantized

from ..models.blocks import Weights
from ..models.llama import Llama
from ..models.loading import LoadedModel
from ..models.loading import load as load_plain
from . import packed_files
from .formats import ROUNDINGS
from .loading import PLAIN
from .packing import Packing
from .store import QuantizedWeights
from .stored import stored_file

STORED = "stored"


def load(source: str | Model, weights: str, packing: Packing) -> LoadedModel:
    """As `loading.load`, for all that concerns codes."""
    if weights not in (*PLAIN, STORED, *ROUNDINGS):
        raise ValueError(f"weights must be one of {', '.join((*PLAIN, STORED, *ROUNDINGS))}, got {weights!r}")
    rounding, dtype = ROUNDINGS.get(weights), PLAIN.get(weights, torch.float32)

    def hold(plain: Weights) -> Weights:
        return plain if rounding is None else QuantizedWeights(plain, rounding=rounding, packing=packing)

    path = stored_file(source) if isinstance(source, str) else None
    try:
        if weights == STORED:
            return _load_stored(source, packing)
        if path is None or path.suffix == ".gguf":
            return load_plain(source if path is None else str(path), dtype, hold)
        model = load_quantized(path)
        return LoadedModel(Llama(model.config, hold(model.weights()), dtype), load_tokenizer(str(path)))
    except CheckpointError:  # it says already what it is about
        raise
    except ValueError as error:
        raise CheckpointError(f"{weights}: {error}") from error


def _load_stored(source: str | Model, packing: Packing) -> LoadedModel:
    path = stored_file(source) if isinstance(source, str) else None
    if source == bundled.NAME:
        path = bundled.bundled_gguf()
    if path is None:
        raise CheckpointError(
            f"{source if isinstance(source, str) else 'a loaded model'} holds no codes that could be taken as they "
            f"are; round it by weights={next(iter(ROUNDINGS))!r} or another format, or quantize it by "
            "`python -m solutions.quantization quantize`"
        )
    if path.suffix == ".gguf":
        return _load_gguf(path, packing, bundled.NAME if source == bundled.NAME else None)
    model = load_quantized(path)
    held = QuantizedWeights(model.floats, model.linears, packing=packing)
    return LoadedModel(Llama(model.config, held), load_tokenizer(str(path)))


def _load_gguf(path: Path, packing: Packing, tokenizer: str | None) -> LoadedModel:
    """From the cache if the file has been packed before.

    Args:
        path: of the file.
        packing: how layers run.
        tokenizer: name of a model with the same tokenizer, if there is one.
    """
    entry = packed_files.entry_of(path, packing)
    if (found := packed_files.read(entry, packing)) is not None:
        return LoadedModel(Llama(*found), load_tokenizer(tokenizer or str(entry)))
    model = load_quantized(path)
    held = QuantizedWeights(model.floats, model.linears, packing=packing)
    llama = Llama(model.config, held)
    packed_files.write(entry, path, model.config, model.floats, held.made)
    return LoadedModel(llama, load_tokenizer(tokenizer or str(path)))
