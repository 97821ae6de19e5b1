"""Dicts in dicts, and a walk that turns back where a byte is dead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.byte_automaton import ByteAutomaton


class TokenTrie:
    """A node is (ids that end here, children by byte)."""

    def __init__(self, vocabulary: Sequence[bytes | None]) -> None:
        if len(vocabulary) == 0 or not all(token is None or isinstance(token, bytes) for token in vocabulary):
            raise ValueError("a vocabulary is at least one entry of bytes or None")
        self.vocabulary = tuple(vocabulary)
        self.root: tuple[list[int], dict[int, Any]] = ([], {})
        for token, data in enumerate(vocabulary):
            node = self.root
            for byte in data or b"":
                node = node[1].setdefault(byte, ([], {}))
            if data:
                node[0].append(token)

    @property
    def vocab_size(self) -> int:
        """Ids."""
        return len(self.vocabulary)

    def token_bytes(self, token: int) -> bytes | None:
        """Of one id."""
        if type(token) is not int or token not in range(len(self.vocabulary)):
            raise ValueError(f"no token {token!r}")
        return self.vocabulary[token]

    def next_states(self, automaton: ByteAutomaton, state: int) -> Tensor:
        """Depth first."""
        if type(state) is not int or state not in range(automaton.num_states):
            raise ValueError(f"no state {state!r}")
        rows: dict[int, list[int]] = {}
        after = torch.full((self.vocab_size,), -1)
        ids, states = [], []
        stack = [(self.root, state)]
        while stack:
            (ending, children), current = stack.pop()
            ids += ending
            states += [current] * len(ending)
            if current not in rows:
                rows[current] = automaton.next_state[current].tolist()
            row = rows[current]
            stack += [(child, row[byte]) for byte, child in children.items() if row[byte] >= 0]
        after[torch.tensor(ids, dtype=torch.int64)] = torch.tensor(states, dtype=torch.int64)
        return after
