"""Task 3: the cached decoder and the generation loop; every call is counted on this side."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_form
from grader.judge.oracle import GreedyJudge, Oracle, ReadAhead
from grader.judge.reference import attention64
from grader.judge.refusal import check_refused
from grader.judge.scripted import RecordingModel, RecordingStore
from labkit.checkpoints import CheckpointError, bundled_folder, load_decoder
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.specs import Checkpoint, Recomputed, ScriptedStore, TinyLlama

pytestmark = pytest.mark.task(3)

CONFIG = ModelConfig.tiny(num_layers=2)
TOKENS = [7, 0, 60, 31, 31, 2, 44, 19, 5]
VOCAB = 13


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The judge's attention, given to the decoder so that task 2 can't decide task 3."""
    return attention64(q, k, v).to(q.dtype)


@cache
def decoder(dtype: torch.dtype, config: ModelConfig = CONFIG, seed: int = 1) -> Decoder:
    """The judge's own copy of the model that the specs build."""
    return Decoder(config, random_weights(config, seed, dtype), dtype)


def whole_run(tokens: list[int], dtype: torch.dtype) -> Tensor:
    """Logits of all tokens in one uncached run, `[tokens, vocab]`."""
    return decoder(dtype)(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0]


def check_logits(what: str, got: object, tokens: list[int], first: int, advice: str) -> None:
    """Logits of tokens[first:] against the float64 run of the whole sequence."""
    reference = whole_run(tokens, torch.float64)[first:]
    check_close(
        what,
        got,
        reference,
        scale=float(reference.abs().max()),
        dtype=torch.float32,
        plain=whole_run(tokens, torch.float32)[first:],
        advice=advice,
    )


def cached_decoder(lab: Any, store: RecordingStore) -> Any:
    """The student's CachedDecoder on the judge's store and attention."""
    return lab.CachedDecoder(TinyLlama(CONFIG, 1), store.spec(), attention)


def count_up(tokens: list[int]) -> int:
    """The next token of a RecordingModel: depends on the last token and on how many there are."""
    return (tokens[-1] + len(tokens)) % VOCAB


def expected_tokens(model: RecordingModel, prompt: list[int], count: int) -> list[int]:
    """What greedy generation gives on a RecordingModel that hasn't run yet."""
    tokens = [*model.tokens, *prompt]
    start = len(tokens)
    for _ in range(count):
        tokens.append(count_up(tokens))
    return tokens[start:]


def test_greedy_takes_the_lowest_of_the_likeliest(lab: Any) -> None:
    for logits, right in (
        ([0.5, -1.0, 3.0, 2.0], 2),
        ([-5.0, -2.0, -9.0], 1),
        ([1.0, 4.0, 4.0, 4.0], 1),
        ([2.0, 2.0], 0),
        ([float("-inf"), float("-inf"), -7.0], 2),
        ([0.0, 0.0, 0.0, 1e-6], 3),
    ):
        for step in (0, 5):
            got = lab.greedy(torch.tensor(logits), step)
            assert type(got) is int, f"greedy must return an int, got {got!r} of type {type(got).__name__}"
            assert got == right, f"greedy({logits}, step={step}) is {right}, got {got}: ties go to the lowest id"


@pytest.mark.parametrize("pieces", [(9,), (1,) * 9, (4, 5), (8, 1), (1, 3, 5)])
def test_append_matches_the_whole_sequence_for_any_split(lab: Any, pieces: tuple[int, ...]) -> None:
    store = RecordingStore(CONFIG.num_layers, 16)
    model = cached_decoder(lab, store)
    assert model.vocab_size == CONFIG.vocab_size, f"vocab_size is {model.vocab_size}, not {CONFIG.vocab_size}"
    end = 0
    for count in pieces:
        start, end = end, end + count
        got = model.append(TOKENS[start:end])
        advice = "One row for each new token, the same as if the whole sequence had been run at once."
        check_logits(f"logits of tokens {start}..{end - 1}, pieces {pieces}", got, TOKENS[:end], start, advice)
        assert model.length == end, f"after {end} tokens length is {model.length}"


