"""Quantized blocks in a list, one for each group of keys and for each token's values, made as they come of age."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.layer_kv import check_new_kv

from .packing import pack_words, unpack_words

Block = tuple[Tensor, Tensor, Tensor]


class KiviCache:
    """Waits in two queues, one of keys and one of values."""

    def __init__(
        self,
        bits: int,
        group_size: int,
        residual: int,
        pack: Callable[[Tensor, int], Tensor] = pack_words,
        unpack: Callable[[Tensor, int, int], Tensor] = unpack_words,
    ) -> None:
        if bits not in (2, 3, 4) or group_size < 1 or residual < 0:
            raise ValueError(f"no cache has {bits} bits, groups of {group_size} and a residual of {residual}")
        self.bits, self.group_size, self.residual, self.pack, self.unpack = bits, group_size, residual, pack, unpack
        self._clear()

    def _clear(self) -> None:
        self.length = 0
        self.blocks: tuple[list[Block], list[Block]] = ([], [])
        self.queues: list[Tensor] = []

    @property
    def quantized_keys(self) -> int:
        """A group of tokens a block."""
        return len(self.blocks[0]) * self.group_size

    @property
    def quantized_values(self) -> int:
        """One token a block."""
        return len(self.blocks[1])

    @property
    def num_bytes(self) -> int:
        """Of all blocks and both queues."""
        stored = [part for side in self.blocks for block in side for part in block] + self.queues
        return sum(part.nbytes for part in stored)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Queue the new tokens, then take from the front what is old enough."""
        check_new_kv(k, v, self.queues[0] if self.queues else None)
        if k.shape[-1] % self.group_size or max(k.abs().max(), v.abs().max()) > 65504:
            raise ValueError(f"head_dim {k.shape[-1]} in groups of {self.group_size}, or numbers beyond float16")
        waiting = self.queues or [k[:, :, :0], v[:, :, :0]]
        self.queues = [torch.cat((old, new), 2) for old, new in zip(waiting, (k, v), strict=True)]
        self.length += k.shape[2]
        for side, (step, axis) in enumerate(((self.group_size, 2), (1, 3))):
            while self.queues[side].shape[2] >= self.residual + step:
                self.blocks[side].append(self._block(self.queues[side][:, :, :step], axis))
                self.queues[side] = self.queues[side][:, :, step:].contiguous().clone()
        return self._all(0, 2), self._all(1, 3)

    def truncate(self, length: int) -> None:
        """Only the queues can be shortened, and only if nothing in blocks would have to come back."""
        if type(length) is not int or not 0 <= length <= self.length:
            raise ValueError(f"length must be from 0 to {self.length}, got {length!r}")
        if length == 0:
            return self._clear()
        old = max(length - self.residual, 0)
        if old < self.quantized_values or old // self.group_size < len(self.blocks[0]):
            raise ValueError(f"{self.length} tokens can't be cut to {length}: some would be needed in full precision")
        gone = self.length - length
        self.queues = [queue[:, :, : queue.shape[2] - gone].clone() for queue in self.queues]
        self.length = length
        return None

    def _block(self, x: Tensor, axis: int) -> Block:
        """Columns of a matrix with a group each, whichever axis the group came from."""
        parts = x.float().movedim(axis, -1).unflatten(-1, (-1, self.group_size))
        low, high = parts.aminmax(dim=-1, keepdim=True)
        step = ((high - low) / (2**self.bits - 1)).half()
        step[step == 0] = 1
        low = low.half()
        codes = torch.clamp(torch.round((parts - low.float()) / step.float()), 0, 2**self.bits - 1)
        codes = codes.flatten(-2).movedim(-1, axis).contiguous().short()
        return self.pack(codes, self.bits), low[..., 0], step[..., 0]

    def _all(self, side: int, axis: int) -> Tensor:
        queue = self.queues[side]
        parts = []
        for words, low, step in self.blocks[side]:
            codes = self.unpack(words, queue.shape[-1], self.bits).float().movedim(axis, -1)
            codes = codes.unflatten(-1, (-1, self.group_size))
            numbers = low.float()[..., None] + step.float()[..., None] * codes
            parts.append(numbers.flatten(-2).movedim(-1, axis).to(queue.dtype))
        return torch.cat([*parts, queue], 2)
