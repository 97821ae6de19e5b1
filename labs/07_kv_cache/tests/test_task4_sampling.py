"""Task 4: sampling, by exact probabilities wherever they can be had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.distributions import chi_square
from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.reference import filtered, inverse_cdf, softmax64
from grader.judge.refusal import check_refused
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams
from labkit.specs import Markov

pytestmark = pytest.mark.task(4)

INF, NAN = float("inf"), float("nan")
LOGITS = [[0.3, -1.2, 2.5, 2.0, -0.4], [4.0, 4.0, -3.0, 0.0, 1.0], [-7.0, -7.5, -6.0, -9.0, -6.5]]


def rows(*values: Sequence[float]) -> Tensor:
    """Rows in float64."""
    return torch.tensor(values, dtype=torch.float64)


def check_probs(what: str, got: object, right: Sequence[Sequence[float]], advice: str = "") -> None:
    """Exact survivors, and probabilities to a few float64 roundings."""
    reference = rows(*right)
    check_close(what, got, reference, scale=4.0, dtype=torch.float64, advice=advice)
    assert isinstance(got, Tensor)
    kept, wanted = (got > 0).tolist(), (reference > 0).tolist()
    assert kept == wanted, f"{what}: tokens with probability above 0 are {kept}, should be {wanted}. {advice}"


def check_filter(what: str, call: Any, probs: Sequence[float], cases: dict[Any, Sequence[float]], advice: str) -> None:
    """One row with each setting, all in one batch: the right row for each."""
    got = call(rows(*([probs] * len(cases))), list(cases))
    check_probs(f"{what} of {list(probs)} with {list(cases)}, one a row,", got, list(cases.values()), advice)


def test_temperature_divides_the_logits(lab: Any) -> None:
    temperatures = [0.5, 1.0, 3.0]
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor(LOGITS, dtype=dtype)
        exact = [softmax64(row, t) for row, t in zip(logits.tolist(), temperatures, strict=True)]
        advice = "softmax(logits / T), each row with its own T, in float64; T below 1 sharpens."
        check_probs(f"apply_temperature of {dtype}", lab.apply_temperature(logits, temperatures), exact, advice)
    masked = torch.tensor([[1.0, -INF, 2.0, -INF, -INF]])
    first, second = softmax64([1.0, 2.0], 2.0)
    got = lab.apply_temperature(masked, [2.0])
    check_probs("masked logits", got, [[first, 0, second, 0, 0]], "-inf means probability 0.")


def test_temperature_zero_is_one_hot(lab: Any) -> None:
    got = lab.apply_temperature(torch.tensor(LOGITS), [0.0, 0.0, 2.0])
    right = [[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], softmax64(LOGITS[2], 2.0)]
    check_probs("temperatures 0, 0 and 2", got, right, "T = 0 is the lowest id of the likeliest, in its own row only.")
    right = [[0, 0, 1, 0], [0, 1, 0, 0]]
    got = lab.apply_temperature(torch.tensor([[-INF, -9.0, -8.0, -INF], [-3.0, 5.0, 5.0, 5.0]]), [0.0, 0.0])
    check_probs("T = 0 with masked and with tied logits", got, right, "Ties go to the lowest id.")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiny_temperatures_stay_finite_in_half_precision(lab: Any, dtype: torch.dtype) -> None:
    logits = torch.tensor([[2.875, 2.9551, 11.0625, -2.4473], [-8.0, -8.0, -60_000.0, -9.0]]).to(dtype)
    right = [[0, 0, 1, 0], [0.5, 0.5, 0, 0]]
    advice = "Subtract the largest logit in float64, then divide: what overflows can then only run towards -inf."
    check_probs(f"T = 1e-5 on {dtype}", lab.apply_temperature(logits, [1e-5, 1e-5]), right, advice)
    got = lab.apply_temperature(logits[:1], [1e-310])
    check_probs(f"T = 1e-310 on {dtype}", got, right[:1], advice)
    exact = [softmax64(row, 0.7) for row in logits.tolist()]
    advice = "Convert to float64 before any arithmetic."
    check_probs(f"T = 0.7 on {dtype}", lab.apply_temperature(logits, [0.7, 0.7]), exact, advice)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_rows_without_a_distribution_are_refused_by_number(lab: Any, row: int) -> None:
    temperatures = [1.0, 0.0, 0.5]
    params = [SamplingParams(temperature=t) for t in temperatures]
    right = [softmax64(values, t) for values, t in zip(LOGITS, temperatures, strict=True)]
    check_probs("good rows", lab.apply_temperature(rows(*LOGITS), temperatures), right)
    for what, position, value in (("NaN", 0, NAN), ("NaN", 4, NAN), ("+inf", 2, INF), ("-inf only", None, -INF)):
        bad = rows(*LOGITS)
        bad[row, slice(None) if position is None else position] = value
        what = f"row {row} with {what}"
        check_refused(what, lambda bad=bad: lab.apply_temperature(bad, temperatures), mentions=f"row {row}")
        check_refused(f"{what}, sampled", lambda bad=bad: lab.sample(bad, params, [0, 0, 0]), mentions=f"row {row}")


def test_top_k_survivors(lab: Any) -> None:
    cases = {
        1: [0, 0, 0, 1],
        2: [0, 0, 3 / 7, 4 / 7],
        3: [0, 2 / 9, 3 / 9, 4 / 9],
        4: [0.1, 0.2, 0.3, 0.4],
    }
    advice = "Exactly k survive, at their own ids, and what survives is divided by its sum."
    check_filter("keep_top_k", lab.keep_top_k, [0.1, 0.2, 0.3, 0.4], cases, advice)
    cases = {1: [0, 1, 0, 0], 2: [0, 0.8, 0, 0.2], 3: [0.25 / 2.75, 2 / 2.75, 0, 0.5 / 2.75]}
    check_filter("keep_top_k", lab.keep_top_k, [0.0859375, 0.6875, 0.0546875, 0.171875], cases, advice)


def test_top_k_breaks_ties_by_id(lab: Any) -> None:
    cases = {1: [1, 0, 0, 0], 2: [0.5, 0.5, 0, 0], 3: [1 / 3, 1 / 3, 1 / 3, 0]}
    advice = "Equal probabilities must not let more than k through; the lower ids survive."
    check_filter("keep_top_k", lab.keep_top_k, [0.25] * 4, cases, advice)
    cases = {
        2: [0, 0.2, 0, 0.8, 0, 0],
        3: [0, 1 / 6, 1 / 6, 4 / 6, 0, 0],
        4: [0, 1 / 7, 1 / 7, 4 / 7, 1 / 7, 0],
    }
    check_filter("keep_top_k", lab.keep_top_k, [0, 0.125, 0.125, 0.5, 0.125, 0.125], cases, advice)
    # Long rows: sorts that are not stable show only here.
    got = lab.keep_top_k(torch.full((1, 4096), 1 / 4096, dtype=torch.float64), [1000])
    check_probs("keep_top_k of 4096 equal ones with 1000", got, [[1e-3] * 1000 + [0.0] * 3096], advice)


def test_top_k_switched_off(lab: Any) -> None:
    probs = [0.1, 0.2, 0.3, 0.4]
    cases = {0: probs, 4: probs, 5: probs, 9_999_999: probs, 3: [0, 2 / 9, 3 / 9, 4 / 9]}
    advice = "0 switches the filter off, and no vocabulary is too small for a large k."
    check_filter("keep_top_k", lab.keep_top_k, probs, cases, advice)


def test_top_p_survivors(lab: Any) -> None:
    advice = "The smallest set whose mass reaches p: the token that crosses p is in, the one after it is not."
    cases = {
        0.3: [1, 0, 0, 0],
        0.45: [4 / 7, 3 / 7, 0, 0],
        0.8: [4 / 9, 3 / 9, 2 / 9, 0],
        0.95: [0.4, 0.3, 0.2, 0.1],
    }
    check_filter("keep_top_p", lab.keep_top_p, [0.4, 0.3, 0.2, 0.1], cases, advice)
    # Sums of eighths are exact in binary: p = 0.75 is met exactly by the first two.
    cases = {
        0.5: [0, 1, 0, 0],
        0.625: [1 / 3, 2 / 3, 0, 0],
        0.75: [1 / 3, 2 / 3, 0, 0],
        0.7500001: [2 / 7, 4 / 7, 1 / 7, 0],
        0.875: [2 / 7, 4 / 7, 1 / 7, 0],
    }
    check_filter("keep_top_p", lab.keep_top_p, [0.25, 0.5, 0.125, 0.125], cases, advice)
    check_filter("keep_top_p", lab.keep_top_p, [0.3, 0.1, 0.1, 0.5], {0.79: [3 / 8, 0, 0, 5 / 8]}, advice)
    check_filter("keep_top_p", lab.keep_top_p, [0.1, 0.9], {0.5: [0, 1]}, advice)


def test_top_p_breaks_ties_by_id(lab: Any) -> None:
    advice = "Equal probabilities are taken in the order of their ids."
    cases = {0.25: [1, 0, 0, 0], 0.3: [0.5, 0.5, 0, 0], 0.75: [1 / 3, 1 / 3, 1 / 3, 0]}
    check_filter("keep_top_p", lab.keep_top_p, [0.25] * 4, cases, advice)
    cases = {0.6: [1 / 5, 0, 4 / 5, 0, 0], 0.7: [1 / 6, 1 / 6, 4 / 6, 0, 0]}
    check_filter("keep_top_p", lab.keep_top_p, [0.125, 0.125, 0.5, 0.125, 0.125], cases, advice)
    # 4096 equal ones: sorts that are not stable show only here.
    got = lab.keep_top_p(torch.full((1, 4096), 1 / 4096, dtype=torch.float64), [0.25])
    check_probs("keep_top_p of 4096 equal ones with 0.25", got, [[1 / 1024] * 1024 + [0.0] * 3072], advice)


def test_top_p_never_leaves_nothing(lab: Any) -> None:
    advice = "Whatever p, the most likely token stays."
    cases = {0.0: [0, 0, 1, 0], 1e-8: [0, 0, 1, 0], 1e-300: [0, 0, 1, 0], 0.85: [0, 2 / 9, 4 / 9, 3 / 9]}
    check_filter("keep_top_p", lab.keep_top_p, [0.1, 0.2, 0.4, 0.3], cases, advice)
    flat = torch.full((2, 4096), 1 / 4096)
    first = [1.0] + [0.0] * 4095
    got = lab.keep_top_p(flat, [1e-8, 0.0])
    check_probs("keep_top_p of 4096 equal fp32 probabilities with 1e-8 and 0", got, [first, first], advice)


def test_top_p_switched_off(lab: Any) -> None:
    advice = "p of 1 or more switches the filter off, also for the least likely tokens."
    tail = [0.5, 0.5 - 2**-40, 2**-41, 2**-41]
    check_filter("keep_top_p", lab.keep_top_p, tail, {1.0: tail, 1.5: tail, 0.5: [1, 0, 0, 0]}, advice)
    # The first two sum to 1 as far as float64 can tell, and still p = 1 removes nothing.
    tiny = [0.5, 0.5, 1e-17, 1e-18]
    check_filter("keep_top_p", lab.keep_top_p, tiny, {1.0: tiny, 0.7: [0.5, 0.5, 0, 0]}, advice)


def test_min_p_survivors(lab: Any) -> None:
    probs = [0.1, 0.2, 0.3, 0.4]
    cases = {
        0.0: probs,
        0.24: probs,
        0.26: [0, 2 / 9, 3 / 9, 4 / 9],
        0.51: [0, 0, 3 / 7, 4 / 7],
        0.76: [0, 0, 0, 1],
    }
    advice = "The threshold is m times the largest probability of the row, not m itself; at the threshold is in."
    check_filter("keep_min_p", lab.keep_min_p, probs, cases, advice)
    cases = {0.25: [0.25, 0.5, 0.125, 0.125], 0.5: [1 / 3, 2 / 3, 0, 0], 0.5000001: [0, 1, 0, 0]}
    check_filter("keep_min_p", lab.keep_min_p, [0.25, 0.5, 0.125, 0.125], cases, advice)
    got = lab.keep_min_p(rows([0.5, 0.25, 0.25], [0.125, 0.75, 0.125]), [0.4, 0.4])
    check_probs("keep_min_p of two rows", got, [[0.5, 0.25, 0.25], [0, 1, 0]], "The largest of its own row counts.")


def test_min_p_above_one_leaves_the_first_of_the_likeliest(lab: Any) -> None:
    advice = "With m above 1 no token reaches the threshold: the lowest id of the likeliest stays."
    cases = {1.05: [0, 0, 1, 0], 100.0: [0, 0, 1, 0], 1.0: [0, 0, 0.5, 0.5], 0.3: [0, 0.2, 0.4, 0.4]}
    check_filter("keep_min_p", lab.keep_min_p, [0.1, 0.18, 0.36, 0.36], cases, advice)


def test_filters_run_in_order_on_renormalised_survivors(lab: Any) -> None:
    probs = [0.1, 0.2, 0.3, 0.4]
    for params, right, advice in (
        (SamplingParams(top_k=2, top_p=0.5), [0, 0, 0, 1], "top-k first: 4/7 of what is left is more than 0.5."),
        (SamplingParams(top_k=1, top_p=0.8), [0, 0, 0, 1], "after top-k the one survivor has probability 1."),
        (SamplingParams(top_k=3, top_p=0.75), [0, 0, 3 / 7, 4 / 7], "after top-k the two largest hold 7/9."),
        (SamplingParams(top_p=0.65, min_p=0.74), [0, 0, 3 / 7, 4 / 7], "min-p keeps 3/7 beside 4/7."),
        (SamplingParams(top_p=0.55, min_p=0.76), [0, 0, 0, 1], "min-p comes after top-p and removes 3/7 beside 4/7."),
        (SamplingParams(top_p=0.8, min_p=0.6), [0, 0, 3 / 7, 4 / 7], "top-p keeps three, then min-p two of them."),
        (SamplingParams(), probs, "without settings nothing is filtered."),
    ):
        got = lab.token_distribution(rows(probs).log(), [params])
        check_probs(f"token_distribution of {probs} with {params}", got, [right], advice)
    # Temperature 2 takes square roots: (0.64, 0.32, 0.04) becomes about (0.516, 0.365, 0.129).
    got = lab.token_distribution(rows([0.64, 0.32, 0.04]).log(), [SamplingParams(temperature=2.0, top_p=0.6)])
    right = filtered(softmax64(rows([0.64, 0.32, 0.04]).log()[0].tolist(), 2.0), top_p=0.6)
    check_probs("T = 2 and top_p = 0.6 of [0.64, 0.32, 0.04]", got, [right], "Temperature comes before the filters.")
    # min-p before top-p would leave (4, 3, 2)/9 and top-p 0.75 then keep two; the right order keeps three, then all.
    got = lab.token_distribution(rows(probs).log(), [SamplingParams(top_p=0.75, min_p=0.45)])
    check_probs("top_p = 0.75, min_p = 0.45", got, [[0, 2 / 9, 3 / 9, 4 / 9]], "top-p comes before min-p.")


def test_rows_have_their_own_settings(lab: Any) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=2),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=2.0, min_p=0.4),
        SamplingParams(temperature=1.5, top_k=4, top_p=0.9, min_p=0.05),
        SamplingParams(),
    ]
    logits = torch.randn(len(params), 9, generator=torch.Generator().manual_seed(3)) * 2
    right = [
        filtered(softmax64(row, p.temperature), p.top_k, p.top_p, p.min_p)
        for row, p in zip(logits.tolist(), params, strict=True)
    ]
    got = lab.token_distribution(logits, params)
    check_probs("a batch with different settings", got, right, "Row i has the settings of params[i] and no others.")
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3], [3], [1, 1]):
        got = lab.token_distribution(logits[order], [params[i] for i in order])
        check_probs(f"rows {order} of that batch", got, [right[i] for i in order], "A row must not see other rows.")


def test_impossible_settings_are_refused(lab: Any) -> None:
    probs = rows([0.25, 0.75], [0.5, 0.5])
    check_probs("top-k", lab.keep_top_k(probs, [1, 2]), [[0, 1], [0.5, 0.5]])
    check_probs("top-p", lab.keep_top_p(probs, [0.5, 1.0]), [[0, 1], [0.5, 0.5]])
    check_probs("min-p", lab.keep_min_p(probs, [0.5, 0.0]), [[0, 1], [0.5, 0.5]])
    check_probs("temperature", lab.apply_temperature(probs.log(), [1.0, 1.0]), probs.tolist())
    check_refused("temperature -1 in row 1", lambda: lab.apply_temperature(probs, [1.0, -1.0]), mentions="row 1")
    check_refused("temperature NaN", lambda: lab.apply_temperature(probs, [1.0, NAN]))
    check_refused("one temperature for two rows", lambda: lab.apply_temperature(probs, [1.0]))
    check_refused("k = -1", lambda: lab.keep_top_k(probs, [-1, 1]))
    check_refused("k = 1.5", lambda: lab.keep_top_k(probs, [1.5, 1]))
    check_refused("p = -0.1", lambda: lab.keep_top_p(probs, [-0.1, 1.0]))
    check_refused("m = NaN", lambda: lab.keep_min_p(probs, [NAN, 0.0]))
    check_refused("rows that don't sum to 1", lambda: lab.keep_top_p(probs / 2, [0.5, 0.5]))
    check_refused("a negative probability", lambda: lab.keep_min_p(rows([1.5, -0.5]), [0.1]))
    check_refused("a uniform of 1", lambda: lab.draw(probs, [0.5, 1.0]))
    check_refused("a negative uniform", lambda: lab.draw(probs, [-0.1, 0.5]))
    check_refused("one row of params for two", lambda: lab.token_distribution(probs.log(), [SamplingParams()]))
    check_refused("step -1", lambda: lab.sample(probs.log(), [SamplingParams()] * 2, [0, -1]))


def test_draw_hits_every_share_of_a_grid(lab: Any) -> None:
    size = 1024
    for probs in ([0.5, 0.25, 0.125, 0.125], [0.0, 0.625, 0.0, 0.375, 0.0], [0.0009765625, 0.9990234375], [1.0]):
        uniforms = [(i + 0.5) / size for i in range(size)]
        got = lab.draw(rows(*([probs] * size)), uniforms)
        right = torch.tensor([inverse_cdf(probs, u) for u in uniforms])
        counts, wanted = (torch.bincount(t.flatten(), minlength=len(probs)).tolist() for t in (got, right))
        assert counts == wanted, f"a grid of {size} uniforms over {probs} gave the tokens {counts} times, not {wanted}"
        check_equal(f"draw from {probs} over a grid of uniforms", got, right, "Low uniforms give low ids.")
    batch = rows([0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [0.25, 0.25, 0.5])
    got = lab.draw(batch, [0.6, 0.2, 0.9])
    check_equal("draw with one uniform a row", got, torch.tensor([1, 1, 2]), "Row i is drawn with uniforms[i].")


def test_draw_at_the_edges(lab: Any) -> None:
    probs = [0.25, 0.5, 0.125, 0.125]
    for u, right in ((0.0, 0), (0.25, 1), (0.75, 2), (0.875, 3), (1 - 2**-53, 3), (0.25 - 2**-54, 0), (0.7499999, 1)):
        advice = "The token is the first whose cumulative probability exceeds the uniform; when equal, the next one."
        check_equal(f"draw from {probs} with {u!r}", lab.draw(rows(probs), [u]), torch.tensor([right]), advice)
    # Seen from fp32, which rounds 0.1 up by 1.5e-9, the last of these uniforms lies below the boundary.
    got = lab.draw(rows([0.1, 0.9], [0.1, 0.9]), [0.1 - 1e-10, 0.1 + 1e-10])
    check_equal("draw next to 0.1", got, torch.tensor([0, 1]), "Probabilities are added up in float64.")


def test_draw_never_takes_an_impossible_token(lab: Any) -> None:
    last = 1 - 2**-53
    ends = rows([0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0.5, 0, 0, 0.5, 0])
    advice = "Tokens of probability 0 at either end, or in the middle, are never drawn."
    for u, right in ((0.0, [2, 3, 1]), (0.5, [3, 3, 4]), (last, [3, 3, 4])):
        check_equal(f"draw with {u!r}", lab.draw(ends, [u] * 3), torch.tensor(right), advice)
    # Ten tenths sum to less than 1, so that the largest uniform lies beyond the cumulative sum.
    tenths = [0.1] * 10 + [0.0] * 3
    assert sum(tenths) <= last
    got = lab.draw(rows(tenths, [0.0, *tenths[:-1]]), [last, 0.0])
    advice = "Where rounding leaves the total below the uniform, the last *possible* token is meant."
    check_equal("draw from ten tenths and zeros", got, torch.tensor([9, 1]), advice)


def test_sample_draws_with_seed_and_step(lab: Any) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    probs = softmax64(logits[0].tolist(), 1.0)
    seeds, steps = [3, 3, 3, 4, 5, 2**40], [0, 1, 17, 0, 1, 3]
    got = lab.sample(logits.expand(6, -1), [SamplingParams(seed=s) for s in seeds], steps)
    uniforms = [uniform(seed, step) for seed, step in zip(seeds, steps, strict=True)]
    right = torch.tensor([inverse_cdf(probs, u) for u in uniforms])
    advice = "The row's random number is uniform(seed, step) with its own seed and step; draw turns it into a token."
    check_equal(f"sample with seeds {seeds} and steps {steps}", got, right, advice)
    params = [SamplingParams(seed=s) for s in reversed(seeds)]
    got = lab.sample(logits.expand(6, -1), params, steps[::-1])
    check_equal(f"sample with seeds {seeds[::-1]} and steps {steps[::-1]}", got, right.flip(0), advice)


def test_sample_is_independent_of_batch_mates(lab: Any) -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(2)) * 2
    params = [SamplingParams(temperature=(0.7, 1.0, 1.5)[i % 3], top_k=(0, 9)[i % 2], seed=100 + i) for i in range(6)]
    steps = [0, 5, 2, 9, 1, 4]
    right = torch.tensor(
        [
            inverse_cdf(filtered(softmax64(row, p.temperature), p.top_k), uniform(p.seed, step))
            for row, p, step in zip(logits.tolist(), params, steps, strict=True)
        ]
    )
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2], [4, 4, 0], [3, 1]):
        got = lab.sample(logits[order], [params[i] for i in order], [steps[i] for i in order])
        advice = "The same request must give the same token in any row and beside any others."
        check_equal(f"requests {order} of a batch", got, right[order], advice)


def test_sampled_frequencies_match_the_distribution(lab: Any) -> None:
    # 8,000 draws in one batch, one step each of one seed. Right code fails with probability alpha for each setting.
    alpha, count = 1e-6, 8_000
    logits = torch.tensor([1.2, -0.3, 0.4, 2.0, -1.5, 0.0, 0.9, -4.0])
    for params in (
        SamplingParams(seed=11),
        SamplingParams(temperature=1.7, top_k=5, seed=12),
        SamplingParams(temperature=0.8, top_p=0.85, seed=13),
        SamplingParams(temperature=1.3, min_p=0.2, seed=14),
    ):
        probs = filtered(softmax64(logits.tolist(), params.temperature), params.top_k, params.top_p, params.min_p)
        got = lab.sample(logits.expand(count, -1), [params] * count, list(range(count)))
        check_form(f"the result of {count} draws", got, (count,), torch.int64)
        assert set(got.tolist()) <= set(range(len(probs))), f"{params}: drew an id outside the vocabulary"
        result = chi_square(got, probs)
        shares = [round(float((got == token).float().mean()), 4) for token in range(len(probs))]
        assert result.p_value > alpha, (
            f"{params}: {count} draws have the shares {shares}, the distribution is {[round(p, 4) for p in probs]}; "
            f"chi-square {result.statistic:.1f} on {result.degrees} degrees, p = {result.p_value:.1e}"
        )


def test_sampler_chooses_like_sample(lab: Any) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(4)) * 2
    params = SamplingParams(temperature=1.4, top_k=20, top_p=0.95, min_p=0.01, seed=8)
    sampler = lab.Sampler(params)
    probs = filtered(softmax64(logits.tolist(), 1.4), 20, 0.95, 0.01)
    # Steps out of order: a sampler must not count on its own.
    for step in (0, 1, 7, 1, 0, 30):
        got, right = sampler.__call__(logits, step), inverse_cdf(probs, uniform(8, step))
        assert type(got) is int, f"a sampler must return an int, got {got!r} of type {type(got).__name__}"
        assert got == right, f"step {step} of seed 8 must give token {right}, got {got}: uniform(seed, step), no state"
    check_refused("logits with two axes", lambda: sampler.__call__(logits.unsqueeze(0), 0))


@pytest.mark.integration
def test_sampler_drives_your_own_generation(lab: Any) -> None:
    transition = ((0.5, 0.25, 0.25, 0.0), (0.0, 0.1, 0.2, 0.7), (0.3, 0.3, 0.3, 0.1), (0.6, 0.0, 0.4, 0.0))
    params = SamplingParams(top_p=0.85, seed=21)
    got = lab.generate(Markov(transition, 60), [1], 40, lab.Sampler(params))
    right, last = [], 1
    for step in range(40):
        last = inverse_cdf(filtered(transition[last], top_p=0.85), uniform(21, step))
        right.append(last)
    assert got == right, f"your sampler and loop on a Markov chain gave {got}, should give {right}"
