"""Task 12, first part: layers with a window: their bytes, what they see, and a cache that keeps no more than that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.attention_variants import windowed_attention
from grader.judge.numerics import check_close, check_equal
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig
from labkit.decoder import Decoder, random_weights
from labkit.specs import TinyLlama

pytestmark = pytest.mark.task(12)

KIB, MIB = 1024, 1024**2

# layers, kv heads, head dim; MiB for 32,768 tokens in a 2-byte dtype with all layers windowed at 4,096, and with every
# fourth layer seeing everything
MODELS = {
    "Qwen2.5-0.5B": (24, 2, 64, 48, 132),
    "Qwen2.5-1.5B": (28, 2, 128, 112, 308),
    "Llama-3-8B": (32, 8, 128, 512, 1408),
    "Llama-3-70B": (80, 8, 128, 1280, 3520),
}
WINDOWS: list[int | None] = [3, None, 5]
CONFIG = ModelConfig.tiny(num_layers=3, num_heads=6, num_kv_heads=2, head_dim=10)


def new_tokens(count: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values of some tokens, no two numbers alike."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, CONFIG.num_kv_heads, count, CONFIG.head_dim)
    return torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of both signs."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Layers:
    """A cache and, beside it, all tokens that each layer was ever given."""

    def __init__(self, lab: Any, windows: list[int | None], capacity: int = 40, slack: int = 0) -> None:
        self.cache = lab.SlidingWindowCache(CONFIG, windows, capacity, slack)
        self.windows = windows
        self.keys, self.values = ([torch.zeros(1, 2, 0, 10) for _ in windows] for _ in range(2))
        self.seed = 0

    def append(self, layer: int, count: int) -> None:
        """One layer gets new tokens; what comes back must be what these see."""
        self.seed += 1
        k, v = new_tokens(count, self.seed)
        old = self.keys[layer].shape[2]
        returned = self.cache.append(layer, k, v)
        self.keys[layer] = torch.cat((self.keys[layer], k), 2)
        self.values[layer] = torch.cat((self.values[layer], v), 2)
        window = self.windows[layer]
        start = 0 if window is None else max(0, old - window + 1)
        where = f"layer {layer}, window {window}, {old} tokens before and {count} new ones"
        advice = f"They are those of positions {start} to {old + count - 1}, the oldest first."
        check_equal(f"{where}: the keys returned", returned[0], self.keys[layer][:, :, start:], advice)
        check_equal(f"{where}: the values returned", returned[1], self.values[layer][:, :, start:], advice)

    def step(self, count: int) -> None:
        """A whole pass."""
        for layer in range(len(self.windows)):
            self.append(layer, count)

    def truncate(self, length: int) -> None:
        """Both forget."""
        self.cache.truncate(length)
        self.keys, self.values = ([t[:, :, :length] for t in tensors] for tensors in (self.keys, self.values))


def test_windowed_bytes_of_the_four_models(lab: Any) -> None:
    for name, (layers, kv_heads, head_dim, all_windowed, mixed) in MODELS.items():
        config = ModelConfig.tiny(num_layers=layers, num_heads=8 * kv_heads, num_kv_heads=kv_heads, head_dim=head_dim)
        per_token = 2 * layers * kv_heads * head_dim * 2
        windows: list[int | None] = [4096] * layers
        for tokens, right in (
            (0, 0),
            (1, per_token),
            (4095, 4095 * per_token),
            (4096, 4096 * per_token),
            (4097, 4096 * per_token),
            (32_768, all_windowed * MIB),
        ):
            got = lab.windowed_kv_bytes(config, windows, tokens, 2)
            assert type(got) is int and got == right, (
                f"{name}, all layers with a window of 4,096, {tokens} tokens: {right} bytes, got {got!r}"
            )
        windows[3::4] = [None] * (layers // 4)
        got = lab.windowed_kv_bytes(config, windows, 32_768, 2)
        assert got == mixed * MIB, f"{name}, every fourth layer sees all, 32k tokens: {mixed * MIB} bytes, got {got!r}"
        got = lab.windowed_kv_bytes(config, [None] * layers, 32_768, 1)
        assert got == 32_768 * per_token // 2, f"{name} without windows, 1 byte a number: got {got!r}"


def test_growth_stops_layer_by_layer(lab: Any) -> None:
    layer = 2 * 2 * 10 * 4
    for tokens, layers in ((0, 3), (2, 3), (3, 2), (4, 2), (5, 1), (6, 1), (1000, 1)):
        got = lab.windowed_kv_bytes_of_next_token(CONFIG, WINDOWS, tokens, 4)
        assert type(got) is int and got == layers * layer, (
            f"windows {WINDOWS}, {tokens} tokens: the next one adds {layers} times {layer} bytes, got {got!r}"
        )
    got = lab.windowed_kv_bytes_of_next_token(CONFIG, [3, 3, 5], 5, 2)
    assert got == 0, f"with all windows full a token takes the place of another and adds nothing, got {got!r}"


def test_the_pattern_of_layers(lab: Any) -> None:
    for arguments, right in (
        ((3, 7), [7, 7, 7]),
        ((4, 7, 2), [7, None, 7, None]),
        ((7, 5, 6), [5, 5, 5, 5, 5, None, 5]),
        ((2, 5, 6), [5, 5]),
        ((2, 5, 1), [None, None]),
    ):
        got = lab.layer_windows(*arguments)
        assert got == right, f"layer_windows{arguments} should be {right}, got {got}"


def test_impossible_windows_are_refused(lab: Any) -> None:
    assert lab.layer_windows(2, 3) == [3, 3], "a good call comes first"
    assert lab.windowed_kv_bytes(CONFIG, WINDOWS, 4, 2) == 880, "a good call comes first"
    assert lab.windowed_kv_bytes_of_next_token(CONFIG, WINDOWS, 4, 2) == 160, "a good call comes first"
    check_refused("a window of 0", lambda: lab.layer_windows(2, 0))
    check_refused("no layers", lambda: lab.layer_windows(0, 3))
    check_refused("full_every -1", lambda: lab.layer_windows(2, 3, -1))
    for function in (lab.windowed_kv_bytes, lab.windowed_kv_bytes_of_next_token):
        check_refused("2 windows for 3 layers", lambda f=function: f(CONFIG, [3, None], 4, 2))
        check_refused("a window of 0", lambda f=function: f(CONFIG, [3, None, 0], 4, 2))
        check_refused("-1 tokens", lambda f=function: f(CONFIG, WINDOWS, -1, 2))
        check_refused("half a byte", lambda f=function: f(CONFIG, WINDOWS, 4, 0.5))


def test_the_mask_has_two_edges(lab: Any) -> None:
    for queries, keys, window in ((1, 1, 1), (3, 5, 2), (5, 5, 3), (4, 9, 4), (5, 3, 2), (4, 4, 9), (3, 5, None)):
        reach = keys + queries if window is None else window
        places = range(keys - queries, keys)
        rows = [[place - reach < key <= place for key in range(keys)] for place in places]
        mask = lab.sliding_window_mask(queries, keys, window)
        advice = "Row i has place p = i + keys - queries, and sees p - window < j <= p: window keys, its own the last."
        check_equal(f"the mask of {queries} queries, {keys} keys, window {window}", mask, torch.tensor(rows), advice)
    check_refused("a window of 0", lambda: lab.sliding_window_mask(2, 2, 0))
    check_refused("-1 queries", lambda: lab.sliding_window_mask(-1, 2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_windowed_attention_matches_the_definition(lab: Any, dtype: torch.dtype) -> None:
    for seed, (heads, kv_heads, queries, keys, dim, window) in enumerate(
        (
            (6, 2, 5, 9, 8, 3),
            (4, 4, 1, 7, 10, 4),
            (3, 1, 7, 7, 6, 1),
            (8, 2, 4, 6, 12, 20),
            (2, 1, 6, 4, 14, 2),
            (6, 3, 9, 11, 4, None),
        )
    ):
        q = random(2, queries, heads, dim, seed=seed, dtype=dtype).transpose(1, 2)
        k, v = (random(2, kv_heads, keys, dim, seed=seed + s, dtype=dtype) for s in (100, 200))
        for scale in (None, 0.7):
            given = [] if scale is None else [scale]
            check_close(
                f"attention of {queries} queries and {keys} keys, heads {heads}/{kv_heads}, window {window}, {dtype}",
                lab.sliding_window_attention(q, k, v, window, *given),
                windowed_attention(q.double(), k.double(), v.double(), window, scale),
                scale=float(v.abs().max()),
                dtype=dtype,
                plain=windowed_attention(q, k, v, window, scale),
                inputs=[q, k, v],
                advice="Look at both edges of the mask, at the heads of a group, and at rows that see nothing.",
            )


def test_what_left_the_window_has_no_weight(lab: Any) -> None:
    q, k, v = random(1, 2, 3, 6, seed=1), random(1, 2, 8, 6, seed=2), random(1, 2, 8, 6, seed=3)
    got = lab.sliding_window_attention(q, k, v, 4)
    check_close(
        "attention of 3 queries, window 4", got, windowed_attention(q.double(), k.double(), v.double(), 4),
        scale=4.0, dtype=torch.float32,
    )  # fmt: skip
    for start in (1, 2):  # the first query sees keys from 2 on
        less = lab.sliding_window_attention(q, k[:, :, start:], v[:, :, start:], 4)
        check_close(
            f"attention without the first {start} keys, which no query sees", less, got.double(),
            scale=4.0, dtype=torch.float32,
        )  # fmt: skip
    half = [t.half() for t in (q * 300, k * 300, v)]
    check_close(
        "fp16 attention whose scores pass 65504", lab.sliding_window_attention(*half, 4),
        windowed_attention(*(t.double() for t in half), 4), scale=4.0, dtype=torch.float16,
        advice="Scores and softmax are computed in fp32.",
    )  # fmt: skip
    more = torch.cat((k, k), dim=1)
    check_refused("2 heads on 4", lambda: lab.sliding_window_attention(q, more, more, 4))
    check_refused("keys of another width", lambda: lab.sliding_window_attention(q, k[..., :5], v[..., :5], 4))
    check_refused("a window of 0", lambda: lab.sliding_window_attention(q, k, v, 0))


@pytest.mark.parametrize("chunks", [(1,) * 14, (2, 1, 4, 1, 1, 2, 3), (3, 3, 3, 3), (7, 6), (13,), (2, 9, 1)])
def test_new_tokens_get_what_they_see(lab: Any, chunks: tuple[int, ...]) -> None:
    for windows in (WINDOWS, [1, 2, 4]):
        layers = Layers(lab, windows)
        total = 0
        for count in chunks:
            layers.step(count)
            total += count
            assert layers.cache.length == total, f"length is {layers.cache.length} after {total} tokens: it counts all"


def test_memory_stops_at_the_window(lab: Any) -> None:
    for windows, capacity, slack, places in (
        ([3, 3, 3], 9, 0, 9),
        (WINDOWS, 9, 0, 17),
        (WINDOWS, 9, 2, 21),
        (WINDOWS, 4, 0, 11),
        ([3, 3, 3], 4, 9, 12),
    ):
        for dtype in (torch.float16, torch.float32):
            cache = lab.SlidingWindowCache(CONFIG, windows, capacity, slack, dtype)
            right = places * 2 * 2 * 10 * dtype.itemsize
            assert cache.capacity == capacity, f"capacity is {cache.capacity}, the cache was built for {capacity}"
            for step in range(capacity + 1):
                assert cache.num_bytes == right, (
                    f"windows {windows}, capacity {capacity}, slack {slack}, {dtype}, {step} tokens: {places} places "
                    f"take {right} bytes, num_bytes is {cache.num_bytes}"
                )
                if step < capacity:
                    for layer in range(3):
                        k, v = new_tokens(1, step, dtype)
                        keys, values = cache.append(layer, k, v)
                        assert keys.dtype == values.dtype == dtype, f"a {dtype} cache returned {keys.dtype}"
            if slack == 0:
                formula = lab.windowed_kv_bytes(CONFIG, windows, capacity, dtype.itemsize)
                assert formula == right, f"the formula gives {formula} bytes for {capacity} tokens, right is {right}"


def test_length_waits_for_every_layer(lab: Any) -> None:
    layers = Layers(lab, WINDOWS)
    layers.step(7)
    for layer in range(3):
        length = layers.cache.length
        assert length == 7, f"layers before {layer} are 2 tokens ahead: length is {length}, should be 7"
        layers.append(layer, 2)
    assert layers.cache.length == 9, f"after passes of 7 and 2 tokens length is {layers.cache.length}, should be 9"


def test_capacity_counts_all_tokens(lab: Any) -> None:
    layers = Layers(lab, [3, 3, 3], capacity=8)
    layers.step(5)
    check_refused("4 tokens where 3 fit", lambda: layers.cache.append(0, *new_tokens(4, 9)))
    layers.step(3)
    check_refused("a token beyond the capacity", lambda: layers.cache.append(1, *new_tokens(1, 9)))
    assert layers.cache.length == 8, f"after refused appends length is {layers.cache.length}, was 8"
    layers.truncate(7)
    layers.step(1)


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_truncation_goes_back_as_far_as_tokens_are_held(lab: Any, slack: int) -> None:
    for total in (3, 4, 6, 9):
        # The ring of 3 + slack places overwrites when more tokens have come; then slack + 1 can be taken back.
        least = 0 if total <= 3 + slack else total - slack - 1
        for length in range(total + 1):
            layers = Layers(lab, [3, None, 3], slack=slack)
            layers.step(total)
            if length >= least or length == 0:
                layers.truncate(length)
            else:
                check_refused(
                    f"window 3, slack {slack}, {total} tokens: truncate({length}) where the tokens before it are gone",
                    lambda cache=layers.cache, length=length: cache.truncate(length),
                    mentions=str(least),
                )
                length = total
            assert layers.cache.length == length, f"after truncate length is {layers.cache.length}, should be {length}"
            layers.step(1)
            layers.step(2)


def test_going_back_twice_is_still_exact(lab: Any) -> None:
    layers = Layers(lab, [3, 4, 3], slack=2)
    layers.step(9)
    layers.truncate(7)
    check_refused("truncate(5): position 3 was overwritten before", lambda: layers.cache.truncate(5), mentions="6")
    layers.truncate(6)
    layers.step(1)
    layers.truncate(6)
    check_refused("truncate(5)", lambda: layers.cache.truncate(5))
    layers.step(2)
    layers.step(4)
    check_refused("truncate(8)", lambda: layers.cache.truncate(8))
    layers.truncate(0)
    for count in (2, 5, 1):
        layers.step(count)


def test_a_broken_pass_is_taken_back_where_it_can_be(lab: Any) -> None:
    layers = Layers(lab, WINDOWS, slack=1)
    layers.step(6)
    kept = [[t.clone() for t in tensors] for tensors in (layers.keys, layers.values)]
    for layer in (0, 1):
        layers.append(layer, 2)
    check_refused("truncate(8) while the last layer has seen 6 tokens", lambda: layers.cache.truncate(8))
    layers.cache.truncate(6)
    layers.keys, layers.values = kept
    layers.step(1)
    layers.append(0, 3)
    check_refused("3 tokens of one layer to take back, with slack for 2", lambda: layers.cache.truncate(7))
    assert layers.cache.length == 7, f"after a refused truncate length is {layers.cache.length}, was 7"
    layers.append(1, 3)
    layers.append(2, 3)
    layers.step(1)
    layers.append(0, 3)
    layers.truncate(0)
    layers.step(5)


def test_wrong_keys_are_refused_by_the_ring(lab: Any) -> None:
    layers = Layers(lab, WINDOWS)
    layers.step(4)
    k, v = new_tokens(1, 5)
    check_refused("layer 3 of 3", lambda: layers.cache.append(3, k, v))
    check_refused("layer -1", lambda: layers.cache.append(-1, k, v))
    check_refused("keys with axes swapped", lambda: layers.cache.append(0, k.transpose(1, 2), v))
    check_refused("fp16 values in an fp32 cache", lambda: layers.cache.append(0, k, v.half()))
    check_refused("more values than keys", lambda: layers.cache.append(0, k, torch.cat((v, v), 2)))
    check_refused("no tokens", lambda: layers.cache.append(0, k[:, :, :0], v[:, :, :0]))
    check_refused("truncate(5) of 4 tokens", lambda: layers.cache.truncate(5))
    check_refused("truncate(-1)", lambda: layers.cache.truncate(-1))
    check_refused("2 windows for 3 layers", lambda: lab.SlidingWindowCache(CONFIG, [3, 3], 8))
    check_refused("a window of 0", lambda: lab.SlidingWindowCache(CONFIG, [3, 3, 0], 8))
    check_refused("a capacity of 0", lambda: lab.SlidingWindowCache(CONFIG, WINDOWS, 0))
    layers.step(1)


def whole_run(tokens: list[int], windows: list[int | None], dtype: torch.dtype) -> Tensor:
    """Logits of a sequence in one uncached run under the windows' masks, `[tokens, vocab]`."""
    model = Decoder(CONFIG, random_weights(CONFIG, 1, dtype), dtype)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        return windowed_attention(q, k, v, windows[layer])

    return model(torch.tensor([tokens]), torch.arange(len(tokens)), attend)[0]


