"""Carries a step out: the moves, then one pass of the model over all its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .attention import PagedAttention
from .features import FeaturePool
from .kv_manager import SlotMove
from .kv_pool import KVPool
from .models.blocks import Record
from .models.packed_attention import PackedAttention
from .step import Step


class PackedModel(Protocol):
    """A model over tokens of many requests laid end to end; see `models.blocks.Decoder`."""

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: PackedAttention, rows: Tensor, record: Record | None = None
    ) -> Tensor:
        """Logits `[rows, vocab_size]`."""


class ModelRunner:
    """Runs steps.

    Args:
        model: what computes.
        pool: where keys and values lie.
        features: where hidden states go that drafters read; None if nobody does.
    """

    def __init__(self, model: PackedModel, pool: KVPool, features: FeaturePool | None = None) -> None:
        self._model = model
        self._pool = pool
        self._features = features

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Computes a step.

        Returns:
            Logits `[rows, vocab_size]`, in the order of the step's work, for each as many rows as it wants.
        """
        self._pool.move(step.moves)
        if self._features is not None:
            self._features.move(step.moves)
        tokens = torch.tensor([token for work in step.work for token in work.tokens])
        positions = torch.tensor([position for work in step.work for position in work.positions])
        rows, end = list[int](), 0
        for work in step.work:
            end += len(work.tokens)
            rows += range(end - work.num_rows, end)
        attend = PagedAttention(self._pool, step.work)
        record = None if self._features is None else partial(self._features.write, attend.slots)
        return self._model(tokens, positions, attend, torch.tensor(rows, dtype=torch.int64), record)

    @torch.inference_mode()
    def keep(self, moves: Sequence[SlotMove]) -> None:
        """Lets drafts that were accepted move up behind their texts."""
        if moves:
            self._pool.move_slots(moves)
            if self._features is not None:
                self._features.move_slots(moves)
