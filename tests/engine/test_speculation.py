"""Speculation in the engine: the text of plain decoding, or at least its distribution, whoever drafts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from grader.judge.numerics import check_close
from labkit.checkpoints import load
from labkit.checkpoints.loading import Model
from labkit.drafting import Draft, DraftTree
from labkit.randomness import uniform
from solutions.engine import Completion, Engine, EngineConfig, SamplingParams
from solutions.engine.drafting.judging import judge_by_comparison
from solutions.engine.drafting.pass_costs import PassCosts
from solutions.engine.drafting.speculation import DRAFTERS, SpeculationConfig, Speculator
from solutions.engine.grammar import Constraint
from solutions.engine.request import Request
from solutions.kv_cache.block_table import BlockTable
from solutions.kv_cache.blocks import BlockAllocator
from solutions.speculative.ngram import NgramDrafter

SETTINGS = [
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=3, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.5, seed=4, max_tokens=13, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=2, seed=9, max_tokens=10, n=2, ignore_eos=True),
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


class Bushy(Oracle):
    """Hides the right continuation among wrong ones, so that what is kept lies scattered over the tree."""

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float]) -> DraftTree:
        """Three levels of the right path, each behind a wrong sibling that has a child of its own."""
        drafts, parents, node = list[int](), list[int](), -1
        for right in self.propose(tokens, min(max_depth, 3), uniforms).tokens:
            drafts += [right + 2, 5, right]
            parents += [node, len(drafts) - 3, node]
            node = len(drafts) - 1
        return DraftTree(tuple(drafts), tuple(parents))


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


class UnrulyTrees:
    """The like with trees."""

    def __init__(self) -> None:
        self._turn = 0

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float]) -> DraftTree:
        """Something else every time."""
        self._turn += 1
        trees = [
            DraftTree((60_000, 1, 2), (-1, 0, -1)), DraftTree((5,) * 20, tuple(range(-1, 19))),
            DraftTree((1, 2), (-1, -1), torch.full((2, 49_152), math.nan)), DraftTree((), ()),
            DraftTree((3,) * 9, (-1,) * 9), DraftTree((1, 2), (-1, 0), torch.full((1, 7), 1 / 7)),
        ]  # fmt: skip
        return trees[self._turn % len(trees)]


def answers(engine: Any) -> list[list[tuple[int, ...]]]:
    """All samples of all prompts."""
    done = engine.generate(PROMPTS, SETTINGS)
    engine.check_idle()
    assert engine._speculator is None or not engine._speculator._drafters, "a request that ended is remembered"
    return [[one.tokens for one in several] for several in done]


@pytest.fixture(scope="module")
def plain(tiny_model: Any) -> list[list[tuple[int, ...]]]:
    """Without speculation."""
    return answers(Engine(tiny_model))


SWAPPED = dict(block_size=4, num_blocks=24, max_running=5, preemption="swap", num_host_blocks=60, prefix_cache="radix")


@pytest.mark.parametrize(
    ("drafter", "limits"),
    [
        pytest.param(Oracle, {}, id="runs"),
        pytest.param(Oracle, dict(block_size=2, num_blocks=40), id="runs, small blocks"),
        pytest.param(Bushy, {}, id="trees"),
        pytest.param(Bushy, dict(token_budget=9, max_running=6), id="trees, little room"),
        pytest.param(Bushy, SWAPPED, id="trees, swapped"),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    make_engine: Any, plain: Any, limits: dict[str, Any], drafter: Callable[..., Any]
) -> None:
    texts = [[*prompt, *tokens] for prompt, several in zip(PROMPTS, plain, strict=True) for tokens in several]
    engine = make_engine(speculation=SpeculationConfig(lambda: drafter(texts)), **limits)
    assert answers(engine) == plain
    metrics = engine.metrics
    assert 0 < metrics.num_accepted_tokens < metrics.num_drafted_tokens
    if limits is SWAPPED:
        assert metrics.num_preemptions > 0, "the pool was to be too small"
        assert answers(engine) == plain, "with what the prefix cache has kept of accepted drafts"
    if not limits:
        assert metrics.num_generated_tokens > 1.5 * metrics.num_steps


@pytest.mark.parametrize("drafter", [NgramDrafter, Unruly, UnrulyTrees])
def test_any_drafter_costs_speed_only(make_engine: Any, plain: Any, drafter: Any) -> None:
    assert answers(make_engine(speculation=SpeculationConfig(drafter))) == plain


def test_a_stop_inside_an_accepted_run_is_seen(make_engine: Any, plain: Any) -> None:
    text = [*PROMPTS[0], *plain[0][0]]
    wanted = plain[0][0]
    stop = wanted[5]
    for drafter in (Oracle, Bushy):
        config = SpeculationConfig(lambda drafter=drafter: drafter([text], wrong_every=1000), num_drafts=8)
        engine = make_engine(speculation=config)
        done = engine.generate([PROMPTS[0]], replace(SETTINGS[0], stop_token_ids=(stop,)))[0][0]
        assert done.tokens == wanted[: wanted.index(stop)] and done.finish_reason == "stop"


def test_reports_are_of_the_path_that_was_kept(make_engine: Any, plain: Any) -> None:
    asked = replace(SETTINGS[2], logprobs=2)
    (alone,) = make_engine().generate([PROMPTS[2]], asked)[0]
    config = SpeculationConfig(lambda: Bushy([[*PROMPTS[2], *plain[2][0]]], wrong_every=1000))
    engine = make_engine(speculation=config)
    (done,) = engine.generate([PROMPTS[2]], asked)[0]
    assert engine.metrics.num_accepted_tokens > 8
    assert [one.token for one in done.logprobs] == list(alone.tokens)
    assert [[token for token, _ in one.top] for one in done.logprobs] == [
        [token for token, _ in one.top] for one in alone.logprobs
    ]
    got, want = (torch.tensor([report.logprob for report in one.logprobs]) for one in (done, alone))
    # Both are float32, so that both may be off.
    check_close("log-probabilities", got, want.double(), scale=2 * math.log(49_152), dtype=torch.float32)


def constrained(engine: Engine) -> Completion:
    """An answer that must be of capitals and digits."""
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=30)
    engine.add_request([7, 400, 31], params, constraint=Constraint("regex", "([A-Z]{2}[0-9]){4}"))
    done = []
    while engine.has_work:
        done += [one.completion for one in engine.step() if one.completion is not None]
    engine.check_idle()
    return done[0]


def test_each_draft_of_a_tree_has_a_mask_of_its_own(make_engine: Any) -> None:
    engine = make_engine()
    matcher = engine._matcher(Constraint("regex", "a(bc|c)"))
    a, b, c = (engine.tokenizer.encode(letter)[0] for letter in "abc")
    drafts, parents = [c, a, c, b, a, c], [-1, -1, 1, 1, 3, 3]
    masks = matcher.masks(drafts, parents)
    for row, path in enumerate([[], None, [a], [a, c], [a, b], None, [a, b, c]]):
        want = torch.zeros_like(masks[row]) if path is None else matcher.masks(path)[-1]
        assert masks[row].equal(want), f"row {row}"
    alone = constrained(engine)
    text = [7, 400, 31, *alone.tokens]
    engine = make_engine(speculation=SpeculationConfig(lambda: Bushy([text], wrong_every=4)))
    assert constrained(engine) == replace(alone, request_id=alone.request_id)
    assert engine.metrics.num_accepted_tokens > 2


P = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
Q = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1], dtype=torch.float64)
"""Of a drafter that knows a token more than the target, which has four."""


def pick(q: torch.Tensor, number: float) -> int:
    """A token of a distribution."""
    return int(torch.searchsorted(q.cumsum(0), number, right=True))


class DrawnRun:
    """Draws two drafts from `Q`."""

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Both from the same distribution."""
        return Draft(tuple(pick(Q, number) for number in uniforms[:2]), Q.expand(2, -1))


