"""Task 7: a small model as the drafter, and q as exactly what it drew from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.distribution import token_distribution
from labkit.drafting import Draft
from labkit.protocols import CachedModel
from labkit.sampling_params import SamplingParams

from .acceptance import draw

Distribution = Callable[[Tensor, SamplingParams], Tensor]


class ModelDrafter:
    """Drafts with a model of its own, whose cache follows the text.

    Args:
        model: a smaller model; empty, and nobody else's.
        params: how drafts are drawn. They need not be the target's settings, but a draft of another temperature or
            other filters is kept less often.
        distribution: called as `distribution(logits [1, vocab_size], params)`.
    """

    def __init__(
        self,
        model: CachedModel,
        params: SamplingParams,
        distribution: Distribution = token_distribution,
    ) -> None:
        self._model = model
        self._params = params
        self._distribution = distribution
        self._read: list[int] = []

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Draw drafts one after another, each from the model's distribution after those before it.

        The model keeps what it read. Of a new text it forgets what differs from that, which includes drafts that the
        target rejected, and reads only what is new; but always the last token, whose logits are needed.

        Args:
            tokens: the text so far, at least one.
            max_drafts: the most tokens to draft, at least 0; fewer where the model's capacity ends.
            uniforms: one number in [0, 1) for each draft.

        Returns:
            The tokens and, row by row, the very distributions that they were drawn from, filters included. Nothing
            if the text holds an id that the model doesn't know.

        Raises:
            ValueError: an empty text, `max_drafts` no int of at least 0, or too few uniforms. Nothing has run then.
        """
        check_tokens("tokens", tokens)
        check_count("max_drafts", max_drafts, 0)
        if len(uniforms) < max_drafts:
            raise ValueError(f"{max_drafts} drafts need as many uniforms, got {len(uniforms)}")
        # BEGIN SOLUTION
        text = list(tokens)
        # The last draft is never read by the model, so the text may fill the capacity but for the drafts before it.
        count = min(max_drafts, self._model.capacity - len(text) + 1)
        if count <= 0 or max(text) >= self._model.vocab_size:
            return Draft(())
        kept = 0
        while kept < min(len(self._read), len(text) - 1) and self._read[kept] == text[kept]:
            kept += 1
        self._model.truncate(kept)
        del self._read[kept:]
        drafts: list[int] = []
        rows: list[Tensor] = []
        new = text[kept:]
        for index in range(count):
            logits = self._model.append(new)[-1:]
            self._read += new
            rows.append(self._distribution(logits, self._params))
            drafts.append(int(draw(rows[-1], torch.tensor([uniforms[index]], dtype=torch.float64))))
            new = drafts[-1:]
        return Draft(tuple(drafts), torch.cat(rows))
        # END SOLUTION
