"""Random lives of the engine's scheduler and blocks, under the KV oracle: every slot remembers its text."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grader.judge.kv_oracle import Ledger
from labkit.drafting import DraftTree
from solutions.engine.attention.kivi_attention import KiviAttention
from solutions.engine.beam_search import BeamSearch, BeamSearchParams, Hypothesis
from solutions.engine.kv_manager import PREFIX_CACHES, KVManager, Move, MoveKind
from solutions.engine.memory.kivi_pool import KiviPool
from solutions.engine.models.kv_shape import KVShape
from solutions.engine.request import FinishReason, Request, Status, blocks_for
from solutions.engine.sampling_params import SamplingParams
from solutions.engine.scheduler import PREEMPTIONS, Scheduler, SchedulerConfig
from solutions.engine.step import Step, Work
from solutions.engine.waiting import rank

ALPHABET = 3
"""Few token ids, so that unrelated prompts share prefixes, too."""
NAMESPACES = {(None, None): 0, ("a", None): 1, (None, "a"): 2}
"""By salt and adapter: what is cached for one is nothing to the others."""
MAX_CONTEXT = 64
MAX_DRAFTS = 7


def next_token(tokens: list[int], seed: int) -> int:
    """What a text goes on with: a pure function of all of it, so that a wrong order or a lost token shows."""
    return zlib.crc32(bytes([*tokens, seed])) % ALPHABET


def next_logits(tokens: list[int]) -> Tensor:
    """The same for a beam, of which every continuation has its own."""
    return torch.tensor([zlib.crc32(bytes([*tokens, token])) % 1000 / 500 for token in range(ALPHABET)])


def search_alone(prompt: tuple[int, ...], params: BeamSearchParams) -> list[Hypothesis]:
    """What a search finds that nobody schedules."""
    table = KVManager(1, 1, "none").new_table()
    settings = SamplingParams(max_tokens=params.max_tokens)
    search = BeamSearch(params, [Request("", prompt, settings, table) for _ in range(params.beam_width)], [0])
    alive = [search.beams[0]]
    while not search.is_done:
        for beam in alive:
            search.offer(beam, next_logits(beam.tokens))
        branches = search.decide()
        texts = [[*branch.parent.tokens, branch.token] for branch in branches]
        alive = [branch.beam for branch in branches]
        for beam, text in zip(alive, texts, strict=True):
            beam.tokens = text
    return search.answers()


@dataclass
class Facts:
    """What happened in a schedule; a proof that nothing ever happens in proves nothing."""

    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    swapped_in: int = 0
    copied: int = 0
    cache_hits: int = 0
    forked: int = 0
    drafts_kept: int = 0
    drafts_dropped: int = 0
    drafts_moved: int = 0
    chunked: int = 0
    refused: int = 0
    searched: int = 0
    beams_forked: int = 0
    beams_dropped: int = 0
    beams_rested: int = 0
    beams_set_aside: int = 0
    paged: int = 0

    def add(self, other: Facts) -> None:
        """Sums up."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class DraftsLast(Scheduler):
    """A scheduler that is watched: once it has handed out a draft in a step, it must not take anybody's blocks."""

    drafted = False

    def _take_blocks(self, request: Request) -> list[Move]:
        assert not self.drafted, "somebody lost his blocks for drafts"
        return super()._take_blocks(request)


