"""The engine on a model of random weights: what it writes never depends on how it was served."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close
from labkit.distribution import token_distribution
from labkit.drafting import Draft
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams as LabParams
from solutions.engine import Completion, Engine, SamplingParams
from solutions.engine.drafting.speculation import SpeculationConfig
from solutions.engine.request import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[7, 400, 31, 31, 2000, 9], [5], list(range(100, 137)), [7, 400, 31, 31, 2000, 9, 11, 12]]
SETTINGS = [
    GREEDY,
    SamplingParams(temperature=0.7, seed=3, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=40, seed=4, max_tokens=9, ignore_eos=True),
    SamplingParams(
        temperature=1.0, top_p=0.8, min_p=0.01, seed=5, max_tokens=13, repetition_penalty=1.3, ignore_eos=True
    ),
]

Logits = Callable[[tuple[int, ...]], Tensor]


def texts(engine: Engine, prompts: Any = PROMPTS, params: Any = SETTINGS) -> list[tuple[int, ...]]:
    """The tokens of each prompt's first answer; afterwards nothing may have leaked."""
    answers = engine.generate(prompts, params)
    engine.check_idle()
    return [several[0].tokens for several in answers]


def test_greedy_answers_are_those_of_transformers(make_engine: Any, oracle_logits: Logits) -> None:
    for prompt, tokens in zip(PROMPTS, texts(make_engine(), params=GREEDY), strict=True):
        text = list(prompt)
        for token in tokens:
            assert token == int(oracle_logits(tuple(text)).argmax())
            text.append(token)
        assert len(tokens) == GREEDY.max_tokens


def test_drawn_answers_follow_transformers_filters(make_engine: Any, oracle_logits: Logits) -> None:
    for prompt, params in zip(PROMPTS[1:3], SETTINGS[1:3], strict=True):
        (tokens,) = texts(make_engine(), [prompt], [params])
        text = list(prompt)
        for step, token in enumerate(tokens):
            cumulative = token_distribution(oracle_logits(tuple(text))[None], params)[0].cumsum(0)
            below = float(cumulative[token - 1]) if token else 0.0
            # Filters and logits of two implementations differ by rounding, so that a draw near an edge may be either's.
            assert below - 1e-4 <= uniform(params.seed, step) <= float(cumulative[token]) + 1e-4
            text.append(token)


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(dict(max_running=1, token_budget=64), id="one at a time"),
        pytest.param(dict(token_budget=5, max_running=4), id="prompts in pieces"),
        pytest.param(dict(max_chunk=3), id="small chunks"),
        pytest.param(dict(block_size=1, num_blocks=400), id="blocks of one"),
        pytest.param(dict(block_size=4, num_blocks=13, max_running=4, token_budget=64), id="preempted by recompute"),
        pytest.param(
            dict(block_size=4, num_blocks=13, num_host_blocks=40, preemption="swap", max_running=4, token_budget=64),
            id="preempted by swap",
        ),
        pytest.param(dict(prefix_cache="radix", block_size=4), id="radix cache"),
        pytest.param(dict(prefix_cache="none"), id="no cache"),
    ],
)
def test_how_it_is_served_changes_nothing(make_engine: Any, limits: dict[str, Any]) -> None:
    alone = [
        texts(make_engine(prefix_cache="none"), [prompt], [params])[0]
        for prompt, params in zip(PROMPTS, SETTINGS, strict=True)
    ]
    engine = make_engine(**limits)
    assert texts(engine) == alone
    again = texts(engine)  # now with whatever the cache has kept
    assert again == alone
    if limits.get("num_blocks") == 13:
        assert engine.metrics.num_preemptions > 0, "the pool was to be too small"


def test_a_prefix_is_computed_once(make_engine: Any) -> None:
    # Of 39 tokens 38 may be found: nine whole blocks of 4, and two tokens of the tenth.
    for kind, cached in (("hash", 36), ("radix", 38), ("none", 0)):
        engine = make_engine(prefix_cache=kind, block_size=4)
        prompt = [*PROMPTS[2], 3, 4]
        first = engine.generate([prompt], GREEDY)[0][0]
        second = engine.generate([prompt], GREEDY)[0][0]
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == cached
        assert second.tokens == first.tokens


