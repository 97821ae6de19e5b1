"""What the linear layers of a decoder read: the activations that calibration, smoothing and audits look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention

_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def block_linears(layer: int) -> tuple[str, ...]:
    """The linear layers of one block in the order in which they run; their weights are these names + ".weight"."""
    return tuple(f"model.layers.{layer}.{part}" for part in _LINEARS)


def linear_names(config: ModelConfig) -> tuple[str, ...]:
    """The linear layers of all blocks; the output projection is not among them."""
    return tuple(name for layer in range(config.num_layers) for name in block_linears(layer))


class LayerWalk:
    """Goes through a decoder block by block, so that only one block's activations are in memory at a time.

    A caller may replace the weights of the block it stands at, in `decoder.weights`, before it advances: the blocks
    behind then see what the changed ones give, as they will when the quantized model runs.

    Args:
        decoder: the model; its own `weights` are read, never written.
        tokens: the sequences to run, `[sequences, tokens]`.

    Raises:
        ValueError: tokens that the decoder refuses.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor) -> None:
        self._positions = torch.arange(tokens.shape[-1])[None]
        decoder.check_inputs(tokens, self._positions[0])
        self._decoder = decoder
        self._rotation = decoder.rotation(self._positions)
        self._hidden = [decoder.embed(row[None]) for row in tokens]
        self.layer = 0

    def inputs(self) -> dict[str, Tensor]:
        """What each linear layer of the present block reads, `[sequences · tokens, in]` under the layer's name.

        Layers that read the same thing share one tensor.
        """
        recorded: dict[str, list[Tensor]] = {}
        for hidden in self._hidden:
            with _recording(self._decoder, recorded):
                self._run(hidden)
        joined: dict[tuple[int, ...], Tensor] = {}
        found = {}
        for name, parts in recorded.items():
            key = tuple(id(part) for part in parts)
            if key not in joined:
                joined[key] = torch.cat([part.flatten(0, -2) for part in parts])
            found[name] = joined[key]
        return found

    def advance(self) -> None:
        """Run the present block with the weights that the decoder has now, and go to the next."""
        self._hidden = [self._run(hidden) for hidden in self._hidden]
        self.layer += 1

    def _run(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return self._decoder.block(self.layer, hidden, self._rotation, self._positions, full_attention)


def linear_inputs(decoder: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """What every linear layer of the blocks reads, `[sequences · tokens, in]`: for small models and few tokens.

    Args:
        decoder: the model.
        tokens: `[sequences, tokens]`.

    Raises:
        ValueError: tokens that the decoder refuses.
    """
    walk = LayerWalk(decoder, tokens)
    found: dict[str, Tensor] = {}
    for _ in range(decoder.config.num_layers):
        found |= walk.inputs()
        walk.advance()
    return found


@contextmanager
def _recording(decoder: Decoder, into: dict[str, list[Tensor]]) -> Iterator[None]:
    """While this lasts, `decoder.linear` also keeps what it is given."""
    run = decoder.linear

    def record(inputs: Tensor, name: str) -> Tensor:
        into.setdefault(name, []).append(inputs)
        return run(inputs, name)

    decoder.linear = record  # type: ignore[method-assign]
    try:
        yield
    finally:
        del decoder.linear