class DrawnTree:
    """Draws two siblings without replacement from `Q`, and a child of the second."""

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float]) -> DraftTree:
        """The second row is what is left of the first."""
        first = pick(Q, uniforms[0])
        left = Q.index_fill(0, torch.tensor([first]), 0.0) / (1 - Q[first])
        second, child = pick(left, uniforms[1]), pick(Q, uniforms[2])
        return DraftTree((first, second, child), (-1, -1, 1), torch.stack([Q, left, Q]))


@pytest.mark.parametrize("drafter", [DrawnRun, DrawnTree])
def test_drafts_that_were_drawn_keep_the_distribution(drafter: Any) -> None:
    """Rounds against the law: each place's token has the chance that the target gives it, whatever came before.

    Five tables of four cells, the first tokens and the second ones behind each first; 20 is passed by chance twice in
    10,000 (3 degrees of freedom). To drop a draft because the target can't read it gives more than 200.
    """
    rounds = 2500
    rows = torch.stack([P, P.flip(0), P.roll(1), P.roll(2)])
    firsts, seconds, kept = Counter[int](), Counter[tuple[int, int]](), 0
    speculator = Speculator(lambda request: drafter(), num_drafts=4, vocab_size=4)
    for seed in range(rounds):
        request = Request("0", (1,), SamplingParams(seed=seed), BlockTable(BlockAllocator(1), 1))
        request.tokens.append(0)
        drafts = speculator.propose(request, 8, 8)
        assert all(token < 4 for token in drafts.tokens)
        # Behind a token the target's distribution depends on it, and on nothing else.
        p = torch.stack([rows[0], *(rows[token] for token in drafts.tokens)])
        verdict = speculator.judge(request, [0] * len(p), lambda p=p: p)
        firsts[verdict.tokens[0]] += 1
        if len(verdict.tokens) > 1:
            seconds[verdict.tokens[0], verdict.tokens[1]] += 1
        kept += len(verdict.path)
        speculator.forget(request)
    assert chi_square([firsts[token] for token in range(4)], rounds * P) < 20.0
    for token in range(4):
        counts = [seconds[token, after] for after in range(4)]
        assert chi_square(counts, sum(counts) * rows[token]) < 20.0
    assert kept > rounds / 3


