"""A drafter's model that costs no download: the first layers of the target, and its own head."""

from __future__ import annotations

from dataclasses import replace

from labkit.checks import check_count
from labkit.decoder import Decoder


def early_exit(decoder: Decoder, num_layers: int) -> Decoder:
    """A decoder that stops after the first layers.

    The final norm and the head were never trained to read what comes out there, so it drafts worse than a trained
    small model; but it is there, and shares all its weights with the decoder.

    Args:
        decoder: the target.
        num_layers: layers to keep, from 1 to those of the decoder.

    Raises:
        ValueError: `num_layers` out of range.
    """
    check_count("num_layers", num_layers, 1)
    if num_layers > decoder.config.num_layers:
        raise ValueError(f"the decoder has {decoder.config.num_layers} layers, asked for the first {num_layers}")
    dropped = tuple(f"model.layers.{layer}." for layer in range(num_layers, decoder.config.num_layers))
    weights = {name: weight for name, weight in decoder.weights.items() if not name.startswith(dropped)}
    return Decoder(replace(decoder.config, num_layers=num_layers), weights, decoder.dtype)
