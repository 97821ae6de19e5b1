"""Carries a step out: the moves, then one pass of the model over all its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .attention.paged_attention import PagedAttention
from .graphs.padded_decoding import PackedModel, PaddedDecoding
from .kv_manager import SlotMove
from .memory.features import FeaturePool
from .memory.kv_memory import KVMemory
from .models.packed_attention import PackedAttention
from .sampler import Draw, draw_filtered
from .step import Step, Work


class StepAttention(PackedAttention, Protocol):
    """Attention that knows where the tokens of a step go."""

    slots: Tensor


MakeAttention = Callable[[Any, tuple[Work, ...]], StepAttention]
"""Called with a memory of the kind that it knows, and with the work of a step."""


class ModelRunner:
    """Runs steps, where the pool lies.

    Args:
        model: what computes.
        pool: where keys and values lie.
        features: where hidden states go that drafters read; None if nobody does.
        attend: makes the attention of a step over that pool.
        decoding: computes the steps that it takes, which are pure decodes; None leaves it all to the one way.
        draw: how tokens are drawn from the logits of a step.
    """

    def __init__(
        self, model: PackedModel, pool: KVMemory, features: FeaturePool | None = None,
        attend: MakeAttention = PagedAttention, decoding: PaddedDecoding | None = None, draw: Draw = draw_filtered,
    ) -> None:  # fmt: skip
        self._model = model
        self._pool = pool
        self._features = features
        self._attend = attend
        self._decoding = decoding
        self.draw = draw

    @property
    def device(self) -> torch.device:
        """Where steps are computed."""
        return self._pool.device

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Computes a step.

        Returns:
            Logits `[rows, vocab_size]`, in the order of the step's work, for each as many rows as it wants. The next
            step may overwrite them.
        """
        self._pool.move(step.moves, step.open_blocks)
        if self._features is not None:
            self._features.move(step.moves)
        if self._decoding is not None and self._decoding.takes(step):
            return self._decoding.run(step)
        rows, end = list[int](), 0
        for work in step.work:
            end += len(work.tokens)
            rows += range(end - work.num_rows, end)
        # What is made of numbers on the way is made where it is needed. On a CPU it is there anyway.
        with self.device if self.device.type != "cpu" else nullcontext():
            tokens = torch.tensor([token for work in step.work for token in work.tokens])
            positions = torch.tensor([position for work in step.work for position in work.positions])
            attend = self._attend(self._pool, step.work)
            record = None if self._features is None else partial(self._features.write, attend.slots)
            return self._model(tokens, positions, attend, torch.tensor(rows, dtype=torch.int64), record)

    @torch.inference_mode()
    def keep(self, moves: Sequence[SlotMove]) -> None:
        """Lets drafts that were accepted move up behind their texts."""
        if moves:
            self._pool.move_slots(moves)
            if self._features is not None:
                self._features.move_slots(moves)
