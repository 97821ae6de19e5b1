"""Task 13: which feature meets which token, what stands in where features end, and that q is what was drawn from."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from grader.judge.feature_heads import (
    CONFIG,
    PROMPT,
    TARGET,
    check_follows_target,
    greedy_text,
    head_weights,
    layer_weights,
    likely_tokens,
)
from grader.judge.numerics import check_close, check_form
from grader.judge.refusal import check_refused
from grader.judge.scripted_head import RecordingHead, state_after
from labkit.decoder import full_attention
from labkit.decoder_layer import decoder_layer
from labkit.distribution import token_distribution
from labkit.drafting import Draft
from labkit.sampling_params import SamplingParams

pytestmark = pytest.mark.task(13)

HIDDEN, VOCAB = CONFIG.hidden_size, 13
SUMS = 500.0
"""Rounding of a state: products that sum dozens of numbers each."""
GREEDY = SamplingParams(temperature=0)
TEXT = [3, 1, 4, 1, 5]


def eagle_weights(drafts: int = CONFIG.vocab_size, bias: bool = True) -> dict[str, Tensor]:
    """A random head."""
    shapes: dict[str, tuple[int, ...]] = {"fc__weight": (HIDDEN, 2 * HIDDEN)}
    if bias:
        shapes["fc__bias"] = (HIDDEN,)
    return head_weights(13, drafts, **shapes) | layer_weights(HIDDEN, 14)


def test_the_head_joins_each_feature_with_the_token_behind_it(lab: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 5, HIDDEN, generator=generator, dtype=torch.float64)
    tokens = torch.randint(CONFIG.vocab_size, (2, 5), generator=generator)
    for bias, start in ((True, 0), (False, 3)):
        given = eagle_weights(bias=bias)
        fc, table = given["fc.weight"], given["embed_tokens.weight"]
        joined = table[tokens] @ fc[:, :HIDDEN].T + features @ fc[:, HIDDEN:].T + given.get("fc.bias", 0.0)
        positions = torch.arange(start, start + 5)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        check_close(
            f"states {'with' if bias else 'without'} bias, positions from {start}",
            lab.eagle_features(CONFIG, given, features, tokens, positions, attend),
            decoder_layer(CONFIG, given, joined, positions, attend), scale=SUMS, dtype=torch.float64,
            advice="fc reads the embedding and the feature side by side, in this order; then comes the layer.",
        )  # fmt: skip
    first = lab.eagle_features(CONFIG, given, features[:1, :1], tokens[:1, :1], torch.arange(1), full_attention)
    check_form("the state of a single row", first, (1, 1, HIDDEN), torch.float64)


def ready(text: list[int], **settings: Any) -> RecordingHead:
    """A head whose target has read all of a text but the last token."""
    head = RecordingHead(VOCAB, **settings)
    head.text = text[:-1]
    return head


def drafter_for(lab: Any, head: RecordingHead, params: SamplingParams = GREEDY) -> Any:
    """The drafter under test."""
    return lab.FeatureDrafter(head.features(), head.spec(), params)


def check_state(what: str, state: Any, text: list[int]) -> None:
    """The state of the newest token, by the definition."""
    right = torch.tensor([state_after(text, [])], dtype=torch.float64)
    check_close(
        what, state, right, scale=0.0, dtype=torch.float64,
        advice="Row i holds read(feature of token i), token i + 1 and position i, and sees the rows up to itself.",
    )  # fmt: skip


def test_each_row_holds_a_feature_and_the_next_token(lab: Any) -> None:
    for text in (TEXT, [5, 2], [9, 9, 9, 9], [1, 2, 3]):
        head = ready(text)
        check_state(f"state after {text}", drafter_for(lab, head).follow(text), text)
        assert head.calls == [text[1:]], f"{text}: one append with the tokens {text[1:]}, got {head.calls}"
    # The target may remember what came before this text; its rows are another text's.
    head = ready(TEXT)
    head.before = [7, 7]
    check_state("state behind other text", drafter_for(lab, head).follow(TEXT), TEXT)


def test_only_new_rows_get_read(lab: Any) -> None:
    head = ready(TEXT)
    drafter = drafter_for(lab, head)
    drafter.follow(TEXT)
    text = list(TEXT)
    for more in ([2], [8, 6, 5], [3]):
        text += more
        head.text = text[:-1]
        head.calls.clear()
        check_state(f"state after {text}", drafter.follow(text), text)
        assert head.calls == [more], f"the text grew by {more}, so {len(more)} rows are new; read were {head.calls}"
    head.calls.clear()
    check_state("the same text once more", drafter.follow(text), text)
    assert head.calls == [text[-1:]], f"the last row is read again, since its state is needed: {head.calls}"


def test_rows_of_another_text_are_forgotten(lab: Any) -> None:
    for other in ([3, 1, 4, 9, 9, 2], [3, 1, 4], [2, 1, 4, 1, 5], [3, 1], [3, 9], [3, 1, 4, 1, 6]):
        head = ready(TEXT)
        drafter = drafter_for(lab, head)
        drafter.follow(TEXT)
        head.text = other[:-1]
        head.calls.clear()
        check_state(f"state after {other}, before it was {TEXT}", drafter.follow(other), other)
        same = next((i for i, (a, b) in enumerate(zip(TEXT, other, strict=False)) if a != b), min(5, len(other)))
        kept = min(max(same - 1, 0), len(other) - 2)
        assert head.calls == [other[kept + 1 :]], (
            f"of {other} the head knows {kept} rows from {TEXT}: read should be {other[kept + 1 :]}, was {head.calls}"
        )


def test_own_states_stand_in_for_features(lab: Any) -> None:
    for text, params, draws in (
        (TEXT, GREEDY, [0.5] * 4), (TEXT, SamplingParams(), [0.1, 0.9, 0.4]), ([5, 2], SamplingParams(), [0.7, 0.2]),
        (TEXT, SamplingParams(temperature=0.6, top_k=4), [0.95, 0.05, 0.5, 0.3]), (TEXT, SamplingParams(), [0.3]),
    ):  # fmt: skip
        head = ready(text)
        draft = drafter_for(lab, head, params).propose(text, len(draws), draws)
        assert isinstance(draft, Draft) and len(draft.tokens) == len(draws), f"{len(draws)} drafts wanted: {draft}"
        rows = check_form("probs", draft.probs, (len(draws), VOCAB), torch.float64)
        for place, u in enumerate(draws):
            so_far = list(draft.tokens[:place])
            right = token_distribution(head.logits_after(text, so_far)[None], params)[0]
            check_close(
                f"q of draft {place} behind {text} with {params}", rows[place], right, scale=1.0, dtype=torch.float64,
                advice="Its row holds the state that the row before led to, the draft, and the next position.",
            )  # fmt: skip
            token = min(int((right.cumsum(0) <= u).sum()), int(right.nonzero().max()))
            assert draft.tokens[place] == token, f"draft {place} drawn with {u} is {token}, got {draft.tokens}"
        tokens = list(draft.tokens)
        assert head.calls == [text[1:], *([token] for token in tokens[:-1])], (
            f"the text's rows in one append, then a row for each draft but the last: {head.calls}"
        )
        assert len(head.rows) == len(text) - 1, f"no row of a draft stays: {len(head.rows)} rows for {text}"


def test_drafts_leave_no_trace(lab: Any) -> None:
    for kept, own in itertools.product((0, 1, 3), (2, 7)):
        head = ready(TEXT)
        drafter = drafter_for(lab, head)
        drafts = list(drafter.propose(TEXT, 3, [0.5] * 3).tokens)
        text = [*TEXT, *drafts[:kept], own]
        head.text = text[:-1]
        head.calls.clear()
        got = drafter.propose(text, 2, [0.5] * 2)
        first = int(head.logits_after(text, []).argmax())
        right = [first, int(head.logits_after(text, [first]).argmax())]
        assert list(got.tokens) == right, (
            f"{kept} drafts came true, then {own}: drafts are {right}, got {got.tokens}. Where the target's feature is "
            "known now, the head's own state has no place any more."
        )
        assert head.calls[0] == text[len(TEXT) :], f"rows of {text[len(TEXT) :]} are new: {head.calls[0]}"


def test_what_can_not_be_drafted_from(lab: Any) -> None:
    head = ready(TEXT)
    drafter = drafter_for(lab, head, SamplingParams())
    assert len(drafter.propose(TEXT, 2, [0.5] * 2).tokens) == 2, "a good request gets drafts"
    rows, calls = list(head.rows), len(head.calls)
    assert drafter.propose(TEXT, 0, []).tokens == (), "no drafts were asked for"
    assert drafter.propose([5], 2, [0.5] * 2).tokens == (), "a text of one token has no feature"
    assert drafter.propose([1, VOCAB, 2], 2, [0.5] * 2).tokens == (), "the head doesn't know this id"
    head.text = TEXT[:-2]
    assert drafter.follow(TEXT) is None, "the target hasn't read the text up to its last token"
    head.text = []
    assert drafter.propose(TEXT, 2, [0.5] * 2).tokens == (), "the target has read nothing"
    check_refused("an empty text", lambda: drafter.propose([], 2, [0.5, 0.5]))
    check_refused("-1 drafts", lambda: drafter.propose(TEXT, -1, []))
    check_refused("one uniform for two drafts", lambda: drafter.propose(TEXT, 2, [0.5]))
    assert len(head.calls) == calls and head.rows == rows, "none of these may run or change the head"
    for good in (0, 1, 2):
        head = ready(TEXT)
        head.bad_after = good
        got = drafter_for(lab, head, SamplingParams()).propose(TEXT, 3, [0.5] * 3)
        assert len(got.tokens) == good, f"logits are NaN from place {good} on, so {good} drafts come: {got.tokens}"
        assert len(head.rows) == len(TEXT) - 1, "no row of a draft stays, whatever ends the run"


def test_tokens_that_are_never_drafted_have_q_0(lab: Any) -> None:
    banned = (0, 2, 3, 5, 8, 12)
    for seed in range(5):
        head = ready([seed, 1, 2], banned=banned)
        draws = [(seed + 0.5) / 5, 0.01, 0.99]
        got = drafter_for(lab, head, SamplingParams()).propose([seed, 1, 2], 3, draws)
        rows = check_form("probs", got.probs, (3, VOCAB), torch.float64)
        assert not rows[:, list(banned)].any(), f"logits of {banned} are -inf, so q is 0 there: {rows}"
        assert not set(got.tokens) & set(banned) and len(got.tokens) == 3


@pytest.mark.integration
def test_no_eagle_changes_the_text(lab: Any) -> None:
    for broken in (False, True):
        given = eagle_weights()
        if broken:
            given["fc.weight"][3, 4] = torch.nan
        model = lab.FeatureModel(TARGET, 40, (CONFIG.num_layers,))
        drafter = lab.FeatureDrafter(model, lab.EagleHead(CONFIG, given), GREEDY)
        got = lab.speculate(model, drafter, PROMPT, 20, num_drafts=3)
        assert [*PROMPT, *got.tokens] == greedy_text(20), f"plain decoding: {greedy_text(20)[4:]}, got {got.tokens}"
        drafted = [round_.drafted > 0 for round_ in got.rounds[1:-3]]
        assert drafted and all(value != broken for value in drafted), f"NaN {broken}: drafts are {got.rounds}"
    # A right drafter fails with probability 1e-6.
    settings = {"temperature": 0.8, "top_k": 2}
    ids = torch.tensor(likely_tokens(SamplingParams(**settings)))
    pruned = eagle_weights(len(ids))

    def generate(params: SamplingParams) -> Any:
        target = lab.FeatureModel(TARGET, 8, (CONFIG.num_layers,))
        drafter = lab.FeatureDrafter(target, lab.EagleHead(CONFIG, pruned, ids), SamplingParams(temperature=1.5))
        return lab.speculate(target, drafter, PROMPT, 3, params, num_drafts=2)

    check_follows_target(generate, settings, 80)