def test_tenants_share_nothing(make_engine: Any) -> None:
    engine = make_engine(block_size=4)

    def cached(salt: str | None) -> int:
        engine.add_request(PROMPTS[2], GREEDY, salt=salt)
        return finish(engine)[0].num_cached_tokens

    assert [cached("a"), cached("b"), cached(None), cached("a")] == [0, 0, 0, 36]


def finish(engine: Engine) -> list[Completion]:
    """Steps until nothing is left; the completions in the order in which they came."""
    done = []
    while engine.has_work:
        done += [one.completion for one in engine.step() if one.completion is not None]
    engine.check_idle()
    return done


def test_samples_share_their_prompt_and_differ(make_engine: Any) -> None:
    engine = make_engine(block_size=4, prefix_cache="none")
    params = replace(SETTINGS[1], n=3)
    engine.add_request(PROMPTS[2], params)
    engine.step()
    # 37 tokens fill 9 blocks, and one token lies in a tenth: shared by all until somebody writes to it.
    assert engine.config.num_blocks - engine._memory.num_free == 10
    engine.step()
    assert engine.config.num_blocks - engine._memory.num_free == 12
    answers = sorted(finish(engine), key=lambda one: one.index)
    for index, answer in enumerate(answers):
        (alone,) = texts(make_engine(), [PROMPTS[2]], [replace(SETTINGS[1], seed=params.seed + index)])
        assert answer.tokens == alone
    assert len({answer.tokens for answer in answers}) == 3


def test_a_sample_that_ends_first_stays_findable(make_engine: Any) -> None:
    engine = make_engine(block_size=2)
    name = engine.add_request(PROMPTS[0], SamplingParams(temperature=1.0, seed=1, max_tokens=40, n=2, ignore_eos=True))
    grown = [[*PROMPTS[0]], [*PROMPTS[0]]]
    for _ in range(8):
        for one in engine.step():
            grown[one.index] += one.tokens
    # Its other sample runs on, and has cached the prompt that both began with.
    engine._scheduler.finish(engine._groups[name][1], FinishReason.STOP)
    other = engine.add_request([*grown[1], 3], GREEDY)
    found = dict[str, Completion]()
    while other not in found:
        found |= {one.request_id: one.completion for one in engine.step() if one.completion is not None}
    # Its newest token was never computed.
    assert found[other].num_cached_tokens == (len(grown[1]) - 1) // 2 * 2


