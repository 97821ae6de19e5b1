"""Task 14: which candidates a tree is made of, and what each row of it sees."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
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
from grader.judge.refusal import check_refused
from grader.judge.scripted_head import RecordingHead, Row, logits_of, state_of, text_rows
from labkit.drafting import DraftTree
from labkit.sampling_params import SamplingParams

pytestmark = pytest.mark.task(14)

VOCAB = 13
TEXT = [3, 1, 4, 1, 5]
Path = tuple[int, ...]


def said(path: Path, vocab_size: int = VOCAB, sharpness: float = 1.0) -> Tensor:
    """Log-probabilities behind a path of drafts; other ones for every path."""
    return (sharpness * logits_of(tuple(map(float, path)), vocab_size)).log_softmax(-1)


def wanted(width: int, depth: int, size: int, said: Any) -> tuple[list[Path], list[list[Path]]]:
    """The drafts of the tree as paths, and those that are expanded level by level: by the definition."""
    confidence: dict[Path, float] = {(): 0.0}
    level: list[Path] = [()]
    expanded: list[list[Path]] = []
    for step in range(depth):
        found = []
        for path in level:
            row = said(path)
            for token in sorted(range(len(row)), key=lambda token: -float(row[token]))[:width]:
                if row[token] > -math.inf:
                    confidence[(*path, token)] = confidence[path] + float(row[token])
                    found.append((*path, token))
        level = sorted(found, key=lambda path: -confidence[path])[:width]
        if step < depth - 1 and level:
            expanded.append(level)
    del confidence[()]
    best = sorted(confidence, key=lambda path: -confidence[path])[:size]
    return [path for path in confidence if path in set(best)], expanded


def paths(tree: DraftTree) -> list[Path]:
    """The tokens that lead to each draft, its own included."""
    found: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


class Expanding:
    """Answers `expand`, and writes down what was expanded."""

    def __init__(self, said: Any, silent_at: int = -1) -> None:
        self.levels: list[list[Path]] = []
        self.first = said(())
        self._nodes: list[Path] = []
        self._said = said
        self._silent_at = silent_at

    def __call__(self, tokens: list[int], parents: list[int]) -> Tensor | None:
        """The rows of a level."""
        assert len(tokens) == len(parents), f"a parent for each token: {tokens}, {parents}"
        assert all(-1 <= parent < len(self._nodes) for parent in parents), (
            f"parents are numbers of nodes expanded before, of which there are {len(self._nodes)}, or -1: {parents}"
        )
        level = [
            (*(self._nodes[parent] if parent >= 0 else ()), token)
            for token, parent in zip(tokens, parents, strict=True)
        ]
        self.levels.append(level)
        self._nodes += level
        if len(self.levels) == self._silent_at:
            return None
        return torch.stack([self._said(path) for path in level])


def grow(lab: Any, say: Any, width: int, depth: int, size: int, silent_at: int = -1) -> tuple[list[Path], Expanding]:
    """A tree as paths, and who was expanded for it."""
    expand = Expanding(say, silent_at)
    tree = lab.grow_tree(expand.first, expand, width, depth, size)
    assert isinstance(tree, DraftTree) and tree.probs is None, f"a DraftTree without probs: {tree}"
    return paths(tree), expand


def check(lab: Any, say: Any, width: int, depth: int, size: int, why: str) -> None:
    """Tree and expansions against the definition."""
    right, levels = wanted(width, depth, size, say)
    got, expand = grow(lab, say, width, depth, size)
    what = f"width {width}, depth {depth}, size {size}"
    assert expand.levels == levels, f"{what}: expanded are to be {levels}, they were {expand.levels}. {why}"
    assert got == right, f"{what}: the tree is {right}, got {got}. {why}"


def test_the_most_confident_are_expanded(lab: Any) -> None:
    why = "Of all new candidates the most confident are expanded, by the product along the path."
    for width, depth in ((1, 4), (2, 3), (3, 3), (4, 2), (3, 1)):
        check(lab, said, width, depth, 1000, why)
        check(lab, partial(said, sharpness=0.3), width, depth, 1000, why)
    for depth in (2, 5):
        _, expand = grow(lab, said, 2, depth, 100)
        assert len(expand.levels) == depth - 1, f"depth {depth}: nobody needs to know what follows the last level"


def test_the_tree_is_the_best_of_all_levels(lab: Any) -> None:
    why = "From all levels the most confident drafts are taken, whether they were expanded or not."
    for size in (1, 2, 4, 7, 12, 20):
        check(lab, said, 3, 4, size, why)
        check(lab, partial(said, sharpness=0.2), 3, 4, size, why)
        check(lab, partial(said, sharpness=3.0), 4, 3, size, why)


def test_a_sure_draft_does_not_go_before_its_parent(lab: Any) -> None:
    # Chains of certainty: every draft on the path is as confident as the first.
    def sure(path: Path) -> Tensor:
        row = torch.full((VOCAB,), -math.inf, dtype=torch.float64)
        if path:
            row[(path[-1] + 1) % VOCAB] = 0.0
        else:
            row[[2, 7]] = torch.tensor([0.625, 0.375], dtype=torch.float64).log()
        return row

    for size in (1, 2, 3, 4, 5, 8):
        check(lab, sure, 2, 4, size, "Of equal confidence the one that was found first comes first.")
    assert grow(lab, sure, 3, 2, 50)[0] == [(2,), (7,), (2, 3), (7, 8)], "a token of -inf is no candidate"


def test_a_tree_ends_where_nothing_is_said(lab: Any) -> None:
    full, _ = wanted(2, 4, 100, said)
    for silent_at in (1, 2, 3):
        got, _ = grow(lab, said, 2, 4, 100, silent_at)
        right = [path for path in full if len(path) <= silent_at]
        assert got == right, f"expand says None at its call {silent_at}: the tree is {right}, got {got}"
    assert grow(lab, said, 2, 0, 5)[0] == [], "no levels, no drafts"


def test_numbers_that_grow_nothing_are_refused(lab: Any) -> None:
    assert grow(lab, said, 2, 2, 3)[0] == wanted(2, 2, 3, said)[0], "a good call"
    for width, depth, size in ((0, 2, 2), (2, -1, 2), (2, 2, 0), (2.0, 2, 2), (2, True, 2)):
        expand = Expanding(said)
        check_refused(
            f"width {width}, depth {depth}, size {size}",
            lambda e=expand, n=(width, depth, size): lab.grow_tree(e.first, e, *n),
        )
        assert not expand.levels, "nothing runs then"


def drafter_for(lab: Any, head: RecordingHead, *numbers: int) -> Any:
    """The drafter under test."""
    return lab.DynamicTreeDrafter(head.features(), head.spec(), *numbers)


def head_says(text: list[int], path: Path) -> Tensor:
    """What the recording head says behind a path, by the definition: rows of text and path, and no others."""
    rows = text_rows(text)
    for token in path:
        rows.append(Row(state_of(rows), token, len(rows)))
    return logits_of(state_of(rows), VOCAB).log_softmax(-1)


@pytest.mark.integration
def test_each_row_sees_its_own_path(lab: Any) -> None:
    head = RecordingHead(VOCAB)
    for text, width, depth, size in ((TEXT, 3, 3, 30), ([*TEXT, 2, 7], 2, 4, 9), ([8, 2], 4, 2, 12), (TEXT, 1, 5, 5)):
        drafter = drafter_for(lab, head, width, depth, size)
        head.rows.clear()
        head.text = text[:-1]
        head.calls.clear()
        right, levels = wanted(width, depth, size, partial(head_says, text))
        got = paths(drafter.propose_tree(text, 9, [0.5]))
        assert got == right, (
            f"{text}, width {width}, depth {depth}, size {size}: the tree is {right}, got {got}. A row holds its "
            "parent's state and its own token, sees the text, its ancestors and itself, and stands behind its parent."
        )
        calls = [text[1:], *([path[-1] for path in level] for level in levels)]
        assert head.calls == calls, f"one append for the text, one for each level: {calls}, got {head.calls}"
        assert len(head.rows) == len(text) - 1, "no row of a draft stays"
    # The rows that stayed are those of the text, also for a run of drafts behind a tree.
    longer = [*TEXT, 9]
    head = RecordingHead(VOCAB)
    head.text = TEXT[:-1]
    drafter = drafter_for(lab, head, 2, 3, 8)
    drafter.propose_tree(TEXT, 9, [0.5])
    head.text = TEXT
    got = paths(drafter.propose_tree(longer, 9, [0.5]))
    assert got == wanted(2, 3, 8, partial(head_says, longer))[0], "the second tree goes on from the text as it is now"


@pytest.mark.integration
def test_trees_end_where_text_and_head_do(lab: Any) -> None:
    head = RecordingHead(VOCAB)
    head.text = TEXT[:-1]
    drafter = drafter_for(lab, head, 2, 4, 50)
    for depth in (3, 2, 1, 6):
        got = paths(drafter.propose_tree(TEXT, depth, [0.5]))
        assert got == wanted(2, min(depth, 4), 50, partial(head_says, TEXT))[0], f"paths of at most {depth} drafts"
    calls = len(head.calls)
    for what, text, read, depth in (
        ("no depth", TEXT, TEXT[:-1], 0), ("a single token", [5], [], 3), ("an unread text", TEXT, [], 3),
        ("an unknown id", [1, VOCAB, 2], [1, 1], 3),
    ):  # fmt: skip
        head.text = read
        assert drafter.propose_tree(text, depth, [0.5]).tokens == (), f"{what}: there is nothing to draft"
    assert len(head.calls) == calls, "and nothing to run"
    check_refused("an empty text", lambda: drafter.propose_tree([], 3))
    check_refused("a depth of -1", lambda: drafter.propose_tree(TEXT, -1))
    for numbers in ((0, 2, 2), (2, 0, 2), (2, 2, 0)):
        check_refused(f"width, depth, size of {numbers}", lambda n=numbers: drafter_for(lab, RecordingHead(VOCAB), *n))
    # Levels of 1, 2 and 2 rows: NaN in the second row of level 2 ends the tree there.
    for good, levels in ((0, 0), (1, 1), (2, 1), (3, 2), (4, 2)):
        head = RecordingHead(VOCAB)
        head.text, head.bad_after = TEXT[:-1], good
        got = paths(drafter_for(lab, head, 2, 4, 50).propose_tree(TEXT, 9, [0.5]))
        right = [path for path in wanted(2, 4, 50, partial(head_says, TEXT))[0] if len(path) <= levels]
        assert got == right, f"NaN after {good} rows of logits: {levels} levels are left, got {got}"
        assert len(head.rows) == len(TEXT) - 1, "no row of a draft stays"


@pytest.mark.integration
def test_no_dynamic_tree_changes_the_text(lab: Any) -> None:
    hidden = CONFIG.hidden_size

    def weights(drafts: int) -> dict[str, Tensor]:
        return head_weights(13, drafts, fc__weight=(hidden, 2 * hidden)) | layer_weights(hidden, 14)

    model = lab.FeatureModel(TARGET, 60, (CONFIG.num_layers,))
    drafter = lab.DynamicTreeDrafter(model, lab.EagleHead(CONFIG, weights(CONFIG.vocab_size)), 3, 3, 9)
    got = lab.speculate_tree(model, drafter, PROMPT, 16)
    assert [*PROMPT, *got.tokens] == greedy_text(16), f"plain decoding: {greedy_text(16)[4:]}, got {got.tokens}"
    assert all(round_.drafted == 9 for round_ in got.rounds[1:-3]), f"trees of nine drafts: {got.rounds}"
    # A right drafter fails with probability 1e-6.
    settings = {"temperature": 0.8, "top_k": 2}
    ids = torch.tensor(likely_tokens(SamplingParams(**settings)))

    def generate(params: SamplingParams) -> Any:
        target = lab.FeatureModel(TARGET, 14, (CONFIG.num_layers,))
        tree = lab.DynamicTreeDrafter(target, lab.EagleHead(CONFIG, weights(len(ids)), ids), 3, 2, 8)
        return lab.speculate_tree(target, tree, PROMPT, 3, params)

    check_follows_target(generate, settings, 80)
