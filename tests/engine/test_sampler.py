"""Logits after penalties, and what is drawn from them, against the formulas."""

from __future__ import annotations

import torch

from labkit.distribution import token_distribution
from solutions.engine import SamplingParams
from solutions.engine.kv_manager import KVManager
from solutions.engine.request import Request
from solutions.engine.sampler import Row, adjust_logits, distribution

VOCAB_SIZE = 11


def row(index: int, params: SamplingParams, output: tuple[int, ...] = (), drafts: tuple[int, ...] = ()) -> Row:
    """Of a request with the prompt 1, 2, 2."""
    request = Request(str(index), (1, 2, 2), params, KVManager(1, 4).new_table())
    request.tokens += output
    return Row(index, request, drafts)


def test_penalties_count_prompt_answer_and_drafts_each_where_they_should() -> None:
    params = SamplingParams(
        presence_penalty=0.7, frequency_penalty=-0.3, repetition_penalty=1.7, logit_bias=((3, 2.0), (9, -1.5), (3, 0.5))
    )
    rows = [row(0, params), row(1, SamplingParams()), row(2, params, (2, 3, 3)), row(3, params, (2, 3), (3, 5, 5))]
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    before = logits.clone()
    got = adjust_logits(logits, rows)
    assert logits.equal(before)
    for place, answer in enumerate([[], None, [2, 3, 3], [2, 3, 3, 5, 5]]):
        want = logits[place].tolist()
        if answer is not None:
            want[3] += 2.5
            want[9] -= 1.5
            for token in {1, 2, *answer}:
                want[token] = want[token] / 1.7 if want[token] > 0 else want[token] * 1.7
            for token in set(answer):
                want[token] -= 0.7 - 0.3 * answer.count(token)
        assert torch.allclose(got[place], torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12), f"row {place}"


def test_each_filter_sees_what_the_one_before_has_left() -> None:
    logits = torch.tensor([[0.3, 0.2, 0.18, 0.17, 0.15]]).double().log().expand(4, -1)
    settings = [dict(top_k=3, top_p=0.7), dict(), dict(top_p=0.45, min_p=0.6), dict(top_k=2, temperature=0.5)]
    params = [SamplingParams(**one) for one in settings]
    got = distribution(logits, [row(index, one) for index, one in enumerate(params)])
    want = torch.cat([token_distribution(logits[:1], one) for one in params])
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    # Of three with 0.68 of the mass two hold 0.735 of it; of all five it takes four to hold 0.7.
    assert got[0].count_nonzero() == 2 and got[1].count_nonzero() == 5
