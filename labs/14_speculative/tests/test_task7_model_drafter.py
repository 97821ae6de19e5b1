"""Task 7: q is what was drawn from, and the drafter's own cache follows the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_form
from grader.judge.refusal import check_refused
from grader.judge.scripted import RecordingModel
from labkit.config import ModelConfig
from labkit.distribution import token_distribution
from labkit.drafting import Draft
from labkit.sampling_params import SamplingParams
from labkit.specs import Cached, Markov, TinyLlama

pytestmark = pytest.mark.task(7)

VOCAB = 11
GREEDY = SamplingParams(temperature=0)


def rule(tokens: list[int]) -> int:
    """What the recording model likes best next."""
    return (tokens[-1] * 2 + len(tokens)) % VOCAB


def small(capacity: int = 50) -> RecordingModel:
    """A drafter's model, empty."""
    return RecordingModel(VOCAB, capacity, rule)


def propose(drafter: Any, text: list[int], draws: list[float]) -> tuple[list[int], Tensor]:
    """Tokens and rows of a draft with as many tokens as uniforms."""
    draft = drafter.propose(text, len(draws), draws)
    assert isinstance(draft, Draft), f"propose must return a Draft, got {draft!r}"
    assert draft.probs is not None or not draft.tokens, "a drafter that draws must hand over its distributions"
    rows = torch.zeros(0, VOCAB) if draft.probs is None else draft.probs
    return list(draft.tokens), check_form("probs", rows, (len(draft.tokens), VOCAB), rows.dtype)


def inverse(row: Tensor, u: float) -> int:
    """The token that a uniform stands for."""
    return min(int((row.cumsum(0) <= u).sum()), int(row.nonzero().max()))


def check_draft(lab: Any, params: SamplingParams, text: list[int], draws: list[float], why: str) -> None:
    """Rows and tokens of a fresh drafter against the model's own distributions."""
    model = small()
    tokens, rows = propose(lab.ModelDrafter(model.spec(), params), text, draws)
    so_far = list(text)
    for i, u in enumerate(draws):
        right = token_distribution(model.logits_after(so_far)[None], params)[0]
        check_close(f"q of draft {i} with {params}", rows[i], right, scale=1.0, dtype=torch.float64, advice=why)
        token = inverse(right, u)
        assert tokens[i] == token, f"draft {i} drawn with {u} is {token}, got {tokens[i]}. {why}"
        so_far.append(tokens[i])


def test_q_is_what_the_drafts_were_drawn_from(lab: Any) -> None:
    for draws in ([0.1], [0.9, 0.5, 0.3], [0.05, 0.95, 0.5, 0.7]):
        check_draft(lab, SamplingParams(), [1, 2, 3], draws, "Row i is the distribution after the text and i drafts.")
        check_draft(lab, GREEDY, [4], draws, "At temperature 0 q is 1 at the likeliest token.")


def test_filters_are_part_of_q(lab: Any) -> None:
    why = "q is what was drawn from, after temperature and filters; with the raw softmax too many drafts are kept."
    for params in (
        SamplingParams(temperature=0.5), SamplingParams(top_k=3), SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.3), SamplingParams(temperature=1.8, top_k=5, top_p=0.8),
    ):  # fmt: skip
        check_draft(lab, params, [5, 6], [0.2, 0.8, 0.99], why)


def test_drafts_use_the_uniforms_in_order(lab: Any) -> None:
    draws = [0.05, 0.35, 0.65, 0.95]
    for shift in range(4):
        check_draft(lab, SamplingParams(), [7, 8], draws[shift:] + draws[:shift], "Draft i uses uniform i.")


def test_only_new_tokens_are_read(lab: Any) -> None:
    model = small()
    drafter = lab.ModelDrafter(model.spec(), GREEDY)
    text = [1, 2, 3]
    tokens, _ = propose(drafter, text, [0.5] * 3)
    assert model.calls == [[1, 2, 3], [tokens[0]], [tokens[1]]], (
        f"the model was run on {model.calls}: the text once, then one draft at a time; the last draft is not read, "
        "since nothing follows it yet"
    )
    # Every draft was kept, and the target added one token: the last draft and that token are new.
    model.calls.clear()
    text += [*tokens, 9]
    more, _ = propose(drafter, text, [0.5] * 2)
    assert model.calls == [[tokens[2], 9], [more[0]]], f"after a full round only {[tokens[2], 9]} is new: {model.calls}"
    assert model.tokens == [*text, more[0]], "the model remembers the text and the drafts it was asked to go on from"


