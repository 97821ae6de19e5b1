"""What a step asks of the machine, in the numbers that its time depends on."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from solutions.engine.kv_manager import MoveKind
from solutions.engine.step import Step


@dataclass(frozen=True)
class Demand:
    """A step, summed up.

    Args:
        tokens: that go through the linear layers.
        sequences: requests that they belong to.
        rows: logits that are wanted.
        pairs: of a query and a key that it attends to; the attention's arithmetic grows with these.
        read: tokens whose keys and values are read, each request's once a step.
        copied: blocks copied inside the pool.
        swapped: blocks moved from or to host memory.
    """

    tokens: int
    sequences: int
    rows: int
    pairs: int
    read: int
    copied: int = 0
    swapped: int = 0

    @classmethod
    def of(cls, step: Step) -> Demand:
        """Counted from what the scheduler decided."""
        tokens = rows = pairs = read = 0
        for work in step.work:
            count = len(work.tokens)
            tokens += count
            rows += work.num_rows
            read += work.end
            # Token i of the work sees `start` earlier ones, the i before it in the work, and itself.
            pairs += count * work.start + count * (count + 1) // 2
        copied = sum(move.kind is MoveKind.COPY for move in step.moves)
        return cls(tokens, len(step.work), rows, pairs, read, copied, len(step.moves) - copied)

    def __add__(self, other: Demand) -> Demand:
        return Demand(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