@pytest.mark.parametrize("chunks", [(6, 1, 1, 1, 1, 1, 1), (4, 4, 4), (12,)])
def test_a_model_with_mixed_layers_equals_the_whole_run(lab: Any, chunks: tuple[int, ...]) -> None:
    tokens = [7, 0, 60, 31, 31, 2, 44, 19, 5, 8, 8, 23]
    dtype = torch.float64
    model = Decoder(CONFIG, random_weights(CONFIG, 1, dtype), dtype)
    cache = lab.SlidingWindowCache(CONFIG, WINDOWS, 20, 0, dtype)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keys, values = cache.append(layer, k, v)
        return lab.sliding_window_attention(q, keys, values, WINDOWS[layer])

    rows, done = [], 0
    for count in chunks:
        ids = torch.tensor([tokens[done : done + count]])
        rows.append(model(ids, torch.arange(done, done + count), attend)[0])
        done += count
    reference = whole_run(tokens, WINDOWS, dtype)
    check_close(
        f"float64 logits in chunks of {chunks}, windows {WINDOWS}",
        torch.cat(rows),
        reference,
        scale=10 * float(reference.abs().max()),
        dtype=dtype,
        advice="Full attention with a window mask gives these; the cache or the mask loses or adds a token.",
    )


@pytest.mark.integration
def test_your_own_decoder_goes_beyond_the_window(lab: Any) -> None:
    prompt, windows = [7, 0, 60, 31], [4, 4, 4]
    cache = lab.SlidingWindowCache(CONFIG, windows, 40)
    # A prompt no longer than the window, then a token at a time: plain causal attention over what the cache returns.
    tokens = lab.generate(lab.CachedDecoder(TinyLlama(CONFIG, 1), cache), prompt, 14)
    assert len(tokens) == 14 and cache.length == 17, f"14 tokens behind 4: got {len(tokens)}, cache of {cache.length}"
    reference = whole_run([*prompt, *tokens], list(windows), torch.float64)[len(prompt) - 1 : -1]
    for step, (token, logits) in enumerate(zip(tokens, reference, strict=True)):
        best = float(logits.max())
        assert best - float(logits[token]) <= 1e-4 * float(reference.abs().max()), (
            f"step {step}: token {token} was generated, a model with windows of 4 prefers {int(logits.argmax())}"
        )
    full = whole_run([*prompt, *tokens], [None] * 3, torch.float64)[len(prompt) - 1 : -1]
    assert full.argmax(1).tolist() != tokens, "the run is too short for the window to matter"
