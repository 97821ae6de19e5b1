"""A deterministic automaton over bytes, as tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DEAD = -1
"""Stands for the state from which no text of the language can be reached any more."""


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """States and where each byte leads from them. State 0 is the start.

    Args:
        next_state: int64 `[num_states, 256]`; entry `[state, byte]` is a state or `DEAD`.
        accepting: bool `[num_states]`; whether what was read on the way to a state is a text of the language.

    Raises:
        ValueError: the tables don't have these shapes and dtypes, or lead to states that don't exist.
    """

    next_state: Tensor
    accepting: Tensor

    def __post_init__(self) -> None:
        states = self.accepting.numel()
        if self.accepting.dtype != torch.bool or self.accepting.shape != (states,) or states == 0:
            raise ValueError(
                f"accepting must be bool [num_states >= 1], got {self.accepting.dtype} {list(self.accepting.shape)}"
            )
        if self.next_state.dtype != torch.int64 or self.next_state.shape != (states, 256):
            raise ValueError(
                f"next_state must be int64 [{states}, 256], got {self.next_state.dtype} {list(self.next_state.shape)}"
            )
        low, high = int(self.next_state.min()), int(self.next_state.max())
        if low < DEAD or high >= states:
            raise ValueError(f"next_state must hold {DEAD} to {states - 1}, got {low} to {high}")

    @property
    def num_states(self) -> int:
        """Size of the automaton."""
        return self.accepting.numel()

    def check_state(self, state: int) -> None:
        """Refuses what is no state.

        Raises:
            ValueError: there is no such state; `DEAD` is none either.
        """
        if isinstance(state, bool) or not isinstance(state, int) or not 0 <= state < self.num_states:
            raise ValueError(f"state must be an int from 0 to {self.num_states - 1}, got {state!r}")

    def run(self, data: bytes, state: int = 0) -> int:
        """The state after some bytes, or `DEAD`.

        Args:
            data: bytes to read, any number of them.
            state: where to start.

        Raises:
            ValueError: there is no such state.
        """
        self.check_state(state)
        for byte in data:
            state = int(self.next_state[state, byte])
            if state == DEAD:
                break
        return state

    def accepts(self, data: bytes) -> bool:
        """Whether bytes are a text of the language, from the start to the end."""
        state = self.run(data)
        return state != DEAD and bool(self.accepting[state])