def test_append_hands_over_new_tokens_only(lab: Any) -> None:
    store, seen = RecordingStore(CONFIG.num_layers, 16), []

    def counting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q.shape[2], k.shape[2], v.shape[2]))
        return attention(q, k, v)

    model = lab.CachedDecoder(TinyLlama(CONFIG, 1), store.spec(), counting)
    for start, count in ((0, 4), (4, 1), (5, 2)):
        store.appends, seen[:] = [], []
        model.append(TOKENS[start : start + count])
        wanted = [(layer, count, count) for layer in range(CONFIG.num_layers)]
        assert store.appends == wanted, (
            f"append of {count} tokens after {start} called the cache with (layer, new keys, new values) = "
            f"{store.appends}, should be {wanted}: each layer once, in order, new tokens only"
        )
        wanted = [(count, start + count, start + count)] * CONFIG.num_layers
        assert seen == wanted, (
            f"append of {count} tokens after {start} called attention with (queries, keys, values) = {seen}, should "
            f"be {wanted}: queries of the new tokens, keys and values of all tokens"
        )


def test_stored_keys_carry_absolute_positions(lab: Any) -> None:
    # RoPE looks at differences only: with every position shifted alike the logits stay right, the keys don't.
    right: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        right.append(k)
        return full_attention(layer, q, k, v, positions)

    decoder(torch.float64)(torch.tensor([TOKENS]), torch.arange(len(TOKENS)), attend)
    for pieces in ((9,), (4, 1, 4), (1,) * 9):
        store = RecordingStore(CONFIG.num_layers, 16)
        model = cached_decoder(lab, store)
        end = 0
        for count in pieces:
            start, end = end, end + count
            model.append(TOKENS[start:end])
        for layer, keys in enumerate(right):
            advice = "Positions are 0, 1, 2, … from the start of the sequence: they continue at the cache's length."
            check_close(
                f"keys stored in layer {layer}, pieces {pieces}",
                store.keys[layer],
                keys,
                scale=32 * float(keys.abs().max()),
                dtype=torch.float32,
                advice=advice,
            )


def test_append_refuses_what_cannot_run(lab: Any) -> None:
    store = RecordingStore(CONFIG.num_layers, 6)
    model = cached_decoder(lab, store)
    check_logits("logits", model.append(TOKENS[:4]), TOKENS[:4], 0, "")
    before = list(store.appends)
    check_refused("3 tokens where 2 fit", lambda: model.append(TOKENS[4:7]))
    check_refused("no tokens", lambda: model.append([]))
    check_refused("a negative token id", lambda: model.append([3, -1]))
    check_refused("a token id outside the vocabulary", lambda: model.append([CONFIG.vocab_size]))
    assert store.appends == before, f"a refused append still wrote to the cache: {store.appends[len(before) :]}"
    check_logits("logits after refused appends", model.append(TOKENS[4:6]), TOKENS[:6], 4, "Room for 2 was left.")


def test_a_failed_pass_is_rolled_back(lab: Any) -> None:
    class Broken(RuntimeError):
        """Raised by this test's attention."""

    store, fail = RecordingStore(CONFIG.num_layers, 16), [False]

    def failing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if fail[0] and store.keys[1] is not None and store.keys[1].shape[2] > 3:
            raise Broken
        return attention(q, k, v)

    model = lab.CachedDecoder(TinyLlama(CONFIG, 1), store.spec(), failing)
    check_logits("logits", model.append(TOKENS[:3]), TOKENS[:3], 0, "")
    fail[0] = True
    with pytest.raises(Broken):
        model.append(TOKENS[3:5])
    fail[0] = False
    held = [0 if t is None else t.shape[2] for t in store.keys]
    assert held == [3] * CONFIG.num_layers, (
        f"attention failed in layer 1 while 2 tokens were added to 3; the layers then hold {held} tokens, should hold "
        "3 each: truncate the cache to its former length and let the error go on"
    )
    got = model.append(TOKENS[3:5])
    check_logits("logits of the pass repeated", got, TOKENS[:5], 3, "The failed pass must leave no trace.")


