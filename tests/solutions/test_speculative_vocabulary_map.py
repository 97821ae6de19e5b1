"""A drafter with other token ids: what it reads, what becomes of its drafts, and that the text is the target's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from grader.judge.distributions import chi_square
from labkit.drafting import Draft, Drafter
from labkit.sampling_params import SamplingParams
from labkit.specs import Markov
from solutions.speculative.loop import speculate
from solutions.speculative.model_drafter import ModelDrafter
from solutions.speculative.vocabulary_map import VocabularyMapDrafter, fit_vocabularies, map_by_bytes

# The target's 0, 1, 2, 3 are the drafter's 2, 4, 0 and nothing; the drafter's 1 and 3 are nothing to the target.
IDS = (2, None, 0, None, 1)
P = ((0.5, 0.2, 0.2, 0.1), (0.1, 0.6, 0.1, 0.2), (0.3, 0.0, 0.3, 0.4), (0.25, 0.25, 0.25, 0.25))
Q = (
    (0.2, 0.2, 0.2, 0.2, 0.2), (0.1, 0.5, 0.2, 0.1, 0.1), (0.3, 0.2, 0.2, 0.2, 0.1), (0.4, 0.1, 0.1, 0.1, 0.3),
    (0.1, 0.3, 0.3, 0.1, 0.2),
)  # fmt: skip


class Fixed:
    """A drafter that says what it was told to, and writes down what it read."""

    def __init__(self, draft: Draft) -> None:
        self.read: list[list[int]] = []
        self._draft = draft

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Always the same."""
        self.read.append(list(tokens))
        return self._draft


def test_text_and_drafts_are_translated() -> None:
    rows = torch.tensor([Q[2], Q[0], Q[1]], dtype=torch.float64)
    inner = Fixed(Draft((0, 4, 3), rows))
    draft = VocabularyMapDrafter(inner, IDS, 4).propose([0, 1, 2, 0], 3, [0.5] * 3)
    assert inner.read == [[2, 4, 0, 2]]
    assert draft.tokens == (2, 1, 4 + 3)
    right = torch.zeros(3, 9, dtype=torch.float64)
    for own, place in enumerate((2, 5, 0, 7, 1)):
        right[:, place] = rows[:, own]
    assert draft.probs is not None and torch.equal(draft.probs, right)
    sure = VocabularyMapDrafter(Fixed(Draft((2, 1, 0, 9))), IDS, 4).propose([0], 4, [0.5] * 4)
    assert sure == Draft((0, 5, 2, 13))


def test_a_text_that_the_drafter_can_not_read_gets_no_drafts() -> None:
    inner = Fixed(Draft((0,)))
    assert VocabularyMapDrafter(inner, IDS, 4).propose([0, 3, 1], 2, [0.5] * 2) == Draft(())
    assert not inner.read
    assert VocabularyMapDrafter(inner, IDS, 4, unknown=3).propose([0, 3, 1], 2, [0.5] * 2) == Draft((2,))
    assert inner.read == [[2, 3, 4]]


def test_what_is_no_draft_stays_none() -> None:
    target = Markov(P, 40)
    plain = speculate(target.build(), Fixed(Draft(())), [0], 8)
    for draft in (
        Draft((-1, 2)), Draft((True, 2)), Draft((0, 2), torch.full((2, 5), torch.nan)),
        Draft((0, 2), torch.ones(5) / 5), Draft((0, 2), torch.full((1, 5), 0.2)),
        Draft((7, 2)), Draft((1, 1), torch.full((2, 3), 1 / 3)),
    ):  # fmt: skip
        mapped = VocabularyMapDrafter(Fixed(draft), IDS, 4, unknown=1)
        assert speculate(target.build(), mapped, [0], 8).tokens == plain.tokens


def test_sampled_text_follows_the_target() -> None:
    # Two tokens of 1,500 texts; right code fails with probability 1e-6 for each. Left-out drafts of unknown tokens
    # would give the first token 0 with probability 0.44 instead of 0.5.
    law = torch.tensor(P[0], dtype=torch.float64)
    settings = SamplingParams()
    texts = []
    rejected = 0
    for seed in range(1500):
        inner: Drafter = ModelDrafter(Markov(Q, 40).build(), settings)
        mapped = VocabularyMapDrafter(inner, IDS, 4, unknown=1)
        got = speculate(Markov(P, 40).build(), mapped, [0], 3, SamplingParams(seed=seed), num_drafts=2)
        texts.append(got.tokens)
        rejected += got.rounds[0].accepted < got.rounds[0].drafted
    for place in range(2):
        result = chi_square(torch.tensor([text[place] for text in texts]), law)
        assert result.p_value > 1e-6, f"token {place}: p-value {result.p_value:.1e}"
        law = law @ torch.tensor(P, dtype=torch.float64)
    assert 300 < rejected < 1400


def test_maps_follow_the_bytes() -> None:
    assert map_by_bytes([b"a", None, b"b", b"c", b"a", b""], [None, b"c", b"a", b"a", b""]) == [
        2, None, None, 1, None, None
    ]  # fmt: skip


def test_vocabularies_fit_or_are_refused() -> None:
    inner = Fixed(Draft((0,)))
    words = [b"a", b"b", None]
    assert fit_vocabularies(inner, words, words) is inner
    assert fit_vocabularies(inner, [*words, None], words) is inner
    assert fit_vocabularies(inner, words, [*words, None, None]) is inner
    with pytest.raises(ValueError, match="token 1 is b'x' for the drafter and b'b' for the target"):
        fit_vocabularies(inner, [b"a", b"x"], words)
    with pytest.raises(ValueError, match="no padding"):
        fit_vocabularies(inner, words, [*words, b"c"])
    with pytest.raises(ValueError, match="no padding"):
        fit_vocabularies(inner, [*words, b"c"], words)
    with pytest.raises(ValueError, match="must name 2 tokens"):
        fit_vocabularies(inner, [b"b", b"a"], words, [1, 0, None])
    mapped = fit_vocabularies(inner, [b"b", b"a"], words, map_by_bytes([b"b", b"a"], words))
    assert mapped.propose([0, 1], 1, [0.5]) == Draft((1,))
    assert inner.read == [[1, 0]]


def test_maps_that_make_no_sense_are_refused() -> None:
    inner = Fixed(Draft((0,)))
    good = VocabularyMapDrafter(inner, IDS, 4)
    for ids, what in (
        ((0, 4), "from 0 to 3"),
        ((-1,), "from 0 to 3"),
        ((True,), "from 0 to 3"),
        ((1, None, 1), "both"),
    ):
        with pytest.raises(ValueError, match=what):
            VocabularyMapDrafter(inner, ids, 4)
    with pytest.raises(ValueError, match="no token at all"):
        VocabularyMapDrafter(inner, (None, None), 4)
    with pytest.raises(ValueError, match="unknown"):
        VocabularyMapDrafter(inner, IDS, 4, unknown=5)
    for tokens, most in (([], 1), ([4], 1), ([0], -1)):
        with pytest.raises(ValueError, match=r"tokens|max_drafts"):
            good.propose(tokens, most, [0.5])
    assert not inner.read
