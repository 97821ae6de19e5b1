"""Speculation for many requests at once: one pass of the target and one verification for all of them a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.distribution import token_distribution
from labkit.drafting import Draft, Drafter, Round, Speculation
from labkit.sampling_params import SamplingParams

from .drafts import draft_probs, widen
from .loop import GREEDY, Distribution
from .rounds import ACCEPT, DRAFT, OWN, Allowed, Finished, judgeable_drafts, place_uniform, until_the_end
from .verification import verify

RunStep = Callable[[list[int], list[list[int]]], Sequence[Tensor]]
Truncate = Callable[[int, int], None]


@dataclass(frozen=True)
class SpeculativeRequest:
    """What someone asks for, and who drafts for it; the arguments mean what they mean in `speculate`.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: the most tokens to generate, at least 1.
        drafter: nobody else's, since it may remember the text.
        params: how the target's tokens are drawn.
        num_drafts: the most drafts a round.
        stop_tokens: ids that end the text.
        finished: called with the generated tokens after each of them; True ends the text there.
        allowed: the mask of tokens that may follow a text.
        arrival: the first step in which the request may run.

    Raises:
        ValueError: a value outside these limits.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    drafter: Drafter
    params: SamplingParams = GREEDY
    num_drafts: int = 4
    stop_tokens: tuple[int, ...] = ()
    finished: Finished | None = None
    allowed: Allowed | None = None
    arrival: int = 0

    def __post_init__(self) -> None:
        check_tokens("prompt", self.prompt)
        check_count("max_new_tokens", self.max_new_tokens, 1)
        check_count("num_drafts", self.num_drafts, 0)
        check_count("arrival", self.arrival, 0)


def speculate_batch(
    requests: Sequence[SpeculativeRequest],
    run: RunStep,
    truncate: Truncate,
    vocab_size: int,
    max_running: int,
    distribution: Distribution = token_distribution,
) -> list[Speculation]:
    """Generate for many requests, each at its own pace, with continuous batching.

    A request joins as soon as it has arrived and one of `max_running` places is free, and leaves when its text ends.
    In each step every running request drafts, one ragged pass reads the new tokens and drafts of all, and one call of
    `verify` judges them, each row with its own number of drafts. Random numbers belong to the places of a request's
    own text, so that it gets the very tokens that `speculate` would give it alone, whoever shares the batch.

    Args:
        requests: what is asked for; the id of a request is its index.
        run: the target, called once a step as `run(ids, tokens)`; returns for each request the logits
            `[new tokens, vocab_size]`. It never holds more of one than prompt + max_new_tokens - 1 tokens.
        truncate: called as `truncate(id, length)` after each step for each request that ran; makes the target forget
            its tokens from `length` on. The last call leaves the text but its last token.
        vocab_size: of the target.
        max_running: the most requests in one step, at least 1.
        distribution: called as `distribution(logits, params)` for each request.

    Returns:
        The tokens and rounds of each request.

    Raises:
        ValueError: a prompt with ids outside the vocabulary, or `max_running` no int of at least 1. Nothing has run
            then.

    Source: Leviathan et al. 2023 (2211.17192); Yu et al. 2022 (Orca, OSDI); module sections 2.1 and 3.
    """
    check_count("max_running", max_running, 1)
    for index, request in enumerate(requests):
        check_tokens(f"requests[{index}].prompt", request.prompt, vocab_size)
    texts = [_Text(request) for request in requests]
    waiting = deque(sorted(range(len(texts)), key=lambda index: requests[index].arrival))
    running: list[int] = []
    step = 0
    while waiting or running:
        while waiting and len(running) < max_running and requests[waiting[0]].arrival <= step:
            running.append(waiting.popleft())
        step += 1
        if not running:
            continue
        drafting = [texts[index].draft(vocab_size) for index in running]
        new = [[*texts[i].pending, *one.readable] for i, one in zip(running, drafting, strict=True)]
        answers = run(list(running), new)
        p = [
            distribution(one.masked(logits), requests[i].params)
            for i, one, logits in zip(running, drafting, answers, strict=True)
        ]
        for index, (tokens, kept) in zip(running, _verify_all(p, drafting), strict=True):
            texts[index].extend(tokens, kept)
            truncate(index, len(texts[index].text) - 1)
        running = [index for index in running if not texts[index].ended]
    return [Speculation(tuple(text.generated), tuple(text.rounds)) for text in texts]


