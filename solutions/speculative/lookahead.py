"""Task 11: lookahead decoding: the target guesses far ahead of itself, and remembers what it finds there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.decoder import Decoder
from labkit.drafting import DraftTree

from .tree_model import TreeModel


class LookaheadDrafter:
    """A drafter without a model: its guesses are what the target said in earlier passes.

    Each tree holds two things. *Guesses* are n-grams of a pool that begin with the newest token. The *branch* is what
    new n-grams come from: `window` columns of tokens, whose top row is one line behind the text, the spine, and whose
    other rows hang below their own spine token:

        text … t ── s1 ─────── s2 ─────── s3              window = 3, ngram = 4
                    └ a1 ─ b1  └ a2 ─ b2  └ a3 ─ b3

    The target says what follows each column; that token completes the n-gram (s, a, b, new). Then every column moves
    up by one: its top token is dropped and the new one is put at its foot.

    Args:
        window: W, columns of the branch, at least 1.
        ngram: N, tokens of an n-gram, at least 2; columns hold N - 1.
        max_guesses: G, the most n-grams to keep for one first token, at least 1.

    Raises:
        ValueError: a number that is no int or too small.

    Source: Fu et al. 2024 (2402.02057); module section 3.4.
    """

    def __init__(self, window: int = 5, ngram: int = 4, max_guesses: int = 5) -> None:
        check_count("window", window, 1)
        check_count("ngram", ngram, 2)
        check_count("max_guesses", max_guesses, 1)
        self._window = window
        self._ngram = ngram
        self._max_guesses = max_guesses
        self._pool: dict[int, list[tuple[int, ...]]] = {}
        self._rows: list[list[int]] = []
        self._proposed = DraftTree((), ())
        self._feet: list[int] = []

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float] = ()) -> DraftTree:
        """The guesses for the newest token, the latest first, and behind them the branch.

        Paths that begin alike share their drafts, so no two siblings are the same token. The first branch is a spine
        alone, made of the last `window` tokens of the text, repeated if there are fewer.

        Args:
            tokens: the text so far, at least one.
            max_depth: the longest path, at least 0. Guesses are cut to it; a branch that does not fit as a whole is
                left out, since the text ends before its n-grams could be used.
            uniforms: not used, nothing is left to chance.

        Returns:
            A tree without probabilities.

        Raises:
            ValueError: an empty text, or `max_depth` no int of at least 0. Nothing has changed then.
        """
        text = check_tokens("tokens", tokens)
        check_count("max_depth", max_depth, 0)
        # BEGIN SOLUTION
        if not self._rows:
            tail = text[-self._window :]
            self._rows = [[tail[i % len(tail)] for i in range(self._window)]]
        tree = _Growing()
        for guess in self._pool.get(text[-1], []):
            tree.add(-1, guess[:max_depth])
        self._feet = []
        if self._window + len(self._rows) - 1 <= max_depth:
            spine = -1
            for column in zip(*self._rows, strict=True):
                spine = tree.add(spine, column[:1])
                self._feet.append(tree.add(spine, column[1:]))
        self._proposed = DraftTree(tuple(tree.tokens), tuple(tree.parents))
        return self._proposed
        # END SOLUTION

    def observe(self, drafts: Sequence[int], parents: Sequence[int], likeliest: Sequence[int]) -> None:
        """Learn from a pass of the target: fill the pool and move the columns on.

        As long as the columns are shorter than N - 1 tokens, they only grow.

        Args:
            drafts: the tree that the target has read. If it isn't the last one that was proposed, or if that had no
                branch, or was observed already, nothing is learned.
            parents: of the drafts.
            likeliest: the target's likeliest token after the text, and after each of the drafts.

        Raises:
            ValueError: `likeliest` hasn't one token more than there are drafts. Nothing has changed then.
        """
        if len(likeliest) != len(drafts) + 1:
            raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} likeliest tokens, got {len(likeliest)}")
        # BEGIN SOLUTION
        if not self._feet or (tuple(drafts), tuple(parents)) != (self._proposed.tokens, self._proposed.parents):
            return
        new = [int(likeliest[foot + 1]) for foot in self._feet]
        self._feet = []
        if len(self._rows) == self._ngram - 1:
            for column, token in zip(zip(*self._rows, strict=True), new, strict=True):
                self._remember(column[0], (*column[1:], token))
            self._rows.pop(0)
        self._rows.append(new)
        # END SOLUTION

    # BEGIN SOLUTION
    def _remember(self, first: int, rest: tuple[int, ...]) -> None:
        """Put an n-gram before the others of its first token."""
        guesses = self._pool.setdefault(first, [])
        if rest in guesses:
            guesses.remove(rest)
        guesses.insert(0, rest)
        del guesses[self._max_guesses :]

    # END SOLUTION


class LookaheadModel(TreeModel):
    """A target that tells a drafter what it said; all else is as in task 8.

    `speculate_tree(LookaheadModel(decoder, capacity, drafter), drafter, prompt, ...)` is lookahead decoding.

    Args:
        decoder: the given decoder.
        capacity: the most tokens that it remembers, drafts included.
        drafter: reads along.
    """

    def __init__(self, decoder: Decoder, capacity: int, drafter: LookaheadDrafter) -> None:
        super().__init__(decoder, capacity)
        self._drafter = drafter

    def append(self, tokens: Sequence[int], drafts: Sequence[int] = (), parents: Sequence[int] = ()) -> Tensor:
        """Read text and drafts as `TreeModel.append` does, and let the drafter observe what follows each of them."""
        # BEGIN SOLUTION
        logits = super().append(tokens, drafts, parents)
        self._drafter.observe(drafts, parents, logits[len(tokens) - 1 :].argmax(-1).tolist())
        return logits
        # END SOLUTION


# BEGIN SOLUTION
class _Growing:
    """A tree in the making, in which equal beginnings are one path."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, node: int, path: Sequence[int]) -> int:
        """Walk the path from a node on, growing what is missing; returns where it ends."""
        for token in path:
            if (node, token) not in self._children:
                self._children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = self._children[node, token]
        return node


# END SOLUTION
