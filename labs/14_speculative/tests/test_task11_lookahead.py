"""Task 11: where the guesses come from, what the branch looks like, and that no pool can change the text."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.distributions import chi_square
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.distribution import token_distribution
from labkit.drafting import DraftTree
from labkit.sampling_params import SamplingParams
from labkit.specs import TinyLlama

pytestmark = pytest.mark.task(11)

Path = tuple[int, ...]


def rule(text: list[int]) -> int:
    """What the target of these tests likes best; another token for nearly every text."""
    number = 7
    for token in text:
        number = (number * 31 + token) % 9973
    return 100 + number


def propose(drafter: Any, text: list[int], depth: int = 30) -> DraftTree:
    """One tree, in the right form."""
    tree = drafter.propose_tree(text, depth, [0.5] * 4)
    assert isinstance(tree, DraftTree), f"propose_tree must return a DraftTree, got {tree!r}"
    assert tree.probs is None, "nothing is left to chance: probs is None"
    return tree


def paths(tree: DraftTree) -> list[Path]:
    """The tokens that lead to each draft, its own included."""
    found: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found), f"two siblings are the same token, the second is never kept: {sorted(found)}"
    return found


def beginnings(*whole: Path) -> list[Path]:
    """All drafts of a tree with these paths, sorted."""
    return sorted({path[: i + 1] for path in whole for i in range(len(path))})


def branch(rows: list[list[int]]) -> list[Path]:
    """The paths of the columns: the spine up to a column, then down."""
    return [(*rows[0][:i], *column) for i, column in enumerate(zip(*rows, strict=True))]


def observe(drafter: Any, text: list[int], tree: DraftTree) -> None:
    """A pass of the target over the tree."""
    drafter.observe(tree.tokens, tree.parents, [rule(text), *(rule([*text, *path]) for path in paths(tree))])


def check(tree: DraftTree, whole: list[Path], what: str) -> None:
    """The tree holds these paths and no more."""
    got, right = sorted(paths(tree)), beginnings(*whole)
    assert got == right, f"{what}: the paths to the drafts should be {right}, they are {got}"


class Plain:
    """What a drafter should hold, by the definitions."""

    def __init__(self, window: int, ngram: int, guesses: int) -> None:
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self.rows: list[list[int]] = []
        self.grams: list[Path] = []

    def wanted(self, text: list[int], depth: int) -> tuple[list[Path], list[Path]]:
        """Guesses in order, and the paths of the branch."""
        if not self.rows:
            self.rows = [(text * self.window)[-self.window :] if len(text) >= self.window else
                         (text * self.window)[: self.window]]  # fmt: skip
        latest = [g[1:] for g in reversed(self.grams) if g[0] == text[-1]]
        guesses = list(dict.fromkeys(latest))[: self.guesses]
        fits = self.window + len(self.rows) - 1 <= depth
        return [g[:depth] for g in guesses if depth], branch(self.rows) if fits else []

    def observe(self, text: list[int], depth: int) -> None:
        """One pass over the tree."""
        columns = self.wanted(text, depth)[1]
        if not columns:
            return
        new = [rule([*text, *path]) for path in columns]
        self.rows.append(new)
        if len(self.rows) == self.ngram:
            self.grams += zip(*self.rows, strict=True)
            self.rows = self.rows[1:]


def warmed(lab: Any, window: int, ngram: int, guesses: int, text: list[int], passes: int) -> tuple[Any, Plain]:
    """A drafter and its plain twin after some passes."""
    drafter, plain = lab.LookaheadDrafter(window, ngram, guesses), Plain(window, ngram, guesses)
    for _ in range(passes):
        tree = propose(drafter, text)
        plain.wanted(text, 30)
        observe(drafter, text, tree)
        plain.observe(text, 30)
    return drafter, plain


def test_the_first_branch_is_the_end_of_the_text(lab: Any) -> None:
    for text, spine in (
        ([5, 6, 7, 8, 9], (7, 8, 9)), ([7, 8, 9], (7, 8, 9)), ([5, 6], (5, 6, 5)), ([4], (4, 4, 4)),
    ):  # fmt: skip
        check(propose(lab.LookaheadDrafter(3, 4, 2), text), [spine], f"window 3, the text is {text}")
        again = lab.LookaheadDrafter(3, 4, 2)
        propose(again, text)
        check(propose(again, text), [spine], "a tree that no pass has read changes nothing")


def test_the_branch_grows_and_moves_on(lab: Any) -> None:
    for ngram in (2, 3, 4):
        drafter = lab.LookaheadDrafter(3, ngram, 2)
        propose(drafter, [5, 6, 7, 8, 9])
        # The text goes on with a token that no n-gram begins with, so that there are no guesses.
        text, rows = [5, 6, 7, 8, 9, 1], [[7, 8, 9]]
        for step in range(5):
            tree = propose(drafter, text)
            check(tree, branch(rows), f"n-grams of {ngram}, after {step} passes with rows {rows}")
            observe(drafter, text, tree)
            # Each column's next token is what the target says behind it, and the oldest row goes.
            rows.append([rule([*text, *path]) for path in branch(rows)])
            rows = rows[-(ngram - 1) :]


def test_n_grams_of_the_columns_become_guesses(lab: Any) -> None:
    text = [5, 6, 7, 8, 9, 1]
    for ngram in (2, 3, 4):
        drafter, plain = warmed(lab, 3, ngram, 4, text, ngram)
        for column in range(3):
            gram = plain.grams[column]
            tree = propose(drafter, [3, gram[0]])
            check(tree, [gram[1:], *branch(plain.rows)], f"the text ends with {gram[0]}, and {gram} was found")
            assert tree.tokens[0] == gram[1] and tree.parents[0] == -1, "guesses come before the branch"
        check(propose(drafter, [3, 2]), branch(plain.rows), "no n-gram begins with 2")


def seeded(lab: Any, guesses: int, grams: list[tuple[int, int, int]]) -> Any:
    """A drafter with one column whose pool was given these n-grams of three, one after another."""
    drafter = lab.LookaheadDrafter(1, 3, guesses)
    for gram in grams:
        # With a window of 1 the column is (s, a). Three passes with chosen answers make it the n-gram wanted.
        for token in gram:
            tree = propose(drafter, [1])
            drafter.observe(tree.tokens, tree.parents, [token] * (len(tree.tokens) + 1))
    return drafter


def guesses_for(drafter: Any, token: int, depth: int = 30) -> list[Path]:
    """Paths of two drafts, in the order of their first drafts, without the branch."""
    tree = propose(drafter, [token], depth)
    return [path for path in paths(tree) if len(path) == 2]


def test_the_latest_guess_comes_first(lab: Any) -> None:
    grams = [(50, 61, 71), (50, 62, 72), (50, 63, 73), (51, 64, 74), (50, 65, 75)]
    for limit in (1, 2, 3, 5):
        got = guesses_for(seeded(lab, limit, grams), 50)
        right = [(65, 75), (63, 73), (62, 72), (61, 71)][:limit]
        assert got[: len(right)] == right and not set(got) & {(61, 71), (62, 72), (63, 73)} - set(right), (
            f"of at most {limit} n-grams that begin with 50 the latest are {right}, the tree has {got}"
        )
    drafter = seeded(lab, 2, [*grams[:2], grams[0]])
    assert guesses_for(drafter, 50)[:2] == [(61, 71), (62, 72)], "an n-gram that is found again is the latest"
    drafter = seeded(lab, 2, [*grams[:2], grams[1], grams[1]])
    assert guesses_for(drafter, 50)[:2] == [(62, 72), (61, 71)], "an n-gram that is found twice is kept once"


def test_guesses_that_begin_alike_share_drafts(lab: Any) -> None:
    drafter = seeded(lab, 4, [(50, 61, 71), (50, 62, 72), (50, 61, 73)])
    tree = propose(drafter, [50])
    got = paths(tree)
    assert got.count((61,)) == 1 and {(61, 71), (61, 73), (62, 72)} <= set(got), f"three guesses, two beginnings: {got}"
    firsts = [path[0] for path in got if len(path) == 1]
    assert firsts[:2] == [61, 62], f"the latest guess begins with 61, then comes 62: {firsts}"
    seconds = [path for path in got if len(path) == 2 and path[0] == 61]
    assert seconds == [(61, 73), (61, 71)], f"below 61 the latest guess comes first, too: {seconds}"


def test_paths_end_where_the_text_must(lab: Any) -> None:
    text = [5, 6, 7, 8, 9, 1]
    drafter, plain = warmed(lab, 3, 4, 4, text, 4)
    gram = plain.grams[0]
    for depth in (6, 5, 4, 3, 2, 1, 0):
        # Three columns of three reach 5 deep.
        wanted = ([gram[1:][:depth]] if depth else []) + (branch(plain.rows) if depth >= 5 else [])
        check(propose(drafter, [3, gram[0]], depth), wanted, f"paths of at most {depth} drafts")
    # What was left out is not moved on by a pass that did not read it.
    tree = propose(drafter, [3, gram[0]], 4)
    observe(drafter, [3, gram[0]], tree)
    check(propose(drafter, [3, 2]), branch(plain.rows), "the branch was left out of the pass, so it stays as it was")


def test_only_its_own_tree_teaches(lab: Any) -> None:
    text = [5, 6, 7]
    drafter = lab.LookaheadDrafter(2, 3, 2)
    tree = propose(drafter, text)
    drafter.observe((6,), (-1,), [1, 2])
    drafter.observe((), (), [1])
    drafter.observe((6, 7), (-1, -1), [1, 2, 3])
    check(propose(drafter, text), [(6, 7)], "passes over other trees say nothing of this one")
    observe(drafter, text, tree)
    rows = [[6, 7], [rule([*text, 6]), rule([*text, 6, 7])]]
    drafter.observe(tree.tokens, tree.parents, [1, 2, 3])
    check(propose(drafter, text), branch(rows), "a pass that was observed already is not observed twice")


def test_random_passes_match_a_plain_pool(lab: Any) -> None:
    generator = random.Random(11)
    guessed = 0
    for _ in range(8):
        window, ngram, guesses = generator.randint(1, 4), generator.randint(2, 4), generator.randint(1, 3)
        drafter, plain = lab.LookaheadDrafter(window, ngram, guesses), Plain(window, ngram, guesses)
        text = [generator.randrange(3) for _ in range(generator.randint(1, 6))]
        for _ in range(14):
            depth = generator.choice((0, 1, 2, 5, 9, 9, 9))
            tree = propose(drafter, text, depth)
            first, rest = plain.wanted(text, depth)
            what = f"window {window}, n-grams of {ngram}, {guesses} guesses, text {text}, depth {depth}"
            check(tree, [*first, *rest], what)
            firsts = [path[0] for path in paths(tree) if len(path) == 1]
            right = list(dict.fromkeys(path[0] for path in [*first, *rest[:1]]))
            assert firsts == right, f"{what}: drafts behind the text in order {right}, got {firsts}"
            guessed += len(first)
            observe(drafter, text, tree)
            plain.observe(text, depth)
            # Texts that often end with what the target has said, so that the pool is asked for something.
            heads = [gram[0] for gram in plain.grams] or [0]
            text = [*text, generator.choice([*heads, rule(text)])]
    assert guessed > 30


def test_calls_that_fit_nothing_are_refused(lab: Any) -> None:
    drafter = lab.LookaheadDrafter(2, 3, 2)
    tree = propose(drafter, [5, 6])
    check(tree, [(5, 6)], "a good call")
    for numbers in ((0, 3, 2), (2, 1, 2), (2, 3, 0), (2.0, 3, 2), (True, 3, 2)):
        check_refused(f"window, ngram, max_guesses of {numbers}", lambda n=numbers: lab.LookaheadDrafter(*n))
    check_refused("an empty text", lambda: drafter.propose_tree([], 5))
    check_refused("a depth of -1", lambda: drafter.propose_tree([5], -1))
    check_refused("two answers for three rows", lambda: drafter.observe(tree.tokens, tree.parents, [1, 2]))
    check_refused("four answers for three rows", lambda: drafter.observe(tree.tokens, tree.parents, [1, 2, 3, 4]))
    observe(drafter, [5, 6], tree)
    rows = [[5, 6], [rule([5, 6, 5]), rule([5, 6, 5, 6])]]
    check(propose(drafter, [5, 6]), branch(rows), "a refused call changes nothing")


CONFIG = ModelConfig.tiny(num_layers=2)
PROMPT = [7, 0, 60, 31]


@cache
def decoder() -> Decoder:
    """The judge's own copy of the model."""
    return Decoder(CONFIG, random_weights(CONFIG, 1, torch.float64), torch.float64)


