"""Task 16: a cache in 8 bits and fewer that depends on its tokens alone, whoever came with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.reference import plain_attention
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights

pytestmark = pytest.mark.task(16)

DIM = 12
GROUP = 4


def pack(codes: Tensor, bits: int) -> Tensor:
    """The right answer of task 2: codes as a stream of bits in 32-bit words."""
    stream = ((codes.long()[..., None] >> torch.arange(bits)) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 32)).unflatten(-1, (-1, 32))
    return (stream << torch.arange(32)).sum(-1).to(torch.int32)


def unpack(words: Tensor, columns: int, bits: int) -> Tensor:
    """Back again."""
    stream = ((words[..., None] >> torch.arange(32)) & 1).flatten(-2)[..., : columns * bits]
    return (stream.unflatten(-1, (columns, bits)) << torch.arange(bits)).sum(-1)


def encode(x: Tensor, format: str) -> Tensor:
    """The right answer of task 8."""
    assert format == "e4m3" and x.dtype == torch.float32, f"encode takes float32 and 'e4m3', got {x.dtype}, {format!r}"
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes: Tensor, format: str) -> Tensor:
    """Back again."""
    return codes.view(torch.float8_e4m3fn).float()


def some_kv(tokens: int, seed: int, batch: int = 2, heads: int = 3, dim: int = DIM) -> tuple[Tensor, Tensor]:
    """Keys with two outlier channels that are far from 0, values with outlier tokens; `[batch, heads, tokens, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, heads, tokens, dim, generator=generator)
    k[..., 1] += 9
    k[..., 5] = 14 * k[..., 5] - 30
    v[:, :, ::5] *= 8
    return k, v


def kivi(lab: Any, bits: int = 2, residual: int = 6, group: int = GROUP) -> Any:
    """An empty cache on right packing."""
    return lab.KiviCache(bits, group, residual, pack, unpack)


def counts(total: int, residual: int, group: int = GROUP) -> tuple[int, int]:
    """Of so many tokens, how many keys and values are quantized."""
    old = max(total - residual, 0)
    return old - old % group, old


def in_range(numbers: Tensor, bits: int) -> Tensor:
    """One group of numbers, quantized and back, with float16 ends."""
    low = numbers.min().half().double()
    scale = float(((numbers.max() - numbers.min()) / (2**bits - 1)).half()) or 1.0
    codes = ((numbers.double() - low) / scale).round().clamp(0, 2**bits - 1)
    return low + codes * scale


def kivi_right(k: Tensor, v: Tensor, bits: int, residual: int, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """What a cache of these tokens holds, group by group, in float64."""
    keys, values = k.double().clone(), v.double().clone()
    old_keys, old_values = counts(k.shape[2], residual, group)
    for row in range(k.shape[0]):
        for head in range(k.shape[1]):
            for start in range(0, old_keys, group):
                for channel in range(k.shape[3]):
                    place = (row, head, slice(start, start + group), channel)
                    keys[place] = in_range(k[place], bits)
            for token in range(old_values):
                for start in range(0, k.shape[3], group):
                    place = (row, head, token, slice(start, start + group))
                    values[place] = in_range(v[place], bits)
    return keys, values


def fill(cache: Any, k: Tensor, v: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Append tokens in parts of these sizes; returns what the cache holds at the end."""
    start, held = 0, (k[:, :, :0], v[:, :, :0])
    for size in sizes:
        held = cache.append(k[:, :, start : start + size], v[:, :, start : start + size])
        start += size
        assert cache.length == start, f"{start} tokens were appended, length says {cache.length}"
    return held


def check_pair(what: str, got: Any, right: tuple[Tensor, Tensor], advice: str = "") -> None:
    """Keys and values against float64."""
    assert isinstance(got, tuple) and len(got) == 2, f"{what}: append returns keys and values, got {type(got).__name__}"
    for name, actual, reference in zip(("keys", "values"), got, right, strict=True):
        scale = float(reference.abs().max())
        check_close(f"{what}: {name}", actual, reference, scale=scale, dtype=torch.float32, advice=advice)


def check_same(what: str, got: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], advice: str) -> None:
    """Bit for bit."""
    for name, actual, expected in zip(("keys", "values"), got, right, strict=True):
        check_equal(f"{what}: {name}", actual, expected, advice)


def int8_right(x: Tensor) -> Tensor:
    """INT8 by token and head, in float64."""
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    scale[scale == 0] = 1
    return (x.double() / scale).round() * scale


# 8 bits.


def test_each_token_has_its_own_int8_scale(lab: Any) -> None:
    x = some_kv(5, 1)[1]
    x[1, 2, 3] = 0
    x[0, 0, 1, 0] = -50
    codes, scale = lab.quantize_tokens(x)
    right = x.double().abs().amax(-1, keepdim=True) / 127
    right[1, 2, 3] = 1
    advice = "A scale for each token of each head, max|x| / 127; 1 where all is 0."
    check_close("scale", scale, right, scale=1.0, dtype=torch.float32, advice=advice)
    check_form("codes", codes, tuple(x.shape), torch.int8)
    wanted = (x.double() / right).round()
    check_equal("codes", codes, wanted.to(torch.int8), "round(x / scale), the largest magnitude becomes 127.")
    assert int(codes[0, 0, 1, 0]) == -127, f"the largest magnitude of a token is -127 here, got {codes[0, 0, 1, 0]}"
    for dtype in (torch.float16, torch.bfloat16):
        half = x.to(dtype)
        codes, scale = lab.quantize_tokens(half)
        check_form(f"scale of {dtype}", scale, (*x.shape[:-1], 1), torch.float32)
        largest = float((codes.double() * scale.double() - half.double()).abs().max())
        assert largest <= 1.01 * float(scale.max()) / 2, f"codes of {dtype} are off by {largest}: compute in float32"
    check_refused("NaN", lambda: lab.quantize_tokens(x / 0))


def test_an_int8_cache_holds_what_its_codes_say(lab: Any) -> None:
    k, v = some_kv(9, 2)
    right = int8_right(k), int8_right(v)
    advice = "Also the new tokens come back as their codes say."
    for sizes in ((9,), (4, 1, 1, 3)):
        cache = lab.Int8KVCache()
        check_pair(f"tokens in parts of {sizes}", fill(cache, k, v, sizes), right, advice)
        # 2 sequences, 3 heads, 9 tokens, keys and values; a byte for a number and four for a scale.
        wanted = 2 * 2 * 3 * 9 * (DIM + 4)
        assert cache.num_bytes == wanted, f"codes and scales of 9 tokens take {wanted} bytes, got {cache.num_bytes}"
    half = lab.Int8KVCache().append(k.half(), v.half())
    check_form("keys of a float16 cache", half[0], tuple(k.shape), torch.float16)


def test_an_fp8_cache_uses_the_scales_that_it_was_given(lab: Any) -> None:
    k, v = some_kv(7, 3)
    k[0, 0, 2, 5], v[1, 1, 1, 4] = 400.0, -3000.0
    for key_scale, value_scale in ((1.0, 1.0), (0.25, 2.0), (3.0, 0.5)):
        right = tuple(
            decode(encode(x / scale, "e4m3"), "e4m3").double() * scale
            for x, scale in ((k, key_scale), (v, value_scale))
        )
        for sizes in ((7,), (2, 5)):
            cache = lab.Fp8KVCache(key_scale, value_scale, encode, decode)
            advice = "What is too large becomes 448 · scale, whatever else is in the cache."
            held = fill(cache, k, v, sizes)
            check_pair(f"scales {key_scale} and {value_scale}, parts of {sizes}", held, (right[0], right[1]), advice)
            wanted = 2 * 2 * 3 * 7 * DIM
            assert cache.num_bytes == wanted, f"a byte a number: {wanted} bytes, got {cache.num_bytes}"


def test_an_fp8_scale_reaches_the_largest_number(lab: Any) -> None:
    for values, right in (([1.0, -896.0, 3.0], 2.0), ([0.5, 0.0], 0.5 / 448), ([0.0, 0.0], 1.0), ([44.8], 0.1)):
        got = lab.fp8_scale(torch.tensor(values))
        assert isinstance(got, float) and math.isclose(got, right, rel_tol=1e-6), (
            f"{values}: max|x| / 448, or 1 if all are 0, is {right}, got {got!r}"
        )
    for what, bad in (("no numbers", torch.zeros(0)), ("infinity", torch.tensor([1.0, math.inf]))):
        check_refused(what, lambda x=bad: lab.fp8_scale(x))


# KIVI.


def test_keys_are_quantized_by_channel_and_values_by_token(lab: Any) -> None:
    for bits, residual, tokens in ((2, 0, 12), (4, 3, 15), (3, 5, 13)):
        k, v = some_kv(tokens, bits)
        got = kivi(lab, bits, residual).append(k, v)
        advice = (
            "Keys: ranges over 4 neighbouring tokens of a channel. Values: over 4 neighbouring channels of a token."
        )
        check_pair(f"{tokens} tokens, {bits} bits, residual {residual}", got, kivi_right(k, v, bits, residual), advice)
    k, v = some_kv(8, 5, dim=32)
    for group in (1, 2, 8):
        advice = f"Groups have {group} numbers here."
        got = kivi(lab, 2, 0, group).append(k, v)
        check_pair(f"groups of {group}", got, kivi_right(k, v, 2, 0, group), advice)


def test_a_group_of_equal_numbers_keeps_them(lab: Any) -> None:
    k, v = some_kv(8, 6)
    k[:, :, :4, 3], k[:, :, 4:, 2], v[:, :, 1] = 2.5, 0.0, -7.0
    v[0, 0, 2, :4] = torch.tensor([1e-9, 2e-9, 3e-9, 4e-9])
    keys, values = kivi(lab, 2, 0).append(k, v)
    check_pair("with constant groups", (keys, values), kivi_right(k, v, 2, 0), "A range of 0 has a scale, too.")
    assert bool((keys[:, :, :4, 3] == 2.5).all() and (keys[:, :, 4:, 2] == 0).all()), "constant keys come back exact"
    assert bool((values[:, :, 1] == -7).all()), "constant values come back exact"


def test_the_newest_tokens_stay_as_they_came(lab: Any) -> None:
    for residual in (0, 1, 5, 8):
        k, v = some_kv(19, 7)
        cache = kivi(lab, 2, residual)
        for token in range(19):
            keys, values = cache.append(k[:, :, token : token + 1], v[:, :, token : token + 1])
            old = counts(token + 1, residual)
            got = cache.quantized_keys, cache.quantized_values
            assert got == old, (
                f"after {token + 1} tokens, one at a time, residual {residual}: {old} keys and values are quantized, "
                f"by position alone; got {got}"
            )
            new_keys, new_values = k[:, :, old[0] : token + 1], v[:, :, old[1] : token + 1]
            check_equal("keys in full precision", keys[:, :, old[0] :], new_keys, "The newest keep every bit.")
            check_equal("values in full precision", values[:, :, old[1] :], new_values, "The newest keep every bit.")


def test_tokens_in_parts_are_tokens_at_once(lab: Any) -> None:
    k, v = some_kv(23, 8)
    for residual in (0, 6, 9):
        whole = kivi(lab, 2, residual)
        right = fill(whole, k, v, (23,))
        check_pair("all at once", right, kivi_right(k, v, 2, residual))
        for sizes in ((10, *[1] * 13), (1, 22), (5, 7, 11), (4, 4, 4, 4, 4, 3), (22, 1)):
            cache = kivi(lab, 2, residual)
            what = f"residual {residual}, parts of {sizes}"
            advice = "What is quantized follows from the tokens' positions, not from how they came."
            check_same(what, fill(cache, k, v, sizes), right, advice)
            assert cache.num_bytes == whole.num_bytes, f"{what}: {cache.num_bytes} bytes, all at once {whole.num_bytes}"


def test_batch_mates_change_nothing(lab: Any) -> None:
    k, v = some_kv(14, 9, batch=3)
    loud_k, loud_v = k.clone(), v.clone()
    loud_k[1:], loud_v[1:] = 100 * k[1:], -100 * v[1:]
    caches: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("INT8", lab.Int8KVCache),
        ("FP8", lambda: lab.Fp8KVCache(1.0, 1.0, encode, decode)),
        ("KIVI", lambda: kivi(lab, 2, 3)),
    )
    rights = (
        (int8_right(k[:1]), int8_right(v[:1])),
        (decode(encode(k[:1], "e4m3"), "e4m3").double(), decode(encode(v[:1], "e4m3"), "e4m3").double()),
        kivi_right(k[:1], v[:1], 2, 3),
    )
    for (name, make), right in zip(caches, rights, strict=True):
        alone = fill(make(), k[:1], v[:1], (9, 5))
        check_pair(f"{name}, one sequence", alone, right)
        for mates_k, mates_v in ((k, v), (loud_k, loud_v)):
            keys, values = fill(make(), mates_k, mates_v, (9, 5))
            advice = "A sequence is quantized as if it were alone."
            check_same(f"{name}, the first of three", (keys[:1], values[:1]), alone, advice)


def test_bytes_are_those_that_are_stored(lab: Any) -> None:
    for bits, dim in ((2, 32), (4, 32), (3, 32), (2, 12)):
        words = -(-dim * bits // 32) * 4
        for tokens, residual in ((40, 8), (40, 0), (21, 8), (5, 8)):
            k, v = some_kv(tokens, 10, dim=dim)
            cache = kivi(lab, bits, residual)
            held = cache.append(k, v)
            assert bool(held[0].isfinite().all()), "the cache must hold numbers"
            keys, values = counts(tokens, residual)
            # Two float16 for the range of a group; four bytes a number in full precision.
            old = keys * words + keys // GROUP * dim * 4 + values * words + values * dim // GROUP * 4
            right = 2 * 3 * (old + (2 * tokens - keys - values) * dim * 4)
            assert cache.num_bytes == right, (
                f"{tokens} tokens of {dim} channels, {bits} bits, residual {residual}: packed codes, ranges in float16 "
                f"and the newest tokens take {right} bytes, got {cache.num_bytes}"
            )


def test_rolled_back_is_as_if_it_had_never_come(lab: Any) -> None:
    k, v = some_kv(12, 11)
    other_k, other_v = some_kv(12, 12)
    makes: tuple[Callable[[], Any], ...] = (lab.Int8KVCache, lambda: lab.Fp8KVCache(1.0, 1.0, encode, decode))
    for make in makes:
        for kept in (0, 1, 7, 12):
            cache, fresh = make(), make()
            fill(cache, k, v, (12,))
            cache.truncate(kept)
            assert cache.length == kept, f"after truncate({kept}) the length is {cache.length}"
            got = cache.append(other_k[:, :, :5], other_v[:, :, :5])
            joined = [torch.cat((a[:, :, :kept], b[:, :, :5]), 2) for a, b in ((k, other_k), (v, other_v))]
            check_same(f"12 tokens cut to {kept}", got, fresh.append(*joined), "Only what was kept may count.")
            assert cache.num_bytes == fresh.num_bytes, "forgotten tokens take no bytes"
    # KIVI with a residual of 6 and groups of 4: of 9 tokens no key and 3 values are quantized.
    cache = kivi(lab)
    held = fill(cache, k, v, (9,))
    check_pair("nine tokens", held, kivi_right(k[:, :, :9], v[:, :, :9], 2, 6))
    for length in (8, 3, 1):
        check_refused(f"9 tokens cut to {length}", lambda n=length: cache.truncate(n))
        assert cache.length == 9, f"a refused truncate({length}) must change nothing, the length is {cache.length}"
    cache.truncate(9)
    more = cache.append(other_k[:, :, :3], other_v[:, :, :3])
    joined = [torch.cat((a[:, :, :9], b[:, :, :3]), 2) for a, b in ((k, other_k), (v, other_v))]
    check_pair("and three more", more, kivi_right(joined[0], joined[1], 2, 6), "A refused call changes nothing.")
    for tokens, kept in ((6, 2), (5, 1), (12, 0)):
        cache = kivi(lab)
        fill(cache, k, v, (tokens,))
        cache.truncate(kept)
        got = cache.append(other_k[:, :, :9], other_v[:, :, :9])
        joined = [torch.cat((a[:, :, :kept], b[:, :, :9]), 2) for a, b in ((k, other_k), (v, other_v))]
        right = kivi_right(joined[0], joined[1], 2, 6)
        check_pair(f"{tokens} tokens cut to {kept}", got, right, "Nothing was quantized, or nothing is left.")


def test_what_does_not_fit_is_refused(lab: Any) -> None:
    k, v = some_kv(8, 13)
    int8, fp8, small = lab.Int8KVCache(), lab.Fp8KVCache(1.0, 1.0, encode, decode), kivi(lab)
    rights = (
        (int8_right(k), int8_right(v)),
        (decode(encode(k, "e4m3"), "e4m3").double(), decode(encode(v, "e4m3"), "e4m3").double()),
        kivi_right(k, v, 2, 6),
    )
    for cache, right in zip((int8, fp8, small), rights, strict=True):
        check_pair("a good call", cache.append(k, v), right)
        bad = k.clone()
        bad[0, 0, 1, 2] = math.nan
        for what, pair in (
            ("NaN among the keys", (bad, v)), ("NaN among the values", (v, bad)), ("another batch", (k[:1], v[:1])),
            ("fewer heads", (k[:, :2], v[:, :2])), ("another dtype", (k.half(), v.half())),
            ("fewer values than keys", (k, v[:, :, :3])), ("no tokens", (k[:, :, :0], v[:, :, :0])),
        ):  # fmt: skip
            check_refused(what, lambda cache=cache, pair=pair: cache.append(*pair))
        assert cache.length == 8, f"refused tokens must not be stored, the length is {cache.length}"
        for length in (-1, 9):
            check_refused(f"truncate({length})", lambda cache=cache, n=length: cache.truncate(n))
    check_refused("keys beyond float16", lambda: small.append(k * 1e5, v))
    check_refused("a head_dim of 10 in groups of 4", lambda: kivi(lab).append(k[..., :10], v[..., :10]))
    for bits in (1, 5, 8):
        check_refused(f"{bits} bits", lambda b=bits: lab.KiviCache(b, GROUP, 6, pack, unpack))
    check_refused("groups of 0", lambda: lab.KiviCache(2, 0, 6, pack, unpack))
    check_refused("a residual of -1", lambda: lab.KiviCache(2, GROUP, -1, pack, unpack))
    for scale in (0.0, -1.0, math.inf):
        check_refused(f"a scale of {scale}", lambda s=scale: lab.Fp8KVCache(1.0, s, encode, decode))


# On a model.

CONFIG = ModelConfig.tiny(num_layers=2, head_dim=16, max_context=64)


def outlier_model() -> Decoder:
    """A tiny model with two channels of keys that are fifteen times as large, and queries that are so much smaller."""
    weights = random_weights(CONFIG, seed=3)
    for layer in range(CONFIG.num_layers):
        for name, factor in (("k_proj", 15.0), ("q_proj", 1 / 15)):
            weight = weights[f"model.layers.{layer}.self_attn.{name}.weight"].unflatten(0, (-1, CONFIG.head_dim))
            # RoPE turns channels i and i + head_dim / 2 into each other, so both of a pair are scaled.
            weight[:, [3, 3 + CONFIG.head_dim // 2]] *= factor
    return Decoder(CONFIG, weights)


def run(decoder: Decoder, tokens: Tensor, caches: Sequence[Any], chunk: int) -> Tensor:
    """Logits of a text that is read in chunks through one cache for each layer."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        return plain_attention(q, *caches[layer].append(k, v))

    parts = [
        decoder(tokens[:, start : start + chunk], torch.arange(start, min(start + chunk, tokens.shape[1])), attend)
        for start in range(0, tokens.shape[1], chunk)
    ]
    return torch.cat(parts, 1)


class _ByToken:
    """Keys and values quantized alike, token by token: the plain way, for comparison."""

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group, self.held = bits, group, list[tuple[Tensor, Tensor]]()

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens so far."""
        self.held.append((self._rounded(k), self._rounded(v)))
        return torch.cat([k for k, _ in self.held], 2), torch.cat([v for _, v in self.held], 2)

    def _rounded(self, x: Tensor) -> Tensor:
        groups = x.unflatten(3, (-1, self.group))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = (high - low) / (2**self.bits - 1)
        return (low + ((groups - low) / step).round() * step).flatten(3)


@pytest.mark.integration
def test_your_own_caches_keep_a_model_with_outlier_channels(lab: Any) -> None:
    decoder = outlier_model()
    tokens = torch.randint(CONFIG.vocab_size, (1, 48), generator=torch.Generator().manual_seed(5))
    right = decoder(tokens, torch.arange(48), full_attention)

    def error(make: Callable[[], Any]) -> float:
        got = run(decoder, tokens, [make() for _ in range(CONFIG.num_layers)], 8)
        check_form("logits", got, tuple(right.shape), torch.float32)
        return float((got - right).square().mean().sqrt() / right.square().mean().sqrt())

    errors = {bits: error(lambda bits=bits: lab.KiviCache(bits, 8, 8)) for bits in (4, 2)}
    plain = {bits: error(lambda bits=bits: _ByToken(bits, 8)) for bits in (4, 2)}
    eight = {"INT8": error(lab.Int8KVCache), "FP8": error(lab.Fp8KVCache)}
    for bits in (4, 2):
        assert 0 < errors[bits] < plain[bits] / 2, (
            f"{bits} bits, two outlier channels among the keys: KIVI changes the logits by {errors[bits]:.3f} of their "
            f"size, plain quantization by token by {plain[bits]:.3f}; KIVI's share must be less than half"
        )
    assert errors[4] < errors[2] and eight["INT8"] < errors[4], f"more bits, less error: {errors} and {eight}"
    assert all(0 < value < 0.2 for value in eight.values()), f"8 bits hardly change the logits: {eight}"