def test_rejected_drafts_are_forgotten(lab: Any) -> None:
    for kept in (0, 1, 2):
        model = small()
        drafter = lab.ModelDrafter(model.spec(), GREEDY)
        tokens, _ = propose(drafter, [1, 2, 3], [0.5] * 3)
        own = (tokens[kept] + 1) % VOCAB
        text = [1, 2, 3, *tokens[:kept], own]
        model.calls.clear()
        got, _ = propose(drafter, text, [0.5] * 2)
        assert model.tokens[: len(text)] == text, (
            f"{kept} drafts were kept, then came {own}: the model remembers {model.tokens}, the text is {text}"
        )
        assert model.calls[0] == [own], f"only {own} is new to the model, but it was run on {model.calls[0]}"
        assert got == [rule(text), rule([*text, rule(text)])], "drafts must go on from the text as it is now"
        # And once more: what the model has read and what it thinks it has read must still agree.
        text += [got[0], (got[1] + 1) % VOCAB]
        model.calls.clear()
        propose(drafter, text, [0.5])
        assert model.calls == [text[-1:]], f"in the third round only {text[-1:]} is new, but it read {model.calls}"
    # Another text altogether, and a shorter one.
    for text in ([9, 9], [1, 2], [1, 2, 3, 4, 5, 6]):
        model = small()
        drafter = lab.ModelDrafter(model.spec(), GREEDY)
        propose(drafter, [1, 2, 3], [0.5] * 3)
        got, _ = propose(drafter, text, [0.5])
        assert model.tokens[: len(text)] == text and got == [rule(text)], f"the text is now {text}: got {got}"


def test_the_last_token_is_always_read_again(lab: Any) -> None:
    model = small()
    drafter = lab.ModelDrafter(model.spec(), GREEDY)
    first, _ = propose(drafter, [1, 2, 3], [0.5] * 2)
    model.calls.clear()
    again, _ = propose(drafter, [1, 2, 3], [0.5] * 2)
    assert again == first, f"the same text gives the same drafts, got {again} after {first}"
    assert model.calls[0] == [3], f"the model knows the text but needs the logits after its last token: {model.calls}"


def test_drafts_end_where_the_room_ends(lab: Any) -> None:
    for capacity, right in ((6, 4), (4, 2), (3, 1), (2, 0), (1, 0)):
        model = small(capacity)
        tokens, _ = propose(lab.ModelDrafter(model.spec(), GREEDY), [1, 2, 3], [0.5] * 4)
        assert len(tokens) == right and len(model.tokens) <= capacity, (
            f"a model with room for {capacity} tokens and a text of 3 can draft {right}, since the last draft is not "
            f"read; got {len(tokens)} drafts and {len(model.tokens)} remembered"
        )


def test_unknown_words_and_bad_requests(lab: Any) -> None:
    model = small()
    drafter = lab.ModelDrafter(model.spec(), GREEDY)
    tokens, _ = propose(drafter, [1, 2], [0.5])
    assert tokens == [rule([1, 2])], "a good request gets a draft"
    held, calls = list(model.tokens), len(model.calls)
    assert drafter.propose([1, VOCAB, 2], 3, [0.5] * 3).tokens == (), "a text with an unknown id gets no drafts"
    assert drafter.propose([1, 2, 3], 0, []).tokens == (), "no drafts were asked for"
    check_refused("an empty text", lambda: drafter.propose([], 2, [0.5, 0.5]))
    check_refused("-1 drafts", lambda: drafter.propose([1], -1, []))
    check_refused("one uniform for two drafts", lambda: drafter.propose([1], 2, [0.5]))
    assert len(model.calls) == calls and model.tokens == held, "none of these may run or change the model"


@pytest.mark.integration
def test_your_own_drafter_and_loop_keep_the_target_s_text(lab: Any) -> None:
    config = ModelConfig.tiny(num_layers=2)
    target, other = Cached(TinyLlama(config, 1), 60), Cached(TinyLlama(config, 2), 60)
    plain = lab.speculate(target, lab.ModelDrafter(other, GREEDY), [3, 1, 4], 20, num_drafts=0)
    same = lab.speculate(target, lab.ModelDrafter(target, GREEDY), [3, 1, 4], 20, num_drafts=4)
    wrong = lab.speculate(target, lab.ModelDrafter(other, GREEDY), [3, 1, 4], 20, num_drafts=4)
    assert len(plain.rounds) == 20 and list(plain.tokens) == list(same.tokens) == list(wrong.tokens), (
        f"plain {plain.tokens}, drafted by itself {same.tokens}, by another model {wrong.tokens}: all must be one text"
    )
    assert len(same.rounds) == 4, f"the target as its own drafter is always right: 4 rounds, took {len(same.rounds)}"
    chain = ((0.5, 0.2, 0.2, 0.1), (0.1, 0.6, 0.1, 0.2), (0.3, 0.0, 0.3, 0.4), (0.25, 0.25, 0.25, 0.25))
    params = SamplingParams(top_k=2)
    for seed in range(6):
        got = lab.speculate(Markov(chain, 40), lab.ModelDrafter(Markov(chain, 40), params), [0], 12,
                            SamplingParams(top_k=2, seed=seed))  # fmt: skip
        assert all(r.accepted == r.drafted for r in got.rounds), (
            f"drafter and target are one model with the same filters, so every draft is kept: {got.rounds}"
        )