def test_an_error_within_a_pass_reaches_the_caller(lab: Any) -> None:
    # An error of this test's own functions would surface anyway; here the store answers with nothing to unpack.
    store, broken = RecordingStore(CONFIG.num_layers, 16), [False]

    def append(layer: int, k: Tensor, v: Tensor) -> Any:
        return None if broken[0] and layer == 1 else store.append(layer, k, v)

    spec = ScriptedStore(16, append, store.truncate, store.length)
    model = lab.CachedDecoder(TinyLlama(CONFIG, 1), spec, attention)
    check_logits("logits", model.append(TOKENS[:3]), TOKENS[:3], 0, "")
    broken[0] = True
    try:
        got = model.append(TOKENS[3:5])
    except NotImplementedError:
        raise
    except Exception:
        got = None
    assert got is None, "the cache failed in layer 1, and append returned logits all the same: let the error go on"
    held = [0 if t is None else t.shape[2] for t in store.keys]
    assert held == [3] * CONFIG.num_layers, f"after the failed pass the layers hold {held} tokens, should hold 3 each"


def test_truncated_tokens_are_forgotten(lab: Any) -> None:
    store = RecordingStore(CONFIG.num_layers, 16)
    model = cached_decoder(lab, store)
    model.append([*TOKENS[:4], 1, 1, 1])
    model.truncate(4)
    assert store.truncations == [4], f"truncate(4) must truncate the cache to 4 once; it was asked {store.truncations}"
    assert model.length == 4, f"after truncate(4) length is {model.length}"
    got = model.append(TOKENS[4:6])
    check_logits("logits after truncate(4)", got, TOKENS[:6], 4, "Positions continue at the new length.")


@pytest.mark.parametrize("held", [[], [4, 9]])
def test_prompt_once_then_one_token_per_step(lab: Any, held: list[int]) -> None:
    model = RecordingModel(VOCAB, 32, count_up, held)
    prompt = [3, 1, 4, 1]
    right = expected_tokens(model, prompt, 5)
    got = lab.generate(model.spec(), prompt, 5)
    assert got == right, f"generate gave {got}, the model's own greedy continuation is {right}"
    wanted = [prompt, *([token] for token in right[:-1])]
    assert model.calls == wanted, (
        f"append was called with {model.calls}, should be {wanted}: the whole prompt at once, then one token a step"
    )
    assert not model.truncations, f"nothing had to be forgotten, but truncate was called: {model.truncations}"


@pytest.mark.parametrize("count", [1, 2, 6])
def test_the_token_that_nothing_follows_is_never_appended(lab: Any, count: int) -> None:
    model = RecordingModel(VOCAB, 32, count_up)
    right = expected_tokens(model, [2, 7], count)
    got = list(lab.stream(model.spec(), [2, 7], count))
    assert got == right, f"stream gave {got} for max_new_tokens={count}, should give {right}"
    assert model.tokens == [2, 7, *right[:-1]], (
        f"the model remembers {model.tokens}, should be {[2, 7, *right[:-1]]}: no token follows the last one, so "
        "running the model on it is wasted work"
    )


@pytest.mark.parametrize("position", [0, 2, 4])
def test_a_stop_token_ends_the_work(lab: Any, position: int) -> None:
    model = RecordingModel(VOCAB, 32, count_up)
    prompt = [9, 1]
    unstopped = expected_tokens(model, prompt, 5)
    stop = unstopped[position]
    never = next(token for token in range(VOCAB) if token not in unstopped)
    got = lab.generate(model.spec(), prompt, 5, stop_tokens=(never, stop))
    assert got == unstopped[: position + 1], (
        f"without stop tokens the output is {unstopped}; with stop token {stop} it must be "
        f"{unstopped[: position + 1]}, the stop token included, got {got}"
    )
    assert model.tokens == [*prompt, *unstopped[:position]], (
        f"the model remembers {model.tokens}: nothing follows the stop token {stop}, so it must not be appended"
    )
    # A stop token in the prompt is part of the question.
    model = RecordingModel(VOCAB, 32, count_up)
    got = lab.generate(model.spec(), prompt, 5, stop_tokens=(prompt[0],))
    assert got == unstopped, f"the stop token {prompt[0]} stands in the prompt only, yet the output is {got}"


