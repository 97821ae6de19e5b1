"""Packed layers: both ways through one are one model, and a loaded checkpoint runs packed in a generation loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grader.judge.numerics import check_close, check_equal
from labkit.decoder import Decoder, full_attention
from solutions.kv_cache.cache import KVCache
from solutions.kv_cache.generation import CachedDecoder, stream
from solutions.quantization.exporting import export
from solutions.quantization.loading import load_quantized
from solutions.quantization.methods import Settings, gguf_tensor
from solutions.quantization.packed_linear import Int4Linear, Int8Linear, PackedDecoder, pack_linear
from solutions.quantization.pipeline import quantize_model
from solutions.quantization.quantized_model import QuantizedLinear
from solutions.quantization.smoothquant import w8a8_linear
from solutions.quantization.uniform import quantize
from tests.quantization.small_models import calibration, decoder, origin

WEIGHT = torch.randn(48, 128, generator=torch.Generator().manual_seed(1)) / 8
INPUTS = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))


def int4(kind: str, packed_tokens: int) -> Any:
    if kind in ("Q4_0", "Q4_1"):
        return pack_linear(QuantizedLinear(gguf_tensor(WEIGHT, kind)), packed_tokens)
    q = quantize(WEIGHT, 3 if kind == "3 bits" else 4, symmetric=kind != "zero points", group_size=64)
    return pack_linear(QuantizedLinear(q), packed_tokens)


KINDS = ("symmetric", "zero points", "3 bits", "Q4_0", "Q4_1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed_tokens", [0, 5])
def test_both_ways_compute_with_the_packed_numbers(kind: str, packed_tokens: int) -> None:
    layer = int4(kind, packed_tokens)
    assert isinstance(layer, Int4Linear)
    # The packed product reads and writes bfloat16.
    read = INPUTS if packed_tokens == 0 else INPUTS.bfloat16().float()
    exact = read.double() @ layer.dequantized().double().T
    dtype = torch.float32 if packed_tokens == 0 else torch.bfloat16
    check_close(kind, layer(INPUTS).to(dtype), exact, scale=float(exact.abs().max()), dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_changes_weights_by_bfloat16_scales_only(kind: str) -> None:
    layer = int4(kind, 5)
    if kind in ("Q4_0", "Q4_1"):
        expected = QuantizedLinear(gguf_tensor(WEIGHT, kind)).weight()
    else:
        q = quantize(WEIGHT, 3 if kind == "3 bits" else 4, symmetric=kind != "zero points", group_size=64)
        expected = QuantizedLinear(q).weight()
    # Code − 8 goes up to 8, and scale and middle are each off by half a unit in the last of 8 bits.
    largest = expected.abs().amax()
    assert float((layer.dequantized() - expected).abs().max()) <= 2.0**-8 * float(largest) * 1.5


def test_integers_are_added_up_exactly_as_in_the_reference() -> None:
    q = quantize(WEIGHT, 8, granularity="channel")
    for tokens in (INPUTS, INPUTS[:1], torch.zeros(2, 128), INPUTS.repeat(9, 1)):
        exact = w8a8_linear(tokens.double(), q).double()
        check_close("W8A8", Int8Linear(q)(tokens), exact, scale=float(exact.abs().max()) + 1e-6, dtype=torch.float32)


def test_what_no_packed_product_knows_is_left_to_the_decoder() -> None:
    assert pack_linear(QuantizedLinear(quantize(WEIGHT, 4, group_size=64))) is not None
    for other in (
        quantize(WEIGHT, 8, group_size=64),
        quantize(WEIGHT, 4, group_size=16),
        quantize(WEIGHT[:7], 4, group_size=64),
        quantize(WEIGHT, 5, group_size=64),
    ):
        assert pack_linear(QuantizedLinear(other)) is None


def test_a_layer_of_another_shape_is_refused() -> None:
    codes = torch.zeros(16, 64, dtype=torch.int8)
    Int4Linear(codes, torch.ones(16, 2), torch.zeros(16, 2))
    with pytest.raises(ValueError, match="packed int4 product"):
        Int4Linear(codes, torch.ones(16, 3), torch.zeros(16, 3))
    with pytest.raises(ValueError, match="one scale a row"):
        Int8Linear(quantize(WEIGHT, 8, group_size=64))


@pytest.mark.parametrize(("method", "format"), [("gptq", "gptq"), ("smoothquant", "compressed-tensors")])
def test_a_loaded_checkpoint_generates_what_its_packed_numbers_stand_for(
    tmp_path: Path, method: str, format: str
) -> None:
    model = quantize_model(decoder(), method, Settings(group_size=32), calibration())
    export(model, format, tmp_path, origin(tmp_path, method))
    packed = PackedDecoder(load_quantized(tmp_path))
    assert set(packed.packed) == set(model.linears)
    assert all(packed.weights[f"{name}.weight"].device.type == "meta" for name in model.linears)
    prompt = [3, 14, 15, 92, 65, 35]
    loop = CachedDecoder(packed, KVCache(packed.config, capacity=64))
    tokens = list(stream(loop, prompt, 12))
    assert len(tokens) == 12
    dense = {f"{name}.weight": layer.dequantized() for name, layer in packed.packed.items()}
    quantized_activations = method == "smoothquant"
    plain = model.decoder() if quantized_activations else Decoder(model.config, dict(model.floats) | dense)
    with torch.no_grad():
        ids = torch.tensor([prompt + tokens])
        logits = plain(ids, torch.arange(ids.shape[1]), full_attention)[0, len(prompt) - 1 : -1]
    # bfloat16 activations, or 8-bit ones, may prefer another token where two are nearly equal.
    best = logits.amax(-1) - logits[torch.arange(12), torch.tensor(tokens)]
    assert float(best.max()) < 0.1 * float(logits.std()), "a generated token is not among the likeliest"


def test_a_head_in_eight_bits_is_packed_too() -> None:
    model = quantize_model(decoder(), "rtn", Settings(group_size=32))
    plain, packed = PackedDecoder(model), PackedDecoder(model, head_bits=8)
    tokens, positions = torch.tensor([[5, 9, 12]]), torch.arange(3)
    with torch.no_grad():
        difference = plain(tokens, positions, full_attention) - packed(tokens, positions, full_attention)
        assert 0 < float(difference.std()) < 0.02 * float(plain(tokens, positions, full_attention).std())
    check_equal("embedding", packed.weights["model.embed_tokens.weight"], plain.weights["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match="8 bits"):
        PackedDecoder(model, head_bits=4)
