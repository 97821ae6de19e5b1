"""What the scheduler decides for one step, as a value that runner, tests and simulator read alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from solutions.speculative.tree import tree_positions

from .kv_manager import Move, SlotMove
from .request import Request


@dataclass(frozen=True)
class Work:
    """The tokens of one request that a step computes.

    Args:
        request: whose they are.
        start: position of the first of them; all before it are computed.
        tokens: known tokens, then drafts, each behind the one that it follows.
        num_drafts: how many of them are drafts.
        slots: where the keys and values of these tokens go, one slot each.
        blocks: the request's block table, as far as these tokens reach.
        gives_token: whether the logits after the newest known token, and after each draft, are wanted.
        parents: for each draft the index of the one that it follows, -1 for the text itself; empty if each follows the
            one before it.
    """

    request: Request
    start: int
    tokens: tuple[int, ...]
    num_drafts: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    gives_token: bool
    parents: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """How many tokens the block table holds with these."""
        return self.start + len(self.tokens)

    @property
    def positions(self) -> Sequence[int]:
        """Of each token in its own text: drafts that exclude each other may stand at the same place."""
        if not self.parents:
            return range(self.start, self.end)
        known = self.end - self.num_drafts
        return [*range(self.start, known), *tree_positions(self.parents, known).tolist()]

    @property
    def drafts(self) -> tuple[int, ...]:
        """Those of the tokens that are drafts."""
        return self.tokens[len(self.tokens) - self.num_drafts :]

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """For the text itself, then for each draft: the drafts from the text to it, by their indices."""
        paths: list[tuple[int, ...]] = [()]
        for index, parent in enumerate(self.parents or range(-1, self.num_drafts - 1)):
            paths.append((*paths[parent + 1], index))
        return paths

    @property
    def num_rows(self) -> int:
        """Logits that are wanted."""
        return self.num_drafts + 1 if self.gives_token else 0

    def kept(self, path: Sequence[int]) -> list[SlotMove]:
        """How the drafts of a path come to lie behind the text, whose continuation they are.

        Their keys were turned for the very positions at which they then stand.
        """
        slots = self.slots[len(self.tokens) - self.num_drafts :]
        return [SlotMove(slots[index], slots[place]) for place, index in enumerate(path) if index != place]


@dataclass(frozen=True)
class Step:
    """One step: first the moves, in order, then one pass over all the work.

    Args:
        work: at most one for each request.
        moves: of blocks.
        preempted: requests that lost their blocks in this step.
        open_blocks: those in which a text ends before the pass, if the memory wants to know; see `KiviPool`.
    """

    work: tuple[Work, ...]
    moves: tuple[Move, ...] = ()
    preempted: tuple[Request, ...] = ()
    open_blocks: frozenset[int] = frozenset()

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return sum(len(work.tokens) for work in self.work)
