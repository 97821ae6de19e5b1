"""Task 17: keys quantized before RoPE within calibrated ranges, and outliers kept as they are."""

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
from labkit.decoder import Decoder, full_attention, random_weights, rope_frequencies, rotate

pytestmark = pytest.mark.task(17)

DIM, HEADS = 12, 3
FREQUENCIES = 1 / 100 ** (torch.arange(0, DIM, 2) / DIM)


def pack(codes: Tensor, bits: int) -> Tensor:
    """The right answer of task 2: codes as a stream of bits in 32-bit words."""
    stream = ((codes.long()[..., None] >> torch.arange(bits)) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 32)).unflatten(-1, (-1, 32))
    return (stream << torch.arange(32)).sum(-1).to(torch.int32)


def unpack(words: Tensor, columns: int, bits: int) -> Tensor:
    """Back again."""
    stream = ((words[..., None] >> torch.arange(32)) & 1).flatten(-2)[..., : columns * bits]
    return (stream.unflatten(-1, (columns, bits)) << torch.arange(bits)).sum(-1)


def some_kv(tokens: int, seed: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Keys with two outlier channels, values with a large number here and there; `[batch, HEADS, tokens, DIM]`."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, HEADS, tokens, DIM, generator=generator)
    k[..., 1] += 9
    k[..., 5] = 14 * k[..., 5] - 30
    v[..., 1::7, 4] *= 20
    return k, v


def ranges() -> tuple[Tensor, Tensor]:
    """Low and high that some of the keys exceed on either side."""
    calm = some_kv(400, 99)[0].double().transpose(0, 1).flatten(1, 2)
    return calm.quantile(0.04, dim=1).float(), calm.quantile(0.96, dim=1).float()


def cache(lab: Any, bits: int = 3, value_outliers: int = 1) -> Any:
    """An empty cache on right packing."""
    return lab.KVQuantCache(bits, *ranges(), FREQUENCIES, value_outliers, pack, unpack)


def turned(keys: Tensor) -> Tensor:
    """RoPE in float64, pair by pair as complex numbers, from position 0 on."""
    first, second = keys.double().chunk(2, -1)
    angles = torch.arange(keys.shape[2], dtype=torch.float64)[:, None] * FREQUENCIES.double()
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def keys_right(k: Tensor, bits: int) -> Tensor:
    """Keys before RoPE, outliers as they are."""
    low, high = (end.double()[:, None] for end in ranges())
    scale = (high - low) / (2**bits - 1)
    exact = k.double()
    rounded = low + ((exact - low) / scale).round() * scale
    return torch.where((exact < low) | (exact > high), exact, rounded)


def values_right(v: Tensor, bits: int, outliers: int) -> Tensor:
    """Values, one token's head after another."""
    result = v.double().clone()
    for row in result.view(-1, DIM):
        apart = sorted(range(DIM), key=lambda i, row=row: -abs(float(row[i])))[:outliers]
        rest = [i for i in range(DIM) if i not in apart]
        low = row[rest].min().half().double()
        scale = float(((row[rest].max() - row[rest].min()) / (2**bits - 1)).half()) or 1.0
        row[rest] = low + ((row[rest] - low) / scale).round().clamp(0, 2**bits - 1) * scale
    return result


def check_pair(what: str, got: Any, k: Tensor, v: Tensor, bits: int = 3, outliers: int = 1, advice: str = "") -> None:
    """What a cache of these tokens must return."""
    assert isinstance(got, tuple) and len(got) == 2, f"{what}: append returns keys and values, got {type(got).__name__}"
    right = turned(keys_right(k, bits)), values_right(v, bits, outliers)
    for name, actual, reference in zip(("keys", "values"), got, right, strict=True):
        scale = 4 * float(reference.abs().max())
        check_close(f"{what}: {name}", actual, reference, scale=scale, dtype=torch.float32, advice=advice)


def fill(held: Any, k: Tensor, v: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Append tokens in parts of these sizes; returns what the cache holds at the end."""
    start, got = 0, (k[:, :, :0], v[:, :, :0])
    for size in sizes:
        got = held.append(k[:, :, start : start + size], v[:, :, start : start + size])
        start += size
        assert held.length == start, f"{start} tokens were appended, length says {held.length}"
    return got


def test_ranges_leave_a_share_outside(lab: Any) -> None:
    k, _ = some_kv(101, 1)
    for share in (0.0, 0.02, 0.25):
        low, high = lab.channel_ranges(k, share)
        channels = k.double().transpose(0, 1).flatten(1, 2).sort(1).values
        for name, got, place in (("low", low, share / 2), ("high", high, 1 - share / 2)):
            at = place * (channels.shape[1] - 1)
            below = min(math.floor(at), channels.shape[1] - 2)
            right = channels[:, below] + (at - below) * (channels[:, below + 1] - channels[:, below])
            advice = (
                "Quantiles of each channel's numbers over all sequences and tokens, half of the share on each side."
            )
            check_close(f"{name} with a share of {share}", got, right, scale=300.0, dtype=torch.float32, advice=advice)
    check_refused("a share of 1", lambda: lab.channel_ranges(k, 1.0))
    check_refused("a share below 0", lambda: lab.channel_ranges(k, -0.1))
    check_refused("NaN", lambda: lab.channel_ranges(k * math.nan, 0.1))
    check_refused("no tokens", lambda: lab.channel_ranges(k[:, :, :0], 0.1))


def test_keys_are_rounded_before_they_are_turned(lab: Any) -> None:
    k, v = some_kv(40, 2)
    for bits in (2, 3, 4):
        advice = "Codes of keys as they were before RoPE; RoPE turns what the codes stand for, by its own position."
        check_pair(f"{bits} bits", cache(lab, bits).append(k, v), k, v, bits, advice=advice)


def test_outliers_are_what_they_were(lab: Any) -> None:
    k, v = some_kv(30, 3)
    low, high = ranges()
    k[0, 1, 3], k[1, 2, 4] = 500.0, -500.0
    for outliers in (0, 1, 3, DIM - 1):
        keys, values = cache(lab, 2, outliers).append(k, v)
        what = f"{outliers} numbers a token apart"
        check_pair(what, (keys, values), k, v, 2, outliers, "Outliers widen no range and come back as they were.")
    first = keys[:, :, 0]
    outside = (k[:, :, 0] < low) | (k[:, :, 0] > high)
    assert bool(outside.any()), "some keys of the first token are outliers"
    check_equal("outliers at position 0, which RoPE leaves alone", first[outside], k[:, :, 0][outside])
    apart = values.double() == v.double()
    assert bool((apart.sum(-1) >= DIM - 1).all()), f"{DIM - 1} of {DIM} values a token are kept exactly"


def test_turned_keys_in_parts_are_turned_keys_at_once(lab: Any) -> None:
    k, v = some_kv(21, 4)
    whole = cache(lab)
    right = fill(whole, k, v, (21,))
    check_pair("all at once", right, k, v)
    for sizes in ((1, 20), (9, *[1] * 12), (7, 7, 7)):
        held = cache(lab)
        got = fill(held, k, v, sizes)
        for name, actual, expected in zip(("keys", "values"), got, right, strict=True):
            check_equal(f"parts of {sizes}: {name}", actual, expected, "Positions and outliers go on where they were.")
        assert held.num_bytes == whole.num_bytes, f"parts of {sizes}: {held.num_bytes} bytes, not {whole.num_bytes}"


def test_batch_mates_change_no_turned_key(lab: Any) -> None:
    k, v = some_kv(12, 5, batch=3)
    alone = fill(cache(lab), k[:1], v[:1], (8, 4))
    check_pair("one sequence", alone, k[:1], v[:1])
    loud_k, loud_v = k.clone(), v.clone()
    loud_k[1:], loud_v[1:] = 90 * k[1:], -90 * v[1:]
    for mates_k, mates_v in ((k, v), (loud_k, loud_v)):
        got = fill(cache(lab), mates_k, mates_v, (8, 4))
        for name, actual, expected in zip(("keys", "values"), got, alone, strict=True):
            check_equal(f"the first of three: {name}", actual[:1], expected, "A sequence is quantized as if alone.")


def test_bytes_hold_outliers_and_their_places(lab: Any) -> None:
    k, v = some_kv(25, 6)
    low, high = (end[:, None] for end in ranges())
    for bits, outliers in ((2, 0), (3, 1), (4, 2)):
        for dtype, size in ((torch.float32, 4), (torch.float16, 2)):
            held = cache(lab, bits, outliers)
            keys, values = held.append(k.to(dtype), v.to(dtype))
            check_form("keys", keys, tuple(k.shape), dtype)
            vectors = 2 * HEADS * 25
            stored = k.to(dtype).float()
            apart = int(((stored < low) | (stored > high)).sum())
            # Keys and values packed, two float16 a range of values; a number apart takes its own size and its place.
            right = 2 * vectors * -(-DIM * bits // 32) * 4 + vectors * 4 + (apart + vectors * outliers) * (size + 4)
            assert held.num_bytes == right, (
                f"{bits} bits, {apart} keys and {outliers} values a token apart, in {dtype}: {right} bytes, got "
                f"{held.num_bytes}"
            )
        assert bool(values.isfinite().all()), "the cache must hold numbers"


def test_outliers_of_forgotten_tokens_are_forgotten(lab: Any) -> None:
    k, v = some_kv(12, 7)
    other_k, other_v = some_kv(6, 8)
    for kept in (0, 1, 7, 12):
        held, fresh = cache(lab), cache(lab)
        fill(held, k, v, (12,))
        held.truncate(kept)
        assert held.length == kept, f"after truncate({kept}) the length is {held.length}"
        joined = [torch.cat((a[:, :, :kept], b), 2) for a, b in ((k, other_k), (v, other_v))]
        got, right = held.append(other_k, other_v), fresh.append(*joined)
        check_pair(f"12 tokens cut to {kept}", got, joined[0], joined[1], advice="Only what was kept may count.")
        for name, actual, expected in zip(("keys", "values"), got, right, strict=True):
            check_equal(f"12 tokens cut to {kept}: {name}", actual, expected)
        assert held.num_bytes == fresh.num_bytes, "forgotten outliers take no bytes"


def test_a_channel_without_a_range_keeps_its_numbers(lab: Any) -> None:
    k, v = some_kv(6, 9)
    low, high = ranges()
    low[1, 2] = high[1, 2] = 4.0
    k[:, 1, :, 2] = 4.0
    k[0, 1, 3, 2] = 5.5
    v[1, 2, 3], v[0, 0, 0] = -7.0, 0.0
    held = lab.KVQuantCache(2, low, high, torch.zeros(DIM // 2), 1, pack, unpack)
    keys, values = held.append(k, v)
    check_equal("keys of the channel", keys[:, 1, :, 2], k[:, 1, :, 2], "A range of 0 has a scale, too.")
    check_equal("equal values", values[1, 2, 3], v[1, 2, 3], "A range of 0 has a scale, too.")
    check_equal("zeros", values[0, 0, 0], v[0, 0, 0])
    apart = int(((k < low[:, None]) | (k > high[:, None])).sum())
    vectors = 2 * HEADS * 6
    right = 2 * vectors * 4 + vectors * 4 + (apart + vectors) * 8
    assert held.num_bytes == right, f"a number at the end of its range has a code: {right} bytes, got {held.num_bytes}"


def test_ranges_and_tokens_that_do_not_fit_are_refused(lab: Any) -> None:
    k, v = some_kv(8, 10)
    held = cache(lab)
    check_pair("a good call", held.append(k, v), k, v)
    bad = v.clone()
    bad[1, 0, 2, 3] = math.inf
    for what, pair in (
        ("infinity among the values", (k, bad)), ("another batch", (k[:1], v[:1])),
        ("another dtype", (k.half(), v.half())), ("values beyond float16", (k, v * 1e5)),
        ("fewer values than keys", (k, v[:, :, :3])), ("no tokens", (k[:, :, :0], v[:, :, :0])),
    ):  # fmt: skip
        check_refused(what, lambda pair=pair: held.append(*pair))
    assert held.length == 8, f"refused tokens must not be stored, the length is {held.length}"
    for length in (-1, 9):
        check_refused(f"truncate({length})", lambda n=length: held.truncate(n))
    check_refused("fewer heads than ranges", lambda: cache(lab).append(k[:, :2], v[:, :2]))
    low, high = ranges()
    make = lab.KVQuantCache
    for bits in (1, 5):
        check_refused(f"{bits} bits", lambda b=bits: make(b, low, high, FREQUENCIES, 1, pack, unpack))
    check_refused("ranges upside down", lambda: make(3, high, low, FREQUENCIES, 1, pack, unpack))
    check_refused("ranges of NaN", lambda: make(3, low * math.nan, high, FREQUENCIES, 1, pack, unpack))
    check_refused("too few frequencies", lambda: make(3, low, high, FREQUENCIES[1:], 1, pack, unpack))
    check_refused("all values apart", lambda: make(3, low, high, FREQUENCIES, DIM, pack, unpack))


# On a model.

CONFIG = ModelConfig.tiny(num_layers=2, head_dim=16, max_context=64)
SPEED = rope_frequencies(CONFIG)


@pytest.mark.integration
def test_your_own_packing_and_ranges_keep_a_model(lab: Any) -> None:
    weights = random_weights(CONFIG, seed=3)
    for layer in range(CONFIG.num_layers):
        for name, factor in (("k_proj", 15.0), ("q_proj", 1 / 15)):
            weight = weights[f"model.layers.{layer}.self_attn.{name}.weight"].unflatten(0, (-1, CONFIG.head_dim))
            weight[:, [3, 3 + CONFIG.head_dim // 2]] *= factor
    decoder = Decoder(CONFIG, weights)
    generator = torch.Generator().manual_seed(6)
    calibration, tokens = torch.randint(CONFIG.vocab_size, (2, 1, 48), generator=generator)
    positions = torch.arange(48)
    keys: list[Tensor] = []

    def before_rope(k: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, :, None].float() * SPEED
        return rotate(k, angles.cos(), -angles.sin())

    def record(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keys.append(before_rope(k, positions))
        return full_attention(layer, q, k, v, positions)

    decoder(calibration, positions, record)
    right = decoder(tokens, positions, full_attention)

    def error(append: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]) -> float:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            return plain_attention(q, *append(layer, before_rope(k, positions), v))

        parts = [decoder(tokens[:, at : at + 8], positions[at : at + 8], attend) for at in range(0, 48, 8)]
        got = torch.cat(parts, 1)
        check_form("logits", got, tuple(right.shape), torch.float32)
        return float((got - right).square().mean().sqrt() / right.square().mean().sqrt())

    def with_cache(bits: int, share: float, apart: int) -> float:
        caches = [lab.KVQuantCache(bits, *lab.channel_ranges(k, share), SPEED, apart) for k in keys]
        return error(lambda layer, k, v: caches[layer].append(k, v))

    four, plain_four = with_cache(4, 0.02, 1), with_cache(4, 0.0, 0)
    two = with_cache(2, 0.02, 1)
    assert 0 < four < 0.5 and four < two, f"4 bits change the logits by {four:.3f} of their size, 2 bits by {two:.3f}"
    assert four < plain_four, (
        f"with outliers apart 4 bits change the logits by {four:.3f}, with none by {plain_four:.3f}; it should be less"
    )
