"""Task 5: chunked prefill gives the logits of a single one, and does the same work in smaller pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from grader.judge.reference import attention64
from grader.judge.refusal import check_refused
from grader.judge.scripted import RecordingModel, RecordingStore
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.specs import ScriptedModel, TinyLlama

pytestmark = pytest.mark.task(5)

CONFIG = ModelConfig.tiny(num_layers=2)
PROMPT = [7, 0, 60, 31, 31, 2, 44, 19, 5]
HELD = [12, 3, 3, 58]
VOCAB = 11


def decoder(dtype: torch.dtype) -> Decoder:
    """The judge's own copy of the model."""
    return Decoder(CONFIG, random_weights(CONFIG, 1, dtype), dtype)


def whole_run(tokens: list[int], dtype: torch.dtype) -> Tensor:
    """Logits of all tokens in one uncached run, `[tokens, vocab]`."""
    return decoder(dtype)(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0]


def check_logits(what: str, got: object, tokens: list[int], first: int) -> None:
    """Logits of tokens[first:] against the float64 run of the whole sequence."""
    reference = whole_run(tokens, torch.float64)[first:]
    check_close(
        what,
        got,
        reference,
        scale=float(reference.abs().max()),
        dtype=torch.float32,
        plain=whole_run(tokens, torch.float32)[first:],
        advice="Chunking changes when work is done, never the logits: one row for each token of the prompt, in order.",
    )


