"""Task 12: what a head says, which tree of candidates is the best, and where its feature comes from."""

from __future__ import annotations

import itertools
import math
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
    hidden_states,
    likely_tokens,
)
from grader.judge.numerics import check_close
from grader.judge.refusal import check_refused
from labkit.drafting import DraftTree
from labkit.features import ScriptedFeatures
from labkit.sampling_params import SamplingParams

pytestmark = pytest.mark.task(12)

HIDDEN, DRAFTS, VOCAB = 5, 7, 11
LAST = (CONFIG.num_layers,)
SUMS = 500.0
"""Rounding of a feature: it went through three layers of products that sum dozens of numbers each."""


def weights(shared: bool = True, heads: int = 3, hidden: int = HIDDEN, drafts: int = DRAFTS) -> dict[str, Tensor]:
    """Random heads."""
    generator = torch.Generator().manual_seed(12)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = {"lm_head.weight": draw(drafts, hidden)} if shared else {}
    for head in range(heads):
        made[f"heads.{head}.linear.weight"] = draw(hidden, hidden)
        made[f"heads.{head}.linear.bias"] = draw(hidden)
        if not shared:
            made[f"heads.{head}.lm_head.weight"] = draw(drafts, hidden)
    return made


def said(given: dict[str, Tensor], feature: Tensor, head: int) -> list[float]:
    """The definition, number by number."""
    matrix, bias = given[f"heads.{head}.linear.weight"].tolist(), given[f"heads.{head}.linear.bias"].tolist()
    x = feature.tolist()
    inner = [sum(m * v for m, v in zip(row, x, strict=True)) + b for row, b in zip(matrix, bias, strict=True)]
    mixed = [v + i / (1 + math.exp(-i)) for v, i in zip(x, inner, strict=True)]
    output = given[f"heads.{head}.lm_head.weight" if "lm_head.weight" not in given else "lm_head.weight"]
    return [sum(o * m for o, m in zip(row, mixed, strict=True)) for row in output.tolist()]


def ranking(given: dict[str, Tensor], feature: Tensor, head: int, ids: Tensor | None = None) -> list[int]:
    """The target's ids from the likeliest on."""
    scores = said(given, feature, head)
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    return order if ids is None else [int(ids[token]) for token in order]


