"""How many drafts a step has room for, when all who are still to come in it get their own tokens and blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labkit.drafting import DraftTree

from ..kv_manager import KVManager
from ..request import Request, blocks_for

ProposeDrafts = Callable[[Request, int, int], DraftTree]
"""Called with a request that decodes, the most drafts that there is room for, and the longest path of use to it, both
at least 1; keeps to them."""

NO_DRAFTS = DraftTree((), ())


class DraftRoom:
    """Asks for drafts, one request of a step after the other; they take nothing from those who are still to come.

    Args:
        propose: whom to ask.
        running: all that may yet get something in the step.
        memory: their blocks.
    """

    def __init__(self, propose: ProposeDrafts, running: Sequence[Request], memory: KVManager) -> None:
        self._propose = propose
        self._memory = memory
        # What those still to come need at most.
        self._owed_tokens = len(running)
        self._owed_blocks = sum(map(self._most_blocks, running))

    def drafts(self, request: Request, budget: int) -> DraftTree:
        """It is this one's turn.

        Args:
            request: one of the running; each comes once.
            budget: tokens of the step that are left once it has those that it misses.

        Returns:
            What to compute behind these; nothing if it doesn't decode.
        """
        self._owed_tokens -= 1
        self._owed_blocks -= self._most_blocks(request)
        if request.is_beam or not request.is_decoding:
            return NO_DRAFTS
        room = min(budget - self._owed_tokens, self._memory.room(request, self._owed_blocks) - 1)
        # A pass gives one token more than it verifies, so the last token needs no draft.
        depth = request.max_length - len(request.tokens) - 1
        return self._propose(request, room, depth) if min(room, depth) > 0 else NO_DRAFTS

    def _most_blocks(self, request: Request) -> int:
        """For all that is known of it, and one for the copy of a block that others hold, too."""
        size = self._memory.block_size
        return blocks_for(len(request.tokens), size) - blocks_for(request.table.length, size) + 1