class CachedReference:
    """The judge's cached model, so that tasks 1 to 3 can't decide task 5."""

    def __init__(self, held: list[int]) -> None:
        self.store = RecordingStore(CONFIG.num_layers, 32)
        self.decoder = decoder(torch.float32)
        if held:
            self.append(held)

    def append(self, tokens: list[int]) -> Tensor:
        """Reads new tokens behind those that the store holds."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            keys, values = self.store.append(layer, k, v)
            return attention64(q, keys, values).to(q.dtype)

        start = self.store.length()
        return self.decoder(torch.tensor([tokens]), torch.arange(start, start + len(tokens)), attend)[0]

    def spec(self) -> ScriptedModel:
        """The argument to pass to the lab."""
        return ScriptedModel(CONFIG.vocab_size, 32, self.append, self.store.truncate, self.store.length)


def count_up(tokens: list[int]) -> int:
    """The next token of a RecordingModel."""
    return (tokens[-1] + len(tokens)) % VOCAB


def right_logits(held: list[int], prompt: list[int]) -> Tensor:
    """What a RecordingModel that holds `held` says to the whole prompt."""
    return RecordingModel(VOCAB, 99, count_up, held).append(prompt)


def check_read(what: str, got: object, held: list[int], prompt: list[int]) -> None:
    """The very rows that a RecordingModel gave, one for each token of the prompt."""
    check_equal(what, got, right_logits(held, prompt), "One row for each token of the prompt, in order.")


@pytest.mark.parametrize("held", [[], HELD], ids=["empty", "warm"])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 8, 9, 20])
def test_chunked_prefill_matches_single_prefill(lab: Any, chunk_size: int, held: list[int]) -> None:
    # 9 tokens: 2 and 4 leave a last chunk of one token, 3 divides, 1 to 4 make at least 3 chunks, 20 is longer.
    model = CachedReference(held)
    got = lab.prefill(model.spec(), PROMPT, chunk_size)
    check_logits(f"logits of a prefill in chunks of {chunk_size}", got, [*held, *PROMPT], len(held))
    assert model.store.length() == len(held) + len(PROMPT), f"the model then remembers {model.store.length()} tokens"


@pytest.mark.parametrize(
    ("chunk_size", "sizes"),
    [(1, [1] * 9), (2, [2, 2, 2, 2, 1]), (4, [4, 4, 1]), (3, [3, 3, 3]), (8, [8, 1]), (9, [9]), (50, [9])],
)
def test_each_chunk_is_full_but_the_last(lab: Any, chunk_size: int, sizes: list[int]) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    model = RecordingModel(VOCAB, 32, count_up)
    got = lab.prefill(model.spec(), prompt, chunk_size)
    assert [len(call) for call in model.calls] == sizes, (
        f"9 tokens in chunks of {chunk_size}: the model was given {[len(call) for call in model.calls]} tokens a call, "
        f"should be {sizes}"
    )
    assert model.tokens == prompt, f"the model read {model.tokens}, the prompt is {prompt}: each token once, in order"
    check_read("the logits", got, [], prompt)


def test_prefill_goes_on_from_what_is_remembered(lab: Any) -> None:
    model = RecordingModel(VOCAB, 32, count_up, [8, 8])
    got = lab.prefill(model.spec(), [3, 1, 4], 2)
    assert model.calls == [[3, 1], [4]] and model.tokens == [8, 8, 3, 1, 4], (
        f"a model that holds [8, 8] was called with {model.calls} and now holds {model.tokens}; it must be given the "
        "prompt's tokens only"
    )
    check_read("the logits of a prompt behind two tokens", got, [8, 8], [3, 1, 4])
    assert not model.truncations, f"nothing had to be forgotten, but truncate was called: {model.truncations}"
    again = lab.prefill(model.spec(), [7], 2)
    check_read("the logits of a second prompt behind the first", again, [8, 8, 3, 1, 4], [7])


def test_a_chunk_runs_when_its_logits_are_asked_for(lab: Any) -> None:
    prompt = [3, 1, 4, 1, 5]
    model = RecordingModel(VOCAB, 32, count_up)
    chunks = iter(lab.prefill_chunks(model.spec(), prompt, 2))
    start = 0
    for index, size in enumerate([2, 2, 1]):
        assert len(model.calls) == index, (
            f"before chunk {index} was asked for the model had run {len(model.calls)} times; between two chunks the "
            "scheduler must be able to run something else"
        )
        check_read(f"the logits of chunk {index}", next(chunks), prompt[:start], prompt[start : start + size])
        start += size
    with pytest.raises(StopIteration):
        next(chunks)

    model = RecordingModel(VOCAB, 32, count_up)
    chunks = iter(lab.prefill_chunks(model.spec(), prompt, 2))
    next(chunks)
    chunks.close()
    assert model.calls == [[3, 1]], f"an iterator left after one chunk went on working: {model.calls}"
    assert not model.truncations, "a prefill that is left early keeps the chunks that ran"


@pytest.mark.parametrize("held", [[], [1, 2, 3]])
def test_the_whole_prompt_must_fit_before_a_chunk_runs(lab: Any, held: list[int]) -> None:
    prompt = [3, 1, 4, 1, 5]
    model = RecordingModel(VOCAB, len(held) + 5, count_up, held)
    check_read("the logits of a prompt that fits exactly", lab.prefill(model.spec(), prompt, 2), held, prompt)
    model = RecordingModel(VOCAB, len(held) + 4, count_up, held)
    what = f"{len(held)} tokens held, a prompt of 5, capacity {len(held) + 4}"
    check_refused(what, lambda: lab.prefill(model.spec(), prompt, 2))
    check_refused(f"{what}, chunk by chunk", lambda: list(lab.prefill_chunks(model.spec(), prompt, 2)))
    assert not model.calls, f"{what}: refused, but these chunks ran first: {model.calls}"


def test_impossible_prompts_run_nothing(lab: Any) -> None:
    model = RecordingModel(VOCAB, 32, count_up)
    check_read("the logits of a good prompt", lab.prefill(model.spec(), [3, 1], 2), [], [3, 1])
    model.calls = []
    for what, prompt, chunk_size in (
        ("an empty prompt", [], 2),
        ("an id of -1 in the second chunk", [3, 1, -1], 2),
        (f"an id of {VOCAB} in the second chunk", [3, 1, VOCAB], 2),
        ("chunk_size = 0", [3, 1], 0),
        ("chunk_size = -1", [3, 1], -1),
    ):
        check_refused(what, lambda p=prompt, c=chunk_size: lab.prefill(model.spec(), p, c))
        check_refused(what, lambda p=prompt, c=chunk_size: list(lab.prefill_chunks(model.spec(), p, c)))
    assert not model.calls, f"a refused prompt still ran the model: {model.calls}"


@pytest.mark.parametrize("held", [[], [6, 6]])
def test_a_failed_chunk_is_rolled_back(lab: Any, held: list[int]) -> None:
    class Broken(RuntimeError):
        """Raised by this test's model."""

    model = RecordingModel(VOCAB, 32, count_up, held)
    spec, fail = model.spec(), [True]

    def failing(tokens: list[int]) -> Tensor:
        if fail[0] and len(model.calls) == 2:
            raise Broken
        return model.append(tokens)

    broken = ScriptedModel(VOCAB, 32, failing, spec.truncate, spec.length)
    with pytest.raises(Broken):
        lab.prefill(broken, [3, 1, 4, 1, 5], 2)
    assert model.tokens == held, (
        f"the third chunk failed; the model must remember what it did before the prefill, {held}, but remembers "
        f"{model.tokens}: a second try would read the first chunks twice"
    )
    fail[0] = False
    check_read("the logits of a second try", lab.prefill(broken, [3, 1, 4, 1, 5], 2), held, [3, 1, 4, 1, 5])


@pytest.mark.integration
@pytest.mark.parametrize("chunk_size", [1, 4, 20])
def test_your_own_cache_prefills_in_chunks(lab: Any, chunk_size: int) -> None:
    model = lab.CachedDecoder(TinyLlama(CONFIG, 1), lab.KVCache(CONFIG, 16))
    got = lab.prefill(model, PROMPT, chunk_size)
    check_logits(f"logits of your own cached decoder in chunks of {chunk_size}", got, PROMPT, 0)
    check_logits("logits of the next token", model.append([33]), [*PROMPT, 33], len(PROMPT))