def chi_square(counts: Sequence[int], expected: torch.Tensor) -> float:
    """Of counts against what is expected of them, cells that can't be left out."""
    cells = expected > 0
    assert not any(count for count, possible in zip(counts, cells.tolist(), strict=True) if not possible)
    got = torch.tensor(counts, dtype=torch.float64)[cells]
    return float(((got - expected[cells]) ** 2 / expected[cells]).sum())


def test_a_text_of_drawn_runs_uses_no_random_number_twice() -> None:
    """Place 4 without drafts, after drafts of place 1 were drawn: plain decoding's number 4 has judged one of them."""
    p = torch.full((1, 4), 0.25, dtype=torch.float64)
    speculator = Speculator(lambda request: DrawnRun(), num_drafts=2, vocab_size=4)
    request = Request("0", (1,), SamplingParams(seed=3), BlockTable(BlockAllocator(1), 1))
    request.tokens.append(0)
    assert speculator.judge(request, [2], lambda: p).tokens == (2,), "nothing was drawn yet"
    speculator.propose(request, 8, 8)
    speculator.judge(request, [0] * 3, lambda: p.expand(3, -1))
    request.tokens += [0, 0, 0]
    assert speculator.judge(request, [2], lambda: p).tokens == (int(4 * uniform(3, 3 * 4 + 2)),)


