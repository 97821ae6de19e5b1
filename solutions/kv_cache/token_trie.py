"""Task 13d: where every token of a vocabulary leads, found in one walk."""

from __future__ import annotations

from collections.abc import Sequence

# BEGIN SOLUTION
from typing import NamedTuple

import numpy as np

# END SOLUTION
import torch
from torch import Tensor

from labkit.byte_automaton import DEAD, ByteAutomaton


# BEGIN SOLUTION
class _Level(NamedTuple):
    """The beginnings of one length, which can be walked in one step: all that they need is in the level above."""

    parents: np.ndarray
    """Place in the level above of each beginning without its last byte."""
    last_bytes: np.ndarray
    tokens: np.ndarray
    """Ids of the tokens that end here, and at which place."""
    places: np.ndarray


# END SOLUTION


class TokenTrie:
    """The tokens of a vocabulary, sorted by their bytes into a tree in which common beginnings are one path.

    Depends on the tokenizer alone: one trie serves all regexes and all requests.

    Args:
        vocabulary: the bytes of each token id. A token may be part of a character, or several words; two tokens may
            have the same bytes. None stands for ids that are no text, such as control tokens.

    Raises:
        ValueError: the vocabulary is empty, or an entry is neither bytes nor None.
    """

    def __init__(self, vocabulary: Sequence[bytes | None]) -> None:
        self._vocabulary = list(vocabulary)
        if not self._vocabulary:
            raise ValueError("a vocabulary needs at least one token, got none")
        for index, token in enumerate(self._vocabulary):
            if token is not None and not isinstance(token, bytes):
                raise ValueError(f"token {index} must be bytes or None, got {token!r}")
        # BEGIN SOLUTION
        self._levels: list[_Level] = []
        longer = [(index, token) for index, token in enumerate(self._vocabulary) if token]
        places = {b"": 0}
        length = 0
        while longer:
            length += 1
            beginnings = list(dict.fromkeys(token[:length] for _, token in longer))
            parents = [places[beginning[:-1]] for beginning in beginnings]
            places = {beginning: place for place, beginning in enumerate(beginnings)}
            ending = [(index, token) for index, token in longer if len(token) == length]
            longer = [(index, token) for index, token in longer if len(token) > length]
            self._levels.append(
                _Level(
                    parents=np.array(parents),
                    last_bytes=np.array([beginning[-1] for beginning in beginnings]),
                    tokens=np.array([index for index, _ in ending], dtype=np.int64),
                    places=np.array([places[token] for _, token in ending], dtype=np.int64),
                )
            )
        # END SOLUTION

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._vocabulary)

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a token, or None if it is no text.

        Raises:
            ValueError: there is no such token.
        """
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
            raise ValueError(f"token must be an int from 0 to {self.vocab_size - 1}, got {token!r}")
        return self._vocabulary[token]

    def next_states(self, automaton: ByteAutomaton, state: int) -> Tensor:
        """Read every token from one state.

        Tokens that share a beginning share the steps through it, and where a beginning is dead, nothing behind it
        needs a look. This is done for each new state while somebody waits for a token, so a loop over the whole
        vocabulary and all its bytes is too slow.

        Args:
            automaton: what reads.
            state: where it stands.

        Returns:
            int64 `[vocab_size]`: the state after each token's bytes; `DEAD` where they lead nowhere, for tokens that
            are no text, and for those without any byte (one that changes nothing could be drawn for ever).

        Raises:
            ValueError: there is no such state.
        """
        automaton.check_state(state)
        # BEGIN SOLUTION
        # In numpy: a walk is a few dozen tiny steps, and torch may wake its threads for each of them.
        next_state = automaton.next_state.numpy()
        reached = np.full(self.vocab_size, DEAD)
        states = np.array([state])
        for level in self._levels:
            before = states[level.parents]
            states = np.where(before == DEAD, DEAD, next_state[before, level.last_bytes])
            reached[level.tokens] = states[level.places]
            if (states == DEAD).all():
                break
        return torch.from_numpy(reached)
        # END SOLUTION