def test_ends(make_engine: Any) -> None:
    engine = make_engine()
    whole = engine.generate([PROMPTS[0]], GREEDY)[0][0]
    assert whole.finish_reason == "length" and len(whole.tokens) == 8
    stopped = engine.generate([PROMPTS[0]], replace(GREEDY, stop_token_ids=(whole.tokens[3],)))[0][0]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == whole.tokens[: whole.tokens.index(whole.tokens[3])]
    stop = whole.text[4:7]
    cut = engine.generate([PROMPTS[0]], replace(GREEDY, stop=(stop,)))[0][0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    last = engine.generate([PROMPTS[0]], replace(GREEDY, stop=(whole.text,)))[0][0]
    assert (last.finish_reason, last.text, len(last.tokens)) == ("stop", "", 8), "complete with the last token of all"
    eos = engine.tokenizer.stop_ids[0]
    biased = replace(GREEDY, logit_bias=((eos, 100.0),), ignore_eos=False)
    ended = engine.generate([PROMPTS[0]], biased)[0][0]
    assert (ended.finish_reason, ended.tokens, ended.text) == ("stop", (), "")


def test_the_pieces_make_the_text(make_engine: Any) -> None:
    engine = make_engine()
    for prompt in PROMPTS:
        engine.add_request(prompt, replace(SETTINGS[1], max_tokens=30))
    pieces: dict[str, str] = {}
    done = {}
    while engine.has_work:
        for one in engine.step():
            pieces[one.request_id] = pieces.get(one.request_id, "") + one.text
            if one.completion is not None:
                done[one.request_id] = one.completion
    assert pieces == {name: completion.text for name, completion in done.items()}
    for completion in done.values():
        assert completion.text == engine.tokenizer.decode(completion.tokens)


def test_penalties_and_biases(make_engine: Any, oracle_logits: Logits) -> None:
    prompt = PROMPTS[0]
    settings = replace(
        GREEDY, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((9, 3.0), (8, -3.0))
    )
    (tokens,) = texts(make_engine(), [prompt], [settings])
    output: list[int] = []
    for token in tokens:
        logits = oracle_logits((*prompt, *output)).double()
        logits[9] += 3.0
        logits[8] -= 3.0
        for seen in {*prompt, *output}:
            logits[seen] = logits[seen] / 1.5 if logits[seen] > 0 else logits[seen] * 1.5
        for seen in set(output):
            logits[seen] -= 0.5 + 0.25 * output.count(seen)
        assert token == int(logits.argmax())
        output.append(token)


def test_logprobs_are_the_models_own(make_engine: Any, oracle_logits: Logits) -> None:
    params = replace(SETTINGS[2], logprobs=3, repetition_penalty=1.5, presence_penalty=1.0, logit_bias=((9, 8.0),))
    answer = make_engine().generate([PROMPTS[2]], params)[0][0]
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.tokens)
    text = list(PROMPTS[2])
    for token, report in zip(answer.tokens, answer.logprobs, strict=True):
        want = oracle_logits(tuple(text)).double().log_softmax(0)
        ids = [one for one, _ in report.top]
        assert ids == want.topk(3).indices.tolist()
        got = torch.tensor([report.logprob, *(value for _, value in report.top)])
        scale = math.log(len(want))
        check_close("log-probabilities", got, want[[token, *ids]], scale=scale, dtype=torch.float32)
        text.append(token)


def test_an_abort_frees_everything_at_once(make_engine: Any) -> None:
    engine = make_engine(max_running=2, token_budget=64, prefix_cache="none")
    names = [engine.add_request(prompt, replace(GREEDY, n=2)) for prompt in PROMPTS]
    engine.step()
    (first, second) = engine.abort(names[0])  # it runs
    assert first.finish_reason == second.finish_reason == "abort" and len(first.tokens) == 1
    assert engine.abort(names[2])[0].tokens == ()  # it waits
    assert engine.abort(names[0]) == engine.abort("nobody") == []
    assert sorted(one.request_id.split(".")[0] for one in finish(engine)) == sorted([names[1], names[3]] * 2)


def test_a_name_that_is_made_up_is_nobodys(make_engine: Any) -> None:
    engine = make_engine()
    taken = [engine.add_request([1], GREEDY, request_id=f"request-{number}") for number in range(3)]
    assert engine.add_request([1], GREEDY) not in taken
    assert len(finish(engine)) == 4


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_what_breaks_off_leaves_nothing_behind(make_engine: Any, preemption: str) -> None:
    calls = 0

    class Breaks:
        def propose(self, text: Any, most: int, uniforms: Any) -> Draft:
            nonlocal calls
            calls += 1
            if calls == 9:
                raise KeyboardInterrupt
            return Draft((5,) * most)

    engine = make_engine(
        block_size=4, num_blocks=13, num_host_blocks=40, preemption=preemption, max_running=4, token_budget=64,
        speculation=SpeculationConfig(Breaks),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SETTINGS)
    engine.check_idle()
    with pytest.raises(ValueError, match="prompt must be"):
        engine.generate([[1, 2], None], GREEDY)
    engine.check_idle()
    assert texts(engine) == texts(make_engine())


