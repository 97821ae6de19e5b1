"""What someone asks of a batch, and who drafts for it: runs or trees."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from labkit.checks import check_count, check_tokens
from labkit.drafting import Drafter, TreeDrafter
from labkit.sampling_params import SamplingParams

from .loop import GREEDY
from .rounds import Allowed, Finished
from .tree import verify_tree
from .tree_loop import Judge


@dataclass(frozen=True)
class SpeculativeRequest:
    """What both kinds have in common; the arguments mean what they mean in `speculate` and `speculate_tree`.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: the most tokens to generate, at least 1.
        drafter: nobody else's, since it may remember the text.
        params: how the target's tokens are drawn.
        stop_tokens: ids that end the text.
        finished: called with the generated tokens after each of them; True ends the text there.
        allowed: the mask of tokens that may follow a text.
        arrival: the first step in which the request may run.

    Raises:
        ValueError: a value outside these limits.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    drafter: Drafter | TreeDrafter
    params: SamplingParams = GREEDY
    _: KW_ONLY
    stop_tokens: tuple[int, ...] = ()
    finished: Finished | None = None
    allowed: Allowed | None = None
    arrival: int = 0

    def __post_init__(self) -> None:
        check_tokens("prompt", self.prompt)
        check_count("max_new_tokens", self.max_new_tokens, 1)
        check_count("arrival", self.arrival, 0)


@dataclass(frozen=True)
class RunRequest(SpeculativeRequest):
    """A text for which runs of drafts are proposed, judged by `verify`.

    Args:
        num_drafts: the most drafts a round.
    """

    drafter: Drafter
    num_drafts: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_drafts", self.num_drafts, 0)


@dataclass(frozen=True)
class TreeRequest(SpeculativeRequest):
    """A text for which trees of drafts are proposed.

    Args:
        judge: the rule; with another one than `verify_tree` the text need not follow the target.
    """

    drafter: TreeDrafter
    judge: Judge = verify_tree
