"""One rule: each step gives every request some tokens, so that computed catches up with known, within a budget.

Continuous batching, chunked prefill, prefix hits, resumption and speculation all follow from it. A request whose prompt
is not computed misses many tokens, one that decodes misses one, one with drafts asks for a few more than it misses, one
that was preempted misses all it knows; the rule is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.checks import check_count
from labkit.drafting import DraftTree

from .beam_search import Branch
from .drafting.draft_room import NO_DRAFTS, DraftRoom, ProposeDrafts
from .kv_manager import KVManager, Move, SlotMove
from .request import FinishReason, Request, Status, blocks_for
from .step import Step, Work
from .waiting import WaitingQueue, rank

PREEMPTIONS = ("recompute", "swap")


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step.

    Args:
        max_running: requests that hold blocks at once.
        token_budget: tokens of a step; at least `max_running`, so that everyone who decodes gets one.
        max_chunk: tokens of one prefill in one step; None means that only the budget limits them.
        max_context: the longest text, prompt and answer together.
        preemption: "recompute" throws away keys and values, "swap" keeps them in host memory while that has room.

    Raises:
        ValueError: a value outside these limits.
    """

    max_running: int = 64
    token_budget: int = 512
    max_chunk: int | None = None
    max_context: int = 2048
    preemption: str = "recompute"

    def __post_init__(self) -> None:
        for name in ("max_running", "token_budget", "max_context"):
            check_count(name, getattr(self, name), 1)
        if self.max_chunk is not None:
            check_count("max_chunk", self.max_chunk, 1)
        if self.token_budget < self.max_running:
            raise ValueError(
                f"token_budget must be at least max_running, {self.max_running}, or some would wait for others to "
                f"end; got {self.token_budget}"
            )
        if self.preemption not in PREEMPTIONS:
            raise ValueError(f"preemption must be one of {', '.join(PREEMPTIONS)}, got {self.preemption!r}")