def rows(count: int, seed: int = 3) -> Tensor:
    """Features of the target."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PATHS = [(0,), (1,), (0, 0), (0, 2), (1, 1), (3,), (0, 2, 1)]


def test_a_head_is_a_residual_block_and_an_output_matrix(lab: Any) -> None:
    features = torch.stack([rows(3), rows(3, 4)])
    for shared, head in itertools.product((True, False), range(3)):
        given = weights(shared)
        right = torch.tensor([[said(given, row, head) for row in batch] for batch in features], dtype=torch.float64)
        check_close(
            f"logits of head {head}, output matrix {'of all' if shared else 'of its own'}",
            lab.medusa_logits(given, features, head), right, scale=1.0, dtype=torch.float64,
            advice="x + silu(linear(x)), then the head's own output matrix, or the common one if it has none.",
        )  # fmt: skip


def likeliest_paths(accuracy: list[list[float]], size: int) -> list[tuple[int, ...]]:
    """All paths there are, from the likeliest on."""
    every = [p for depth in range(len(accuracy)) for p in itertools.product(range(len(accuracy[0])), repeat=depth + 1)]
    chance = {p: math.prod(accuracy[i][rank] for i, rank in enumerate(p)) for p in every}
    return sorted(every, key=lambda p: (-chance[p], len(p), p))[:size]


def test_the_candidate_tree_is_the_likeliest(lab: Any) -> None:
    tables = [
        [[0.5, 0.25, 0.125], [0.5, 0.25, 0.0], [0.5, 0.5, 0.25]],
        [[0.75, 0.125], [1.0, 0.5], [0.75, 0.25]],
        [[0.5, 0.25, 0.125, 0.0625]],
        [[0.0, 0.0], [0.5, 0.5]],
    ]
    for table, size in itertools.product(tables, (1, 2, 3, 5, 8, 40)):
        got = [tuple(path) for path in lab.medusa_paths(torch.tensor(table), size)]
        right = likeliest_paths(table, size)
        assert got == right, (
            f"accuracies {table}, {size} drafts: the likeliest paths are {right}, got {got}. A path is right with the "
            "product of its accuracies; of equal ones the shorter comes first, then the lower ranks."
        )


def propose(lab: Any, features: Tensor, text: list[int], depth: int = 9, **changes: Any) -> DraftTree:
    """The tree of a fresh drafter."""
    arguments = {"weights": weights(), "paths": PATHS, "vocab_size": VOCAB, "target_ids": torch.arange(DRAFTS)}
    arguments |= changes
    drafter = lab.MedusaDrafter(ScriptedFeatures(lambda: features), **arguments)
    tree = drafter.propose_tree(text, depth, [0.5] * 4)
    assert isinstance(tree, DraftTree), f"propose_tree must return a DraftTree, got {tree!r}"
    return tree


def check(tree: DraftTree, paths: list[tuple[int, ...]], feature: Tensor, given: dict[str, Tensor], ids: Any) -> None:
    """The tree against the choices of the heads."""
    tokens = tuple(ranking(given, feature, len(path) - 1, ids)[path[-1]] for path in paths)
    parents = tuple(paths.index(path[:-1]) if path[:-1] else -1 for path in paths)
    assert tree.parents == parents, f"paths {paths} have the parents {parents}, got {tree.parents}"
    assert tree.tokens == tokens, (
        f"paths {paths}: the choices are {tokens}, got {tree.tokens}. Depth 1 is head 0 on the newest feature."
    )
    assert tree.probs is None, "nothing was drawn, so probs is None: each row is 1 at its token"


def test_drafts_are_choices_of_the_heads_along_the_paths(lab: Any) -> None:
    for count, text in ((3, [1, 2, 3, 4]), (1, [5, 6]), (6, [1, 2, 3])):
        features = rows(count)
        check(propose(lab, features, text), PATHS, features[-1], weights(), None)
    features = rows(2, 9)
    own = weights(shared=False)
    check(propose(lab, features, [1, 2, 3], weights=own), PATHS, features[-1], own, None)


def test_a_draft_vocabulary_speaks_the_target_s_ids(lab: Any) -> None:
    ids = torch.tensor([9, 2, 10, 0, 5, 4, 7])
    features = rows(3)
    tree = propose(lab, features, [1, 2, 3, 4], target_ids=ids)
    check(tree, PATHS, features[-1], weights(), ids)
    assert set(tree.tokens) <= set(ids.tolist())
    whole = weights(drafts=VOCAB)
    check(propose(lab, features, [1, 2, 3, 4], weights=whole, target_ids=None), PATHS, features[-1], whole, None)


def test_candidates_end_where_the_text_must(lab: Any) -> None:
    features = rows(3)
    for depth in (3, 2, 1, 0):
        paths = [path for path in PATHS if len(path) <= depth]
        check(propose(lab, features, [1, 2, 3, 4], depth), paths, features[-1], weights(), None)


def test_without_features_there_are_no_drafts(lab: Any) -> None:
    assert propose(lab, rows(3), [1, 2, 3, 4]).tokens, "the target has read all but the last token"
    assert propose(lab, rows(0), [1, 2, 3, 4]).tokens == (), "the target has read nothing yet"
    assert propose(lab, rows(2), [1, 2, 3, 4]).tokens == (), "the target has read two tokens of four"
    assert propose(lab, rows(0), [1]).tokens == (), "a text of one token has no feature"
    for head in range(3):
        broken = weights()
        broken[f"heads.{head}.linear.weight"][2, 1] = torch.nan
        assert propose(lab, rows(3), [1, 2, 3, 4], weights=broken).tokens == (), f"head {head} says NaN"


def test_trees_and_heads_that_do_not_fit_are_refused(lab: Any) -> None:
    check(propose(lab, rows(3), [1, 2, 3, 4]), PATHS, rows(3)[-1], weights(), None)
    for paths in ([], [(0,), (0,)], [(0, 0), (0,)], [(0,), (1, 0)], [()], [(-1,)], [(DRAFTS,)],
                  [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]):  # fmt: skip
        check_refused(f"the paths {paths}", lambda paths=paths: propose(lab, rows(3), [1, 2], paths=paths))
    for ids in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 5], [0, 1, 2, 3, 4, 5, VOCAB]):
        check_refused(f"ids {ids}", lambda ids=ids: propose(lab, rows(3), [1, 2], target_ids=torch.tensor(ids)))
    check_refused("no ids for 7 of 11 tokens", lambda: propose(lab, rows(3), [1, 2], target_ids=None))
    for given in ({}, {"lm_head.weight": weights()["lm_head.weight"]}):
        check_refused(f"weights {list(given)}", lambda given=given: propose(lab, rows(3), [1, 2], weights=given))
    check_refused("an empty text", lambda: propose(lab, rows(3), []))
    check_refused("a depth of -1", lambda: propose(lab, rows(3), [1, 2], -1))
    assert len(lab.medusa_paths(torch.tensor([[0.5, 0.25]]), 2)) == 2
    for accuracy in ([[0.25, 0.5]], [[1.5, 0.5]], [[0.5, -0.5]], [[math.nan, 0.5]], [0.5, 0.25]):
        check_refused(f"accuracies {accuracy}", lambda a=accuracy: lab.medusa_paths(torch.tensor(a), 2))
    check_refused("a tree of 0 drafts", lambda: lab.medusa_paths(torch.tensor([[0.5]]), 0))


def check_features(what: str, model: Any, text: list[int], layers: tuple[int, ...]) -> None:
    """The model's features against one pass over its text."""
    assert model.length == len(text), f"{what}: the model remembers {model.length} tokens, the text has {len(text)}"
    check_close(
        f"features {what}", model.features(), hidden_states(text, layers), scale=SUMS, dtype=torch.float64,
        advice="Row i belongs to token i of what the model remembers now, not to a draft that was dropped.",
    )  # fmt: skip


