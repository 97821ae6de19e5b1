"""A generator of tokens: each judged by `verify` on its own, as soon as its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.distribution import token_distribution
from labkit.drafting import Draft, Drafter, Round, Speculation
from labkit.protocols import CachedModel
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams

from .drafts import draft_probs, usable_drafts, widen
from .verification import verify

GREEDY = SamplingParams(temperature=0.0)
DRAFT, ACCEPT, OWN = range(3)


def speculate(
    target: CachedModel,
    drafter: Drafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    params: SamplingParams = GREEDY,
    num_drafts: int = 4,
    stop_tokens: Collection[int] = (),
    finished: Callable[[list[int]], bool] | None = None,
    allowed: Callable[[list[int]], Tensor] | None = None,
    distribution: Callable[[Tensor, SamplingParams], Tensor] = token_distribution,
) -> Speculation:
    """Rounds whose tokens are taken one by one, until somebody says stop."""
    ids = check_tokens("prompt", prompt, target.vocab_size)
    check_count("max_new_tokens", max_new_tokens, 1)
    check_count("num_drafts", num_drafts, 0)
    before = target.length
    if before + len(ids) + max_new_tokens - 1 > target.capacity:
        raise ValueError(f"{max_new_tokens} new tokens don't fit into {target.capacity}")

    def number(place: int, use: int) -> float:
        return uniform(params.seed, 3 * place + use)

    def probs(logits: Tensor, text: list[int]) -> Tensor:
        row = logits if allowed is None else logits.masked_fill(~allowed(text), -torch.inf)
        return distribution(row[None], params)

    def judged(text: list[int], draft: Draft, count: int) -> Iterator[tuple[int, bool]]:
        """Tokens of one round with whether each is a draft."""
        place = len(text) - len(ids)
        q = draft_probs(draft, count, target.vocab_size)
        drafts = list(draft.tokens[:count])
        readable = next((i for i, token in enumerate(drafts) if token >= target.vocab_size), count)
        fresh = text[target.length - before :]
        logits = target.append([*fresh, *drafts[:readable]])[len(fresh) - 1 :]
        for i, token in enumerate([*drafts, None]):
            p = widen(probs(logits[i], [*text, *drafts[:i]]), max(target.vocab_size, q.shape[1]))
            here = torch.tensor([[[number(place + i, ACCEPT), number(place + i, OWN)]]], dtype=torch.float64)
            if token is None:
                yield int(verify(p[None], q[None, :0], torch.zeros(1, 0, dtype=torch.int64), here)[0][0, 0]), False
                return
            # The row behind the draft isn't judged here; any distribution stands in for it.
            both = torch.stack([p[0], p[0]])[None]
            tokens, kept = verify(both, q[None, i : i + 1], torch.tensor([[token]]), here.repeat(1, 2, 1))
            yield int(tokens[0, 0]), bool(kept[0])
            if not kept[0]:
                return

    text, rounds = list(ids), list[Round]()
    while True:
        left = max_new_tokens - (len(text) - len(ids))
        most = min(num_drafts, left - 1)
        place = max_new_tokens - left
        draft = Draft(())
        if most:
            draft = drafter.propose(list(text), most, [number(place + i, DRAFT) for i in range(most)])
        count = _until_forbidden(draft, usable_drafts(draft, most), text, target.vocab_size, allowed)
        accepted = emitted = 0
        ended = False
        for token, is_draft in judged(list(text), draft, count):
            text.append(token)
            emitted += 1
            accepted += is_draft
            generated = text[len(ids) :]
            ended = token in stop_tokens or len(generated) == max_new_tokens
            ended = ended or (finished is not None and finished(list(generated)))
            if ended:
                break
        target.truncate(before + len(text) - 1)
        rounds.append(Round(count, accepted, emitted))
        if ended:
            return Speculation(tuple(text[len(ids) :]), tuple(rounds))


def _until_forbidden(
    draft: Draft, count: int, text: list[int], vocab_size: int, allowed: Callable[[list[int]], Tensor] | None
) -> int:
    """Drafts up to the first that the target can't write, that one included."""
    for i, token in enumerate(draft.tokens[:count]):
        if token >= vocab_size or (allowed is not None and not allowed([*text, *draft.tokens[:i]])[token]):
            return i + 1
    return count
