"""Markov chains that read trees of drafts, one text or many, and a drafter of trees that draws them from a chain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.drafting import DraftTree
from labkit.specs import Markov
from solutions.speculative.acceptance import draw

Chain = tuple[tuple[float, ...], ...]


class MarkovText:
    """A target for `speculate_tree`; what follows a token doesn't depend on those before it.

    Args:
        chain: probabilities of the token after each token.
        capacity: tokens, drafts included.
    """

    def __init__(self, chain: Chain, capacity: int) -> None:
        self.vocab_size = len(chain)
        self.capacity = capacity
        self._model = Markov(chain, capacity).build()
        self._drafts: list[int] = []

    @property
    def length(self) -> int:
        """Tokens remembered, drafts included."""
        return self._model.length

    def append(self, tokens: Sequence[int], drafts: Sequence[int] = (), parents: Sequence[int] = ()) -> Tensor:
        """One row of logits for each new token and draft."""
        assert not self._drafts, f"{len(self._drafts)} drafts are still here"
        self._drafts = list(drafts)
        return self._model.append([*tokens, *drafts])

    def keep(self, path: Sequence[int]) -> None:
        """The drafts of a path become text."""
        kept = [self._drafts[index] for index in path]
        self._model.truncate(self.length - len(self._drafts))
        self._drafts = []
        if kept:
            self._model.append(kept)


class MarkovBatch:
    """A target for `speculate_batch` that writes its calls down.

    Args:
        chain: of all texts.
        capacity: of each text.
    """

    def __init__(self, chain: Chain, capacity: int) -> None:
        self.vocab_size = len(chain)
        self.capacity = capacity
        self.texts: dict[int, MarkovText] = {}
        self.calls: list[list[int]] = []
        self.longest: dict[int, int] = {}
        self._chain = chain

    def run(
        self, ids: list[int], tokens: list[list[int]], drafts: list[list[int]], parents: list[Sequence[int]]
    ) -> list[Tensor]:
        """One row of logits for each new token and draft."""
        self.calls.append(ids)
        answers = []
        for index, *its in zip(ids, tokens, drafts, parents, strict=True):
            text = self.texts.setdefault(index, MarkovText(self._chain, self.capacity))
            answers.append(text.append(*its))
            self.longest[index] = max(self.longest.get(index, 0), text.length)
        return answers

    def keep(self, index: int, path: Sequence[int]) -> None:
        """The drafts of a path become text."""
        self.texts[index].keep(path)


class Siblings:
    """Two siblings drawn without replacement, and a child of the second, each with the q that it was drawn from.

    Args:
        chain: what they are drawn from.
    """

    def __init__(self, chain: Chain) -> None:
        self._q = torch.tensor(chain, dtype=torch.float64)

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float]) -> DraftTree:
        """A tree by the first three uniforms."""
        numbers = torch.tensor(uniforms[:3], dtype=torch.float64)
        q = self._q[tokens[-1]]
        first = int(draw(q, numbers[0]))
        rest = q.clone()
        rest[first] = 0
        rest /= rest.sum()
        second = int(draw(rest, numbers[1]))
        child = int(draw(self._q[second], numbers[2]))
        return DraftTree((first, second, child), (-1, -1, 1), torch.stack([q, rest, self._q[second]]))
