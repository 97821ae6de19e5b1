"""Task 3c: the whole loop: draft, verify in one pass, roll back, go on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

# BEGIN SOLUTION
from dataclasses import dataclass

# END SOLUTION
import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.distribution import token_distribution
from labkit.drafting import Draft, Drafter, Round, Speculation
from labkit.protocols import CachedModel
from labkit.sampling_params import SamplingParams

from .drafts import draft_probs, widen
from .rounds import ACCEPT, DRAFT, OWN, Allowed, Finished, judgeable_drafts, place_uniform, until_the_end
from .verification import verify

Distribution = Callable[[Tensor, SamplingParams], Tensor]

GREEDY = SamplingParams(temperature=0.0)


def speculate(
    target: CachedModel,
    drafter: Drafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    params: SamplingParams = GREEDY,
    num_drafts: int = 4,
    stop_tokens: Collection[int] = (),
    finished: Finished | None = None,
    allowed: Allowed | None = None,
    distribution: Distribution = token_distribution,
) -> Speculation:
    """Generate as the target alone would, several tokens a pass.

    Each round asks the drafter for tokens, gives the newest token and the drafts to the target in one `append`,
    judges the drafts with `verify`, and truncates the target to what was kept. At the end the target remembers the
    prompt and all generated tokens but the last, as after plain generation.

    The random numbers of a token are those of its place, see `place_uniform`. Numbers that a dropped draft had used
    come up again in the next round, and may: nothing that was emitted depended on them.

    Args:
        target: empty, or it remembers what comes before the prompt.
        drafter: called as `propose(prompt + generated, max_drafts, uniforms)`. Whatever it does can cost speed, never
            correctness: see `usable_drafts`. An exception of the drafter ends the generation.
        prompt: token ids, at least one.
        max_new_tokens: the most tokens to generate.
        params: how the target's tokens are drawn; temperature 0 by default.
        num_drafts: the most drafts a round; fewer are asked for where the text must end before, or room is short.
        stop_tokens: ids that end the text, wherever in a round they come up; the one that did is the last token.
        finished: called with the generated tokens after each of them; True ends the text there.
        allowed: called with prompt + generated + drafts so far; a bool mask `[vocab_size]` of the tokens that may
            follow. Others get probability 0 at this position, drafted or not.
        distribution: called as `distribution(logits, params)`.

    Returns:
        The tokens and the rounds.

    Raises:
        ValueError: an empty prompt, ids outside the vocabulary, a count that is no int of at least 1 (`num_drafts`:
            0), or a text that in the longest case exceeds the target's capacity. Nothing has run then.

    Source: Leviathan et al. 2023 (2211.17192); module section 3.
    """
    ids = check_tokens("prompt", prompt, target.vocab_size)
    check_count("max_new_tokens", max_new_tokens, 1)
    check_count("num_drafts", num_drafts, 0)
    needed = target.length + len(ids) + max_new_tokens - 1
    if needed > target.capacity:
        raise ValueError(
            f"{target.length} remembered tokens, a prompt of {len(ids)} and {max_new_tokens} new tokens need room for "
            f"{needed}, but the capacity is {target.capacity}; shorten the prompt or lower max_new_tokens"
        )
    # BEGIN SOLUTION
    start, pending, ended = target.length, ids, False
    text, generated, rounds = list(ids), list[int](), list[Round]()
    while not ended:
        place = len(generated)
        # The last token needs no draft: a pass gives one token more than it verifies. Nor does it need room.
        most = min(num_drafts, max_new_tokens - place - 1)
        now = open_run(drafter, text, place, most, target.vocab_size, params, allowed)
        logits = target.append([*pending, *now.readable])[-len(now.readable) - 1 :]
        [(tokens, kept)] = judge_runs([now], [distribution(now.masked(logits), params)])
        emitted, ended = until_the_end(tokens, generated, max_new_tokens, stop_tokens, finished)
        generated += emitted
        text += emitted
        rounds.append(Round(now.num_drafts, min(kept, len(emitted)), len(emitted)))
        target.truncate(start + len(text) - 1)
        pending = text[-1:]
    return Speculation(tuple(generated), tuple(rounds))
    # END SOLUTION


# BEGIN SOLUTION
@dataclass(frozen=True)
class RunRound:
    """A round of one text, alone or in a batch: what the target is to read, and what it takes to judge its answer.

    Args:
        draft: what the drafter handed over.
        drafts: those of its tokens that will be judged.
        readable: those of them that the target reads; a last one that it can't read is judged all the same, with p = 0,
            not by dropping it.
        masks: of the tokens that may follow the text and each readable draft, `[readable + 1, vocab_size]`; None allows
            all.
        uniforms: `[drafts + 1, 2]`, to judge and to draw.
    """

    draft: Draft
    drafts: list[int]
    readable: list[int]
    masks: Tensor | None
    uniforms: Tensor

    @property
    def parents(self) -> Sequence[int]:
        """A run as a tree: each draft follows the one before it."""
        return range(-1, len(self.readable) - 1)

    @property
    def num_drafts(self) -> int:
        """Drafts that are judged."""
        return len(self.drafts)

    def masked(self, logits: Tensor) -> Tensor:
        """The rows that judge drafts, without the tokens that may not follow."""
        return logits if self.masks is None else logits.masked_fill(~self.masks, -torch.inf)


def open_run(
    drafter: Drafter,
    text: list[int],
    place: int,
    most: int,
    vocab_size: int,
    params: SamplingParams,
    allowed: Allowed | None,
) -> RunRound:
    """Ask a drafter for drafts behind a text of which `place` tokens were generated.

    Args:
        drafter: nobody trusts it.
        text: so far.
        place: tokens of it that were generated.
        most: drafts, at most.
        vocab_size: of the target.
        params: hold the seed.
        allowed: as in `speculate`.
    """
    draws = [place_uniform(params, place + i, DRAFT) for i in range(most)]
    draft = drafter.propose(list(text), most, draws) if most else Draft(())
    drafts, masks = judgeable_drafts(draft, most, text, vocab_size, allowed)
    uniforms = [[place_uniform(params, place + i, use) for use in (ACCEPT, OWN)] for i in range(len(drafts) + 1)]
    return RunRound(
        draft, drafts, drafts[: len(masks) - 1], None if allowed is None else torch.stack(masks),
        torch.tensor(uniforms, dtype=torch.float64),
    )  # fmt: skip


def judge_runs(rounds: Sequence[RunRound], p: Sequence[Tensor]) -> list[tuple[list[int], int]]:
    """Judge the drafts of many texts in one call of `verify`.

    Args:
        rounds: one of each text.
        p: the target's distributions for each, `[readable + 1, vocab_size]`.

    Returns:
        For each the tokens that are let through, and how many of them are drafts.
    """
    counts = [len(now.drafts) for now in rounds]
    q = [draft_probs(now.draft, count, rows.shape[1]) for now, count, rows in zip(rounds, counts, p, strict=True)]
    size, k, width = len(rounds), max(counts), max(rows.shape[1] for rows in q)
    all_p = torch.zeros(size, k + 1, width, dtype=torch.float64)
    all_q = torch.zeros(size, k, width, dtype=torch.float64)
    drafts = torch.zeros(size, k, dtype=torch.int64)
    uniforms = torch.zeros(size, k + 1, 2, dtype=torch.float64)
    for row, (now, count) in enumerate(zip(rounds, counts, strict=True)):
        # Behind a draft that the target couldn't read there is no row, and none is needed; any distribution will do.
        all_p[row, : count + 1] = torch.cat([widen(p[row], width), widen(p[row][-1:], width)])[: count + 1]
        all_q[row, :count] = widen(q[row], width)
        drafts[row, :count] = torch.tensor(now.drafts, dtype=torch.int64)
        uniforms[row, : count + 1] = now.uniforms
    tokens, kept = verify(all_p, all_q, drafts, uniforms, torch.tensor(counts))
    return [(row[: int(count) + 1].tolist(), int(count)) for row, count in zip(tokens, kept, strict=True)]


# END SOLUTION