def test_comparison_walks_down_to_the_first_surprise() -> None:
    def kept(drawn: Sequence[int], tokens: tuple[int, ...], parents: tuple[int, ...]) -> Any:
        verdict = judge_by_comparison(drawn, DraftTree(tokens, parents))
        return verdict.tokens, verdict.path

    assert kept([5], (), ()) == ((5,), ())
    assert kept([5, 6, 7], (5, 6), (-1, 0)) == ((5, 6, 7), (0, 1))
    assert kept([5, 6, 7], (5, 8), (-1, 0)) == ((5, 6), (0,))
    assert kept([5, 6, 7], (4, 6), (-1, 0)) == ((5,), ())
    assert kept([5, 1, 6, 2, 9], (4, 5, 6, 6), (-1, -1, 0, 1)) == ((5, 6, 9), (1, 3)), (
        "the child of another is no child"
    )


def test_the_adaptive_drafter_gives_way_to_the_load() -> None:
    costs = PassCosts(((1, 1.0), (8, 1.0), (16, 9.0)))
    assert costs.of(1) == costs.of(5) == 1.0 and costs.of(12) == 5.0 and costs.of(24) == 17.0
    assert costs.shares(2, 3) == [0.5, 0.5, 0.5, 0.5]
    assert costs.shares(8, 1) == [1 / 8, 9 / 8]
    for wrong in (((1, 1.0),), ((2, 1.0), (3, 1.0)), ((1, 2.0), (3, 1.0)), ((1, 1.0), (3, math.inf))):
        with pytest.raises(ValueError, match=r"points|costs"):
            PassCosts(wrong)


def test_lookahead_learns_from_what_the_model_says(make_engine: Any) -> None:
    params = replace(SETTINGS[0], max_tokens=60)
    engine = make_engine(speculation="lookahead")
    assert (
        engine.generate([PROMPTS[0]], params)[0][0].tokens == make_engine().generate([PROMPTS[0]], params)[0][0].tokens
    )
    assert engine.metrics.num_accepted_tokens > 0


def test_what_cannot_draft_is_refused(make_engine: Any) -> None:
    with pytest.raises(ValueError, match=r"one of n-gram, draft-model.*'eagle-4'"):
        make_engine(speculation="eagle-4")
    with pytest.raises(ValueError, match="num_drafts"):
        SpeculationConfig("n-gram", num_drafts=0)
    for name in DRAFTERS:
        if name in ("n-gram", "lookahead"):
            assert len(make_engine(speculation=name).generate([[5]], SETTINGS[0])[0][0].tokens) == 16
        else:
            with pytest.raises(ValueError, match=f"speculation by {name} needs a head that was trained for this very"):
                make_engine(speculation=name)


@pytest.fixture(scope="module")
def real_model() -> Model:
    """The bundled one, whose heads come with it."""
    return load("smollm2")


@pytest.fixture(scope="module")
def real_answers(real_model: Model) -> list[tuple[int, ...]]:
    """Plain decoding."""
    return real(Engine(real_model))


def real(engine: Engine) -> list[tuple[int, ...]]:
    """A greedy and a drawn answer."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    settings = [params, replace(params, temperature=0.8, seed=2, top_p=0.9)]
    done = engine.generate(["1, 2, 3, 4, 5, 6,", "def add(a, b):\n    return a"], settings)
    engine.check_idle()
    return [several[0].tokens for several in done]


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_of_lab_14_on_its_own_model(real_model: Model, real_answers: Any, name: str) -> None:
    config = SpeculationConfig(name, costs=PassCosts(((1, 1.0), (64, 1.1))))
    engine = Engine(real_model, EngineConfig(num_blocks=64, speculation=config))
    assert real(engine) == real_answers
    assert engine.metrics.num_accepted_tokens > 0 or name == "lookahead"
    if name == "eagle":  # drafts may be drawn, too: nothing changes where the target draws nothing
        drawn = Engine(real_model, EngineConfig(num_blocks=64, speculation=SpeculationConfig(name, drawn=True)))
        greedy, other = real(drawn)
        assert (greedy, len(other)) == (real_answers[0], 8)
    if name == "adaptive":
        busy = SpeculationConfig(name, costs=PassCosts(((1, 1.0), (64, 64.0))))
        engine = Engine(real_model, EngineConfig(num_blocks=64, speculation=busy))
        assert real(engine) == real_answers and engine.metrics.num_drafted_tokens == 0