class Scheduler:
    """Decides what each step computes, and who holds blocks meanwhile.

        add ──► waiting ──admit──► running ──commit──► finished
                   ▲                  │
                   └──── preempt ─────┘

    Beams of a search rest between a commit and the next branch; see `Status`.

    Args:
        config: the limits.
        memory: the blocks.

    Source: Yu et al. 2022 (Orca) and Agrawal et al. 2024 (2403.02310); module sections 2.1 to 2.4.
    """

    def __init__(self, config: SchedulerConfig, memory: KVManager) -> None:
        self.config = config
        self.memory = memory
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        # Beams that wait for others of their search, in a place and with blocks that can be taken from them.
        self._resting: list[Request] = []
        self._steps = 0
        self._arrivals = 0
        # Places among the running that are kept for samples which start when their prompt is computed.
        self._promised_places = 0

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Requests with blocks, most urgent first."""
        return tuple(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._running and not len(self._waiting)

    def check_can_ever_run(self, num_prompt: int, max_tokens: int, num_samples: int) -> None:
        """Refuses at once what would wait for ever.

        Raises:
            ValueError: longer than the context, more blocks than the pool has, or more samples than may run at once.
        """
        length = num_prompt + max_tokens
        if length > self.config.max_context:
            raise ValueError(
                f"a prompt of {num_prompt} tokens and max_tokens of {max_tokens} need {length} tokens, and the context "
                f"holds {self.config.max_context}; shorten the prompt or lower max_tokens"
            )
        # The last token is never computed: nothing comes after it.
        needed = blocks_for(length - 1, self.memory.block_size)
        if needed > self.memory.num_blocks:
            raise ValueError(
                f"a text of {length} tokens needs {needed} blocks, and the pool has {self.memory.num_blocks}; shorten "
                f"the prompt, lower max_tokens or give the engine more memory"
            )
        if num_samples > self.config.max_running:
            raise ValueError(
                f"{num_samples} samples or beams of a prompt run at once, and max_running is "
                f"{self.config.max_running}; lower n or beam_width, or raise max_running"
            )

    def add(self, request: Request) -> None:
        """Takes in a request, and with it the siblings that will share its prompt.

        Raises:
            ValueError: a priority that is no int, or see `check_can_ever_run`. Nothing has changed then.
        """
        if isinstance(request.priority, bool) or not isinstance(request.priority, int):
            raise ValueError(f"priority must be an int, smaller for more urgent, got {request.priority!r}")
        self.check_can_ever_run(len(request.prompt), request.params.max_tokens, 1 + len(request.siblings))
        for one in (request, *request.siblings):
            one.arrival, one.waiting_since = self._arrivals, self._steps
            self._arrivals += 1
        self._waiting.push(request)

    def schedule(self, propose: ProposeDrafts | None = None) -> Step:
        """Decides the next step.

        1. Requests that decode get their token, and drafts as far as these fit without cost to others.
        2. What is left of the budget goes to prefills under way, then to requests that wait, by urgency.

        While blocks are too few for a running request, the least urgent of all is preempted, beams that rest before all
        others, in the end the very one that asks. Nobody who waits preempts anybody but beams that rest while nothing
        else is to be done, and nobody is admitted in a step that preempts.

        Args:
            propose: asks for drafts; None means no speculation.
        """
        self._steps += 1
        moves: list[Move] = []
        work: dict[Request, Work] = {}
        preempted: list[Request] = []
        budget = self.config.token_budget
        draft_room = None if propose is None else DraftRoom(propose, self._running, self.memory)
        self._running.sort(key=rank)
        for request in sorted(self._running, key=lambda one: not one.is_decoding):
            if request.status is not Status.RUNNING:
                continue  # preempted for the sake of a more urgent one, in this very loop
            count = min(request.num_missing, budget, self.config.max_chunk or budget)
            if count == 0:
                break
            while not self.memory.fits(request, count):
                if self._resting:
                    preempted.append(self._set_aside(moves))
                    continue
                victim = self._running[-1]
                moves += self._preempt(victim)
                preempted.append(victim)
                if victim in work:
                    budget += len(work.pop(victim).tokens)
                if victim is request:
                    break
            if request.status is Status.RUNNING:
                drafts = NO_DRAFTS if draft_room is None else draft_room.drafts(request, budget - count)
                work[request] = self._give(request, count, drafts, moves)
                budget -= len(work[request].tokens)
        promised = self._promised_blocks() if len(self._waiting) else 0
        aside: list[Request] = []
        while not preempted and budget > 0 and (waiting := self._waiting.peek()) is not None:
            if self._admit(waiting, promised, moves):
                count = min(waiting.num_missing, budget, self.config.max_chunk or budget)
                work[waiting] = self._give(waiting, count, NO_DRAFTS, moves)
                promised += self._blocks_to_come(waiting)
                budget -= count
            elif not work and self._resting:
                aside.append(self._set_aside(moves))  # it may rest for the sake of the very one that can't be admitted
            else:
                break
        open_blocks = self.memory.open_blocks((*self._running, *self._resting))
        return Step(tuple(work.values()), tuple(moves), (*preempted, *aside), open_blocks)

    def commit(
        self, step: Step, emitted: Mapping[Request, Sequence[int]],
        paths: Mapping[Request, Sequence[int]] | None = None,
    ) -> list[SlotMove]:  # fmt: skip
        """Takes over what a step has computed.

        Args:
            step: the one decided last.
            emitted: for each request whose work gives tokens, those that its text grows by: the drafts that were
                accepted, and one more. A sibling's first token is among them. A beam gets none, and rests.
            paths: for each request whose drafts were a tree, the indices of those that were accepted.

        Returns:
            What has to be copied before the next step, so that accepted drafts lie one behind the other.
        """
        moves: list[SlotMove] = []
        for work in step.work:
            request = work.request
            if request.status is not Status.RUNNING:
                continue  # aborted while the step ran
            if not work.gives_token:
                request.num_computed = work.end
            elif request.is_beam:
                request.num_computed = work.end
                self._rest(request)
            else:
                new = list(emitted[request])
                if work.parents:
                    moves += work.kept((paths or {})[request])
                request.num_computed = work.end - work.num_drafts + len(new) - 1
                request.table.truncate(request.num_computed)
                self._start_siblings(request, emitted)
                request.tokens += new
            # While a prompt is computed; what is written is kept at the end.
            if not work.gives_token or len(work.tokens) > 1 + work.num_drafts:
                self.memory.remember(request)
        return moves

    def branch(self, branches: Sequence[Branch]) -> None:
        """Lets beams go on that have rested.

        Args:
            branches: all of a search. A beam that takes over another's text is parent of none.
        """
        for branch in branches:
            if branch.beam is not branch.parent:
                self._take_over(branch.beam, branch.parent)
        for branch in branches:
            branch.beam.tokens.append(branch.token)
            self._wake(branch.beam)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request wherever it is; its blocks are free at once, and stay findable by their tokens."""
        if request.status is Status.FINISHED:
            return
        if request.leader is not None:  # its place is given back when the others start
            request.status, request.finish_reason = Status.FINISHED, reason
            return
        if request.status is Status.RUNNING:
            self._running.remove(request)
            self._promised_places -= len(request.siblings)
        elif request.status is Status.WAITING:
            self._waiting.forget_one()
        elif request in self._resting:
            self._resting.remove(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        self.memory.release(request, keep=True)
        for sibling in request.siblings:  # they cannot start any more
            if sibling.status is not Status.FINISHED:
                sibling.status, sibling.finish_reason = Status.FINISHED, reason
        request.siblings = []

    def _give(self, request: Request, count: int, drafts: DraftTree, moves: list[Move]) -> Work:
        """The next tokens of a request, with slots for them."""
        start, end = request.num_computed, request.num_computed + count
        num_drafts = len(drafts.tokens)
        slots, copies = self.memory.reserve(request, count + num_drafts)
        moves += copies
        is_line = drafts.parents == tuple(range(-1, num_drafts - 1))
        return Work(
            request, start, (*request.tokens[start:end], *drafts.tokens), num_drafts, tuple(slots),
            tuple(request.table.blocks), end == len(request.tokens), () if is_line else drafts.parents,
        )  # fmt: skip

    def _admit(self, request: Request, promised: int, moves: list[Move]) -> bool:
        """Makes the first of the waiting a running one if all that it knows fits, and leaves it waiting if not.

        Args:
            request: the first of the waiting.
            promised: blocks that prefills under way have yet to take.
            moves: to add to.
        """
        places = 1 + len(request.siblings)
        if places > self._free_places():
            return False
        if not request.host_blocks:
            request.num_computed = self.memory.attach_prefix(request)
        if not self._has_room(request, promised):
            # What was hit in part of a block costs a block more than the text alone would.
            request.num_computed = self.memory.drop_partial_block(request)
        if not self._has_room(request, promised):
            if not request.host_blocks:
                self.memory.release(request)
                request.num_computed = 0
            return False
        if request.host_blocks:
            moves += self.memory.swap_in(request)
        elif request.num_output == 0:
            request.num_cached = request.num_computed
        self._waiting.pop()
        request.status = Status.RUNNING
        self._running.append(request)
        self._promised_places += len(request.siblings)
        return True

    def _free_places(self) -> int:
        """How many more requests may hold blocks."""
        return self.config.max_running - len(self._running) - len(self._resting) - self._promised_places

    def _has_room(self, request: Request, promised: int) -> bool:
        """Whether the whole text of a waiting request fits, with a block to grow into if others run.

        Who is admitted for less is soon preempted.
        """
        wanted = self._blocks_to_come(request)
        wanted += request.table.length % self.memory.block_size > 0  # the copy of a block that was hit in part
        spare = 1 + len(request.siblings) if self._running else 0
        return wanted + promised + spare <= self.memory.num_free

    def _promised_blocks(self) -> int:
        """Blocks that prefills under way have yet to take."""
        return sum(self._blocks_to_come(request) for request in self._running if not request.is_decoding)

    def _blocks_to_come(self, request: Request) -> int:
        """Blocks that what is known of a request needs besides its own."""
        size = self.memory.block_size
        return blocks_for(len(request.tokens), size) - blocks_for(request.table.length, size)

    def _preempt(self, request: Request) -> list[Move]:
        """Takes a running request's blocks; it waits again, at its old place."""
        moves = self._take_blocks(request)
        self._running.remove(request)
        self._promised_places -= len(request.siblings)
        request.status = Status.WAITING
        self._waiting.push(request)
        return moves

    def _take_blocks(self, request: Request) -> list[Move]:
        """Takes a request's blocks, to host memory if it has a choice and room."""
        if self.config.preemption == "swap" and self.memory.can_swap_out(request):
            return self.memory.swap_out(request)
        self.memory.release(request, keep=True)
        request.num_computed = 0
        return []

    def _start_siblings(self, request: Request, emitted: Mapping[Request, Sequence[int]]) -> None:
        """The prompt is computed: the other samples begin, on the same blocks."""
        if request.siblings:  # what is findable for one is so for all
            self.memory.remember(request)
        self._promised_places -= len(request.siblings)
        for sibling in request.siblings:
            sibling.leader = None
            if sibling.status is Status.FINISHED:
                continue
            sibling.table, sibling.num_findable = request.table.fork(), request.num_findable
            sibling.num_computed = sibling.num_cached = request.num_computed
            sibling.tokens += emitted[sibling]
            sibling.status = Status.RUNNING
            self._running.append(sibling)
        request.siblings = []

    def _rest(self, beam: Request) -> None:
        """A beam has nothing to compute until its search goes on; with the first, the others get their places."""
        self._running.remove(beam)
        self._promised_places -= len(beam.siblings)
        for one in (beam, *beam.siblings):
            one.leader, one.status = None, Status.RESTING
            self._resting.append(one)
        beam.siblings = []

    def _set_aside(self, moves: list[Move]) -> Request:
        """Takes place and blocks from the least urgent beam that rests. It waits for nothing but its search."""
        beam = max(self._resting, key=rank)
        self._resting.remove(beam)
        moves += self._take_blocks(beam)
        return beam

    def _take_over(self, beam: Request, parent: Request) -> None:
        """A beam gives up its text and goes on with another's, on the same blocks if it has a place for them."""
        self.memory.release(beam)
        beam.tokens, beam.num_computed = list(parent.tokens), 0
        if parent in self._resting and beam not in self._resting and self._free_places():
            self._resting.append(beam)
        if parent not in self._resting or beam in self._resting:
            self.memory.fork(beam, parent)

    def _wake(self, beam: Request) -> None:
        """A beam has a new token to compute: at once if it still has its blocks, or as one of those who wait."""
        if beam in self._resting:
            self._resting.remove(beam)
        if beam.table.length:
            beam.status = Status.RUNNING
            self._running.append(beam)
        else:
            beam.status = Status.WAITING
            self._waiting.push(beam)
