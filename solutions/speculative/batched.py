"""Speculation for many requests at once: one pass of the target a step for all of them, runs and trees side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.distribution import token_distribution
from labkit.drafting import Round, Speculation

from .batch_requests import RunRequest, TreeRequest
from .loop import Distribution, RunRound, judge_runs, open_run
from .rounds import until_the_end
from .tree_loop import TreeRound, open_tree


class BatchTarget(Protocol):
    """A model that reads new tokens and drafts of many texts in one pass; `BatchModel` is one."""

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to `vocab_size - 1`."""

    @property
    def capacity(self) -> int:
        """Tokens of one text that can be remembered, drafts included."""

    def run(
        self, ids: list[int], tokens: list[list[int]], drafts: list[list[int]], parents: list[Sequence[int]]
    ) -> Sequence[Tensor]:
        """Reads new tokens of some texts and a tree of drafts behind each.

        Args:
            ids: of the texts.
            tokens: they continue the text, at least one for each.
            drafts: of each, maybe none.
            parents: for each draft the index of the one before it, -1 for those that follow the text.

        Returns:
            For each text the logits `[tokens + drafts, vocab_size]`.
        """

    def keep(self, index: int, path: Sequence[int]) -> None:
        """Makes the drafts of a path part of a text and forgets its others."""


def speculate_batch(
    requests: Sequence[RunRequest | TreeRequest],
    target: BatchTarget,
    max_running: int,
    distribution: Distribution = token_distribution,
) -> list[Speculation]:
    """Generate for many requests, each at its own pace, with continuous batching.

    A request joins as soon as it has arrived and one of `max_running` places is free, and leaves when its text ends.
    In each step every running request drafts, and one ragged pass reads the new tokens and drafts of all: to the target
    a run is a tree without branches. One call of `verify` then judges all runs, each with its own number of drafts, and
    each tree is judged by its own rule. Random numbers belong to the places of a request's own text, so that it gets
    the very tokens that `speculate` or `speculate_tree` would give it alone, whoever shares the batch.

    Args:
        requests: what is asked for; the id of a request, and of its text in the target, is its index.
        target: remembers none of the texts. It never holds more of one with runs than prompt + max_new_tokens - 1
            tokens; trees are cut to what is left of its capacity. At the end it remembers each text but its last token.
        max_running: the most requests in one step, at least 1.
        distribution: called as `distribution(logits, params)` for each request.

    Returns:
        The tokens and rounds of each request.

    Raises:
        ValueError: a prompt with ids outside the vocabulary, a text that in the longest case exceeds the target's
            capacity, or `max_running` no int of at least 1. Nothing has run then.

    Source: Leviathan et al. 2023 (2211.17192); Yu et al. 2022 (Orca, OSDI); module sections 2.1 and 3.
    """
    check_count("max_running", max_running, 1)
    for index, request in enumerate(requests):
        check_tokens(f"requests[{index}].prompt", request.prompt, target.vocab_size)
        needed = len(request.prompt) + request.max_new_tokens - 1
        if needed > target.capacity:
            raise ValueError(
                f"requests[{index}]: a prompt of {len(request.prompt)} and {request.max_new_tokens} new tokens need "
                f"room for {needed}, but the capacity is {target.capacity}; shorten the prompt or lower max_new_tokens"
            )
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
        those = [texts[index] for index in running]
        rounds = [text.open_round(target) for text in those]
        answers = target.run(
            list(running),
            [text.pending for text in those],
            [now.readable for now in rounds],
            [now.parents for now in rounds],
        )
        logits = [rows[-len(now.readable) - 1 :] for now, rows in zip(rounds, answers, strict=True)]
        verdicts = _judge_all(those, rounds, logits, distribution)
        for index, text, now, (path, tokens) in zip(running, those, rounds, verdicts, strict=True):
            target.keep(index, text.extend(now, path, tokens))
        running = [index for index in running if not texts[index].ended]
    return [Speculation(tuple(text.generated), tuple(text.rounds)) for text in texts]


class _Text:
    """A request and what has become of it."""

    def __init__(self, request: RunRequest | TreeRequest) -> None:
        self.request = request
        self.text, self.pending = list(request.prompt), list(request.prompt)
        self.generated: list[int] = []
        self.rounds: list[Round] = []
        self.ended = False

    def open_round(self, target: BatchTarget) -> RunRound | TreeRound:
        """Ask the drafter, for no more than the text and the target have room for."""
        request, place = self.request, len(self.generated)
        most = request.max_new_tokens - place - 1
        if isinstance(request, TreeRequest):
            room = target.capacity - len(self.text)
            return open_tree(
                request.drafter, self.text, place, most, room, target.vocab_size, request.params, request.allowed
            )
        most = min(request.num_drafts, most)
        return open_run(request.drafter, self.text, place, most, target.vocab_size, request.params, request.allowed)

    def extend(self, now: RunRound | TreeRound, path: Sequence[int], tokens: list[int]) -> Sequence[int]:
        """Take over what was judged, up to the token that ends the text; returns the drafts that the target keeps.

        Args:
            now: the round.
            path: drafts that were kept.
            tokens: they, and the target's own.
        """
        request = self.request
        emitted, self.ended = until_the_end(
            tokens, self.generated, request.max_new_tokens, request.stop_tokens, request.finished
        )
        self.generated += emitted
        self.text += emitted
        self.pending = self.text[-1:]
        self.rounds.append(Round(now.num_drafts, min(len(path), len(emitted)), len(emitted)))
        # The last token of the text is never read, drafted or not.
        return path[: len(emitted) - 1]


def _judge_all(
    texts: list[_Text], rounds: list[RunRound | TreeRound], logits: list[Tensor], distribution: Distribution
) -> list[tuple[Sequence[int], list[int]]]:
    """For each text the drafts that are kept, and with the target's own the tokens that come of them."""
    p = [
        distribution(now.masked(rows), text.request.params)
        for text, now, rows in zip(texts, rounds, logits, strict=True)
    ]
    runs = {i: now for i, now in enumerate(rounds) if isinstance(now, RunRound)}
    verdicts: dict[int, tuple[Sequence[int], list[int]]] = {}
    if runs:
        judged = judge_runs(list(runs.values()), [p[i] for i in runs])
        verdicts = {i: (range(kept), tokens) for i, (tokens, kept) in zip(runs, judged, strict=True)}
    for i, (text, now) in enumerate(zip(texts, rounds, strict=True)):
        if isinstance(now, TreeRound) and isinstance(text.request, TreeRequest):
            verdicts[i] = now.judged(p[i], text.request.judge)
    return [verdicts[i] for i in range(len(texts))]
