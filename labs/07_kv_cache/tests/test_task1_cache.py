"""Task 1b: the cache that holds those bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_equal
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig

pytestmark = pytest.mark.task(1)

# Every size differs from every other, so that swapped axes can't hide.
CONFIG = ModelConfig.tiny(num_layers=3, num_heads=8, num_kv_heads=2, head_dim=10)
CAPACITY = 7


def new_tokens(count: int, seed: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values of some tokens, no two numbers alike."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, CONFIG.num_kv_heads, count, CONFIG.head_dim)
    return torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)


def append_all(cache: Any, count: int, seed: int, batch: int = 1) -> list[tuple[Tensor, Tensor]]:
    """One whole pass: new tokens for every layer, different in each; returns what was given."""
    given = [new_tokens(count, seed * 100 + layer, batch) for layer in range(CONFIG.num_layers)]
    for layer, (k, v) in enumerate(given):
        cache.append(layer, k, v)
    return given


def check_layer(cache: Any, layer: int, pieces: list[tuple[Tensor, Tensor]], when: str) -> None:
    """The layer holds exactly these tokens, in this order."""
    keys, values = (torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
    advice = "Valid tokens only, the oldest first, keys apart from values."
    check_equal(f"keys({layer}) {when}", cache.keys(layer), keys, advice)
    check_equal(f"values({layer}) {when}", cache.values(layer), values, advice)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 2), (torch.float32, 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_cache_bytes_match_formula(lab: Any, batch: int, dtype: torch.dtype, size: int) -> None:
    cache = lab.KVCache(CONFIG, CAPACITY, batch, dtype)
    per_token = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * size
    right = per_token * CAPACITY * batch
    by_formula = lab.kv_cache_bytes(CONFIG, CAPACITY * batch, size)
    assert by_formula == right, f"kv_cache_bytes gives {by_formula} for {CAPACITY * batch} tokens, right is {right}"
    assert cache.capacity == CAPACITY, f"capacity is {cache.capacity}, the cache was built for {CAPACITY}"
    for length in range(CAPACITY + 1):
        got = cache.num_bytes
        assert got == right, (
            f"with {length} of {CAPACITY} tokens num_bytes is {got}, the formula gives {right}: "
            "all the memory is allocated once, for keys and values of all layers, in the dtype asked for"
        )
        live = [t for layer in range(CONFIG.num_layers) for t in (cache.keys(layer), cache.values(layer))]
        measured = sum(t.numel() * t.element_size() for t in live)
        assert measured == per_token * length * batch, (
            f"keys and values of {length} tokens take {measured} bytes, the formula gives {per_token * length * batch}"
        )
        if length < CAPACITY:
            for layer in range(CONFIG.num_layers):
                cache.append(layer, *new_tokens(1, length, batch, dtype))


@pytest.mark.parametrize("pieces", [(1,), (3,), (1, 1, 1), (2, 1, 4), (7,)])
def test_appended_tokens_come_back_in_order(lab: Any, pieces: tuple[int, ...]) -> None:
    cache = lab.KVCache(CONFIG, CAPACITY, 2)
    given: list[tuple[Tensor, Tensor]] = []
    for number, count in enumerate(pieces):
        given.append(new_tokens(count, number, batch=2))
        keys, values = cache.append(1, *given[-1])
        all_keys, all_values = (torch.cat(parts, dim=2) for parts in zip(*given, strict=True))
        advice = "append returns every token the layer holds, the new ones last."
        check_equal(f"keys returned by append number {number + 1} of {pieces}", keys, all_keys, advice)
        check_equal(f"values returned by append number {number + 1} of {pieces}", values, all_values, advice)
        check_layer(cache, 1, given, f"after append number {number + 1} of {pieces}")


def test_layers_are_kept_apart(lab: Any) -> None:
    cache = lab.KVCache(CONFIG, CAPACITY)
    first = append_all(cache, 2, seed=1)
    second = append_all(cache, 3, seed=2)
    for layer in range(CONFIG.num_layers):
        check_layer(cache, layer, [first[layer], second[layer]], "after two passes over all layers")
    cache.append(0, *new_tokens(1, 9))
    check_layer(cache, 2, [first[2], second[2]], "after an append to layer 0 only")


def test_length_is_what_every_layer_holds(lab: Any) -> None:
    cache = lab.KVCache(CONFIG, CAPACITY)
    assert cache.length == 0, f"a new cache has length {cache.length}, should be 0"
    append_all(cache, 2, seed=1)
    assert cache.length == 2, f"after one pass of 2 tokens length is {cache.length}, should be 2"
    for layer in range(CONFIG.num_layers):
        assert cache.length == 2, (
            f"layers before {layer} have got 3 tokens more and the others not yet: length is {cache.length}, should "
            "be 2, the number that every layer holds (positions of the running pass are counted from it)"
        )
        cache.append(layer, *new_tokens(3, layer))
    assert cache.length == 5, f"after passes of 2 and 3 tokens length is {cache.length}, should be 5"


def test_capacity_is_exact_and_a_refused_append_changes_nothing(lab: Any) -> None:
    whole = lab.KVCache(CONFIG, CAPACITY)
    given = append_all(whole, CAPACITY, seed=3)
    assert whole.length == CAPACITY, f"{CAPACITY} tokens fit exactly; length is {whole.length}"
    check_refused("one token into a full cache", lambda: whole.append(0, *new_tokens(1, 4)))
    check_layer(whole, 0, [given[0]], "after a refused append")

    cache = lab.KVCache(CONFIG, CAPACITY)
    first = append_all(cache, 5, seed=5)
    check_refused("3 tokens where 2 fit", lambda: cache.append(0, *new_tokens(3, 6)))
    assert cache.length == 5, f"after a refused append length is {cache.length}, was 5"
    for layer in range(CONFIG.num_layers):
        check_layer(cache, layer, [first[layer]], "after a refused append")
    second = append_all(cache, 2, seed=7)
    check_layer(cache, 2, [first[2], second[2]], "after an append that fits exactly")


def test_truncate_keeps_the_first_tokens(lab: Any) -> None:
    cache = lab.KVCache(CONFIG, CAPACITY)
    given = append_all(cache, 5, seed=1)
    cache.truncate(5)
    assert cache.length == 5, f"truncate to the present length changes nothing; length is {cache.length}, was 5"
    cache.truncate(3)
    assert cache.length == 3, f"after truncate(3) length is {cache.length}"
    kept = [(k[:, :, :3], v[:, :, :3]) for k, v in given]
    for layer in range(CONFIG.num_layers):
        check_layer(cache, layer, [kept[layer]], "after truncate(3) of 5 tokens")
    more = append_all(cache, CAPACITY - 3, seed=2)
    for layer in range(CONFIG.num_layers):
        check_layer(cache, layer, [kept[layer], more[layer]], "after truncate(3) and filling up again")
    cache.truncate(0)
    assert cache.length == 0, f"after truncate(0) length is {cache.length}"
    assert cache.keys(1).shape[2] == 0, "after truncate(0) a layer still returns keys"
    again = append_all(cache, CAPACITY, seed=3)
    check_layer(cache, 2, [again[2]], "after truncate(0) and filling up again")


def test_truncate_refuses_tokens_never_seen(lab: Any) -> None:
    cache = lab.KVCache(CONFIG, CAPACITY)
    given = append_all(cache, 4, seed=1)
    cache.truncate(3)
    assert cache.length == 3, f"after truncate(3) length is {cache.length}"
    for length in (4, CAPACITY, CAPACITY + 1, -1):
        check_refused(f"truncate({length}) of 3 tokens", lambda length=length: cache.truncate(length))
        assert cache.length == 3, f"after a refused truncate({length}) length is {cache.length}, was 3"
    check_layer(cache, 2, [(given[2][0][:, :, :3], given[2][1][:, :, :3])], "after refused truncations")


def test_truncate_evens_out_a_broken_pass(lab: Any) -> None:
    cache = lab.KVCache(CONFIG, CAPACITY)
    first = append_all(cache, 2, seed=1)
    for layer in (0, 1):
        cache.append(layer, *new_tokens(3, layer))
    check_refused("truncate(3) while the last layer holds 2 tokens", lambda: cache.truncate(3))
    cache.truncate(cache.length)
    for layer in range(CONFIG.num_layers):
        check_layer(cache, layer, [first[layer]], "after a broken pass and truncate(cache.length)")
    second = append_all(cache, 5, seed=2)
    for layer in range(CONFIG.num_layers):
        check_layer(cache, layer, [first[layer], second[layer]], "after a broken pass, truncate and a whole pass")


def test_wrong_keys_and_values_are_refused(lab: Any) -> None:
    cache = lab.KVCache(CONFIG, CAPACITY)
    given = append_all(cache, 2, seed=1)
    check_layer(cache, 0, [given[0]], "after a good append")
    k, v = new_tokens(1, 5)
    check_refused("a layer that the model has not", lambda: cache.append(3, k, v))
    check_refused("layer -1", lambda: cache.append(-1, k, v))
    check_refused("keys of layer 3", lambda: cache.keys(3))
    check_refused("keys with the axes of tokens and heads swapped", lambda: cache.append(0, k.transpose(1, 2), v))
    check_refused("keys of another batch size", lambda: cache.append(0, k.expand(2, -1, -1, -1), v))
    check_refused("keys with one channel too few", lambda: cache.append(0, k[..., :-1], v))
    check_refused("fp16 values in an fp32 cache", lambda: cache.append(0, k, v.half()))
    check_refused("more values than keys", lambda: cache.append(0, k, torch.cat((v, v), dim=2)))
    check_refused("no tokens", lambda: cache.append(0, k[:, :, :0], v[:, :, :0]))
    check_refused("a capacity of 0", lambda: lab.KVCache(CONFIG, 0))
    for layer in range(CONFIG.num_layers):
        check_layer(cache, layer, [given[layer]], "after refused appends")
