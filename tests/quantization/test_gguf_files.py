"""GGUF files of ours: equal in the gguf package, and in llama.cpp the probabilities of our dequantized model."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from grader.judge.numerics import check_equal
from labkit.checkpoints import load_tokenizer
from labkit.checkpoints.bundled import bundled_gguf
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.linear_inputs import linear_names
from labkit.texts import documents
from solutions.quantization.exporting import export
from solutions.quantization.gguf_writer import permute_rows
from solutions.quantization.loading import load_quantized
from solutions.quantization.methods import FALLBACK, gguf_tensor, round_in_groups
from solutions.quantization.quantized_model import QuantizedLinear, QuantizedModel
from tests.labkit.gguf_files import llama_cpp_rows
from tests.quantization.llama_cpp import log_probabilities, plain_text_ids
from tests.quantization.small_models import origin

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")


@lru_cache(maxsize=1)
def two_layers() -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Two layers with the real tokenizer; o_proj's rows of 192 are no multiple of 256."""
    config = dataclasses.replace(
        ModelConfig.from_gguf(bundled_gguf()),
        hidden_size=256, intermediate_size=512, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=32, max_context=512,
    )  # fmt: skip
    return config, random_weights(config, 1)


def mixed_model() -> QuantizedModel:
    """Every block type in one model, and codes of another method."""
    config, drawn = two_layers()
    linears, weights = {}, dict(drawn)
    kinds = (*KINDS, *KINDS[:5], "Q8_0", "Q5_1")  # k-quants take long to fit: one layer of each
    for index, name in enumerate(linear_names(config)):
        weight = weights.pop(f"{name}.weight")
        codes = round_in_groups(weight, 4, 32, symmetric=True)
        use_codes = index == len(KINDS)
        linears[name] = QuantizedLinear(codes if use_codes else gguf_tensor(weight, kinds[index]))
    floats = {name: weight.half().float() for name, weight in weights.items()}
    return QuantizedModel(config, linears, floats)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuantizedModel, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    model = mixed_model()
    export(model, "gguf", folder, origin(folder, "q4_k", bundled_gguf()), head_bits=16)
    return model, folder / "model.gguf"


@pytest.fixture(scope="module")
def read(written: tuple[QuantizedModel, Path]) -> gguf.GGUFReader:
    return gguf.GGUFReader(written[1])


def test_the_gguf_package_dequantizes_every_tensor_to_our_values(
    written: tuple[QuantizedModel, Path], read: gguf.GGUFReader
) -> None:
    model, _ = written
    tensors = {tensor.name: tensor for tensor in read.tensors}
    found = {tensor.tensor_type.name for tensor in tensors.values()}
    assert found == {*KINDS, "F16", "F32"}
    weights = model.weights()
    for short, long in (("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"),
                        ("attn_output", "self_attn.o_proj"), ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"),
                        ("ffn_down", "mlp.down_proj"), ("attn_norm", "input_layernorm")):  # fmt: skip
        for layer in range(2):
            tensor = tensors[f"blk.{layer}.{short}.weight"]
            values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            expected = weights[f"model.layers.{layer}.{long}.weight"].numpy()
            if short in ("attn_q", "attn_k"):
                expected = llama_cpp_rows(expected, 6 if short == "attn_q" else 2)
            check_equal(short, torch.from_numpy(values), torch.from_numpy(np.ascontiguousarray(expected)))


def test_the_tokenizer_and_the_facts_of_the_model_are_carried_over(read: gguf.GGUFReader) -> None:
    ours, source = read, gguf.GGUFReader(bundled_gguf())
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.pre",
                "tokenizer.chat_template", "tokenizer.ggml.add_bos_token", "general.name"):  # fmt: skip
        assert ours.get_field(key).contents() == source.get_field(key).contents(), key
        assert ours.get_field(key).types == source.get_field(key).types, key


def test_our_loader_gives_back_the_model(written: tuple[QuantizedModel, Path]) -> None:
    model, path = written
    found = load_quantized(path)
    for name, weight in model.weights().items():
        check_equal(name, found.weights()[name], weight)


def test_llama_cpp_gives_the_text_the_probability_that_our_dequantized_model_gives(
    written: tuple[QuantizedModel, Path],
) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp, of the extra dev, is the reader under test")
    model, path = written
    text = next(text for text in documents("prose", "evaluation").values() if text.isascii())
    ids = plain_text_ids(load_tokenizer("smollm2").encode(text), 160)
    theirs = log_probabilities(path, ids)
    with torch.no_grad():
        logits = Decoder(model.config, model.weights())(torch.tensor([ids]), torch.arange(len(ids)), full_attention)[0]
    ours = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].double()
    apart = theirs - ours
    assert abs(float(apart.mean().expm1())) < 0.01, "perplexities are apart by 1 % or more"
    # Its activations are rounded to 8 bits, so single tokens differ a little; with rows in another order they would
    # differ by as much as the tokens do among themselves.
    assert float(apart.std()) < 0.1 * float(ours.std()), f"single tokens differ by {float(apart.std()):.3f}"


@pytest.mark.parametrize(("kind", "columns", "expected"), [
    ("Q4_K", 576, "Q5_0"), ("Q6_K", 576, "Q8_0"), ("Q4_K", 1536, "Q4_K"), ("Q6_K", 256, "Q6_K"), ("Q4_0", 576, "Q4_0"),
])  # fmt: skip
def test_rows_that_256_does_not_divide_fall_back(kind: str, columns: int, expected: str) -> None:
    weight = torch.randn(4, columns, generator=torch.Generator().manual_seed(0))
    assert gguf_tensor(weight, kind).kind == expected
    assert set(FALLBACK) == {"Q4_K", "Q6_K"}


def test_permuted_rows_are_those_of_the_definition() -> None:
    config, weights = two_layers()
    for part, heads in (("q_proj", 6), ("k_proj", 2)):
        name = f"model.layers.0.self_attn.{part}.weight"
        expected = torch.from_numpy(llama_cpp_rows(weights[name].numpy(), heads))
        check_equal(part, permute_rows(name, weights[name], config), expected)
    qwen = dataclasses.replace(config, architecture="qwen2", attention_bias=True)
    check_equal("qwen2", permute_rows(name, weights[name], qwen), weights[name])


def test_a_gguf_export_without_a_tokenizer_is_refused(written: tuple[QuantizedModel, Path], tmp_path: Path) -> None:
    model, _ = written
    with pytest.raises(ValueError, match="tokenizer of a GGUF file"):
        export(model, "gguf", tmp_path / "out", origin(tmp_path, "q4_k"))
    assert not (tmp_path / "out").exists()


def test_a_head_in_eight_bits_is_refused_where_the_layout_has_none(
    written: tuple[QuantizedModel, Path], tmp_path: Path
) -> None:
    model, _ = written
    with pytest.raises(ValueError, match="head"):
        export(model, "compressed-tensors", tmp_path / "out", origin(tmp_path), head_bits=8)
    assert not (tmp_path / "out").exists()
