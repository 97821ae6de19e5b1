"""Drafts for requests that decode: each has a drafter of its own, and the engine asks and judges them all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from labkit.checks import check_count
from labkit.drafting import Drafter, DraftTree, TreeDrafter
from labkit.randomness import uniform
from labkit.trained_heads.loading import FOLDER
from solutions.speculative.rounds import DRAFT, judgeable_drafts, place_uniform
from solutions.speculative.tree_drafts import usable_tree
from solutions.speculative.tree_loop import PLACE

from ..request import Request
from .draft_room import NO_DRAFTS
from .judging import Verdict, had_no_choice, judge_by_comparison, judge_run, judge_tree
from .pass_costs import PassCosts

DRAFTERS: Mapping[str, str] = {
    "n-gram": "n-gram", "draft-model": "draft model", "medusa": "Medusa", "eagle": "EAGLE", "eagle-2": "EAGLE-2",
    "eagle-3": "EAGLE-3", "mtp": "MTP", "lookahead": "lookahead", "adaptive": "adaptive",
}  # fmt: skip
"""Those that have names, with what lab 14 calls them."""

MakeDrafter = Callable[[], Drafter | TreeDrafter]
"""Makes the drafter of one request."""

_TREE_DRAWS = 64
"""Random numbers that a drafter of trees is given; as in lab 14."""


@dataclass(frozen=True)
class SpeculationConfig:
    """How the engine speculates.

    Args:
        drafter: one of `DRAFTERS`, or what makes a drafter for one request; that one reads the request's text alone.
        num_drafts: the most drafts in a line of a request in one step. A tree is as large as its drafter makes it.
        drawn: lets a named drafter with a distribution draw its drafts with the request's own settings. More of them
            are kept then at temperatures above 0, and the text follows the same distribution, but is no longer the
            very text that plain decoding gives for the seed.
        heads: folder of the trained heads that a named drafter takes.
        costs: of a pass, for the adaptive drafter.

    Raises:
        ValueError: an unknown name, or `num_drafts` no int of at least 1.
    """

    drafter: str | MakeDrafter
    num_drafts: int = 4
    drawn: bool = False
    heads: Path = FOLDER
    costs: PassCosts = field(default_factory=PassCosts)

    def __post_init__(self) -> None:
        if isinstance(self.drafter, str) and self.drafter not in DRAFTERS:
            raise ValueError(f"speculation must be one of {', '.join(DRAFTERS)}, got {self.drafter!r}")
        check_count("num_drafts", self.num_drafts, 1)


class MakeRequestDrafter(Protocol):
    """Makes the drafter of one request; see `drafters`."""

    def __call__(self, request: Request) -> Drafter | TreeDrafter:
        """It may remember the request's text."""


@dataclass(frozen=True)
class _Proposal:
    """What a drafter has handed over for one step.

    Args:
        tree: the drafts, a line or a tree, and what they were drawn from.
        is_run: whether they come from a drafter of lines: lab 14 numbers the random numbers of the two differently.
    """

    tree: DraftTree
    is_run: bool


class Speculator:
    """Asks each request's drafter, and judges what came of it.

    A drafter without chance is judged by comparison: each place is drawn as if nothing had been drafted, with that
    place's own random number, and drafts are kept as long as they are what was drawn. The text is then the very text
    of plain decoding, at any temperature. A drafter that draws its tokens from q is judged by the rule of lab 14, which
    keeps the distribution and more of the drafts, but not the very token of a seed.

    Args:
        make_drafter: makes a drafter for one request.
        num_drafts: the most drafts of a line.
        vocab_size: of the target.
    """

    def __init__(self, make_drafter: MakeRequestDrafter, num_drafts: int, vocab_size: int) -> None:
        self._make_drafter = make_drafter
        self.num_drafts = num_drafts
        self._vocab_size = vocab_size
        self._drafters: dict[Request, Drafter | TreeDrafter] = {}
        self._proposals: dict[Request, _Proposal] = {}
        self._drawing: set[Request] = set()

    def propose(self, request: Request, room: int, depth: int) -> DraftTree:
        """What the target is to compute.

        Args:
            request: decodes.
            room: the most drafts in the pass.
            depth: the longest path.

        Returns:
            At most `room` drafts, all of them ids that the target can read.
        """
        if request not in self._drafters:
            self._drafters[request] = self._make_drafter(request)
        drafter = self._drafters[request]
        if isinstance(drafter, TreeDrafter):
            proposal = _Proposal(self._tree(drafter, request, room, depth), is_run=False)
        else:
            proposal = _Proposal(self._run(drafter, request, min(room, depth, self.num_drafts)), is_run=True)
        self._proposals[request] = proposal
        # What the target can't read is never kept: any token may hold its place in the pass.
        tokens = tuple(token if token < self._vocab_size else 0 for token in proposal.tree.tokens)
        return DraftTree(tokens, proposal.tree.parents)

    def observe(self, request: Request, logits: Tensor) -> None:
        """Lets a drafter that learns from the target see what that said.

        Args:
            request: whose drafts were computed.
            logits: after the text, then after each draft, as the model gave them: `[drafts + 1, vocab_size]`.
        """
        if (observe := getattr(self._drafters[request], "observe", None)) is not None:
            tree = self._proposals[request].tree
            observe(tree.tokens, tree.parents, logits.argmax(-1).tolist())

    def judge(self, request: Request, drawn: Sequence[int], distributions: Callable[[], Tensor]) -> Verdict:
        """Which of its drafts a text keeps.

        Args:
            request: whose they are.
            drawn: what plain decoding would draw after the text, then after each draft that was computed; there are
                either all of the last `propose` or none.
            distributions: the target's at these places, after filters and masks, if they are needed.
        """
        proposal = self._proposals[request] if len(drawn) > 1 else _Proposal(NO_DRAFTS, is_run=True)
        tree = proposal.tree
        if proposal.is_run and not had_no_choice(tree):
            self._drawing.add(request)
        # The random numbers of a text whose runs are drawn are numbered differently: to draw one of its places as
        # plain decoding does would use a number that an earlier place has used already.
        if request in self._drawing:
            return judge_run(distributions(), tree, request.params, request.num_output)
        if had_no_choice(tree):
            return judge_by_comparison(drawn, tree)
        return judge_tree(distributions(), tree, request.params, request.num_output)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._drafters.pop(request, None)
        self._proposals.pop(request, None)
        self._drawing.discard(request)

    def _run(self, drafter: Drafter, request: Request, most: int) -> DraftTree:
        """Drafts in a line."""
        place, text = request.num_output, list(request.tokens)
        uniforms = [place_uniform(request.params, place + i, DRAFT) for i in range(most)]
        draft = drafter.propose(text, most, uniforms)
        tokens, _ = judgeable_drafts(draft, most, text, self._vocab_size)
        count = len(tokens)
        return DraftTree(
            tuple(tokens), tuple(range(-1, count - 1)), None if draft.probs is None else draft.probs[:count]
        )

    def _tree(self, drafter: TreeDrafter, request: Request, room: int, depth: int) -> DraftTree:
        """Drafts in a tree."""
        base = request.num_output * PLACE + PLACE // 2
        uniforms = [uniform(request.params.seed, base + i) for i in range(_TREE_DRAWS)]
        tree = drafter.propose_tree(list(request.tokens), depth, uniforms)
        return usable_tree(tree, depth, room, self._vocab_size)
