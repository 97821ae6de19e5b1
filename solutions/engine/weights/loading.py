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
    device: torch.device | str = "cpu", adapt: Callable[[Weights], Weights] | None = None,
) -> LoadedModel:  # fmt: skip
    """Loads a model and its tokenizer.

    Args:
        source: a name or path as in `labkit.checkpoints.load`, of any family in `models.loading`; a folder that
            `solutions.quantization` wrote; or what `labkit` has loaded.
        weights: "fp32", "bf16" or "fp16"; "stored" for the codes of a quantized checkpoint, or of the bundled model's
            GGUF file; or a name in `formats.ROUNDINGS`. All but "stored" do for every checkpoint: one that is
            quantized is dequantized first.
        packing: how quantized layers run.
        device: where the model is to lie.
        adapt: adds adapters to plain weights; None for no adapters.

    Raises:
        ValueError: an unknown format, one that is not for this device, or adapters that don't suit weights or device.
        CheckpointError: the model can't be found, read or followed, or not be held so.
    """
    on_cpu = torch.device(device).type == "cpu"
    if adapt is not None and not on_cpu:
        raise ValueError(f"adapters run on device 'cpu' only, got {str(device)!r}; merge one into its base model")
    if weights in PLAIN and (not isinstance(source, str) or stored_file(source) is None):
        place = adapt or (lambda given: {name: one.to(device) for name, one in given.items()})
        return load_plain(source, PLAIN[weights], place)
    if adapt is not None:
        raise ValueError(
            f"adapters run on weights {', '.join(PLAIN)} of a checkpoint that is not quantized, got {weights!r}"
        )
    if not on_cpu:
        raise ValueError(
            f"weights {weights!r} of this model run on device 'cpu' only, got {str(device)!r}; on a GPU take one of "
            f"{', '.join(PLAIN)}, and a checkpoint that is not quantized"
        )
    # Imported here: plain weights need nothing of lab 13.
    from . import quantized

    return quantized.load(source, weights, packing or Packing())
