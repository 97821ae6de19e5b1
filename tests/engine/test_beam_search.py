"""Beam search: what it finds is what transformers finds, and what it costs is blocks for what beams do not share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from grader.judge.numerics import check_close
from labkit.checkpoints.loading import Model
from labkit.config import ModelConfig
from labkit.decoder import Decoder, random_weights
from labkit.transformers_model import build_transformers_model
from solutions.engine import Completion, Engine, EngineConfig, SamplingParams
from solutions.engine.__main__ import app
from solutions.engine.beam_search import BeamSearchParams
from solutions.engine.drafting.speculation import SpeculationConfig
from solutions.engine.scheduler import SchedulerConfig
from tests.engine.test_speculation import Bushy

PROMPTS = [[7, 400, 31, 31, 2000, 9], [5], list(range(100, 137))]
PARAMS = BeamSearchParams(beam_width=3, max_tokens=7, num_answers=3, ignore_eos=True)
SWAPPED = dict(block_size=4, num_blocks=13, num_host_blocks=40, preemption="swap", max_running=6, token_budget=64)
BESIDE = SamplingParams(temperature=0.8, seed=3, max_tokens=9, n=2, ignore_eos=True)
Found = list[tuple[tuple[int, ...], str]]


def small_model(tokenizer: Any, vocab_size: int) -> tuple[Model, Any]:
    """A model whose choices are not all equal, here and in transformers."""
    config = ModelConfig.tiny(vocab_size=vocab_size, num_layers=2)
    weights = random_weights(config, seed=5)
    weights["model.embed_tokens.weight"] *= 3
    return Model(Decoder(config, weights), tokenizer), build_transformers_model(config, weights, torch.float32)


@pytest.fixture(scope="module")
def served_alone(tiny_model: Model) -> tuple[list[Found], list[tuple[int, ...]]]:
    """What each search finds, and what the request beside them writes, with an engine to itself."""

    def engine() -> Engine:
        return Engine(tiny_model, EngineConfig(prefix_cache="none"))

    searched = [found(engine().beam_search([prompt], PARAMS)[0]) for prompt in PROMPTS]
    return searched, [one.tokens for one in engine().generate([PROMPTS[2]], BESIDE)[0]]


def engine_of(model: Model, width: int) -> Engine:
    return Engine(model, EngineConfig(SchedulerConfig(max_running=width), num_blocks=100, block_size=4))


def found(answers: list[Completion]) -> Found:
    return [(one.tokens, one.finish_reason) for one in answers]


@pytest.mark.parametrize("stops", [(), (17,), (3, 17, 40)])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_answers_and_scores_are_those_of_transformers(
    tiny_model: Model, early_stopping: bool | str, stops: tuple[int, ...]
) -> None:
    model, oracle = small_model(tiny_model.tokenizer, 97)
    prompt, reasons = [7, 31, 31, 20, 9], set[str]()
    for length_penalty, width in ((0.0, 2), (1.0, 5), (2.0, 3), (-1.0, 4)):
        params = BeamSearchParams(width, 10, length_penalty, early_stopping, width, stops, ignore_eos=True)
        answers = engine_of(model, width).beam_search([prompt], params)[0]
        expected = oracle.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), num_beams=width,
            max_new_tokens=10, do_sample=False, length_penalty=length_penalty, early_stopping=early_stopping,
            num_return_sequences=width, eos_token_id=list(stops) or None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        for answer, sequence in zip(answers, expected.sequences[:, len(prompt) :].tolist(), strict=True):
            end = next((place for place, token in enumerate(sequence) if token in stops), len(sequence))
            assert answer.tokens == tuple(sequence[:end]), (length_penalty, width)
        scores = torch.tensor([answer.score for answer in answers])
        largest = float(expected.sequences_scores.abs().max())
        check_close("scores", scores, expected.sequences_scores.double(), scale=10 * largest, dtype=torch.float32)
        reasons |= {answer.finish_reason for answer in answers}
    assert reasons == ({"stop", "length"} if stops else {"length"})


def test_a_beam_for_every_text_finds_the_best_of_all(tiny_model: Model) -> None:
    size, most, stop = 4, 3, 2
    model, oracle = small_model(tiny_model.tokenizer, size)
    prompt = [3, 0, 1]
    texts = []
    for length in range(1, most + 1):
        for text in product(range(size), repeat=length):
            if stop in text[:-1] or (length < most and text[-1] != stop):
                continue
            with torch.no_grad():
                logprobs = oracle(torch.tensor([[*prompt, *text]])).logits[0].double().log_softmax(-1)
            total = sum(float(logprobs[len(prompt) - 1 + place, token]) for place, token in enumerate(text))
            texts.append((total / length**0.7, text))
    best = sorted(texts, reverse=True)[:6]
    params = BeamSearchParams(64, most, 0.7, "never", 6, (stop,), ignore_eos=True)
    answers = engine_of(model, 64).beam_search([prompt], params)[0]
    assert [one.tokens for one in answers] == [tuple(t for t in text if t != stop) for _, text in best]
    scores = torch.tensor([one.score for one in answers])
    check_close("scores", scores, torch.tensor([score for score, _ in best]).double(), scale=10.0, dtype=torch.float32)
    # A narrow search may miss them, or the wide one would prove nothing.
    narrow = engine_of(model, 64).beam_search([prompt], replace(params, beam_width=1, num_answers=1))[0][0]
    assert narrow.score is not None and narrow.score <= best[0][0] + 1e-5


def test_one_beam_is_greedy_decoding(make_engine: Any) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    plain = make_engine().generate(PROMPTS, greedy)
    searched = make_engine().beam_search(PROMPTS, replace(PARAMS, beam_width=1, num_answers=1))
    assert [one[0].tokens for one in searched] == [one[0].tokens for one in plain]
    assert [one[0].text for one in searched] == [one[0].text for one in plain]


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(dict(max_running=3, token_budget=64), id="one at a time"),
        pytest.param(dict(token_budget=7, max_running=7), id="prompts in pieces"),
        pytest.param(dict(block_size=4, num_blocks=13, max_running=6, token_budget=64), id="preempted by recompute"),
        pytest.param(
            dict(block_size=4, num_blocks=13, max_running=6, token_budget=64, prefix_cache="none"),
            id="preempted by recompute, no cache",
        ),
        pytest.param(SWAPPED, id="preempted by swap"),
        pytest.param(dict(block_size=4, num_blocks=12, max_running=3, token_budget=64), id="a text at a time"),
        pytest.param(dict(prefix_cache="radix", block_size=4), id="radix cache"),
        pytest.param(dict(drafts=True), id="trees of drafts beside"),
        pytest.param(dict(drafts=True, **SWAPPED), id="trees of drafts beside, preempted by swap"),
    ],
)
def test_how_it_is_served_changes_nothing(
    make_engine: Any, served_alone: tuple[list[Found], list[tuple[int, ...]]], limits: dict[str, Any]
) -> None:
    alone, beside = served_alone
    limits = dict(limits)
    if has_drafts := limits.pop("drafts", False):
        texts = [[*PROMPTS[2], *tokens] for tokens in beside]
        limits["speculation"] = SpeculationConfig(lambda: Bushy(texts))
    engine = make_engine(**limits)
    for _ in range(2):  # the second time with whatever the cache has kept
        name = engine.add_request(PROMPTS[2], BESIDE)
        searches = [engine.add_beam_search(prompt, PARAMS) for prompt in PROMPTS]
        done: dict[str, list[Completion]] = {}
        while engine.has_work:
            for one in engine.step():
                if one.completion is not None:
                    done.setdefault(one.request_id, []).append(one.completion)
        engine.check_idle()
        assert [found(done[search]) for search in searches] == alone
        assert [one.tokens for one in sorted(done[name], key=lambda one: one.index)] == beside
    if limits.get("num_blocks", 100) < 20:
        assert engine.metrics.num_preemptions > 0, "the pool was to be too small"
    assert (engine.metrics.num_accepted_tokens > 0) == has_drafts


def test_beams_share_what_they_have_in_common(make_engine: Any) -> None:
    engine = make_engine(block_size=4, prefix_cache="none")
    used: Callable[[], int] = lambda: engine.config.num_blocks - engine._memory.num_free  # noqa: E731
    engine.add_beam_search(PROMPTS[2], PARAMS)
    engine.step()
    # 37 tokens fill 9 blocks, and one token lies in a tenth: shared by three beams until they write to it.
    assert used() == 10
    engine.step()
    assert used() <= 12
    while engine.has_work:
        assert used() <= 9 + 3 * 2  # at most 7 tokens more than 36, for each beam
        engine.step()
    engine.check_idle()


def test_an_abort_frees_everything_at_once(make_engine: Any) -> None:
    engine = make_engine(max_running=3, token_budget=64, prefix_cache="none")
    runs, waits = (engine.add_beam_search(prompt, replace(PARAMS, num_answers=2)) for prompt in PROMPTS[:2])
    engine.step()
    engine.step()
    assert [(one.finish_reason, len(one.tokens)) for one in engine.abort(runs)] == [("abort", 2)] * 2
    assert [one.tokens for one in engine.abort(waits)] == [()]
    assert engine.abort(runs) == engine.abort(waits) == []
    assert not engine.has_work
    engine.check_idle()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], PARAMS, "prompt"),
        ([1] * 4, replace(PARAMS, max_tokens=125), "context holds 128"),
        ([1] * 60, PARAMS, "the pool has 4"),
        ([1], replace(PARAMS, beam_width=5), "max_running is 4"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    make_engine: Any, prompt: list[int], params: BeamSearchParams, message: str
) -> None:
    engine = make_engine(num_blocks=4, block_size=16, max_running=4, token_budget=64)
    with pytest.raises(ValueError, match=message):
        engine.beam_search([PROMPTS[0], prompt], params)
    assert not engine.has_work
    assert len(engine.beam_search([PROMPTS[0]], PARAMS)[0]) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        dict(beam_width=0), dict(beam_width=65), dict(max_tokens=0), dict(num_answers=0), dict(num_answers=5),
        dict(length_penalty=float("nan")), dict(early_stopping="sometimes"), dict(stop_token_ids=(-1,)),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    assert BeamSearchParams(beam_width=4).beam_width == 4
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BeamSearchParams(**wrong)


def test_the_command_searches() -> None:
    drawn = CliRunner().invoke(app, ["generate", "Hi", "--beams", "2", "--temperature", "0.5"])
    assert drawn.exit_code == 2 and "give --beams or a --temperature, got 0.5" in drawn.output
    result = CliRunner().invoke(app, ["generate", "The capital of France is", "--beams", "3", "--max-tokens", "3"])
    assert result.exit_code == 0 and "Paris" in result.output, result.output