@dataclass
class Schedule:
    """One random life of a scheduler.

    Args:
        seed: decides everything.
    """

    seed: int
    facts: Facts = field(default_factory=Facts)

    def __post_init__(self) -> None:
        self.random = choose = random.Random(self.seed)
        self.block_size = choose.choice([1, 2, 3, 4, 8])
        self.num_blocks = choose.randint(4, 24)
        max_running = choose.randint(1, 6)
        self.config = SchedulerConfig(
            max_running=max_running,
            token_budget=max_running + choose.choice([0, 1, 5, 30]),
            max_chunk=choose.choice([None, None, 1, 3, 7]),
            max_context=MAX_CONTEXT,
            preemption=choose.choice(PREEMPTIONS),
        )
        self.num_host_blocks = choose.choice([0, 3, 30])
        cache = choose.choice(PREFIX_CACHES)
        self.speculate = choose.random() < 0.5
        seals_blocks = choose.random() < 0.15
        self.memory = KVManager(self.num_blocks, self.block_size, cache, self.num_host_blocks, seals_blocks)
        # Hands out pages of open blocks for all that happens, and has as many as there can be.
        self.pages = KiviPool(
            KVShape(1, 2, 1, 2), 4, self.num_blocks, self.block_size, max_running, self.num_host_blocks,
            max_drafts=MAX_DRAFTS if self.speculate else 0,
        ) if seals_blocks else None  # fmt: skip
        self.scheduler = DraftsLast(self.config, self.memory)
        self.ledger = Ledger(self.num_blocks * self.block_size)
        self.host: dict[int, list[int | None]] = {}
        self.shared = [self._tokens(choose.randint(1, 20)) for _ in range(3)]
        self.alive: list[Request] = []
        self.searches: list[BeamSearch] = []
        self.where = (
            f"seed {self.seed}: {self.num_blocks} blocks of {self.block_size}, {cache} cache, {self.config}, "
            f"{self.num_host_blocks} host blocks"
        )

    def run(self, num_requests: int = 12) -> Facts:
        """Serves so many requests to their ends.

        Raises:
            AssertionError: with all that is needed to repeat it.
        """
        try:
            left = num_requests
            for _ in range(4000):
                if left and self.random.random() < 0.4:
                    left -= 1
                    self._arrive()
                if self.alive and self.random.random() < 0.03:
                    self._abort()
                if not self.scheduler.is_idle:
                    self._step()
                elif not left:
                    break
            assert self.scheduler.is_idle and not left, "requests were left unfinished"
            assert not self.alive, f"{len(self.alive)} requests were forgotten"
            self.memory.check_idle()
        except Exception as error:
            raise AssertionError(f"{self.where}: {type(error).__name__} {error}") from error
        return self.facts

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(ALPHABET) for _ in range(count)]

    def _arrive(self) -> None:
        choose = self.random
        prompt = choose.choice(self.shared)[: choose.randint(1, 20)] + self._tokens(choose.randint(0, 6))
        is_beam = choose.random() < 0.2
        n = choose.choice([1, 1, 1, 2, 3]) if not is_beam else choose.randint(1, 4)
        salt, adapter = choose.choice(list(NAMESPACES))
        params = [
            SamplingParams(temperature=0.0, max_tokens=choose.randint(1, 12), n=n, seed=seed) for seed in range(n)
        ]
        requests = [
            Request(
                str(index), tuple(prompt), one, self.memory.new_table(), priority=choose.choice([0, 0, 1]), salt=salt,
                adapter=adapter, is_beam=is_beam,
            )
            for index, one in enumerate(params)
        ]  # fmt: skip
        first, *others = requests
        for other in others:
            other.priority, other.params, other.leader = first.priority, other.params, first
        first.siblings = others
        if is_beam:
            params = [first.params] * n
        longest = max(len(prompt) + one.max_tokens for one in params)
        too_long = longest > MAX_CONTEXT or blocks_for(longest - 1, self.block_size) > self.num_blocks
        try:
            for one in params:
                self.scheduler.check_can_ever_run(len(prompt), one.max_tokens, n)
        except ValueError:
            assert too_long or n > self.config.max_running, "a request that could run was refused"
            self.facts.refused += 1
            return
        self.scheduler.add(first)
        self.alive += requests
        if is_beam:
            wanted = BeamSearchParams(
                n, first.params.max_tokens, choose.choice([0.0, 1.0, -1.0]), choose.choice([False, True, "never"]), n
            )
            self.searches.append(BeamSearch(wanted, requests, [0]))

    def _abort(self) -> None:
        request = self.random.choice(self.alive)
        if request.is_beam:
            search = next(search for search in self.searches if request in search.beams)
            self._end_search(search)
            self.facts.aborted += len(search.beams)
            return
        ended = [one for one in (request, *request.siblings) if one.status is not Status.FINISHED]
        self.scheduler.finish(request, FinishReason.ABORT)
        for one in ended:
            assert one.status is Status.FINISHED
            self.alive.remove(one)
        self.facts.aborted += len(ended)

    def _step(self) -> None:
        before = self.scheduler.running
        decoding = [request for request in before if request.is_decoding]
        self.scheduler.drafted = False
        step = self.scheduler.schedule(self._propose if self.speculate else None)
        served = {*step.preempted, *(work.request for work in step.work)}
        assert served.issuperset(decoding), "the drafts of some have taken the turn of others"
        assert step.work, "a step did nothing, and work is left"
        most = self.config.max_chunk or self.config.token_budget
        assert all(len(work.tokens) - work.num_drafts <= most for work in step.work), "a piece is longer than may be"
        self._check_who_gave_way(before, step)
        assert step.num_tokens <= self.config.token_budget, f"{step.num_tokens} tokens exceed the budget"
        assert len(self.scheduler.running) <= self.config.max_running
        self._move(step)
        if self.pages is not None:
            self._hand_out_pages(self.pages, step)
        for work in step.work:
            self._compute(work)
        for work in step.work:  # only after all have written: a slot with two writers shows now
            self._read(work)
        self._commit(step)
        self.memory._pool.check()
        self.facts.preempted += len(step.preempted)
        self.facts.beams_set_aside += sum(one.status is Status.RESTING for one in step.preempted)

    def _check_who_gave_way(self, before: Sequence[Request], step: Step) -> None:
        lost = [request for request in step.preempted if request.status is Status.WAITING]
        kept = {request for request in before if request.status is Status.RUNNING}
        assert not lost or kept == set(self.scheduler.running), "somebody was admitted while others lost their blocks"
        aside = [request for request in step.preempted if request.status is Status.RESTING]
        for gone, left in ((lost, kept), (aside, self.scheduler._resting)):
            if gone and left:
                assert max(map(rank, left)) < min(map(rank, gone)), "a less urgent one has kept its blocks"

    def _move(self, step: Step) -> None:
        size = self.block_size
        held = self.ledger._written
        for move in step.moves:
            if move.kind is MoveKind.COPY:
                self.ledger.copy(move.source, move.target, size)
                self.facts.copied += 1
            elif move.kind is MoveKind.OUT:
                self.host[move.target] = held[move.source * size : (move.source + 1) * size]
            else:
                held[move.target * size : (move.target + 1) * size] = self.host[move.source]
                self.facts.swapped_in += 1

    def _hand_out_pages(self, pages: KiviPool, step: Step) -> None:
        pages.move(step.moves, step.open_blocks)
        for work in step.work:
            if work.start % self.block_size:
                assert work.blocks[work.start // self.block_size] in pages._page_of, "an open block has lost its page"
        KiviAttention(pages, step.work)
        held = list(pages._page_of.values())
        assert len(set(held)) == len(held), "two blocks have one page"
        self.facts.paged += len(held)

    def _known(self, work: Work) -> list[int]:
        """What stands before the work's drafts, or all of it if there are none."""
        return [*work.request.tokens[: work.start], *work.tokens[: len(work.tokens) - work.num_drafts]]

    def _compute(self, work: Work) -> None:
        request, known = work.request, self._known(work)
        assert work.start == request.num_computed
        assert known == request.tokens[: len(known)]
        assert work.gives_token == (len(known) == len(request.tokens))
        assert len(work.slots) == len(work.tokens)
        self.facts.chunked += len(known) < len(request.prompt)
        numbers = self._numbers(work, known)[work.start :]
        drafts = [self._numbers(work, [*known, *(work.drafts[i] for i in path)])[-1] for path in work.paths[1:]]
        self.ledger.write(list(work.slots), [*numbers, *drafts])

    def _read(self, work: Work) -> None:
        """The newest token sees the text before it, each draft that text and the drafts that lead to it."""
        size, known = self.block_size, self._known(work)
        slots = [work.blocks[i // size] * size + i % size for i in range(work.end)]
        assert slots[work.start :] == list(work.slots), "slots and block table disagree"
        for path in work.paths:
            seen = [*slots[: len(known)], *(slots[len(known) + i] for i in path)]
            text = [*known, *(work.drafts[i] for i in path)]
            self.ledger.read(f"request {work.request.request_id}", seen, self._numbers(work, text))

    def _numbers(self, work: Work, text: list[int]) -> list[int]:
        return self.ledger.numbers(text, NAMESPACES[work.request.salt, work.request.adapter])

    def _propose(self, request: Request, room: int, depth: int) -> DraftTree:
        """A tree or a line whose deepest branch is right for a while; equal siblings come up, too."""
        assert room > 0 and depth > 0 and not request.is_beam
        paths: list[list[int]] = [[]]
        tokens, parents = list[int](), list[int]()
        branches = self.random.choice([1, 1, 3]) if self.pages is None else 1
        for _ in range(self.random.randint(0, min(room, MAX_DRAFTS))):
            node = len(tokens) - 1 if branches == 1 else self.random.randrange(-1, len(tokens))
            if len(paths[node + 1]) == depth:
                continue
            right = next_token([*request.tokens, *paths[node + 1]], request.params.seed)
            token = right if self.random.random() < 0.7 else (right + 1) % ALPHABET
            paths.append([*paths[node + 1], token])
            tokens.append(token)
            parents.append(node)
        self.scheduler.drafted |= bool(tokens)
        return DraftTree(tuple(tokens), tuple(parents))

    def _commit(self, step: Step) -> None:
        emitted: dict[Request, list[int]] = {}
        paths: dict[Request, list[int]] = {}
        for work in step.work:
            if not work.gives_token:
                continue
            request = work.request
            if request.is_beam:
                continue
            emitted[request], paths[request] = self._judge(work)
            for sibling in request.siblings:
                if sibling.status is not Status.FINISHED:
                    emitted[sibling] = [next_token(sibling.tokens, sibling.params.seed)]
                    self.facts.forked += 1
        before = {work.request: work.request.num_computed for work in step.work}
        moves = self.scheduler.commit(step, emitted, paths)
        held = self.ledger._written
        for move, number in zip(moves, [held[move.source] for move in moves], strict=True):
            held[move.target] = number
        self.facts.drafts_moved += len(moves)
        for work in step.work:
            assert work.request.num_computed > before[work.request], "a request that ran made no progress"
        for request in emitted:
            if request.num_output == request.params.max_tokens:
                self._check_finished(request)
        self._search_on(step)

    def _search_on(self, step: Step) -> None:
        for work in step.work:
            if work.gives_token and work.request.is_beam:
                search = next(search for search in self.searches if work.request in search.beams)
                search.offer(work.request, next_logits(work.request.tokens))
                self.facts.beams_rested += not search.is_due
        for search in [search for search in self.searches if search.is_due]:
            branches = search.decide()
            expected = {branch.beam: [*branch.parent.tokens, branch.token] for branch in branches}
            self.facts.beams_forked += len(branches) - len({branch.parent for branch in branches})
            self.facts.beams_dropped += sum(
                branch.beam is not branch.parent and branch.beam.num_output > 0 for branch in branches
            )
            self.scheduler.branch(branches)
            for beam, text in expected.items():
                assert beam.tokens == text, "a beam has another text than its search gave it"
            if search.is_done:
                alone = search_alone(search.beams[0].prompt, search.params)
                assert search.answers() == alone, "a search differs from its run alone"
                self.facts.searched += 1
                self._end_search(search)

    def _end_search(self, search: BeamSearch) -> None:
        self.searches.remove(search)
        for beam in search.beams:
            self.scheduler.finish(beam, FinishReason.ABORT)
            self.alive.remove(beam)

    def _judge(self, work: Work) -> tuple[list[int], list[int]]:
        """The drafts that are right and one token more; and which drafts these are."""
        tokens, path = list(work.request.tokens), list[int]()
        parents = work.parents or tuple(range(-1, work.num_drafts - 1))
        while True:
            tokens.append(next_token(tokens, work.request.params.seed))
            node = path[-1] if path else -1
            right = [i for i, parent in enumerate(parents) if parent == node and work.drafts[i] == tokens[-1]]
            if not right:
                break
            path.append(self.random.choice(right))
        self.facts.drafts_kept += len(path)
        self.facts.drafts_dropped += work.num_drafts - len(path)
        return tokens[len(work.request.tokens) :], path

    def _check_finished(self, request: Request) -> None:
        tokens = list(request.prompt)
        while len(tokens) < request.max_length:
            tokens.append(next_token(tokens, request.params.seed))
        assert request.tokens == tokens, f"request {request.request_id} differs from its run alone"
        self.facts.cache_hits += request.num_cached > 0
        self.facts.finished += 1
        self.scheduler.finish(request, FinishReason.LENGTH)
        self.alive.remove(request)