@pytest.mark.integration
def test_features_follow_what_the_model_remembers(lab: Any) -> None:
    for layers in (LAST, (0, 2, 3), (1,)):
        model = lab.FeatureModel(TARGET, 40, layers)
        assert tuple(model.features().shape) == (0, len(layers) * CONFIG.hidden_size), "nothing was read yet"
        model.append([3, 1, 4])
        check_features("after a text", model, [3, 1, 4], layers)
        logits = model.append([1], [5, 9, 2, 6], [-1, 0, -1, 2])
        assert tuple(logits.shape) == (5, CONFIG.vocab_size), "append still returns the logits"
        assert model.features().shape[0] == 8, "until keep says which came true, the drafts' rows are there"
        model.keep([2, 3])
        check_features("after a kept branch", model, [3, 1, 4, 1, 2, 6], layers)
        model.append([8], [7], [-1])
        model.keep([])
        check_features("after a rejection of all drafts", model, [3, 1, 4, 1, 2, 6, 8], layers)
        model.append([5, 5, 9])
        model.truncate(5)
        check_features("after truncate(5)", model, [3, 1, 4, 1, 2], layers)
        model.append([30, 2])
        check_features("after more text", model, [3, 1, 4, 1, 2, 30, 2], layers)


@pytest.mark.integration
def test_refused_calls_leave_the_features_whole(lab: Any) -> None:
    model = lab.FeatureModel(TARGET, 8, LAST)
    model.append([3, 1, 4])
    for what, call in (
        ("a token outside", lambda: model.append([CONFIG.vocab_size])),
        ("too much text", lambda: model.append([1] * 6)),
        ("a draft that isn't there", lambda: model.keep([0])),
        ("more than there is", lambda: model.truncate(4)),
        ("a length of -1", lambda: model.truncate(-1)),
        ("a layer that the model doesn't have", lambda: lab.FeatureModel(TARGET, 8, (CONFIG.num_layers + 1,))),
        ("no layer", lambda: lab.FeatureModel(TARGET, 8, ())),
    ):
        check_refused(what, call)
        check_features(f"after {what}", model, [3, 1, 4], LAST)
    model.append([5], [6], [-1])
    check_refused("truncate while drafts wait", lambda: model.truncate(2))
    model.keep([0])
    check_features("after keep", model, [3, 1, 4, 5, 6], LAST)


@pytest.mark.integration
def test_no_head_changes_the_text(lab: Any) -> None:
    given = weights(hidden=CONFIG.hidden_size, drafts=CONFIG.vocab_size)
    model = lab.FeatureModel(TARGET, 40, LAST)
    drafter = lab.MedusaDrafter(model, given, PATHS, CONFIG.vocab_size)
    got = lab.speculate_tree(model, drafter, PROMPT, 20)
    assert [*PROMPT, *got.tokens] == greedy_text(20), f"plain decoding gives {greedy_text(20)[4:]}, got {got.tokens}"
    assert all(round_.drafted for round_ in got.rounds[1:-2]), f"only the first round has no feature: {got.rounds}"
    # Heads that choose among tokens which the target is likely to say; a right drafter fails with 1e-6.
    settings = {"temperature": 0.8, "top_k": 2}
    ids = torch.tensor(likely_tokens(SamplingParams(**settings)))
    pruned = weights(hidden=CONFIG.hidden_size, drafts=len(ids))
    paths = [*((rank,) for rank in range(min(4, len(ids)))), (0, 0), (0, 1), (1, 0), (2, 1)]

    def generate(params: SamplingParams) -> Any:
        target = lab.FeatureModel(TARGET, 8, LAST)
        one = lab.MedusaDrafter(target, pruned, paths, CONFIG.vocab_size, ids)
        return lab.speculate_tree(target, one, PROMPT, 3, params)

    check_follows_target(generate, settings, 80)
