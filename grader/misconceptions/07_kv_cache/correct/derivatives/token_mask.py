"""Keeps the states behind all tokens instead of masks, and the tokens drawn instead of a state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.byte_automaton import ByteAutomaton

from .token_trie import TokenTrie


class TokenMasks:
    """A table that grows by a row for each state that is met; -2 is the end."""

    def __init__(self, trie: TokenTrie, automaton: ByteAutomaton, stop_tokens: Sequence[int]) -> None:
        self.stops = set(stop_tokens)
        if not self.stops or not self.stops <= set(range(trie.vocab_size)):
            raise ValueError(f"these can't be stop tokens: {sorted(self.stops)}")
        self.trie, self.automaton = trie, automaton
        self.table: dict[int, Tensor] = {}

    @property
    def vocab_size(self) -> int:
        """Ids."""
        return self.trie.vocab_size

    def is_accepting(self, state: int) -> bool:
        """The automaton's word."""
        return bool(self.automaton.accepting[state])

    def _row(self, state: int) -> Tensor:
        if state not in self.table:
            row = self.trie.next_states(self.automaton, state).clone()
            for stop in self.stops:
                row[stop] = -2 if self.is_accepting(state) else -1
            self.table[state] = row
        return self.table[state]

    def mask(self, state: int) -> Tensor:
        """All that leads somewhere, or to the end."""
        return self._row(state) != -1

    def next_state(self, state: int, token: int) -> int | None:
        """A look into the table."""
        if type(token) is not int or token not in range(self.vocab_size) or self._row(state)[token] == -1:
            raise ValueError(f"token {token!r} can't come in state {state}")
        following = int(self._row(state)[token])
        return None if following == -2 else following


class TokenConstraint:
    """A list of tokens."""

    def __init__(self, masks: TokenMasks) -> None:
        self.masks = masks
        self.drawn: list[int] = []

    def _state(self) -> int | None:
        state: int | None = 0
        for token in self.drawn:
            assert state is not None
            state = self.masks.next_state(state, token)
        return state

    @property
    def is_complete(self) -> bool:
        """Ended, or could."""
        state = self._state()
        return state is None or self.masks.is_accepting(state)

    def mask(self) -> Tensor:
        """Of where the tokens lead."""
        state = self._state()
        return torch.full((self.masks.vocab_size,), False) if state is None else self.masks.mask(state)

    def advance(self, token: int) -> None:
        """One more, if it may."""
        state = self._state()
        if state is None:
            raise ValueError("it is over")
        self.masks.next_state(state, token)
        self.drawn.append(token)