def last_logits(tokens: list[int]) -> Tensor:
    """After the whole text, `[1, vocab_size]`."""
    return decoder()(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0, -1:]


def junk(drafter: Any, seed: int) -> None:
    """Fill a pool with n-grams that nobody ever said."""
    generator = random.Random(seed)
    for _ in range(12):
        tree = propose(drafter, [generator.randrange(CONFIG.vocab_size) for _ in range(6)])
        likeliest = [generator.randrange(CONFIG.vocab_size) for _ in range(len(tree.tokens) + 1)]
        drafter.observe(tree.tokens, tree.parents, likeliest)


@pytest.mark.integration
def test_no_pool_changes_the_text(lab: Any) -> None:
    # A pass over prompt and tree tells the drafter what the target says behind each column.
    drafter = lab.LookaheadDrafter(2, 3, 3)
    tree = propose(drafter, PROMPT)
    lab.LookaheadModel(TinyLlama(CONFIG, 1), 60, drafter).append(PROMPT, tree.tokens, tree.parents)
    said = [int(last_logits([*PROMPT, *path]).argmax()) for path in ((60,), (60, 31))]
    check(propose(drafter, PROMPT), branch([[60, 31], said]), f"the target says {said} behind the two columns")
    # A model that reads its own tree is its own drafter: the text must be the one of plain decoding.
    plain = list(PROMPT)
    for _ in range(40):
        plain.append(int(last_logits(plain).argmax()))
    for window, ngram, filled in ((5, 4, 0), (1, 2, 0), (3, 3, 1), (4, 2, 2)):
        drafter = lab.LookaheadDrafter(window, ngram, 3)
        for seed in range(filled):
            junk(drafter, seed)
        got = lab.speculate_tree(lab.LookaheadModel(TinyLlama(CONFIG, 1), 120, drafter), drafter, PROMPT, 40)
        assert list(got.tokens) == plain[4:], f"W {window}, N {ngram}: {list(got.tokens)}, plain {plain[4:]}"
    # Once more with what the pool has learned: it must know this text by now.
    drafter = lab.LookaheadDrafter(5, 4, 3)
    for _ in range(2):
        got = lab.speculate_tree(lab.LookaheadModel(TinyLlama(CONFIG, 1), 120, drafter), drafter, PROMPT, 40)
        assert list(got.tokens) == plain[4:]
    assert len(got.rounds) < 40, "of the target's own n-grams some must come true: none did in 40 rounds"
    # Sampled: the first two tokens against the target's law, in classes. Right code fails with probability alpha.
    alpha, runs, settings = 1e-6, 150, SamplingParams(temperature=0.7, top_k=4)
    law = token_distribution(last_logits(PROMPT), settings)[0]
    likely = int(law.argmax())
    second = token_distribution(last_logits([*PROMPT, likely]), settings)[0]
    firsts, seconds = [], []
    for seed in range(runs):
        drafter = lab.LookaheadDrafter(2, 2, 3)
        # The branch's spine begins with the likeliest token, so that drafts are kept and rejected.
        tree = propose(drafter, PROMPT)
        drafter.observe(tree.tokens, tree.parents, [likely] * (len(tree.tokens) + 1))
        target = lab.LookaheadModel(TinyLlama(CONFIG, 1), 20, drafter)
        got = lab.speculate_tree(target, drafter, PROMPT, 3, SamplingParams(temperature=0.7, top_k=4, seed=seed))
        firsts.append(got.tokens[0])
        seconds += [got.tokens[1]] if got.tokens[0] == likely else []
    for what, tokens, right in (("first", firsts, law), ("second", seconds, second)):
        result = chi_square(torch.tensor(tokens), right)
        assert result.p_value > alpha, f"{what} tokens don't follow the target: p-value {result.p_value:.1e}"
