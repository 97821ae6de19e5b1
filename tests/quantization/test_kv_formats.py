"""A model on quantized caches: exact with plain ones, close with all others, and smaller."""

from __future__ import annotations

import torch

from grader.judge.numerics import check_close
from labkit.decoder import full_attention, rope_frequencies, rotate
from solutions.quantization.kv_formats import CachedLogits, KVFormat, PlainKV, before_rope, kv_formats, recorded_kv
from tests.quantization.small_models import CONFIG, TOKENS, decoder


def test_reading_in_chunks_through_plain_caches_changes_nothing() -> None:
    model, tokens = decoder(), TOKENS[0].tolist()
    reference = model(TOKENS[:1], torch.arange(40), full_attention)[0]
    for chunk in (1, 7, 40):
        run = CachedLogits(model, KVFormat("plain", lambda layer: PlainKV(torch.float32)), chunk)
        scale = 20 * float(reference.abs().max())
        check_close(f"chunks of {chunk}", run(tokens), reference.double(), scale=scale, dtype=torch.float32)
        assert run.bytes_per_token == CONFIG.num_layers * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4


def test_keys_are_turned_back() -> None:
    keys = torch.randn(2, 3, 9, 16, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(9).expand(2, 9)
    angles = positions[:, None, :, None] * rope_frequencies(CONFIG)
    turned = rotate(keys, angles.cos(), angles.sin())
    back = before_rope(turned, positions, rope_frequencies(CONFIG))
    check_close("keys", back, keys.double(), scale=8.0, dtype=torch.float32)


def test_every_format_runs_and_is_smaller() -> None:
    model, tokens = decoder(), TOKENS[0].tolist()
    reference = model(TOKENS[:1], torch.arange(40), full_attention)[0]
    plain_bytes = CONFIG.num_layers * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    errors, sizes = {}, {}
    for format in kv_formats(model, TOKENS[1:], residual=4, group_size=8):
        run = CachedLogits(model, format, chunk=4)
        errors[format.name] = float((run(tokens) - reference).norm() / reference.norm())
        sizes[format.name] = run.bytes_per_token
    assert all(size < plain_bytes for size in sizes.values()), sizes
    assert errors["FP16"] < errors["INT8"] < errors["KIVI 4"] < errors["KIVI 3"] < errors["KIVI 2"]
    assert errors["INT8"] < errors["KVQuant 4"] < errors["KVQuant 3"] < errors["KVQuant 2"]
    assert sizes["KIVI 2"] < sizes["KIVI 4"] < sizes["FP16"]


def test_recorded_keys_are_those_of_every_layer() -> None:
    seen = recorded_kv(decoder(), TOKENS)
    assert len(seen) == CONFIG.num_layers
    for after, before, values in seen:
        assert after.shape == before.shape == values.shape == (3, CONFIG.num_kv_heads, 40, CONFIG.head_dim)
        check_close("keys at position 0", before[:, :, 0], after[:, :, 0].double(), scale=8.0, dtype=torch.float32)
