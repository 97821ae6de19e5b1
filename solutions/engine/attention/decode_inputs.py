"""What a pure decode step reads, in memory that stays where it is: what was recorded can run on new contents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..step import Work


@dataclass(frozen=True)
class Bucket:
    """The size that steps are padded to.

    Args:
        rows: requests.
        width: blocks of a block table.
    """

    rows: int
    width: int


class DecodeInputs:
    """One token each of up to `bucket.rows` requests. The other rows are padding.

    A padding row has no tokens to read, and its key and value go to a slot that is in nobody's block.

    Args:
        bucket: how many rows, and how long their block tables.
        scratch_slot: where padding rows write.
        device: where the step is computed.

    All tensors are int64: `tokens`, `positions`, `slots` and `lengths`, the tokens that a row reads, its own
    included, are `[rows]`; `tables` is `[rows, width]`; `every_row` numbers the rows. What stands in a table behind
    the blocks of a row's length is some block's number, and is not read.
    """

    def __init__(self, bucket: Bucket, scratch_slot: int, device: torch.device) -> None:
        self._bucket = bucket
        self._scratch_slot = scratch_slot
        rows, width = bucket.rows, bucket.width
        # In one piece, so that a step needs one transfer; pinned, so that a GPU fetches it by itself.
        self._host = torch.zeros(rows * (4 + width), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._device = torch.zeros(rows * (4 + width), dtype=torch.int64, device=device)
        self.tokens, self.positions, self.slots, self.lengths = self._device[: 4 * rows].view(4, rows).unbind()
        self.tables = self._device[4 * rows :].view(rows, width)
        self.every_row = torch.arange(rows, device=device)
        self.load(())

    def load(self, work: Sequence[Work]) -> None:
        """Puts a step in, once the last one is over.

        Args:
            work: one token each, at most as many as there are rows; their tables must fit.
        """
        count, rows = len(work), self._bucket.rows
        numbers = self._host.numpy()
        tokens, positions, slots, lengths = numbers[: 4 * rows].reshape(4, rows)
        tables = numbers[4 * rows :].reshape(rows, self._bucket.width)
        tokens[:count] = [one.tokens[0] for one in work]
        positions[:count] = [one.start for one in work]
        slots[:count] = [one.slots[0] for one in work]
        lengths[:count] = [one.end for one in work]
        tokens[count:] = positions[count:] = lengths[count:] = 0
        slots[count:] = self._scratch_slot
        for table, one in zip(tables, work, strict=False):
            table[: len(one.blocks)] = one.blocks
        self._device.copy_(self._host, non_blocking=True)


DecodeStep = Callable[[DecodeInputs], Tensor]
"""Computes logits `[rows, vocab_size]` of what lies in its inputs."""