def test_tokens_are_handed_over_as_they_come(lab: Any) -> None:
    model = RecordingModel(VOCAB, 32, count_up)
    right = expected_tokens(model, [5, 6], 4)
    tokens = iter(lab.stream(model.spec(), [5, 6], 4))
    for step in range(4):
        got = next(tokens)
        assert got == right[step], f"token {step} of the stream is {got}, should be {right[step]}"
        assert len(model.calls) == step + 1, (
            f"when token {step} was handed over the model had run {len(model.calls)} times, should be {step + 1}: "
            "a reader waits for each token no longer than for its own work"
        )
    with pytest.raises(StopIteration):
        next(tokens)

    model = RecordingModel(VOCAB, 32, count_up)
    tokens = iter(lab.stream(model.spec(), [5, 6], 4))
    next(tokens)
    del tokens
    assert model.calls == [[5, 6]], f"a stream that is left after one token went on working: {model.calls}"


def test_choose_gets_the_newest_logits_and_the_step(lab: Any) -> None:
    model = RecordingModel(VOCAB, 32, count_up, held=[9])
    prompt, choices, seen = [4, 4, 10], [8, 0, 3, 3], []

    def choose(logits: Tensor, step: int) -> int:
        seen.append((logits, step))
        return choices[step]

    got = lab.generate(model.spec(), prompt, len(choices), choose)
    assert got == choices, f"choose answered {choices}, generate returned {got}"
    steps = [step for _, step in seen]
    assert steps == [0, 1, 2, 3], f"choose was called with steps {steps}, should be [0, 1, 2, 3]"
    for step, (logits, _) in enumerate(seen):
        right = model.logits_after([9, *prompt, *choices[:step]])
        check_form(f"the logits given to choose at step {step}", logits, (VOCAB,), torch.float32)
        assert torch.equal(logits, right), (
            f"at step {step} choose got logits that do not follow the newest token: its row is the last one that "
            "append returned"
        )


@pytest.mark.parametrize("held", [[], [1, 2, 3]])
@pytest.mark.parametrize("count", [1, 4])
def test_capacity_decides_before_anything_runs(lab: Any, held: list[int], count: int) -> None:
    prompt = [3, 1, 4]
    needed = len(held) + len(prompt) + count - 1
    model = RecordingModel(VOCAB, needed, count_up, held)
    right = expected_tokens(model, prompt, count)
    got = lab.generate(model.spec(), prompt, count)
    assert got == right, f"{needed} tokens have to be remembered and fit exactly; generate gave {got}, not {right}"

    model = RecordingModel(VOCAB, needed - 1, count_up, held)
    what = f"{len(held)} tokens held, a prompt of 3, {count} new tokens and a capacity of {needed - 1}"
    check_refused(what, lambda: lab.generate(model.spec(), prompt, count))
    check_refused(f"{what}, streamed", lambda: list(lab.stream(model.spec(), prompt, count)))
    assert not model.calls, f"{what}: refused, but the model ran first: {model.calls}"


def test_impossible_requests_run_nothing(lab: Any) -> None:
    model = RecordingModel(VOCAB, 32, count_up)
    right = expected_tokens(model, [3, 1], 2)
    got = lab.generate(model.spec(), [3, 1], 2)
    assert got == right, f"a good request comes first: generate gave {got}, not {right}"
    model.calls = []
    for what, prompt, count in (
        ("an empty prompt", [], 2),
        ("a prompt with id -1", [3, -1], 2),
        (f"a prompt with id {VOCAB}", [VOCAB, 3], 2),
        ("max_new_tokens = 0", [3, 1], 0),
        ("max_new_tokens = -1", [3, 1], -1),
    ):
        check_refused(what, lambda prompt=prompt, count=count: lab.generate(model.spec(), prompt, count))
        check_refused(what, lambda prompt=prompt, count=count: list(lab.stream(model.spec(), prompt, count)))
    assert not model.calls, f"a refused request still ran the model: {model.calls}"


