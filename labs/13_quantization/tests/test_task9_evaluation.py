"""Task 9: every token scored once, differences in pairs, and questions that have an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from grader.judge.refusal import check_refused
from labkit.evaluation import ChoiceQuestion, Interval

pytestmark = pytest.mark.task(9)

VOCAB = 13


class RecordingModel:
    """A model whose logits depend on every token that it reads, so that a missing one shows.

    Args:
        shift: added to all logits; it changes no probability.
        dtype: of the logits.
    """

    def __init__(self, shift: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        self.shift, self.dtype = shift, dtype
        self.calls: list[list[int]] = []
        generator = torch.Generator().manual_seed(4)
        self.table = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)

    def __call__(self, tokens: list[int]) -> Tensor:
        """Logits `[n, VOCAB]`."""
        self.calls.append(list(tokens))
        return self.rows(tokens)

    def rows(self, tokens: Sequence[int]) -> Tensor:
        """The same, not recorded: what row i says fades by 0.8 a token, but never quite."""
        state, rows = torch.zeros(VOCAB, dtype=torch.float64), []
        for token in tokens:
            state = 0.8 * state + self.table[token]
            rows.append(state)
        return (torch.stack(rows) + self.shift).to(self.dtype)

    def loss(self, context: Sequence[int], token: int) -> float:
        """-ln p of one token after a context."""
        row = self.rows(context)[-1].double()
        return float(row.exp().sum().log() - row[token]) if not self.shift else self._far(row, token)

    @staticmethod
    def _far(row: Tensor, token: int) -> float:
        top = row.max()
        return float((row - top).exp().sum().log() + top - row[token])


def some_text(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def context_start(token: int, window: int, stride: int) -> int:
    """Where the window begins that scores a token: the first multiple of the stride that reaches it."""
    return max(0, math.ceil((token + 1 - window) / stride)) * stride


def vectors(sizes: Sequence[int], seed: int, mean: float = 2.0) -> list[Tensor]:
    """One vector of random losses for each size."""
    generator = torch.Generator().manual_seed(seed)
    return [mean + torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def uniforms(resamples: int, blocks: int, seed: int) -> Tensor:
    """`[resamples, blocks]` numbers from 0 to 1."""
    return torch.rand(resamples, blocks, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def resampled(blocks: Sequence[Tensor], draws: Tensor) -> Tensor:
    """The mean of each resample, put together token by token."""
    means = []
    for row in draws.tolist():
        means.append(torch.cat([blocks[int(u * len(blocks))] for u in row]).mean())
    return torch.stack(means)


def check_interval(what: str, got: Any, estimate: float, means: Tensor, confidence: float, advice: str) -> None:
    """An interval against the resamples that it comes from."""
    assert isinstance(got, Interval), f"{what} must be a labkit Interval, got {got!r}"
    low, high = (float(means.quantile(q)) for q in ((1 - confidence) / 2, (1 + confidence) / 2))
    for name, value, right in (("estimate", got.estimate, estimate), ("low", got.low, low), ("high", got.high, high)):
        close = isinstance(value, float) and math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-12)
        assert close, f"{what}: {name} is {right:.6f}, got {value!r}. {advice}"


# Perplexity.


def test_windows_score_every_token_once_and_with_context(lab: Any) -> None:
    for length, window, stride in (
        (2, 2, 1), (10, 4, 3), (10, 4, 1), (13, 8, 4), (12, 8, 4), (16, 8, 4), (17, 8, 4), (5, 9, 3), (9, 9, 8),
        (30, 7, 5),
    ):  # fmt: skip
        what = f"{length} tokens by windows of {window}, stride {stride}"
        found = [tuple(int(number) for number in part) for part in lab.windows(length, window, stride)]
        scored = [token for start, end, first in found for token in range(first, end)]
        assert scored == list(range(1, length)), (
            f"{what}: tokens 1 to {length - 1} must be scored once each and in order, got {scored}"
        )
        for start, end, first in found:
            assert 0 <= start < first and end - start <= window and end <= length, (
                f"{what}: no such window: {(start, end, first)}"
            )
            for token in range(first, end):
                right = context_start(token, window, stride)
                assert start == right, f"{what}: token {token} is scored by the window from {right} on, got {start}"


def test_a_token_s_loss_has_its_window_as_context(lab: Any) -> None:
    for length, window, stride in ((23, 8, 5), (24, 8, 3), (7, 8, 5), (8, 8, 7), (9, 8, 7), (2, 8, 1)):
        text, model = some_text(length, length), RecordingModel()
        got = lab.token_losses(model, text, window, stride)
        right = torch.tensor(
            [model.loss(text[context_start(t, window, stride) : t], text[t]) for t in range(1, length)],
            dtype=torch.float64,
        )
        advice = f"Windows of {window}, stride {stride}: token t follows row t - 1 - start of its window."
        check_close(f"losses of {length} tokens", got, right, scale=10.0, dtype=torch.float64, advice=advice)


def test_the_model_reads_each_window_once(lab: Any) -> None:
    for length, window, stride in ((23, 8, 5), (21, 8, 5), (6, 8, 4)):
        text, model = some_text(length), RecordingModel()
        got = lab.token_losses(model, text, window, stride)
        starts = sorted({context_start(t, window, stride) for t in range(1, length)})
        right = [text[start : start + window] for start in starts]
        assert model.calls == right, (
            f"{length} tokens, window {window}, stride {stride}: the model should read {len(right)} windows, from "
            f"{starts} on, each once; it was called with {[len(call) for call in model.calls]} tokens"
        )
        newest = model.loss(text[starts[-1] : -1], text[-1])
        last = torch.tensor(newest, dtype=torch.float64)
        check_close("the last token's loss", got[-1], last, scale=10.0, dtype=torch.float64)


def test_probabilities_are_summed_in_float64(lab: Any) -> None:
    # Around 20,000 a float32 has steps of 0.002: logits are what they are, but what follows must add no error.
    for dtype, shift in ((torch.float32, 20_000.0), (torch.bfloat16, 0.0), (torch.float16, 40.0)):
        text, model = some_text(12, 3), RecordingModel(shift, dtype)
        got = lab.token_losses(model, text, 16, 8)
        right = torch.tensor([model.loss(text[:t], text[t]) for t in range(1, 12)], dtype=torch.float64)
        # A difference of two float64 of size `shift` has their roundings.
        what, scale = f"losses from {dtype} logits around {shift:g}", 10.0 + abs(shift)
        check_close(what, got, right, scale=scale, dtype=torch.float64, advice="Bring logits to float64 first.")


def test_perplexity_is_the_mean_over_tokens(lab: Any) -> None:
    documents = [*vectors((3, 40, 1, 17), 1), torch.full((29,), 4.0, dtype=torch.float64)]
    got, right = lab.perplexity(documents), float(torch.cat(documents).mean().exp())
    assert isinstance(got, float) and math.isclose(got, right, rel_tol=1e-12), (
        f"documents of 3, 40, 1, 17 and 29 tokens have a perplexity of {right:.6f}, got {got!r}: every token weighs "
        "the same, in whichever document it stands"
    )
    for size in (2, 50):
        got = lab.perplexity([torch.full((7,), math.log(size), dtype=torch.float64)])
        assert math.isclose(got, size, rel_tol=1e-12), (
            f"{size} equally likely tokens: a perplexity of {size}, not {got}"
        )
    # A million float32 losses: their sum has to keep its digits.
    many = torch.full((1_000_000,), 2.3, dtype=torch.float32)
    many[::2] = 0.1
    got, right = lab.perplexity([many]), math.exp((float(many[0]) + float(many[1])) / 2)
    assert math.isclose(got, right, rel_tol=1e-9), f"a million float32 losses: {right!r}, got {got!r}"


def test_bits_per_byte_do_not_depend_on_the_tokenizer(lab: Any) -> None:
    documents = vectors((5, 12), 2)
    total = float(torch.cat(documents).sum())
    for num_bytes in (1, 40, 1000):
        got, right = lab.bits_per_byte(documents, num_bytes), total / math.log(2) / num_bytes
        assert isinstance(got, float) and math.isclose(got, right, rel_tol=1e-12), (
            f"{total:.4f} nats over {num_bytes} bytes are {right:.6f} bits a byte, got {got!r}"
        )
    halves = lab.bits_per_byte([part / 2 for document in documents for part in (document, document)], 40)
    assert math.isclose(halves, lab.bits_per_byte(documents, 40), rel_tol=1e-12), (
        "twice as many tokens of half the loss are the same text: bits a byte must not change"
    )


def test_a_model_that_breaks_has_no_perplexity(lab: Any) -> None:
    text = some_text(9)
    sound = RecordingModel()
    right = [sound.loss(text[context_start(t, 6, 3) : t], text[t]) for t in range(1, 9)]
    got, expected = lab.token_losses(sound, text, 6, 3), torch.tensor(right, dtype=torch.float64)
    check_close("a good call", got, expected, scale=10.0, dtype=torch.float64)

    def broken(value: float) -> Any:
        def logits(tokens: list[int]) -> Tensor:
            rows = RecordingModel().rows(tokens)
            rows[-1, 2] = value
            return rows

        return logits

    for value in (math.nan, math.inf):
        call = lambda value=value: lab.token_losses(broken(value), text, 6, 3)  # noqa: E731
        check_refused(f"logits with {value}", call, mentions="finite")
    rows = RecordingModel().rows
    check_refused("a row too few", lambda: lab.token_losses(lambda tokens: rows(tokens)[1:], text, 6, 3))
    few = lambda tokens: torch.zeros(len(tokens), VOCAB)  # noqa: E731
    check_refused("an id that the model lacks", lambda: lab.token_losses(few, [1, VOCAB, 2], 6, 3))
    check_refused("one token", lambda: lab.token_losses(rows, [1], 6, 3))
    check_refused("windows that don't overlap", lambda: lab.token_losses(rows, text, 6, 6), mentions="6")
    check_refused("a stride of 0", lambda: lab.windows(9, 6, 0))
    for what, losses in (
        ("no losses", []),
        ("a loss of NaN", [torch.tensor([1.0, math.nan])]),
        ("no tokens", [torch.zeros(0)]),
    ):
        check_refused(what, lambda losses=losses: lab.perplexity(losses))
    check_refused("no bytes", lambda: lab.bits_per_byte([torch.ones(3)], 0))


# Pairs.


def test_blocks_hold_neighbours_of_one_document(lab: Any) -> None:
    documents = vectors((7, 3, 6, 1), 3)
    for size, right in ((3, [3, 3, 1, 3, 3, 3, 1]), (4, [4, 3, 3, 4, 2, 1]), (100, [7, 3, 6, 1]), (1, [1] * 17)):
        blocks = lab.split_blocks(documents, size)
        assert [len(block) for block in blocks] == right, (
            f"documents of 7, 3, 6 and 1 tokens in blocks of {size}: {right}, got {[len(block) for block in blocks]}"
        )
        check_equal(f"all blocks of {size} in a row", torch.cat(list(blocks)), torch.cat(documents))


def test_an_interval_comes_from_the_drawn_blocks(lab: Any) -> None:
    sizes = (5, 1, 8, 3, 3, 7)
    first, second = vectors(sizes, 4), vectors(sizes, 5, mean=2.1)
    for resamples, confidence in ((1, 0.9), (40, 0.95), (41, 0.5)):
        draws = uniforms(resamples, len(sizes), resamples)
        differences = [b - a for a, b in zip(first, second, strict=True)]
        got = lab.paired_bootstrap(first, second, draws, confidence)
        advice = "A resample's mean is the sum of all drawn differences by the number of drawn tokens."
        means, estimate = resampled(differences, draws), float(torch.cat(differences).mean())
        check_interval(f"{resamples} resamples, {confidence:.0%}", got, estimate, means, confidence, advice)
    edge = torch.full((3, len(sizes)), 1 - 2**-53, dtype=torch.float64)
    got = lab.paired_bootstrap(first, second, edge)
    right = float((second[-1] - first[-1]).mean())
    assert math.isclose(got.low, right, rel_tol=1e-9), (
        f"uniforms just below 1 all draw the last block: {right}, got {got}"
    )


def test_what_is_hard_for_both_cancels(lab: Any) -> None:
    generator = torch.Generator().manual_seed(6)
    hard = 3 * torch.rand(40, 1, generator=generator, dtype=torch.float64)
    noise = 0.2 * torch.randn(2, 40, 9, generator=generator, dtype=torch.float64)
    first, second = list(hard + noise[0]), list(hard + noise[1] + 0.1)
    draws, more = uniforms(300, 40, 7), uniforms(300, 40, 8)
    paired = lab.paired_bootstrap(first, second, draws)
    apart = lab.unpaired_bootstrap(first, second, draws, more)
    estimate = float(torch.cat(second).mean() - torch.cat(first).mean())
    right = resampled(second, more) - resampled(first, draws)
    check_interval("the unpaired interval", apart, estimate, right, 0.95, "Each side draws its own blocks.")
    assert math.isclose(paired.estimate, apart.estimate, rel_tol=1e-9), "both estimate the same difference"
    assert apart.high - apart.low > 5 * (paired.high - paired.low), (
        f"passages differ 3 nats, models 0.1: the unpaired interval {apart} must be many times as wide as {paired}"
    )
    assert paired.excludes_zero and not apart.excludes_zero, "only the paired one can tell that the second is worse"
    other = vectors((4, 4, 9, 2), 9)
    got = lab.unpaired_bootstrap(first, other, draws[:20], uniforms(20, 4, 10), 0.8)
    right = resampled(other, uniforms(20, 4, 10)) - resampled(first, draws[:20])
    estimate = float(torch.cat(other).mean() - torch.cat(first).mean())
    check_interval("models on different texts", got, estimate, right, 0.8, "Number and size of blocks may differ.")


def test_the_interval_holds_the_truth_as_often_as_it_says(lab: Any) -> None:
    # 24 blocks of one normal shock each, which 16 neighbouring tokens share, and little noise on top. Block means are
    # then normal, and the ends are at 1.96 standard errors with n instead of n - 1: coverage is that of Student's t
    # with 23 degrees of freedom within ±1.92, 0.933; 400 resamples place the ends with an error of their own, which
    # takes 0.013 of it. Of 120 experiments at least 94 hold the truth then, with a false alarm in fewer than 1 of 1e6
    # (binomial). Whoever draws single tokens has an interval a quarter as wide, which holds it in about 45.
    experiments, blocks, size, truth = 120, 24, 16, 0.3
    generator = torch.Generator().manual_seed(11)
    shocks = torch.randn(experiments, blocks, 1, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(experiments, blocks, size, generator=generator, dtype=torch.float64)
    base = 2 + torch.randn(blocks, size, generator=generator, dtype=torch.float64)
    draws = uniforms(400, blocks, 12)
    first = [base.flatten()]
    own, held = lab.split_blocks(first, size), 0
    for index in range(experiments):
        second = lab.split_blocks([(base + truth + shocks[index] + noise[index]).flatten()], size)
        got = lab.paired_bootstrap(own, second, draws)
        held += got.low <= truth <= got.high
    at_least = _least_held(experiments, 0.92, 1e-6)
    assert held >= at_least, (
        f"{held} of {experiments} intervals of 95 % hold the true difference; right ones do so at least {at_least} "
        "times. Draw whole blocks, not tokens: neighbours err together"
    )
    assert held < experiments, "an interval of 95 % must also miss now and then"


def _least_held(experiments: int, coverage: float, false_alarm: float) -> int:
    """The largest number that right intervals fall short of with at most the given probability; exact binomial."""
    below = 0.0
    for held in range(experiments + 1):
        below += math.comb(experiments, held) * coverage**held * (1 - coverage) ** (experiments - held)
        if below > false_alarm:
            return held
    return experiments


def test_only_equal_sizes_are_compared(lab: Any) -> None:
    bits = {"gptq": 4.25, "full": 16.0, "nf4": 4.127, "rtn": 4.25, "int8": 8.25}
    right = [("full", "gptq"), ("full", "nf4"), ("full", "rtn"), ("full", "int8")]
    for tolerance, more in (
        (0.1, [("gptq", "rtn")]), (0.2, [("gptq", "nf4"), ("gptq", "rtn"), ("nf4", "rtn")]), (0.0, [("gptq", "rtn")]),
    ):  # fmt: skip
        got = [tuple(pair) for pair in lab.fair_pairs(bits, "full", tolerance)]
        assert got == right + more, f"{bits} with a tolerance of {tolerance}: {right + more}, got {got}"
    same = {"a": 16.0, "full": 16.0, "b": 4.5}
    got = [tuple(pair) for pair in lab.fair_pairs(same, "full")]
    assert got == [("full", "a"), ("full", "b")], f"the baseline is compared with each once, got {got}"


def test_comparisons_that_mean_nothing_are_refused(lab: Any) -> None:
    first, second, draws = vectors((3, 4), 1), vectors((3, 4), 2), uniforms(5, 2, 3)
    differences = [b - a for a, b in zip(first, second, strict=True)]
    got = lab.paired_bootstrap(first, second, draws)
    check_interval("a good call", got, float(torch.cat(differences).mean()), resampled(differences, draws), 0.95, "")
    pair, apart = lab.paired_bootstrap, lab.unpaired_bootstrap
    check_refused("other tokens", lambda: pair(first, vectors((4, 3), 2), draws))
    check_refused("fewer blocks", lambda: pair(first, second[:1], draws))
    check_refused("one block", lambda: pair(first[:1], second[:1], draws[:, :1]))
    check_refused("a loss of NaN", lambda: pair(first, [second[0], second[1] * math.nan], draws), mentions="finite")
    check_refused("numbers for one block too many", lambda: pair(first, second, uniforms(5, 3, 3)))
    check_refused("a uniform of 1", lambda: pair(first, second, draws * 0 + 1))
    check_refused("no resamples", lambda: pair(first, second, draws[:0]))
    for confidence in (0.0, 1.0, 95.0):
        check_refused(f"a confidence of {confidence}", lambda c=confidence: pair(first, second, draws, c))
    check_refused("uneven resamples", lambda: apart(first, second, draws, draws[1:]))
    check_refused("blocks of no tokens", lambda: lab.split_blocks(first, 0))
    check_refused("an unknown baseline", lambda: lab.fair_pairs({"a": 4.0}, "b"))
    check_refused("no bits", lambda: lab.fair_pairs({"a": 4.0, "b": 0.0}, "a"))


# Questions.


def test_a_fact_stands_at_its_depth(lab: Any) -> None:
    filler, fact, question = list(range(100, 140)), [1, 2, 3], [7, 8]
    for length, depth, before in (
        (25, 0.0, 0), (25, 1.0, 20), (25, 0.26, 5), (25, 0.29, 6), (5, 0.7, 0), (45, 0.77, 31), (16, 0.6, 7),
    ):  # fmt: skip
        room = length - 5
        right = filler[:before] + fact + filler[before:room] + question
        got = list(lab.hide_fact(filler, fact, question, length, depth))
        assert got == right, f"{length} tokens, depth {depth}: {before} of {room} filler tokens stand before: got {got}"
    check_refused("a length without room", lambda: lab.hide_fact(filler, fact, question, 4, 0.5))
    check_refused("too little filler", lambda: lab.hide_fact(filler, fact, question, 46, 0.5))
    check_refused("a depth of 1.5", lambda: lab.hide_fact(filler, fact, question, 20, 1.5))
    check_refused("no fact", lambda: lab.hide_fact(filler, [], question, 20, 0.5))


def test_a_choice_is_as_likely_as_all_its_tokens(lab: Any) -> None:
    model, context = RecordingModel(), some_text(9, 5)
    choices = [[3], [4, 5, 6], [4, 5], some_text(6, 6)]
    right = []
    for choice in choices:
        text = context + choice
        right.append(sum(model.loss(text[:t], text[t]) for t in range(len(context), len(text))))
    got = lab.choice_losses(model, context, choices)
    advice = "Sum -ln p of the choice's own tokens, each after the context and the choice so far."
    expected = torch.tensor(right, dtype=torch.float64)
    check_close("losses of four choices", got, expected, scale=20.0, dtype=torch.float64, advice=advice)
    assert model.calls == [context + choice for choice in choices], "each choice is read once, after the context"
    one = lab.choice_losses(model, [2], [[3], [4]])
    expected = torch.tensor([model.loss([2], 3), model.loss([2], 4)], dtype=torch.float64)
    check_close("after one token", one, expected, scale=10.0, dtype=torch.float64)


def test_the_likeliest_choice_is_the_answer(lab: Any) -> None:
    model = RecordingModel()
    questions, right, by_token = [], [], []
    for seed in range(12):
        context = tuple(some_text(4, 20 + seed))
        choices = tuple(tuple(some_text(1 + (seed + index) % 3, 40 * seed + index)) for index in range(4))
        questions.append(ChoiceQuestion(context, choices, seed % 4))
        sums = [sum(model.loss([*context, *c[:i]], c[i]) for i in range(len(c))) for c in choices]
        means = [loss / len(choice) for loss, choice in zip(sums, choices, strict=True)]
        right.append(float(sums.index(min(sums)) == seed % 4))
        by_token.append(float(means.index(min(means)) == seed % 4))
    assert right != by_token and 0 < sum(right) < 12, "the questions tell the two rules apart"
    got = lab.answer_questions(model, questions)
    check_equal("right answers by the sum", got, torch.tensor(right, dtype=torch.float64))
    got = lab.answer_questions(model, questions, per_token=True)
    check_equal("right answers by the mean", got, torch.tensor(by_token, dtype=torch.float64))


def test_not_knowing_is_no_answer(lab: Any) -> None:
    flat = lambda tokens: torch.zeros(len(tokens), VOCAB)  # noqa: E731
    questions = [ChoiceQuestion((1, 2), ((3, 4), (5, 6)), answer) for answer in (0, 1)]
    questions.append(ChoiceQuestion((1, 2), ((3, 4), (5,)), 1))
    got = lab.answer_questions(flat, questions)
    right = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    check_equal("answers of a model that finds all tokens equal", got, right, "A tie is not a right answer.")
    check_refused("no questions", lambda: lab.answer_questions(flat, []))
    check_refused("no choices", lambda: lab.choice_losses(flat, [1], []))
    check_refused("an empty choice", lambda: lab.choice_losses(flat, [1], [[2], []]))
    nothing = lambda tokens: torch.full((len(tokens), VOCAB), math.nan)  # noqa: E731
    check_refused("a model of NaN", lambda: lab.answer_questions(nothing, questions), mentions="finite")
