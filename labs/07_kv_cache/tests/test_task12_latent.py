"""Task 12, second part: multi-head latent attention: a small cache, and two ways to attend to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.attention_variants import latent_attention
from grader.judge.numerics import check_close, check_equal
from grader.judge.refusal import check_refused
from labkit.latent_config import LatentConfig

pytestmark = pytest.mark.task(12)

# layers of the four models of task 1, and KiB a token if each cached a latent of 512 and a key part of 64
LATENT_KIB = {
    "Qwen2.5-0.5B": (24, 27.0),
    "Qwen2.5-1.5B": (28, 31.5),
    "Llama-3-8B": (32, 36.0),
    "Llama-3-70B": (80, 90.0),
}
CONFIG = LatentConfig.tiny()
FORMS = ["decompressed_attention", "absorbed_attention"]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of both signs."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def attention_inputs(
    queries: int, keys: int, seed: int, dtype: torch.dtype = torch.float32, c: LatentConfig = CONFIG, batch: int = 2
) -> list[Tensor]:
    """q_nope, q_rope, latents, rope_keys, w_uk, w_uv."""
    shapes = (
        (batch, c.num_heads, queries, c.qk_nope_head_dim),
        (batch, c.num_heads, queries, c.qk_rope_head_dim),
        (batch, keys, c.kv_lora_rank),
        (batch, keys, c.qk_rope_head_dim),
        (c.num_heads, c.qk_nope_head_dim, c.kv_lora_rank),
        (c.num_heads, c.v_head_dim, c.kv_lora_rank),
    )
    return [random(*shape, seed=10 * seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def doubles(tensors: list[Tensor]) -> list[Tensor]:
    """In float64."""
    return [t.double() for t in tensors]


def value_scale(inputs: list[Tensor]) -> float:
    """A bound of the heads' values, whatever the weights are."""
    return float((inputs[2].double().abs() @ inputs[5].double().abs().transpose(1, 2).unsqueeze(1)).max())


def test_latent_bytes_per_token(lab: Any) -> None:
    for name, (layers, kib) in LATENT_KIB.items():
        got = lab.latent_bytes_per_token(LatentConfig(layers, 128), 2)
        assert type(got) is int and got == int(kib * 1024), f"{name} with latents: {kib} KiB a token, got {got!r} bytes"
    for config, size, right in (
        (LatentConfig(60, 128), 2, 69_120),  # DeepSeek-V2
        (LatentConfig(61, 128), 2, 70_272),  # DeepSeek-V3
        (LatentConfig(27, 16), 2, 31_104),  # DeepSeek-V2-Lite
        (CONFIG, 4, 192),
        (LatentConfig.tiny(num_heads=10), 4, 192),
        (LatentConfig.tiny(v_head_dim=70, qk_nope_head_dim=60), 1, 48),
    ):
        got = lab.latent_bytes_per_token(config, size)
        assert got == right, f"{config}, {size} bytes a number: {right} bytes a token, got {got!r}; heads store nothing"


def test_latent_bytes_at_a_length(lab: Any) -> None:
    for config, tokens, size, right in (
        (LatentConfig(60, 128), 32_768, 2, 2_264_924_160),
        (LatentConfig(61, 128), 131_072, 1, 4_605_345_792),
        (CONFIG, 0, 4, 0),
        (CONFIG, 7, 2, 672),
    ):
        got = lab.latent_cache_bytes(config, tokens, size)
        assert type(got) is int and got == right, f"{config}, {tokens} tokens of {size} bytes: {right}, got {got!r}"


def test_what_the_heads_would_store(lab: Any) -> None:
    for config, size, right in (
        (LatentConfig(60, 128), 2, 4_915_200),
        (LatentConfig(27, 16), 2, 276_480),
        (CONFIG, 4, 1020),
    ):
        got = lab.decompressed_bytes_per_token(config, size)
        assert type(got) is int and got == right, (
            f"{config}: keys of both parts and values of every head take {right} bytes a token, got {got!r}"
        )


def test_operations_of_the_two_forms(lab: Any) -> None:
    big = LatentConfig(60, 128)
    for config, queries, keys, absorbed, right in (
        (CONFIG, 1, 1, False, 2 * 5 * (12 * 13 + 10 + 7)),
        (CONFIG, 1, 1, True, 2 * 5 * (12 * 13 + 16 + 12)),
        (CONFIG, 3, 8, False, 2 * 5 * (8 * 12 * 13 + 24 * 17)),
        (CONFIG, 3, 8, True, 2 * 5 * (3 * 12 * 13 + 24 * 28)),
        (big, 1, 4096, False, 137_774_497_792),
        (big, 1, 4096, True, 1_174_405_120),
        (big, 4096, 4096, False, 1_511_828_488_192),
        (big, 4096, 4096, True, 4_810_363_371_520),
    ):
        got = lab.latent_attention_flops(config, queries, keys, absorbed)
        form = "absorbed" if absorbed else "decompressed"
        assert type(got) is int and got == right, (
            f"{form}, {queries} queries and {keys} keys of {config}: {right} operations, got {got!r}"
        )


