"""Task 3c: the whole loop: draft, verify in one pass, roll back, go on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

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
    start, pending = target.length, ids
    text, generated, rounds = list(ids), list[int](), list[Round]()
    while len(generated) < max_new_tokens:
        place = len(generated)
        # The last token needs no draft: a pass gives one token more than it verifies. Nor does it need room.
        most = min(num_drafts, max_new_tokens - place - 1)
        draws = [place_uniform(params, place + i, DRAFT) for i in range(most)]
        draft = drafter.propose(list(text), most, draws) if most else Draft(())
        drafts, masks = judgeable_drafts(draft, most, text, target.vocab_size, allowed)
        # A last draft that the target can't read is judged all the same: with p = 0, not by dropping it.
        readable = len(masks) - 1
        logits = target.append([*pending, *drafts[:readable]])[-readable - 1 :]
        if allowed is not None:
            logits = logits.masked_fill(~torch.stack(masks), -torch.inf)
        tokens, kept = _judge(distribution(logits, params), draft, drafts, params, place)
        emitted, ended = until_the_end(tokens, generated, max_new_tokens, stop_tokens, finished)
        generated += emitted
        text += emitted
        rounds.append(Round(len(drafts), min(kept, len(emitted)), len(emitted)))
        target.truncate(start + len(text) - 1)
        if ended:
            break
        pending = text[-1:]
    return Speculation(tuple(generated), tuple(rounds))
    # END SOLUTION


# BEGIN SOLUTION
def _judge(p: Tensor, draft: Draft, drafts: list[int], params: SamplingParams, place: int) -> tuple[list[int], int]:
    """The tokens that `verify` lets through, and how many of them are drafts."""
    q = draft_probs(draft, len(drafts), p.shape[1])
    p = widen(p, q.shape[1])
    # Behind a draft that the target couldn't read there is no row, and none is needed; any distribution will do.
    p = torch.cat([p, p[-1:]])[: len(drafts) + 1]
    uniforms = [[place_uniform(params, place + i, use) for use in (ACCEPT, OWN)] for i in range(len(drafts) + 1)]
    tokens, kept = verify(
        p[None], q[None], torch.tensor([drafts], dtype=torch.int64), torch.tensor([uniforms], dtype=torch.float64)
    )
    return tokens[0, : int(kept) + 1].tolist(), int(kept)


# END SOLUTION