@pytest.mark.parametrize("priority", [math.nan, 1.5, True, "high", None])
def test_a_priority_that_cannot_be_ordered_is_refused(make_engine: Any, priority: Any) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="priority must be an int"):
        engine.add_request([1], GREEDY, priority=priority, request_id="one")
    assert not engine.has_work
    engine.add_request([1], GREEDY, request_id="one", priority=-3)
    assert len(finish(engine)) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt"),
        ([1, 49_152], GREEDY, "49152"),
        ([1] * 100, replace(GREEDY, max_tokens=100), "context holds 128"),
        ([1] * 60, GREEDY, "the pool has 4"),
        ([1], replace(GREEDY, n=5), "max_running is 2"),
        ([1], replace(GREEDY, logit_bias=((60_000, 1.0),)), "60000"),
        ([1], replace(GREEDY, logit_bias=((49_152, 1.0),)), "49152"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    make_engine: Any, prompt: list[int], params: SamplingParams, message: str
) -> None:
    engine = make_engine(num_blocks=4, block_size=16, max_running=2, token_budget=64)
    running = engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params)
    with pytest.raises(ValueError, match="is being served"):
        engine.add_request([1], GREEDY, request_id=running)
    assert (engine.num_running, engine.num_waiting) == (1, 0)
    assert len(finish(engine)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        dict(max_tokens=0), dict(n=0), dict(n=65), dict(stop="text"), dict(stop=("",)), dict(stop_token_ids=(-1,)),
        dict(presence_penalty=2.5), dict(frequency_penalty=math.nan), dict(repetition_penalty=0.0),
        dict(logit_bias=((1, math.inf),)), dict(logprobs=21), dict(temperature=-1.0), dict(temperature=True),
        dict(temperature=np.float32(0.7)), dict(temperature="1"), dict(temperature=10**400), dict(top_p=None),
        dict(top_p=False), dict(top_p=np.float32(0.5)), dict(min_p=True), dict(min_p="0"), dict(stop=None),
        dict(stop=7), dict(stop=[1]), dict(stop=iter("ab")), dict(stop_token_ids=7), dict(ignore_eos="no"),
        dict(presence_penalty=True), dict(presence_penalty="1"), dict(frequency_penalty=None),
        dict(repetition_penalty="1"), dict(repetition_penalty=1e-40), dict(repetition_penalty=1e39),
        dict(logit_bias={1: 2.0}), dict(logit_bias=None), dict(logit_bias=((1, 2.0, 3.0),)),
        dict(logit_bias=((1, "2"),)), dict(logit_bias=((1, 100.5),)), dict(logit_bias=((1, True),)),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    assert SamplingParams(max_tokens=1, stop=["a"], logit_bias=[(1, 100)], top_p=1, min_p=1).max_tokens == 1
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_settings_at_their_bounds_give_tokens(make_engine: Any) -> None:
    greedy = make_engine().generate([[5]], replace(GREEDY, max_tokens=3))[0][0].tokens
    most = dict(presence_penalty=2, frequency_penalty=2, logit_bias=((9, 100), (9, 100.0), (8, -100)))
    extremes = [
        dict(temperature=1e-320), dict(temperature=1e-6), dict(top_p=1e-9), dict(top_p=0), dict(min_p=1e300),
        dict(top_k=1), dict(temperature=1e308, top_k=2**70), dict(repetition_penalty=0.01, **most),
        dict(repetition_penalty=100, **most),
    ]  # fmt: skip
    settings = [SamplingParams(**{"max_tokens": 3, "ignore_eos": True, **one}) for one in extremes]
    tokens = texts(make_engine(), [[5]] * len(settings), settings)
    assert tokens[:6] == [greedy] * 6
    assert all(len(one) == 3 for one in tokens)


@pytest.mark.parametrize("wrong", [None, 7, b"text", [[5], None], [[5], b"text"], [[5], 7.5], np.array([5, 6])])
def test_what_is_no_prompt_is_refused(make_engine: Any, wrong: Any) -> None:
    engine = make_engine()
    assert len(engine.generate(["text", [5]], GREEDY)) == 2
    with pytest.raises(ValueError, match="prompt"):
        engine.generate(wrong, GREEDY)
    engine.check_idle()


@pytest.mark.parametrize("wrong", [dict(temperature=0.0), [dict(temperature=0.0)], LabParams(), "greedy"])
def test_what_are_no_settings_is_refused(make_engine: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match="params"):
        make_engine().generate([[5]], wrong)
