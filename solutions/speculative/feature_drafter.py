"""Task 13b: a drafter that reads the target's features, and where they end its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.distribution import token_distribution
from labkit.draft_head import DraftHead
from labkit.drafting import Draft
from labkit.features import FeatureSource
from labkit.sampling_params import SamplingParams

from .acceptance import draw

Distribution = Callable[[Tensor, SamplingParams], Tensor]


class FeatureDrafter:
    """Drafts with a head on the target's hidden states.

    Row i of the head is the feature of token i with token i + 1, at position i. Of a text of n tokens the target has
    read all but the last, so there are n - 1 rows with features of the target; the last of them leads to the state of
    the newest token, and so to the first draft. Rows behind it have no feature yet: the head's own states stand in.

    Args:
        target: remembers the features of the text. If it remembers more, the text is the end of it.
        head: empty, and nobody else's.
        params: how drafts are drawn.
        distribution: called as `distribution(logits [1, vocab_size], params)`.

    Source: Li et al. 2024 (2401.15077); module section 3.4.
    """

    def __init__(
        self,
        target: FeatureSource,
        head: DraftHead,
        params: SamplingParams,
        distribution: Distribution = token_distribution,
    ) -> None:
        self._target = target
        self._head = head
        self._params = params
        self._distribution = distribution
        self._read: list[int] = []

    def follow(self, tokens: Sequence[int]) -> Tensor | None:
        """Bring the head up to a text: one `append` of the rows that are new, each with the target's feature.

        The head keeps the rows that it has read of this text already, but always reads the last one, whose state is
        needed. It forgets all others.

        Args:
            tokens: the text so far, at least one.

        Returns:
            The head's state of the newest token, `[1, hidden]`. None if the text is a single token, if the target
            hasn't read it up to its last token, or if it holds an id that the head doesn't know; nothing has run then.

        Raises:
            ValueError: an empty text.
        """
        text = check_tokens("tokens", tokens)
        # BEGIN SOLUTION
        features = self._target.features()
        count = len(text) - 1
        if count == 0 or features.shape[0] < count or max(text) >= self._head.vocab_size:
            return None
        same = 0
        while same < min(len(self._read), len(text)) and self._read[same] == text[same]:
            same += 1
        # Row i holds token i + 1, so one row fewer than tokens is known.
        kept = max(0, min(same - 1, count - 1, self._head.length))
        self._head.truncate(kept)
        self._read = text
        return self._head.append(
            self._head.read(features[-count:][kept:]),
            torch.tensor(text[kept + 1 :]),
            torch.arange(kept, count),
            torch.ones(count - kept, count, dtype=torch.bool).tril(kept),
        )[-1:]
        # END SOLUTION

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Draw drafts one after another, each from what the head says after those before it.

        The last draft is not read by the head. Afterwards the head remembers the rows of the text, and none of a
        draft.

        Args:
            tokens: the text so far, at least one.
            max_drafts: the most tokens to draft, at least 0.
            uniforms: one number in [0, 1) for each draft.

        Returns:
            The tokens and, row by row, the very distributions that they were drawn from, `[drafts, vocab_size]`.
            Nothing where `follow` has nothing, or from the first place on where the head's logits are none: NaN,
            +inf, or nothing above -inf.

        Raises:
            ValueError: an empty text, `max_drafts` no int of at least 0, or too few uniforms. Nothing has run then.
        """
        check_tokens("tokens", tokens)
        check_count("max_drafts", max_drafts, 0)
        if len(uniforms) < max_drafts:
            raise ValueError(f"{max_drafts} drafts need as many uniforms, got {len(uniforms)}")
        # BEGIN SOLUTION
        state = self.follow(tokens) if max_drafts else None
        if state is None:
            return Draft(())
        count = len(tokens) - 1
        drafts: list[int] = []
        rows: list[Tensor] = []
        for place in range(max_drafts):
            if place:
                seen = torch.ones(1, count + place, dtype=torch.bool)
                state = self._head.append(state, torch.tensor(drafts[-1:]), torch.tensor([count + place - 1]), seen)
            logits = self._head.logits(state)
            if not can_be_drawn_from(logits):
                break
            rows.append(self._distribution(logits, self._params))
            drafts.append(int(draw(rows[-1], torch.tensor([uniforms[place]], dtype=torch.float64))))
        self._head.truncate(count)
        return Draft(tuple(drafts), torch.cat(rows)) if rows else Draft(())
        # END SOLUTION


def can_be_drawn_from(logits: Tensor) -> bool:
    """Whether every row of logits is a distribution: no NaN, no +inf, something above -inf."""
    # The maximum of a row with NaN is NaN.
    return bool(logits.amax(-1).isfinite().all())
