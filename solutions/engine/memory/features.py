"""What the target thought of each token: hidden states for the drafters that read them, kept beside the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.features import check_layers

from ..kv_manager import Move, SlotMove
from ..models.blocks import Decoder
from ..models.kv_shape import KVShape
from ..request import Request, blocks_for
from .kv_pool import KVPool


class FeaturePool:
    """Hidden states of chosen layers, one row for each slot of the KV pool.

    They go wherever keys and values go: what a prefix cache finds has them, samples of a prompt share them, a block
    that is copied or swapped takes them along, and accepted drafts move up with theirs. So a request that decodes has
    the features of all that it has computed, however it came to be computed. That costs as many numbers a token as the
    layers have hidden ones: for one layer of the bundled model a twentieth of what its keys and values take.

    Args:
        layers: numbers of hidden states, as `labkit.decoder.Decoder.hidden_states` counts them.
        model: whose they are.
        num_blocks: as in the KV pool.
        block_size: as in the KV pool.
        num_host_blocks: as in the KV pool.

    Raises:
        ValueError: a layer that the model doesn't have.
    """

    def __init__(
        self, layers: Sequence[int], model: Decoder, num_blocks: int, block_size: int, num_host_blocks: int = 0
    ) -> None:
        check_layers(model.config, layers)
        self._layers = tuple(layers)
        shape = KVShape(len(self._layers), 1, 1, model.config.hidden_size)
        self._pool = KVPool(
            shape, num_blocks, block_size, num_host_blocks, model.dtype, device=model.device, scratch=True
        )  # fmt: skip

    def write(self, slots: Tensor, number: int, hidden: Tensor) -> None:
        """Stores hidden states `[tokens, hidden]` if they are of one of the layers."""
        if number in self._layers:
            self._pool.write(self._layers.index(number), slots, hidden[:, None])

    def move(self, moves: Sequence[Move]) -> None:
        """Makes the moves of a step, in order."""
        self._pool.move(moves)

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """Copies single tokens."""
        self._pool.move_slots(moves)

    def read(self, request: Request) -> Tensor:
        """Row i belongs to the token i that is computed: float32 `[num_computed, layers * hidden]`, on the host."""
        count = request.num_computed
        own = request.table.blocks[: blocks_for(count, self._pool.block_size)]
        blocks = torch.tensor(own, dtype=torch.int64, device=self._pool.device)
        rows = [self._pool.read(index, blocks)[0][:count, 0] for index in range(len(self._layers))]
        return torch.cat(rows, -1).to("cpu", torch.float32)


class RequestFeatures:
    """One request's features, as a drafter reads them: a `labkit.features.FeatureSource`.

    Args:
        pool: where they lie; None if no drafter asks.
        request: whose they are.
    """

    def __init__(self, pool: FeaturePool | None, request: Request) -> None:
        self._pool = pool
        self._request = request

    def features(self) -> Tensor:
        """Row i belongs to the token i that is computed, `[num_computed, width]`."""
        return torch.zeros(0, 0) if self._pool is None else self._pool.read(self._request)
