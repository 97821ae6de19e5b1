"""What a drafter hands to the verifier, and what a drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """A guess at how a text goes on.

    Args:
        tokens: the drafted token ids, in order; may be empty.
        probs: `[len(tokens), vocab_size]`, row i the distribution that token i was drawn from, given the tokens
            before it; None says that the drafter had no choice, so each row is 1 at its token.

    Source: q in Leviathan et al. 2023 (2211.17192); module section 3.
    """

    tokens: tuple[int, ...]
    probs: Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """Guesses the next tokens of a text, cheaply.

    It is always given the whole text, so it needs no word about which of its drafts came true: whatever it remembers
    of an earlier text it compares with this one.
    """

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Drafts up to `max_drafts` tokens that may follow `tokens`.

        Args:
            tokens: the text so far, prompt included.
            max_drafts: the most tokens worth drafting.
            uniforms: `max_drafts` numbers in [0, 1), one for each draw; a drafter without chance ignores them.
        """


@dataclass(frozen=True)
class DraftTree:
    """Several guesses that share their beginnings.

    Args:
        tokens: the drafted token ids, parents before their children, siblings in the order in which they were drawn.
        parents: for each token the index of the token before it, -1 for those that follow the text itself.
        probs: `[len(tokens), vocab_size]`, row i the distribution that token i was drawn from, given its ancestors
            and its elder siblings; None says that the drafter had no choice.

    Raises:
        ValueError: other than one parent for each token, or a parent that isn't -1 or the index of an earlier token.

    Source: Miao et al. 2023 (2305.09781), Medusa (2401.10774); module section 3.4.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens need as many parents, got {len(self.parents)}")
        for index, parent in enumerate(self.parents):
            if isinstance(parent, bool) or not isinstance(parent, int) or not -1 <= parent < index:
                raise ValueError(f"parents[{index}] must be -1 or the index of an earlier token, got {parent!r}")


@runtime_checkable
class TreeDrafter(Protocol):
    """Guesses several continuations of a text at once."""

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float]) -> DraftTree:
        """Drafts a tree of tokens that may follow `tokens`.

        Args:
            tokens: the text so far, prompt included.
            max_depth: the longest path worth drafting.
            uniforms: numbers in [0, 1) for its draws; a drafter without chance ignores them.
        """


@dataclass(frozen=True)
class Round:
    """What one round of speculation did.

    Args:
        drafted: tokens that the target verified.
        accepted: those of them that were kept, from the front.
        emitted: tokens that the text grew by: the accepted ones, and the one that the target itself added unless
            the text ended before it.
    """

    drafted: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class Speculation:
    """A generated text and the rounds that made it.

    Args:
        tokens: the generated ids; a stop token is the last of them.
        rounds: in order. The first pass over the prompt is part of the first round.
    """

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts by verified drafts; 0 if nothing was drafted."""
        drafted = sum(round_.drafted for round_ in self.rounds)
        return sum(round_.accepted for round_ in self.rounds) / drafted if drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens emitted by one pass of the target, on average."""
        return len(self.tokens) / len(self.rounds)
