"""Speculation in the engine: the text of plain decoding, or at least its distribution, whoever drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from labkit.drafting import Draft
from solutions.engine import SamplingParams
from solutions.engine.speculation import SpeculationConfig, Speculator, accept_matching
from solutions.speculative.ngram import NgramDrafter

SETTINGS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=3, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.5, seed=4, max_tokens=21, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=2, seed=9, max_tokens=17, n=2, ignore_eos=True),
]
PROMPTS = [[7, 400, 31, 7, 400], [5], list(range(100, 137)), [3, 4] * 6]


class Oracle:
    """Drafts what plain decoding gave, right for a while and then wrong, of any length."""

    def __init__(self, texts: list[list[int]], wrong_every: int = 5) -> None:
        self._texts = texts
        self._wrong_every = wrong_every

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """The rest of the text that begins like this."""
        for text in self._texts:
            if text[: len(tokens)] == list(tokens):
                rest = text[len(tokens) : len(tokens) + max_drafts]
                return Draft(tuple(
                    token if (len(tokens) + i) % self._wrong_every else token + 1 for i, token in enumerate(rest)
                ))  # fmt: skip
        return Draft(())


class Unruly:
    """A drafter that does what none should."""

    def __init__(self) -> None:
        self._turn = 0

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Something else every time."""
        self._turn += 1
        nan = torch.full((2, 49_152), math.nan)
        few = torch.full((1, 7), 1 / 7)
        drafts = [Draft((60_000, 1)), Draft((5,) * 50), Draft((1, 2), nan), Draft(()), Draft((1, 2), few), Draft((3,))]
        return drafts[self._turn % len(drafts)]


def answers(engine: Any) -> list[list[tuple[int, ...]]]:
    """All samples of all prompts."""
    done = engine.generate(PROMPTS, SETTINGS)
    engine.check_idle()
    return [[one.tokens for one in several] for several in done]


@pytest.fixture(scope="module")
def plain(tiny_model: Any) -> list[list[tuple[int, ...]]]:
    """Without speculation."""
    from solutions.engine import Engine

    return answers(Engine(tiny_model))


@pytest.mark.parametrize("limits", [{}, dict(token_budget=9, max_running=6), dict(block_size=2, num_blocks=40)])
def test_the_text_is_that_of_plain_decoding(make_engine: Any, plain: Any, limits: dict[str, int]) -> None:
    texts = [[*prompt, *tokens] for prompt, several in zip(PROMPTS, plain, strict=True) for tokens in several]
    engine = make_engine(speculation=SpeculationConfig(lambda: Oracle(texts)), **limits)
    assert answers(engine) == plain
    metrics = engine.metrics
    assert 0 < metrics.num_accepted_tokens < metrics.num_drafted_tokens
    if not limits:
        assert metrics.num_generated_tokens > 1.5 * metrics.num_steps


@pytest.mark.parametrize("drafter", [NgramDrafter, Unruly])
def test_any_drafter_costs_speed_only(make_engine: Any, plain: Any, drafter: Any) -> None:
    assert answers(make_engine(speculation=SpeculationConfig(drafter))) == plain


def test_a_stop_inside_an_accepted_run_is_seen(make_engine: Any, plain: Any) -> None:
    text = [*PROMPTS[0], *plain[0][0]]
    engine = make_engine(speculation=SpeculationConfig(lambda: Oracle([text], wrong_every=1000), num_drafts=8))
    wanted = plain[0][0]
    stop = wanted[5]
    done = engine.generate([PROMPTS[0]], replace(SETTINGS[0], stop_token_ids=(stop,)))[0][0]
    assert done.tokens == wanted[: wanted.index(stop)] and done.finish_reason == "stop"


def test_drafts_that_were_drawn_keep_the_distribution() -> None:
    """First tokens of 4,000 rounds against p: chi-square of 4 cells; 16.3 is passed by chance once in 1,000."""
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)

    class Drawn:
        def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
            return Draft((int(torch.searchsorted(q.cumsum(0), uniforms[0], right=True)),), q[None])

    from solutions.engine.request import Request
    from solutions.kv_cache.block_table import BlockTable
    from solutions.kv_cache.blocks import BlockAllocator

    counts = torch.zeros(4, dtype=torch.float64)
    kept = 0
    rounds = 4000
    speculator = Speculator(SpeculationConfig(Drawn), vocab_size=4)
    for seed in range(rounds):
        table = BlockTable(BlockAllocator(1), 1)
        request = Request("0", (1,), SamplingParams(seed=seed), table)
        drafts = speculator.propose(request, 1)
        assert speculator.draws(request)
        tokens = speculator.judge(request, p, drafts)
        counts[tokens[0]] += 1
        kept += len(tokens) - 1
        speculator.forget(request)
    expected = rounds * p[0]
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3
    assert abs(kept / rounds - 0.6) < 0.04, "the chance to be kept is the overlap of p and q, 0.6"


def test_matching_keeps_a_prefix_and_one_more() -> None:
    assert accept_matching([5], []) == [5]
    assert accept_matching([5, 6, 7], [5, 6]) == [5, 6, 7]
    assert accept_matching([5, 6, 7], [5, 8]) == [5, 6]
    assert accept_matching([5, 6, 7], [4, 6]) == [5]
