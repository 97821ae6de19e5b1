"""The KV oracle: each physical slot remembers the tokens that led to it, and every read is checked against its reader.

No keys, values or weights are needed to find a block with two writers, a freed block that is still read, or a cached
block under the wrong name: it is enough to know which prefix wrote each slot last. `kv_schedules` drives allocator,
block tables and prefix cache with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Ledger:
    """What every physical slot holds: the number of the token prefix that wrote it.

    Args:
        num_slots: slots in the pool.
    """

    def __init__(self, num_slots: int) -> None:
        self._written: list[int | None] = [None] * num_slots
        self._numbers: dict[tuple[int, int], int] = {}
        self._prefixes: list[list[int]] = [[]]

    def numbers(self, tokens: list[int], namespace: int = 0) -> list[int]:
        """For each token the number of the prefix that ends with it; equal prefixes have equal numbers."""
        # Negative parents can't be prefixes of the common space: namespaces never meet.
        number, result = -namespace, []
        for token in tokens:
            key = (number, token)
            if key not in self._numbers:
                self._numbers[key] = len(self._prefixes)
                self._prefixes.append([*(self._prefixes[number] if number > 0 else []), token])
            number = self._numbers[key]
            result.append(number)
        return result

    def write(self, slots: list[int], numbers: list[int]) -> None:
        """Tokens are computed and their keys and values stored."""
        for slot, number in zip(slots, numbers, strict=True):
            self._written[slot] = number

    def copy(self, source: int, target: int, block_size: int) -> None:
        """A block is copied."""
        start = source * block_size
        self._written[target * block_size : (target + 1) * block_size] = self._written[start : start + block_size]

    def read(self, who: str, slots: list[int], numbers: list[int]) -> None:
        """A sequence attends to all its tokens.

        Raises:
            AssertionError: a slot holds something else than what this sequence would have written there.
        """
        for position, (slot, number) in enumerate(zip(slots, numbers, strict=True)):
            held = self._written[slot]
            if held != number:
                what = "nothing" if held is None else f"what the prefix {self._prefixes[held]} wrote"
                raise AssertionError(
                    f"{who} reads slot {slot} for its position {position} and finds {what}; its own prefix is "
                    f"{self._prefixes[number]}. Somebody wrote to, freed or shared a block that was not theirs to use."
                )


@dataclass
class Sequence:
    """A live sequence, as the oracle knows it."""

    name: str
    table: Any
    tokens: list[int]
    namespace: int = 0
    slots: list[int] = field(default_factory=list)

    def blocks(self, block_size: int) -> list[int]:
        """Its blocks, by its slots."""
        return [slot // block_size for slot in self.slots[::block_size]]
