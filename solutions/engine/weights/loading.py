"""From a model's name and the name of a format of weights to a model that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from labkit.checkpoints.loading import Model

from ..models.blocks import Weights
from ..models.loading import LoadedModel
from ..models.loading import load as load_plain
from .packing import Packing
from .stored import stored_file

PLAIN: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats without codes; activations have the same type."""


def load(
    source: str | Model, weights: str = "fp32", packing: Packing | None = None,
    adapt: Callable[[Weights], Weights] | None = None,
) -> LoadedModel:  # fmt: skip
    """Loads a model and its tokenizer.

    Args:
        source: a name or path as in `labkit.checkpoints.load`, of any family in `models.loading`; a folder that
            `solutions.quantization` wrote; or what `labkit` has loaded.
        weights: "fp32", "bf16" or "fp16"; "stored" for the codes of a quantized checkpoint, or of the bundled model's
            GGUF file; or a name in `formats.ROUNDINGS`. All but "stored" do for every checkpoint: one that is
            quantized is dequantized first.
        packing: how quantized layers run.
        adapt: adds adapters to plain weights; None for no adapters.

    Raises:
        ValueError: an unknown format, or adapters that don't suit the weights.
        CheckpointError: the model can't be found, read or followed, or not be held so.
    """
    if weights in PLAIN and (not isinstance(source, str) or stored_file(source) is None):
        return load_plain(source, PLAIN[weights], adapt or dict)
    if adapt is not None:
        raise ValueError(
            f"adapters run on weights {', '.join(PLAIN)} of a checkpoint that is not quantized, got {weights!r}"
        )
    # Imported here: plain weights need nothing of lab 13.
    from . import quantized

    return quantized.load(source, weights, packing or Packing())