def test_impossible_latent_sizes_are_refused(lab: Any) -> None:
    good = (lab.latent_bytes_per_token(CONFIG, 1), lab.latent_cache_bytes(CONFIG, 2, 1))
    assert good == (48, 96), f"a good call comes first, got {good}"
    good = (lab.decompressed_bytes_per_token(CONFIG, 1), lab.latent_attention_flops(CONFIG, 1, 1, True))
    assert good == (255, 1840), f"a good call comes first, got {good}"
    check_refused("0 bytes a number", lambda: lab.latent_bytes_per_token(CONFIG, 0))
    check_refused("-1 tokens", lambda: lab.latent_cache_bytes(CONFIG, -1, 2))
    check_refused("half a byte", lambda: lab.latent_cache_bytes(CONFIG, 1, 0.5))
    check_refused("0 bytes a number", lambda: lab.decompressed_bytes_per_token(CONFIG, 0))
    check_refused("no queries", lambda: lab.latent_attention_flops(CONFIG, 0, 1, True))
    check_refused("no keys", lambda: lab.latent_attention_flops(CONFIG, 1, 0, False))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 2), (torch.float32, 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_latents_come_back_in_order(lab: Any, batch: int, dtype: torch.dtype, size: int) -> None:
    cache = lab.LatentCache(CONFIG, 7, batch, dtype)
    right = lab.latent_cache_bytes(CONFIG, 7 * batch, size)
    held = [(torch.zeros(batch, 0, 12, dtype=dtype), torch.zeros(batch, 0, 4, dtype=dtype)) for _ in range(3)]
    for number, count in enumerate((2, 1, 4)):
        for layer in range(3):
            new = (
                random(batch, count, 12, seed=10 * number + layer, dtype=dtype),
                random(batch, count, 4, seed=50 + 10 * number + layer, dtype=dtype),
            )
            held[layer] = (torch.cat((held[layer][0], new[0]), 1), torch.cat((held[layer][1], new[1]), 1))
            latents, rope_keys = cache.append(layer, *new)
            check_equal(f"latents of layer {layer} after append {number}", latents, held[layer][0], "Oldest first.")
            check_equal(f"key parts of layer {layer} after append {number}", rope_keys, held[layer][1], "Oldest first.")
            length = held[2][0].shape[1]
            assert cache.length == length, f"length is {cache.length}, every layer holds {length}"
        assert cache.num_bytes == right == 7 * batch * 48 * size, (
            f"num_bytes is {cache.num_bytes}, the formula gives {right}: memory for {7 * batch} tokens is taken at once"
        )
    assert cache.capacity == 7, f"capacity is {cache.capacity}, the cache was built for 7"


def test_refused_latents_leave_the_cache_whole(lab: Any) -> None:
    cache = lab.LatentCache(CONFIG, 5)
    held = [(random(1, 4, 12, seed=layer), random(1, 4, 4, seed=10 + layer)) for layer in range(3)]
    for layer in range(3):
        cache.append(layer, *held[layer])
    latents, rope_keys = random(1, 1, 12, seed=20), random(1, 1, 4, seed=21)
    check_refused("2 tokens where 1 fits", lambda: cache.append(0, random(1, 2, 12, seed=1), random(1, 2, 4, seed=2)))
    check_refused("layer 3 of 3", lambda: cache.append(3, latents, rope_keys))
    check_refused("layer -1", lambda: cache.append(-1, latents, rope_keys))
    check_refused("the two swapped", lambda: cache.append(0, rope_keys, latents))
    check_refused("fp16 latents", lambda: cache.append(0, latents.half(), rope_keys))
    check_refused("more key parts than latents", lambda: cache.append(0, latents, rope_keys.repeat(1, 2, 1)))
    check_refused("another batch", lambda: cache.append(0, latents.repeat(2, 1, 1), rope_keys.repeat(2, 1, 1)))
    check_refused("no tokens", lambda: cache.append(0, latents[:, :0], rope_keys[:, :0]))
    check_refused("truncate(5) of 4 tokens", lambda: cache.truncate(5))
    check_refused("truncate(-1)", lambda: cache.truncate(-1))
    check_refused("a capacity of 0", lambda: lab.LatentCache(CONFIG, 0))
    assert cache.length == 4, f"after refused calls length is {cache.length}, was 4"
    for layer in range(3):
        got = cache.append(layer, latents, rope_keys)
        check_equal("latents after refused calls", got[0], torch.cat((held[layer][0], latents), 1))
        check_equal("key parts after refused calls", got[1], torch.cat((held[layer][1], rope_keys), 1))


def test_truncated_latents_are_forgotten(lab: Any) -> None:
    cache = lab.LatentCache(CONFIG, 6)
    first = [(random(1, 5, 12, seed=layer), random(1, 5, 4, seed=10 + layer)) for layer in range(3)]
    for layer in range(3):
        cache.append(layer, *first[layer])
    cache.append(0, random(1, 1, 12, seed=30), random(1, 1, 4, seed=31))
    check_refused("truncate(6) while two layers hold 5 tokens", lambda: cache.truncate(6))
    cache.truncate(2)
    assert cache.length == 2, f"after truncate(2) length is {cache.length}"
    for layer in range(3):
        new = (random(1, 4, 12, seed=40 + layer), random(1, 4, 4, seed=50 + layer))
        got = cache.append(layer, *new)
        check_equal("latents after truncate(2)", got[0], torch.cat((first[layer][0][:, :2], new[0]), 1), "The first 2.")
        check_equal("key parts after truncate(2)", got[1], torch.cat((first[layer][1][:, :2], new[1]), 1))


def test_the_projection_is_split_head_by_head(lab: Any) -> None:
    weight = torch.arange(5 * 13 * 12, dtype=torch.float32).view(65, 12)
    w_uk, w_uv = lab.split_kv_projection(weight, CONFIG)
    advice = "Rows go head by head, and in a head its key's before its value's."
    check_equal("W_UK", w_uk, torch.stack([weight[13 * head : 13 * head + 6] for head in range(5)]), advice)
    check_equal("W_UV", w_uv, torch.stack([weight[13 * head + 6 : 13 * head + 13] for head in range(5)]), advice)
    check_refused("a transposed weight", lambda: lab.split_kv_projection(weight.T, CONFIG))
    check_refused("a row too few", lambda: lab.split_kv_projection(weight[1:], CONFIG))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_latent_attention_matches_the_definition(lab: Any, form: str, dtype: torch.dtype) -> None:
    wide = LatentConfig.tiny(num_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=5, v_head_dim=3)
    for seed, (queries, keys, config) in enumerate(
        ((1, 1, CONFIG), (1, 9, CONFIG), (4, 9, CONFIG), (7, 7, CONFIG), (3, 8, wide), (5, 3, CONFIG))
    ):
        inputs = attention_inputs(queries, keys, seed, dtype, config)
        for scale in (None, 0.2):
            given = [] if scale is None else [scale]
            check_close(
                f"{form} of {queries} queries and {keys} keys, scale {scale}, {dtype}",
                getattr(lab, form)(*inputs, *given),
                latent_attention(*doubles(inputs), scale),
                scale=value_scale(inputs),
                dtype=dtype,
                plain=latent_attention(*inputs, scale),
                inputs=inputs,
                advice="Look at the scale of both parts together, the causal mask, and the dimension of each product.",
            )


@pytest.mark.parametrize("form", FORMS)
def test_latent_attention_survives_large_and_late_tokens(lab: Any, form: str) -> None:
    inputs = attention_inputs(3, 8, seed=3)
    whole = getattr(lab, form)(*inputs)
    reference = latent_attention(*doubles(inputs))
    check_close("3 queries of 8 tokens", whole, reference, scale=value_scale(inputs), dtype=torch.float32)
    # The first of these queries is the sixth token, which may not see the last two.
    early = [inputs[0][:, :, :1], inputs[1][:, :, :1], inputs[2][:, :6], inputs[3][:, :6], *inputs[4:]]
    check_close(
        "the first query without the tokens behind it", getattr(lab, form)(*early), reference[:, :, :1],
        scale=value_scale(inputs), dtype=torch.float32,
    )  # fmt: skip
    half = [(t * factor).half() for t, factor in zip(inputs, (300, 300, 100, 100, 1, 1), strict=True)]
    check_close(
        f"{form} in fp16, with scores that pass 65504", getattr(lab, form)(*half), latent_attention(*doubles(half)),
        scale=value_scale(half), dtype=torch.float16, advice="Everything is computed in fp32.",
    )  # fmt: skip
    for index, name in enumerate(("q_nope", "q_rope", "latents", "rope_keys", "w_uk", "w_uv")):
        bad = [t[..., :-1, :] if i == index else t for i, t in enumerate(inputs)]
        if name != "w_uv":  # its rows decide how wide values are
            check_refused(f"{form} with a row too few in {name}", lambda bad=bad: getattr(lab, form)(*bad))
    check_refused(f"{form} of w_uv of another rank", lambda: getattr(lab, form)(*inputs[:5], inputs[5][..., :-1]))


@pytest.mark.integration
@pytest.mark.parametrize("form", FORMS)
def test_a_cached_layer_equals_the_whole_sequence(lab: Any, form: str) -> None:
    dtype = torch.float64
    inputs = attention_inputs(9, 9, seed=4, dtype=dtype, batch=1)
    weight = torch.cat((inputs[4], inputs[5]), dim=1).flatten(0, 1)
    w_uk, w_uv = lab.split_kv_projection(weight, CONFIG)
    reference = latent_attention(*inputs)
    cache = lab.LatentCache(CONFIG, 9, 1, dtype)
    rows, done = [], 0
    for count in (4, 1, 1, 3):
        here = slice(done, done + count)
        held = cache.append(1, inputs[2][:, here], inputs[3][:, here])
        rows.append(getattr(lab, form)(inputs[0][:, :, here], inputs[1][:, :, here], *held, w_uk, w_uv))
        done += count
    check_close(
        f"{form} over the cache in passes of 4, 1, 1 and 3", torch.cat(rows, 2), reference,
        scale=value_scale(inputs), dtype=dtype,
    )  # fmt: skip