@dataclass(frozen=True)
class _Drafting:
    """One request's part of a step.

    Args:
        draft: what its drafter handed over.
        drafts: those of its tokens that will be judged.
        masks: of allowed tokens, for each place that the target can read and the one behind.
        uniforms: `[drafts + 1, 2]`, to judge and to draw.
        masking: whether the masks say anything.
    """

    draft: Draft
    drafts: list[int]
    masks: list[Tensor]
    uniforms: Tensor
    masking: bool

    @property
    def readable(self) -> list[int]:
        """The drafts that the target reads; one that it can't read is judged without."""
        return self.drafts[: len(self.masks) - 1]

    def masked(self, logits: Tensor) -> Tensor:
        """The rows that judge drafts, without the tokens that may not follow."""
        rows = logits[-len(self.masks) :]
        return rows.masked_fill(~torch.stack(self.masks), -torch.inf) if self.masking else rows


@dataclass
class _Text:
    """A request and what has become of it."""

    request: SpeculativeRequest
    text: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    ended: bool = False
    num_drafted: int = 0

    def __post_init__(self) -> None:
        self.text, self.pending = list(self.request.prompt), list(self.request.prompt)

    def draft(self, vocab_size: int) -> _Drafting:
        """Ask the drafter, for no more than the text has room for."""
        request, place = self.request, len(self.generated)
        most = min(request.num_drafts, request.max_new_tokens - place - 1)
        draws = [place_uniform(request.params, place + i, DRAFT) for i in range(most)]
        draft = request.drafter.propose(list(self.text), most, draws) if most else Draft(())
        drafts, masks = judgeable_drafts(draft, most, self.text, vocab_size, request.allowed)
        places = range(place, place + len(drafts) + 1)
        uniforms = [[place_uniform(request.params, at, use) for use in (ACCEPT, OWN)] for at in places]
        self.num_drafted = len(drafts)
        return _Drafting(
            draft, drafts, masks, torch.tensor(uniforms, dtype=torch.float64), request.allowed is not None
        )  # fmt: skip

    def extend(self, tokens: list[int], kept: int) -> None:
        """Take over what was verified, up to the token that ends the text."""
        request = self.request
        emitted, self.ended = until_the_end(
            tokens, self.generated, request.max_new_tokens, request.stop_tokens, request.finished
        )
        self.generated += emitted
        self.text += emitted
        self.pending = self.text[-1:]
        self.rounds.append(Round(self.num_drafted, min(kept, len(emitted)), len(emitted)))


def _verify_all(p: list[Tensor], drafting: list[_Drafting]) -> list[tuple[list[int], int]]:
    """Judge the drafts of all requests in one call; for each the tokens let through and how many are drafts."""
    counts = [len(one.drafts) for one in drafting]
    q = [draft_probs(one.draft, count, rows.shape[1]) for one, count, rows in zip(drafting, counts, p, strict=True)]
    k, width = max(counts), max(rows.shape[1] for rows in q)
    size = len(drafting)
    all_p = torch.zeros(size, k + 1, width, dtype=torch.float64)
    all_q = torch.zeros(size, k, width, dtype=torch.float64)
    drafts = torch.zeros(size, k, dtype=torch.int64)
    uniforms = torch.zeros(size, k + 1, 2, dtype=torch.float64)
    for row, (one, count) in enumerate(zip(drafting, counts, strict=True)):
        rows = widen(p[row], width)
        # A draft that the target couldn't read has no row behind it, and needs none.
        all_p[row, : count + 1] = torch.cat([rows, rows[-1:]])[: count + 1]
        all_q[row, :count] = widen(q[row], width)
        drafts[row, :count] = torch.tensor(one.drafts, dtype=torch.int64)
        uniforms[row, : count + 1] = one.uniforms
    tokens, kept = verify(all_p, all_q, drafts, uniforms, torch.tensor(counts))
    return [(row[: count + 1].tolist(), int(count)) for row, count in zip(tokens, kept, strict=True)]
