"""Task 13e: which tokens may come next, for one regex, and for one request that follows it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.byte_automaton import DEAD, ByteAutomaton
from labkit.checks import check_tokens

from .token_trie import TokenTrie


class TokenMasks:
    """The masks of one regex over one vocabulary, each worked out when its state is first met.

    Shared by all requests with this regex: a mask depends on nothing but the automaton's state.

    Args:
        trie: of the vocabulary.
        automaton: of the regex.
        stop_tokens: ids that end a text. Their own bytes, if they have any, count for nothing.

    Raises:
        ValueError: there is no stop token, or one is outside the vocabulary.
    """

    def __init__(self, trie: TokenTrie, automaton: ByteAutomaton, stop_tokens: Sequence[int]) -> None:
        self._stop_tokens = check_tokens("stop_tokens", stop_tokens, trie.vocab_size)
        self._trie = trie
        self._automaton = automaton
        self._masks: dict[int, Tensor] = {}

    def mask(self, state: int) -> Tensor:
        """The tokens that may come next in a state.

        A token is allowed if its bytes lead to a state from which the text can still be completed, even when they
        end within a character. A stop token is allowed exactly in accepting states, and other tokens that are no
        text never.

        Args:
            state: of the automaton.

        Returns:
            bool `[vocab_size]`, kept for the next request that comes to this state: read it only.

        Raises:
            ValueError: there is no such state.
        """
        self._automaton.check_state(state)
        # BEGIN SOLUTION
        if state not in self._masks:
            mask = self._trie.next_states(self._automaton, state) != DEAD
            mask[self._stop_tokens] = self._automaton.accepting[state]
            self._masks[state] = mask
        return self._masks[state]
        # END SOLUTION

    def next_state(self, state: int, token: int) -> int | None:
        """The state after a token, or None after a stop token.

        Args:
            state: of the automaton.
            token: a token id.

        Raises:
            ValueError: there is no such state or token, or the token isn't allowed there.
        """
        data = self._trie.token_bytes(token)
        # BEGIN SOLUTION
        if not bool(self.mask(state)[token]):
            raise ValueError(f"token {token} ({data!r}) is not allowed here: no text of the regex goes on with it")
        return None if token in self._stop_tokens else self._automaton.run(data or b"", state)
        # END SOLUTION

    def is_accepting(self, state: int) -> bool:
        """Whether what was read on the way to a state is a whole text.

        Raises:
            ValueError: there is no such state.
        """
        self._automaton.check_state(state)
        return bool(self._automaton.accepting[state])

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._trie.vocab_size


class TokenConstraint:
    """Follows the tokens of one request through the automaton.

    Args:
        masks: of the regex; requests share them, but each has a constraint of its own.
    """

    def __init__(self, masks: TokenMasks) -> None:
        self._masks = masks
        # BEGIN SOLUTION
        self._state: int | None = 0
        # END SOLUTION

    @property
    def is_complete(self) -> bool:
        """Whether the tokens so far are a whole text: it could end here, or a stop token has ended it."""
        # BEGIN SOLUTION
        return self._state is None or self._masks.is_accepting(self._state)
        # END SOLUTION

    def mask(self) -> Tensor:
        """The tokens that may come next, bool `[vocab_size]`; none after a stop token."""
        # BEGIN SOLUTION
        if self._state is None:
            return torch.zeros(self._masks.vocab_size, dtype=torch.bool)
        return self._masks.mask(self._state)
        # END SOLUTION

    def advance(self, token: int) -> None:
        """Take the token that was drawn.

        Raises:
            ValueError: the token isn't allowed, or a stop token has ended the text. The state is as before.
        """
        # BEGIN SOLUTION
        if self._state is None:
            raise ValueError(f"the text has ended with a stop token; token {token} can't follow")
        self._state = self._masks.next_state(self._state, token)
        # END SOLUTION
