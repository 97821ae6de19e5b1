"""Task 8: trees on a real decoder: each path as if it were alone, and whole texts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.distributions import chi_square
from grader.judge.numerics import check_close, check_form
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.distribution import token_distribution
from labkit.drafting import DraftTree, Speculation
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams
from labkit.scripted_drafter import ScriptedTreeDrafter
from labkit.specs import TinyLlama

pytestmark = pytest.mark.task(8)

CONFIG = ModelConfig.tiny(num_layers=2)
TEXT = [7, 0, 60, 31]
DRAFTS, PARENTS = (5, 9, 31, 5, 44, 2), (-1, -1, 0, 0, 1, 2)
PATHS = ((0,), (1,), (0, 2), (0, 3), (1, 4), (0, 2, 5))


@cache
def decoder(dtype: torch.dtype) -> Decoder:
    """The judge's own copy of the model."""
    return Decoder(CONFIG, random_weights(CONFIG, 1, dtype), dtype)


def whole_run(tokens: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits of a text that is read alone, `[tokens, vocab]`."""
    return decoder(dtype)(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0]


def check_rows(what: str, got: Tensor, tokens: list[int], rows: int, advice: str) -> None:
    """The last rows of a text's logits."""
    right = whole_run(tokens)[-rows:]
    plain = whole_run(tokens, torch.float32)[-rows:]
    scale = float(right.abs().max())
    check_close(what, got, right, scale=scale, dtype=torch.float32, plain=plain, advice=advice)


def greedy_text(prompt: list[int], count: int) -> list[int]:
    """What the target writes alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(whole_run(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def model(lab: Any, capacity: int = 60) -> Any:
    """A target that reads trees."""
    return lab.TreeModel(TinyLlama(CONFIG, 1), capacity)


def test_each_path_reads_as_if_it_were_alone(lab: Any) -> None:
    for before in ([], [3, 3, 50]):
        target = model(lab)
        if before:
            target.append(before)
        logits = target.append(TEXT, DRAFTS, PARENTS)
        check_form("the logits of text and tree", logits, (10, CONFIG.vocab_size), torch.float32)
        check_rows("the text before the tree", logits[:4], [*before, *TEXT], 4, "The text sees no draft.")
        for index, path in enumerate(PATHS):
            alone = [*before, *TEXT, *(DRAFTS[i] for i in path)]
            advice = "A draft sees the text, its ancestors and itself, at the position that it has in its own text."
            check_rows(f"draft {index}, path {path}", logits[4 + index : 5 + index], alone, 1, advice)
        assert target.length == len(before) + 10, f"text and drafts are remembered, length is {target.length}"


def test_a_kept_path_becomes_the_text(lab: Any) -> None:
    for path in (*PATHS, ()):
        target = model(lab)
        target.append(TEXT, DRAFTS, PARENTS)
        target.keep(path)
        text = [*TEXT, *(DRAFTS[i] for i in path)]
        assert target.length == len(text), f"the text and {len(path)} drafts stay, length is {target.length}"
        logits = target.append([1, 2], (8, 9), (-1, 0))
        check_rows(f"after keeping {path}", logits, [*text, 1, 2, 8, 9], 4, "Only kept drafts, in their order, stay.")


def test_refused_calls_leave_the_model_whole(lab: Any) -> None:
    target = model(lab, 12)
    target.append(TEXT, DRAFTS, PARENTS)
    check_refused("new tokens while drafts are there", lambda: target.append([1]))
    for path in ((6,), (-1,), (2, 0), (0, 0)):
        check_refused(f"keeping {path}", lambda chosen=path: target.keep(chosen))
    assert target.length == 10, f"refused calls must change nothing, length is {target.length}"
    target.keep((0, 3))
    check_refused("seven tokens where six fit", lambda: target.append([1, 2], (3, 4, 5, 6, 7), (-1, -1, -1, -1, -1)))
    check_refused("no tokens", lambda: target.append([]))
    check_refused("an id outside", lambda: target.append([1], (61,), (-1,)))
    check_refused("two drafts, one parent", lambda: target.append([1], (3, 4), (-1,)))
    logits = target.append([1], (3, 4), (-1, -1))
    check_rows("after refused calls", logits[:1], [*TEXT, 5, 5, 1], 1, "Refused calls change nothing.")


class Trees:
    """A drafter that knows the target's text and surrounds it with wrong guesses.

    Args:
        depth: generations of its trees.
        right: whether its trees hold the target's text at all.
    """

    def __init__(self, depth: int, right: bool = True) -> None:
        self.depth, self.right = depth, right
        self.asked: list[int] = []

    def spec(self) -> ScriptedTreeDrafter:
        """The argument to pass to the lab in place of a drafter."""
        return ScriptedTreeDrafter(self.propose)

    def propose(self, text: list[int], most: int, draws: list[float]) -> DraftTree:
        """In each generation a wrong guess, then the right one, which the next generation follows."""
        self.asked.append(most)
        tokens: list[int] = []
        parents: list[int] = []
        node = -1
        for token in greedy_text(text, self.depth):
            tokens += [(token + 1) % CONFIG.vocab_size, token if self.right else (token + 2) % CONFIG.vocab_size]
            parents += [node, node]
            node = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents))


NAN, EVEN = torch.full((4,), torch.nan), torch.full((4,), 0.25)
TREES: list[tuple[str, DraftTree, int, int, tuple[int, ...], tuple[int, ...]]] = [
    ("all in order", DraftTree((1, 2, 3), (-1, -1, 0)), 2, 9, (1, 2, 3), (-1, -1, 0)),
    ("nothing", DraftTree((), ()), 2, 9, (), ()),
    ("too deep", DraftTree((1, 2, 3, 0), (-1, 0, 1, -1)), 2, 9, (1, 2, 0), (-1, 0, -1)),
    ("no depth", DraftTree((1, 2), (-1, 0)), 0, 9, (), ()),
    ("no room for all", DraftTree((1, 2, 3), (-1, -1, 0)), 2, 2, (1, 2), (-1, -1)),
    ("a negative id with a child and siblings", DraftTree((1, -1, 2, 3, 0), (-1, -1, 1, -1, 0)), 3, 9, (1, 0), (-1, 0)),
    ("a bad draft before a family", DraftTree((1, -1, 3, 4), (-1, 0, -1, 2)), 3, 9, (1, 3, 4), (-1, -1, 1)),
    ("an unreadable id with a child and a sibling", DraftTree((9, 2, 3), (-1, 0, -1)), 3, 9, (9, 3), (-1, -1)),
    ("three drawn drafts", DraftTree((1, 2, 3), (-1, -1, 0), torch.stack([EVEN] * 3)), 2, 9, (1, 2, 3), (-1, -1, 0)),
    ("NaN in the eldest", DraftTree((1, 2, 3), (-1, -1, 0), torch.stack([NAN, EVEN, EVEN])), 2, 9, (), ()),
    ("NaN in the younger", DraftTree((1, 2, 3), (-1, -1, 0), torch.stack([EVEN, NAN, EVEN])), 2, 9, (1, 3), (-1, 0)),
    ("rows missing", DraftTree((1, 2, 3), (-1, -1, 0), torch.stack([EVEN, EVEN])), 2, 9, (), ()),
    ("one axis", DraftTree((1,), (-1,), EVEN), 2, 9, (), ()),
]


def test_what_of_a_tree_can_be_judged(lab: Any) -> None:
    for what, tree, depth, room, tokens, parents in TREES:
        got = lab.usable_tree(tree, depth, room, 5)
        assert isinstance(got, DraftTree), f"usable_tree must return a DraftTree, got {type(got).__name__}"
        assert (got.tokens, got.parents) == (tokens, parents), (
            f"a tree with {what}: tokens {tokens} with parents {parents} can be judged, got {got.tokens}, {got.parents}"
        )
    for rows, vocab_size, width in ((EVEN, 5, 5), (EVEN, 3, 4)):
        got = lab.usable_tree(DraftTree((1, 3), (-1, 0), torch.stack([rows] * 2)), 2, 9, vocab_size)
        right = torch.zeros(2, width, dtype=torch.float64)
        right[:, :4] = 0.25
        advice = "Rows keep their numbers; the shorter vocabulary is filled up with zeros."
        what = f"rows of 4 on a target of {vocab_size}"
        check_close(what, got.probs, right, scale=1.0, dtype=torch.float64, advice=advice)


def test_a_bad_tree_costs_speed_only(lab: Any) -> None:
    text = greedy_text(TEXT, 6)
    wide = torch.full((2, 70), 1 / 70)
    for what, tree in (
        ("ids outside", DraftTree((61, 5, 99), (-1, 0, -1))), ("a negative id", DraftTree((-3, 5), (-1, 0))),
        ("NaN", DraftTree((1, 2), (-1, 0), torch.full((2, 61), torch.nan))),
        ("a wider vocabulary", DraftTree((65, 2), (-1, -1), wide)),
        ("a narrower vocabulary", DraftTree((1, 2), (-1, 0), torch.full((2, 4), 0.25))),
        ("more than there is room for", DraftTree((1,) * 90, (-1,) * 90)),
    ):  # fmt: skip
        target = model(lab, 24)
        got = lab.speculate_tree(target, ScriptedTreeDrafter(lambda *_, tree=tree: tree), TEXT, 6)
        assert list(got.tokens) == text, f"a drafter that hands over {what}: {list(got.tokens)}, should be {text}"
        assert target.length == len(TEXT) + 5, f"a drafter that hands over {what} left junk behind: {target.length}"


def test_text_from_trees_is_the_target_s_own(lab: Any) -> None:
    text = greedy_text(TEXT, 9)
    for depth, right, rounds in ((3, True, [(6, 3, 4), (6, 3, 4), (0, 0, 1)]), (1, True, None), (2, False, None)):
        trees = Trees(depth, right)
        got = lab.speculate_tree(model(lab), trees.spec(), TEXT, 9)
        assert isinstance(got, Speculation), f"speculate_tree must return a Speculation, got {type(got).__name__}"
        assert list(got.tokens) == text, f"trees of depth {depth}: {list(got.tokens)}, alone the target writes {text}"
        if rounds:
            seen = [(r.drafted, r.accepted, r.emitted) for r in got.rounds]
            assert seen == rounds, f"rounds as (drafted, accepted, emitted): {seen}, should be {rounds}"
            assert trees.asked == [8, 4], f"with 9 and 5 tokens to go the depths are 8 and 4, not {trees.asked}"


def test_a_text_from_trees_ends_inside_a_round(lab: Any) -> None:
    text = greedy_text(TEXT, 12)
    for count in range(1, 7):
        target = model(lab, 40)
        got = lab.speculate_tree(target, Trees(4).spec(), TEXT, count)
        assert list(got.tokens) == text[:count], f"{count} tokens were asked for: {list(got.tokens)}"
        assert target.length == len(TEXT) + count - 1, (
            f"the last token of the text is never read, drafted or not: length {target.length} after {count} tokens"
        )
    for place in range(6):
        first = text.index(text[place])
        target = model(lab, 40)
        got = lab.speculate_tree(target, Trees(4).spec(), TEXT, 12, stop_tokens=(text[place],))
        assert list(got.tokens) == text[: first + 1], f"stop token {text[place]}: {list(got.tokens)}"
        assert target.length == len(TEXT) + first, f"junk behind the stop token stayed: length {target.length}"


def test_a_stop_condition_is_asked_after_each_token_of_a_path(lab: Any) -> None:
    text = greedy_text(TEXT, 12)
    for count in range(1, 7):
        target, asked = model(lab, 40), list[list[int]]()

        def finished(tokens: list[int], asked: Any = asked, count: int = count) -> bool:
            asked.append(list(tokens))
            return len(tokens) == count

        got = lab.speculate_tree(target, Trees(4).spec(), TEXT, 12, finished=finished)
        assert list(got.tokens) == text[:count], f"finished says True after {count} tokens: {list(got.tokens)}"
        right = [text[:i] for i in range(1, count + 1)]
        assert asked == right, f"finished is asked after each token, with the generated ones: {asked}, not {right}"
        assert target.length == len(TEXT) + count - 1, f"junk behind the end stayed: length {target.length}"


def test_masks_hold_for_every_draft_of_a_tree(lab: Any) -> None:
    asked: list[list[int]] = []

    def rule(text: list[int]) -> Tensor:
        # It goes by the whole text, as a grammar does.
        ids = torch.arange(CONFIG.vocab_size)
        return (ids % 3 == sum(text) % 3) | (ids % 7 == 1)

    def allowed(text: list[int]) -> Tensor:
        asked.append(list(text))
        return rule(text)

    text = list(TEXT)
    for _ in range(9):
        text.append(int(whole_run(text)[-1].masked_fill(~rule(text), -torch.inf).argmax()))

    def propose(so_far: list[int], most: int, draws: list[float]) -> DraftTree:
        # A banned draft with a child, then the right one with a banned child and the right one, and one outside.
        right = [*text[len(so_far) :], 0, 0][:2]
        first, second = (int((~rule(before)).nonzero()[0]) for before in (so_far, [*so_far, right[0]]))
        return DraftTree((first, 5, right[0], second, right[1], 61), (-1, 0, -1, 2, 2, 4))

    got = lab.speculate_tree(model(lab), ScriptedTreeDrafter(propose), TEXT, 9, allowed=allowed)
    assert list(got.tokens) == text[4:], f"with masks the target writes {text[4:]}, with trees it wrote {got.tokens}"
    assert got.rounds[0].accepted == 2, f"two drafts of the first tree are right and allowed, kept: {got.rounds[0]}"
    for path in asked:
        wrong = [place for place in range(4, len(path)) if not rule(path[:place])[path[place]]]
        assert not wrong, f"allowed was asked what follows {path}, but token {wrong} of it may not stand there"


def test_sampled_text_from_trees_follows_the_target(lab: Any) -> None:
    # The first two tokens of 250 texts against the target's own law, in bins of probability 1/6 or so. Right code
    # fails with probability alpha for each of the two.
    alpha, runs = 1e-6, 250
    settings = SamplingParams(temperature=0.7, top_k=6)
    law = token_distribution(whole_run(TEXT)[-1:], settings)[0]
    likely = law.argsort(descending=True)[:6].tolist()

    def propose(text: list[int], most: int, draws: list[float]) -> DraftTree:
        return DraftTree((likely[0], likely[1], likely[2], likely[0]), (-1, -1, 0, 0))

    # Without drafts each place draws its own token with the second number of the first row.
    got = lab.speculate_tree(
        model(lab), ScriptedTreeDrafter(lambda *_: DraftTree((), ())), TEXT, 8, SamplingParams(temperature=1.0, seed=3)
    )
    right = list(TEXT)
    for place in range(8):
        row = token_distribution(whole_run(right)[-1:], SamplingParams())[0]
        right.append(int((row.cumsum(0) <= uniform(3, place * (1 << 16) + 1)).sum()))
    assert list(got.tokens) == right[4:], f"place n draws with uniform(seed, n * PLACE + 1): {right[4:]}, not {got}"
    firsts: list[int] = []
    seconds: dict[int, list[int]] = {}
    for seed in range(runs):
        got = lab.speculate_tree(
            model(lab), ScriptedTreeDrafter(propose), TEXT, 3, SamplingParams(temperature=0.7, top_k=6, seed=seed)
        )
        firsts.append(got.tokens[0])
        seconds.setdefault(got.tokens[0], []).append(got.tokens[1])
    result = chi_square(torch.tensor(firsts), law)
    assert result.p_value > alpha, f"first tokens of {runs} texts don't follow the target: p-value {result.p_value:.1e}"
    second = token_distribution(whole_run([*TEXT, likely[0]])[-1:], settings)[0]
    result = chi_square(torch.tensor(seconds[likely[0]]), second)
    assert result.p_value > alpha, f"second tokens after {likely[0]} don't: p-value {result.p_value:.1e}"


@pytest.mark.integration
def test_your_own_tree_runs_on_your_own_model(lab: Any) -> None:
    target, text = model(lab), list(TEXT)
    logits = target.append(text, (5, 9, 9), (-1, -1, 0))
    for _ in range(4):
        rows = logits[-4:].double().softmax(-1)
        drafts = (5, 9, 9)
        path, token = lab.verify_tree(rows, DraftTree(drafts, (-1, -1, 0)), torch.full((4, 2), 0.999).double())
        target.keep(path)
        text += [*(drafts[i] for i in path), token]
        logits = target.append([token], drafts, (-1, -1, 0))
        check_rows("the text that came out", logits[:1], text, 1, "What was kept must read like the text itself.")
