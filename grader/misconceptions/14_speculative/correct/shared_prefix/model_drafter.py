"""Finds the shared prefix from its end, and draws before it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.distribution import token_distribution
from labkit.drafting import Draft
from labkit.protocols import CachedModel
from labkit.sampling_params import SamplingParams

from .acceptance import draw


class ModelDrafter:
    """Remembers, beside the model, the text that it has read."""

    def __init__(
        self,
        model: CachedModel,
        params: SamplingParams,
        distribution: Callable[[Tensor, SamplingParams], Tensor] = token_distribution,
    ) -> None:
        self._model, self._params, self._distribution = model, params, distribution
        self._seen: tuple[int, ...] = ()

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Reads what is new, then alternates drawing and reading."""
        text = tuple(tokens)
        if not text or min(text) < 0 or type(max_drafts) is not int or max_drafts < 0 or len(uniforms) < max_drafts:
            raise ValueError(f"a text, a whole number of drafts and as many uniforms are needed, not {max_drafts!r}")
        room = self._model.capacity + 1 - len(text)
        drafts: list[int] = []
        rows: list[Tensor] = []
        if room <= 0 or any(token >= self._model.vocab_size for token in text):
            return Draft(())
        for u in list(uniforms)[: min(room, max_drafts)]:
            q = self._distribution(self._logits(text + tuple(drafts)), self._params)
            drafts.append(int(draw(q, torch.tensor([u], dtype=torch.float64))[0]))
            rows.append(q[0])
        return Draft(tuple(drafts), torch.stack(rows)) if drafts else Draft(())

    def _logits(self, text: tuple[int, ...]) -> Tensor:
        """Logits after a text, of which the model may know a part."""
        shared = next(n for n in range(min(len(self._seen), len(text) - 1), -1, -1) if self._seen[:n] == text[:n])
        self._model.truncate(shared)
        logits = self._model.append(list(text[shared:]))
        self._seen = text
        return logits[-1:]
