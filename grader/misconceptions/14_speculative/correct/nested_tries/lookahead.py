"""Keeps columns, not rows, and builds its trees breadth first from nested dicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from labkit.decoder import Decoder
from labkit.drafting import DraftTree

from .tree_model import TreeModel

Trie = dict[int, Any]


class LookaheadDrafter:
    """The pool is one dict of n-grams in the order of finding."""

    def __init__(self, window: int = 5, ngram: int = 4, max_guesses: int = 5) -> None:
        for value, least in ((window, 1), (ngram, 2), (max_guesses, 1)):
            if type(value) is not int or value < least:
                raise ValueError(f"a whole number of at least {least} is needed, got {value!r}")
        self._window, self._ngram, self._most = window, ngram, max_guesses
        self._found: dict[tuple[int, ...], None] = {}
        self._columns: list[tuple[int, ...]] = []
        self._open: tuple[tuple[int, ...], tuple[int, ...], list[int]] | None = None

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float] = ()) -> DraftTree:
        """All paths go into one trie, then the trie is written down level by level."""
        text = tuple(tokens)
        if not text or type(max_depth) is not int or max_depth < 0:
            raise ValueError(f"a text and a depth of at least 0 are needed, got {len(text)} tokens and {max_depth!r}")
        if not self._columns:
            tail = text[-self._window :] * self._window
            self._columns = [(token,) for token in tail[: self._window]]
        matches = [gram for gram in reversed(self._found) if gram[0] == text[-1]][: self._most]
        wanted = [gram[1 : max_depth + 1] for gram in matches]
        tops = tuple(column[0] for column in self._columns)
        ways = [tops[:index] + column for index, column in enumerate(self._columns)]
        if len(ways[-1]) > max_depth:
            ways = []
        trie: Trie = {}
        for path in [*wanted, *ways]:
            node = trie
            for token in path:
                node = node.setdefault(token, {})
        drafts: list[int] = []
        parents: list[int] = []
        index_of: dict[tuple[int, ...], int] = {(): -1}
        queue = deque([((), trie)])
        while queue:
            before, node = queue.popleft()
            for token, below in node.items():
                path = (*before, token)
                index_of[path] = len(drafts)
                drafts.append(token)
                parents.append(index_of[before])
                queue.append((path, below))
        tree = DraftTree(tuple(drafts), tuple(parents))
        self._open = (tree.tokens, tree.parents, [index_of[way] for way in ways]) if ways else None
        return tree

    def observe(self, drafts: Sequence[int], parents: Sequence[int], likeliest: Sequence[int]) -> None:
        """Each column takes its answer; one that is too long loses its top."""
        if len(likeliest) - len(drafts) != 1:
            raise ValueError(f"{len(likeliest)} answers don't fit {len(drafts)} drafts")
        if self._open is None or self._open[:2] != (tuple(drafts), tuple(parents)):
            return
        answers = [likeliest[index + 1] for index in self._open[2]]
        self._open = None
        longer = [(*column, answer) for column, answer in zip(self._columns, answers, strict=True)]
        for gram in longer:
            if len(gram) == self._ngram:
                self._found.pop(gram, None)
                self._found[gram] = None
        self._columns = [gram[-(self._ngram - 1) :] for gram in longer]


class LookaheadModel(TreeModel):
    """Watches its own passes."""

    def __init__(self, decoder: Decoder, capacity: int, drafter: LookaheadDrafter) -> None:
        TreeModel.__init__(self, decoder, capacity)
        self._tell = drafter.observe

    def append(self, tokens: Sequence[int], drafts: Sequence[int] = (), parents: Sequence[int] = ()) -> Tensor:
        """Row by row."""
        logits = TreeModel.append(self, tokens, drafts, parents)
        self._tell(drafts, parents, [int(row.argmax()) for row in logits[-(len(drafts) + 1) :]])
        return logits
