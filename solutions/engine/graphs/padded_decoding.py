"""Pure decode steps in few sizes: padded to a bucket, so that a step can be recorded or compiled once and run often."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..attention.decode_attention import DecodeAttention
from ..attention.decode_inputs import Bucket, DecodeInputs, DecodeStep
from ..memory.features import FeaturePool
from ..memory.kv_pool import KVPool
from ..models.blocks import Record
from ..models.packed_attention import PackedAttention
from ..request import blocks_for
from ..step import Step
from .cuda_graphs import Compute, Recorder

MakeDecodeAttention = Callable[[KVPool, DecodeInputs], PackedAttention]
"""Called with the memory, and with the inputs of a step."""

Compile = Callable[[DecodeStep], DecodeStep]
"""Makes a faster step of one that computes the same."""

Width = Callable[[int], int]
"""Given how many blocks are needed, how many there are to be; cut to the most that a text can have."""


class PackedModel(Protocol):
    """A model over tokens of many requests laid end to end; see `models.blocks.Decoder`."""

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: PackedAttention, rows: Tensor, record: Record | None = None
    ) -> Tensor:
        """Logits `[rows, vocab_size]`."""


def power_above(count: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (count - 1).bit_length()


def next_eight(count: int) -> int:
    """The smallest multiple of eight that is no smaller: little that is read in vain, where any size will do."""
    return -(-count // 8) * 8


def as_wide_as_can_be(count: int) -> int:
    """For all the same."""
    return sys.maxsize


def as_it_is(step: DecodeStep) -> DecodeStep:
    """A step that is not compiled."""
    return step


class PaddedDecoding:
    """Runs steps in which every request computes one token.

    Rows come in powers of two.

    Args:
        model: what computes; it must not look at the numbers that it computes with.
        pool: with a scratch slot.
        max_rows: requests of a step.
        max_context: tokens of a text.
        recorder: how a step is kept.
        attend: makes the attention of a step.
        width: how wide block tables are, by the longest of a step's. With `as_wide_as_can_be` all have one width; that
            is for an `attend` that looks at no more of a table than its row's length asks for.
        features: as in `ModelRunner`; with a scratch slot too.
        compile: called once, with the function that computes a step.

    Raises:
        ValueError: the pool has no scratch slot.
    """

    def __init__(
        self, model: PackedModel, pool: KVPool, max_rows: int, max_context: int, recorder: Recorder,
        attend: MakeDecodeAttention = DecodeAttention, width: Width = power_above, features: FeaturePool | None = None,
        compile: Compile = as_it_is,
    ) -> None:  # fmt: skip
        if pool.scratch_slot is None:
            raise ValueError("padding rows need a slot to write to; make the pool with scratch=True")
        self._model = model
        self._pool = pool
        self._scratch_slot = pool.scratch_slot
        self._max_width = min(blocks_for(max_context, pool.block_size), pool.num_blocks)
        self._width = width
        self._recorder = recorder
        self._attend = attend
        self._features = features
        self._step = compile(self._compute)
        self._recorded: dict[Bucket, tuple[DecodeInputs, Compute]] = {}
        self.buckets = [1 << power for power in range((max_rows - 1).bit_length() + 1)]

    def takes(self, step: Step) -> bool:
        """Whether a step's requests are few enough, compute one token each, and one of them gets its next token.

        Inputs may be overwritten only when the step that reads them is over, which is known when a token of it has come
        back.
        """
        fits = len(step.work) <= self.buckets[-1] and any(one.gives_token for one in step.work)
        return fits and all(len(one.tokens) == 1 for one in step.work)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Records a step of each number of rows, the largest first, since the others can use its memory."""
        for rows in reversed(self.buckets):
            self._prepared(Bucket(rows, self._max_width))

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Computes a step that it takes.

        Returns:
            Logits `[rows, vocab_size]`, one row for each request that wants one. They are overwritten by the next step.
        """
        inputs, compute = self._prepared(self._bucket(step))
        inputs.load(step.work)
        logits = compute()
        wanted = [row for row, one in enumerate(step.work) if one.gives_token]
        if len(wanted) == len(step.work):
            return logits[: len(wanted)]
        return logits[torch.tensor(wanted, dtype=torch.int64, device=logits.device)]

    def _bucket(self, step: Step) -> Bucket:
        width = self._width(max(len(one.blocks) for one in step.work))
        return Bucket(power_above(len(step.work)), min(width, self._max_width))

    def _prepared(self, bucket: Bucket) -> tuple[DecodeInputs, Compute]:
        if bucket not in self._recorded:
            inputs = DecodeInputs(bucket, self._scratch_slot, self._pool.device)
            self._recorded[bucket] = inputs, self._recorder.record(lambda: self._step(inputs))
        return self._recorded[bucket]

    def _compute(self, inputs: DecodeInputs) -> Tensor:
        attend = self._attend(self._pool, inputs)
        record = None if self._features is None else partial(self._features.write, inputs.slots)
        return self._model(inputs.tokens, inputs.positions, attend, inputs.every_row, record)
