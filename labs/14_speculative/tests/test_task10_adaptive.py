"""Task 10: which k is chosen, what it is chosen by, and that the text is none the worse for it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.distributions import chi_square
from grader.judge.refusal import check_refused
from labkit.drafting import Draft
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams
from labkit.scripted_drafter import ScriptedDrafter
from labkit.specs import Markov

pytestmark = pytest.mark.task(10)

FLAT = (1.0,) * 9
STEEP = (1.0, 1.9, 2.8, 3.7)
OWN = 99
"""What the target says itself; no drafter says it."""


class Counting:
    """A drafter that drafts 0, 1, 2, ... and writes down what it was asked."""

    def __init__(self, probs: bool = False) -> None:
        self.calls: list[tuple[list[int], int, list[float]]] = []
        self._probs = probs

    def spec(self) -> ScriptedDrafter:
        """The argument to pass to the lab in place of a drafter."""
        return ScriptedDrafter(self.propose)

    def propose(self, text: list[int], most: int, uniforms: list[float]) -> Draft:
        """As many as asked for."""
        self.calls.append((text, most, uniforms))
        return Draft(tuple(range(most)), torch.eye(20)[:most] * 0.2 + 0.8 / 20 if self._probs else None)


def best(alpha: float, cost: float, costs: Sequence[float]) -> int:
    """The k of the largest speed-up, term by term."""
    gains = [math.fsum(alpha**i for i in range(k + 1)) / (k * cost + v) for k, v in enumerate(costs)]
    return next(k for k, gain in enumerate(gains) if gain >= max(gains) * (1 - 1e-12))


class Estimate:
    """Kept by judged, with forgetting."""

    def __init__(self, alpha: float, decay: float) -> None:
        self.kept, self.judged, self.decay = alpha, 1.0, decay

    def observe(self, kept: int, judged: int) -> None:
        """One round."""
        self.kept, self.judged = self.decay * self.kept + kept, self.decay * self.judged + judged

    @property
    def value(self) -> float:
        """The estimate."""
        return self.kept / self.judged


def ask(drafter: Any, text: list[int], most: int = 8) -> int:
    """One round; how many drafts came."""
    draft = drafter.propose(text, most, [0.5] * most)
    assert isinstance(draft, Draft), f"propose must return a Draft, got {draft!r}"
    return len(draft.tokens)


def check_estimate(drafter: Any, right: float, what: str) -> None:
    """The property against its closed form."""
    got = drafter.acceptance
    fits = isinstance(got, float) and math.isclose(got, right, rel_tol=1e-12, abs_tol=1e-15)
    assert fits, f"{what}: the estimate should be {right:.6f}, it is {got!r}"


def test_the_number_that_pays_under_load(lab: Any) -> None:
    tile = (1.0, 1.0, 1.0, 1.0, 1.7, 1.7, 1.7, 1.7)
    for costs in (FLAT, STEEP, tile, (1.0,), (3.0, 3.3, 3.6), (1.0, 1.5, 1.6, 1.7, 1.8)):
        for alpha in (0.0, 0.3, 0.6, 0.8, 0.95, 1.0):
            for cost in (0.0, 0.05, 0.3, 1.0):
                got, right = lab.best_num_drafts_under_load(alpha, cost, costs), best(alpha, cost, costs)
                assert got == right, f"alpha {alpha}, c {cost}, v = {costs}: the best k is {right}, got {got!r}"
    assert lab.best_num_drafts_under_load(0.8, 0.05, FLAT) == 8, "with v = 1 the numbers are those of task 5"
    assert lab.best_num_drafts_under_load(0.8, 0.0, STEEP) == 0, "where each draft costs nearly a pass, none pays"


def test_the_choice_follows_what_was_kept(lab: Any) -> None:
    generator = random.Random(10)
    for decay in (0.9, 0.5, 0.0, 1.0):
        inner, estimate, text = Counting(), Estimate(0.6, decay), [7]
        drafter = lab.AdaptiveDrafter(inner.spec(), lambda: FLAT, 0.1, 0.6, decay, 1)
        check_estimate(drafter, 0.6, "before the first round")
        chosen = set()
        for step in range(25):
            got = ask(drafter, text)
            check_estimate(drafter, estimate.value, f"decay {decay}, round {step}")
            right = best(estimate.value, 0.1, FLAT) or 1
            assert got == right, f"decay {decay}, alpha {estimate.value:.3f}: k is {right}, {got} drafts came"
            chosen.add(got)
            kept = got if generator.random() < (0.9 if step < 12 else 0.1) else generator.randrange(got)
            estimate.observe(kept, min(kept + 1, got))
            text = [*text, *range(kept), OWN]
        assert len(chosen) > 1 or decay == 1, f"k never changed: {chosen}"


def test_drafts_that_nobody_judged_leave_no_trace(lab: Any) -> None:
    seen = []
    for drafts in ((1, 2, 3, 4), (1, 7, 5, 5), (1, 7), (1, 3, 99, 8)):
        drafter = lab.AdaptiveDrafter(ScriptedDrafter(lambda *_, d=drafts: Draft(d)), lambda: FLAT, 0.1, 0.8)
        ask(drafter, [5, 6])
        ask(drafter, [5, 6, 1, OWN])
        seen.append(drafter.acceptance)
        check_estimate(
            drafter, (0.9 * 0.8 + 1) / (0.9 + 2), f"{drafts} were drafted and the text went on with 1, {OWN}"
        )
    assert len(set(seen)) == 1, (
        f"the same text came of all four drafts, but what is believed afterwards differs: {seen}. What was dropped "
        "must not decide anything: its random numbers come up again"
    )


def test_rounds_that_judged_nothing_teach_nothing(lab: Any) -> None:
    def fresh() -> Any:
        drafter = lab.AdaptiveDrafter(Counting().spec(), lambda: FLAT, 0.1, 0.8)
        assert ask(drafter, [5, 6]) == 6
        return drafter

    for text, kept, judged, what in (
        ([5, 6, 0, 1, OWN], 2, 3, "two drafts came true and the third did not"),
        ([5, 6, OWN], 0, 1, "none came true"),
        ([5, 6, OWN, 1, 2], 0, 1, "the first did not come true; what agrees behind it was not drafted for this text"),
        ([5, 6, 0, 1], 2, 2, "the text shows two kept drafts and nothing behind them"),
        ([5, 6, 0, 1, 2, 3, 4, 5, OWN], 6, 6, "all came true, and the target added one"),
        ([5, 6], 0, 0, "the text has not gone on"),
        ([5, 7, 0, 1, OWN], 0, 0, "another text"),
        ([5], 0, 0, "a shorter text"),
        ([9, 5, 6, 0, OWN], 0, 0, "a text that begins otherwise"),
    ):
        drafter, estimate = fresh(), Estimate(0.8, 0.9)
        if judged:
            estimate.observe(kept, judged)
        ask(drafter, text)
        check_estimate(drafter, estimate.value, what)
    # An empty draft, and a text that is asked for twice: a round counts once.
    drafter = lab.AdaptiveDrafter(ScriptedDrafter(lambda *_: Draft(())), lambda: FLAT, 0.1, 0.8)
    ask(drafter, [5, 6])
    ask(drafter, [5, 6, OWN])
    check_estimate(drafter, 0.8, "the drafter had nothing to say")


def test_speculation_turns_itself_off_and_comes_back(lab: Any) -> None:
    inner, text, estimate = Counting(), [7], Estimate(0.5, 0.5)
    drafter = lab.AdaptiveDrafter(inner.spec(), lambda: STEEP[:3], 0.0, 0.5, 0.5, 4)
    seen = []
    for _ in range(9):
        seen.append(ask(drafter, text))
        if seen[-1]:
            estimate.observe(0, 1)
        text = [*text, OWN]
    assert seen == [0, 0, 0, 1, 0, 0, 0, 1, 0], f"no k pays; every fourth round probes with one draft: {seen}"
    assert len(inner.calls) == 2, f"a drafter that isn't used costs nothing: it was called {len(inner.calls)} times"
    check_estimate(drafter, estimate.value, "after two probes that failed")
    seen = []
    for _ in range(40):
        count = ask(drafter, text)
        check_estimate(drafter, estimate.value, "while probes come true")
        seen.append(count)
        assert (count > 1) == (best(estimate.value, 0.0, STEEP[:3]) > 1)
        if count:
            estimate.observe(count, count)
        text = [*text, *range(count), OWN]
    assert seen[-8:] == [2] * 8, f"every draft comes true again, so speculation must come back: {seen}"
    # On and off again: the count of idle rounds starts anew.
    probes = lab.AdaptiveDrafter(Counting().spec(), lambda: STEEP, 0.0, 0.0, 0.0, 3)
    assert [ask(probes, [1] * n, most) for n, most in enumerate((3, 0, 3, 0, 3, 3), start=1)] == [0, 0, 0, 0, 1, 0], (
        "a round in which no draft was asked for is not one in which speculation was off"
    )


def test_the_load_is_asked_in_every_round(lab: Any) -> None:
    loads = [FLAT, STEEP, FLAT[:4], STEEP, FLAT, (2.0, 2.0, 2.1)]
    asked = iter(loads)
    drafter = lab.AdaptiveDrafter(Counting().spec(), lambda: next(asked), 0.05, 0.8, 1.0, 100)
    text, estimate = [1], Estimate(0.8, 1.0)
    for costs in loads:
        got, right = ask(drafter, text), best(estimate.value, 0.05, costs)
        assert got == right, f"at v = {costs} and alpha {estimate.value:.3f} k is {right}, got {got}"
        if got:
            estimate.observe(got, got)
        text = [*text, *range(got), OWN]


def test_the_limit_of_the_loop_is_kept(lab: Any) -> None:
    # Only a long draft pays: with less room none does.
    tile = (1.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    for most in (6, 5, 4, 3, 2, 1, 0):
        inner = Counting()
        drafter = lab.AdaptiveDrafter(inner.spec(), lambda: tile, 0.01, 0.8, 0.9, 100)
        got, right = ask(drafter, [1, 2], most), best(0.8, 0.01, tile[: most + 1])
        assert got == right, f"of at most {most} drafts {right} are best, got {got}"
        assert [call[1] for call in inner.calls] == [right] * bool(right)


def test_drafts_are_handed_on_as_they_are(lab: Any) -> None:
    for cost, right in ((0.05, 8), (0.2, 4), (0.4, 2)):
        inner = Counting(probs=True)
        drafter = lab.AdaptiveDrafter(inner.spec(), lambda: FLAT, cost, 0.8)
        uniforms = [i / 10 for i in range(9)]
        draft = drafter.propose([4, 5, 6], 9, uniforms)
        assert inner.calls == [([4, 5, 6], right, uniforms[:right])], (
            f"the drafter is asked once for {right} drafts with their uniforms, it was asked {inner.calls}"
        )
        same = Counting(probs=True).propose([4, 5, 6], right, [])
        assert isinstance(draft, Draft) and draft.tokens == same.tokens, f"the drafts were {same.tokens}, got {draft!r}"
        assert draft.probs is not None and same.probs is not None and torch.equal(draft.probs, same.probs), (
            "q must stay what was drawn from"
        )


def inverse(row: Tensor, u: float) -> int:
    """The token that a uniform stands for."""
    return min(int((row.cumsum(0) <= u).sum()), int(row.nonzero().max()))


P = torch.tensor([[0.3, 0.7], [0.8, 0.2]], dtype=torch.float64)
Q = torch.tensor([[0.29, 0.71], [0.25, 0.75]], dtype=torch.float64)


def speculated(drafter: Any, seed: int, count: int) -> list[int]:
    """A text by the rules of tasks 1 to 3, round by round."""
    text = [0]
    while len(text) <= count:
        place = len(text) - 1
        draws = [uniform(seed, 3 * (place + i)) for i in range(count - place - 1)]
        draft = drafter.propose(text, len(draws), draws) if draws else Draft(())
        for i, token in enumerate(draft.tokens):
            assert draft.probs is not None
            p, q = P[text[-1]], draft.probs[i]
            if uniform(seed, 3 * (place + i) + 1) < p[token] / q[token]:
                text.append(token)
                continue
            excess = (p - q).clamp(min=0)
            text.append(inverse(excess / excess.sum(), uniform(seed, 3 * (place + i) + 2)))
            break
        else:
            text.append(inverse(P[text[-1]], uniform(seed, 3 * (len(text) - 1) + 2)))
    return text[1:]


def test_text_stays_the_target_s(lab: Any) -> None:
    # 400 texts of four tokens: their first tokens, and all 16 texts. Right code fails with probability alpha for each.
    # A drafter that keeps tokens below q = 0.3 to itself gives the first token 0 with 0.1 instead of 0.3.
    alpha, runs = 1e-6, 400
    lengths = []

    def propose(text: list[int], most: int, draws: list[float]) -> Draft:
        tokens = list(text)
        for i in range(most):
            tokens.append(inverse(Q[tokens[-1]], draws[i]))
        lengths.append(most)
        return Draft(tuple(tokens[len(text) :]), Q[tokens[len(text) - 1 : -1]])

    counts = []
    for seed in range(runs):
        # Forgetful, so that k goes up and down within four tokens.
        drafter = lab.AdaptiveDrafter(ScriptedDrafter(propose), lambda: FLAT, 0.3, 0.7, 0.1, 2)
        text = speculated(drafter, seed, 4)
        counts.append(sum(bit << i for i, bit in enumerate(text)))
    law = []
    for number in range(16):
        text = [0, *(number >> i & 1 for i in range(4))]
        law.append(math.prod(float(P[a, b]) for a, b in pairwise(text)))
    firsts = [number & 1 for number in counts]
    for what, got, right in (("first tokens", firsts, P[0]), ("texts", counts, torch.tensor(law, dtype=torch.float64))):
        result = chi_square(torch.tensor(got), right)
        assert result.p_value > alpha, (
            f"with a k that adapts, the {what} of {runs} runs don't follow the target: p-value {result.p_value:.1e}. "
            "Whether a place is drafted may depend on what was emitted, never on the draft itself"
        )
    assert {1, 2} <= set(lengths), f"k did not adapt at all: {set(lengths)}"


def test_costs_and_texts_that_are_none_are_refused(lab: Any) -> None:
    assert lab.best_num_drafts_under_load(0.8, 0.05, (1.0, 1.0)) == 1, "a good call: one draft pays"
    for costs in ((), (0.0, 1.0), (1.0, -1.0), (1.0, math.nan), (1.0, math.inf), (True, 1.0)):
        check_refused(f"costs {costs}", lambda c=costs: lab.best_num_drafts_under_load(0.8, 0.05, c))
    check_refused("alpha above 1", lambda: lab.best_num_drafts_under_load(1.1, 0.05, FLAT))
    check_refused("a negative draft cost", lambda: lab.best_num_drafts_under_load(0.5, -1.0, FLAT))
    inner = Counting()
    for arguments in ((0.1, 1.5), (0.1, -0.1), (-0.1,), (0.1, 0.5, 1.1), (0.1, 0.5, -0.1), (0.1, 0.5, 0.9, 0)):
        check_refused(f"AdaptiveDrafter with {arguments}", lambda a=arguments: lab.AdaptiveDrafter(
            inner.spec(), lambda: FLAT, *a))  # fmt: skip
    loads: list[Sequence[float]] = [FLAT]
    drafter = lab.AdaptiveDrafter(inner.spec(), lambda: loads[-1], 0.1, 0.8)
    assert ask(drafter, [5, 6]) == 6
    before = drafter.acceptance
    check_refused("an empty text", lambda: drafter.propose([], 4, [0.5] * 4))
    check_refused("-1 drafts", lambda: drafter.propose([5, 6, OWN], -1, []))
    check_refused("one uniform for four drafts", lambda: drafter.propose([5, 6, OWN], 4, [0.5]))
    loads.append(())
    check_refused("no costs at all", lambda: drafter.propose([5, 6, OWN], 4, [0.5] * 4))
    loads.append(FLAT)
    assert drafter.acceptance == before and len(inner.calls) == 1, "a refused call must change and run nothing"


@pytest.mark.integration
def test_your_own_loop_turns_speculation_off(lab: Any) -> None:
    turn = tuple(tuple(1.0 if j == (i + 1) % 5 else 0.0 for j in range(5)) for i in range(5))

    def right(text: list[int], most: int, draws: list[float]) -> Draft:
        return Draft(tuple((text[-1] + 1 + i) % 5 for i in range(most)))

    def wrong(text: list[int], most: int, draws: list[float]) -> Draft:
        return Draft((text[-1],) * most)

    plain = [(1 + i) % 5 for i in range(40)]
    shares = {}
    for name, propose in (("right", right), ("wrong", wrong)):
        for costs in (FLAT, STEEP):
            drafter = lab.AdaptiveDrafter(ScriptedDrafter(propose), lambda costs=costs: costs, 0.05)
            got = lab.speculate(Markov(turn, 60), drafter, [0], 40, SamplingParams(temperature=0), num_drafts=8)
            assert list(got.tokens) == plain, f"{name} drafts, v = {costs}: {got.tokens}, alone the target: {plain}"
            shares[name, costs] = sum(r.drafted for r in got.rounds) / len(got.rounds)
    assert shares["right", FLAT] > 4, f"drafts that are right and cheap to verify: {shares['right', FLAT]} a round"
    assert shares["wrong", FLAT] < 0.3 and shares["wrong", STEEP] < 0.1, f"drafts that never come true: {shares}"