def greedy_judge(oracle: Oracle, own: Decoder, prompt: list[int]) -> GreedyJudge:
    """Compares each step with the oracle; what fp32 explains is measured on an uncached run of the given decoder."""

    def plain(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return own(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0]

    return GreedyJudge(ReadAhead(oracle.logits), prompt, ReadAhead(plain))


def judged_run(lab: Any, what: str, make: Callable[[], Any], judge: GreedyJudge, count: int, vocab_size: int) -> None:
    """Generates with the student's own greedy choice, then again with the judge looking at each step's logits."""
    greedy = lab.generate(make(), judge.prompt, count)
    assert len(greedy) == count and all(type(token) is int and 0 <= token < vocab_size for token in greedy), (
        f"{what}: {count} ids from 0 to {vocab_size - 1} were asked for, generate returned {greedy}"
    )
    judge.read_ahead(greedy[:-1])
    got = lab.generate(make(), judge.prompt, count, judge.choose)
    assert got == judge.tokens, f"{what}: generate returned {got}, but {judge.tokens} were chosen"
    judge.check_ties(count)
    if judge.ties == 0:
        assert greedy == judge.tokens, f"{what}: got {greedy}, recomputing everything gives {judge.tokens}"


@pytest.mark.parametrize(("config", "seed"), [(CONFIG, 1), (ModelConfig.tiny(num_heads=3, num_kv_heads=3), 2)])
def test_cached_generation_equals_recomputing(lab: Any, config: ModelConfig, seed: int) -> None:
    oracle, own = Oracle(config, random_weights(config, seed)), decoder(torch.float32, config, seed)
    spec, prompt, count = TinyLlama(config, seed), TOKENS[:5], 12

    def cached() -> Any:
        return lab.CachedDecoder(spec, RecordingStore(config.num_layers, 16).spec(), attention)

    for what, make in (("cached generation", cached), ("uncached generation", lambda: Recomputed(spec, 16))):
        judged_run(lab, what, make, greedy_judge(oracle, own, prompt), count, config.vocab_size)


@pytest.mark.integration
def test_your_own_parts_generate_together(lab: Any) -> None:
    judge = greedy_judge(Oracle(CONFIG, random_weights(CONFIG, 1)), decoder(torch.float32), TOKENS[:3])

    def own() -> Any:
        return lab.CachedDecoder(TinyLlama(CONFIG, 1), lab.KVCache(CONFIG, 40))

    judged_run(lab, "your cache, attention and loop together", own, judge, 38, CONFIG.vocab_size)


@pytest.mark.integration
def test_real_model_generates_the_oracle_tokens(lab: Any) -> None:
    # A tiny model first: what isn't written yet must fail here, not be skipped where the real one is missing.
    first = lab.generate(lab.CachedDecoder(TinyLlama(CONFIG, 1), lab.KVCache(CONFIG, 4)), TOKENS[:4], 1)
    right = int(whole_run(TOKENS[:4], torch.float64)[-1].argmax())
    assert first == [right], f"a tiny model's first token is {right}, got {first}"
    try:
        bundled_folder()
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")
    own = load_decoder("smollm2")
    # "The capital of France is" in the ids of the bundled tokenizer.
    prompt, count = [504, 3575, 282, 4649, 314], 12

    def model() -> Any:
        return lab.CachedDecoder(Checkpoint("smollm2"), lab.KVCache(own.config, len(prompt) + count - 1))

    judge = greedy_judge(Oracle(own.config, own.weights), own, prompt)
    judged_run(lab, "the real model", model, judge, count, own.config.vocab_size)
