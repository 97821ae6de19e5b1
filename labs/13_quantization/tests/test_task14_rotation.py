"""Task 14: the matrices, their fast product, a rotated model that answers as before, and outliers that are gone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.linear_inputs import linear_inputs

pytestmark = pytest.mark.task(14)

DOUBLE = torch.float64
ORDERS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 60, 64, 72, 76, 80, 140, 576)
MODELS = {
    "llama": ModelConfig.tiny(),
    "llama, untied, with biases": ModelConfig.tiny(tie_embeddings=False, attention_bias=True),
    "qwen2": ModelConfig.tiny(architecture="qwen2"),
}
MODEL = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def drawn(seed: int, *shape: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def orthogonal(seed: int, size: int) -> Tensor:
    """Any rotation, float64; far from symmetric."""
    return torch.linalg.qr(drawn(seed, size, size)).Q


def logits(config: ModelConfig, weights: dict[str, Tensor], decoder: type[Decoder] = Decoder) -> Tensor:
    """What a model says to two sequences."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (2, 11), generator=generator)
    dtype = weights["model.embed_tokens.weight"].dtype
    return decoder(config, weights, dtype)(tokens, torch.arange(11), full_attention)


def check_same_answers(what: str, got: Tensor, right: Tensor, advice: str) -> None:
    """Logits of two float64 models."""
    # A few thousand roundings lie between a weight and a logit.
    check_close(what, got, right, scale=300 * float(right.abs().max()), dtype=DOUBLE, advice=advice)


def check_weights_form(weights: object, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """A dict of weights with the names, shapes and dtypes of others."""
    assert isinstance(weights, dict), f"weights must be a dict, got {type(weights).__name__}"
    assert set(weights) == set(like), f"names that differ: {sorted(set(weights) ^ set(like))[:3]}"
    for name, weight in like.items():
        check_form(name, weights[name], tuple(weight.shape), weight.dtype)
    return weights


def folded(config: ModelConfig, weights: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Gains of 1, by the judge."""
    result = {"lm_head.weight": weights["model.embed_tokens.weight"], **weights}
    readers = {"input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
               "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")}  # fmt: skip
    for layer in range(config.num_layers):
        for norm, names in readers.items():
            gain = weights[f"model.layers.{layer}.{norm}.weight"]
            for name in names:
                key = f"model.layers.{layer}.{name}.weight"
                result[key] = weights[key] * gain
    result["lm_head.weight"] = result["lm_head.weight"] * weights["model.norm.weight"]
    ones = {name: torch.ones_like(weight) for name, weight in weights.items() if name.endswith("norm.weight")}
    return ModelConfig(**{**vars(config), "tie_embeddings": False}), {**result, **ones}


def with_outliers(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Weights of a model two of whose channels are far larger than the others, as in real ones; float64."""
    weights = random_weights(config, seed, DOUBLE)
    for name, weight in weights.items():
        if name.endswith(("embed_tokens.weight", "input_layernorm.weight", "post_attention_layernorm.weight")):
            weight[..., 5] *= 12
            weight[..., 17] *= -7
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 0.3
    return weights


def rounded(values: Tensor, bits: int = 4) -> Tensor:
    """Each row on its own symmetric grid."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
    return (values / scale).round() * scale


def error_of_four_bits(inputs: Tensor, weight: Tensor) -> float:
    """The relative error of a layer's output where inputs and weight have 4 bits."""
    right = inputs @ weight.T
    return float((rounded(inputs) @ rounded(weight).T - right).norm() / right.norm())


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_a_hadamard_matrix_are_orthogonal(lab: Any, order: int) -> None:
    matrix = check_form("hadamard_matrix", lab.hadamard_matrix(order), (order, order), DOUBLE)
    assert bool((matrix.abs() == 1).all()), f"order {order}: every entry must be 1 or −1"
    products = matrix @ matrix.T
    right = order * torch.eye(order, dtype=DOUBLE)
    check_equal(f"H Hᵀ of order {order}", products, right, "Two different rows must agree in half of their places.")


def test_orders_that_have_no_matrix_are_refused(lab: Any) -> None:
    matrix = lab.hadamard_matrix(12)
    assert float((matrix @ matrix.T).trace()) == 144, "a good call first: order 12"
    for order in (0, -4, 3, 6, 18, 9, 577, True, 4.0):
        mentions = str(order) if type(order) is int and order > 0 else "order"
        check_refused(f"order {order!r}", lambda n=order: lab.hadamard_matrix(n), mentions=mentions)
    check_refused("a row of 6", lambda: lab.hadamard_transform(torch.ones(2, 6)), mentions="6")
    check_refused("NaN", lambda: lab.hadamard_transform(torch.tensor([1.0, math.nan])))
    check_refused("integers", lambda: lab.hadamard_transform(torch.ones(4, dtype=torch.int64)))
    check_refused("a rotation of order 6", lambda: lab.random_rotation(6, 1), mentions="6")


@pytest.mark.parametrize("order", [2, 8, 12, 24, 36, 56, 576])
def test_the_transform_is_the_product_with_the_matrix(lab: Any, order: int) -> None:
    matrix = lab.hadamard_matrix(order) / math.sqrt(order)
    for dtype, shape in ((DOUBLE, (2, 3, order)), (torch.float32, (order,)), (torch.float16, (5, order))):
        values = drawn(order, *shape, dtype=dtype)
        right = values.double() @ matrix
        plain = right.to(dtype) if dtype == torch.float16 else values @ matrix.to(dtype)
        got = lab.hadamard_transform(values)
        advice = "x H / √n with the H of hadamard_matrix: the order of the Kronecker product, and which side."
        check_close("hadamard_transform", got, right, scale=4.0, dtype=dtype, plain=plain, advice=advice)
        shares = got.double().norm(dim=-1) / values.double().norm(dim=-1)
        assert bool(((shares - 1).abs() < 0.01).all()), f"a rotation keeps lengths, these are multiplied by {shares}"
    large = drawn(1, 3, order, dtype=torch.float16) * 4000
    got = lab.hadamard_transform(large)
    check_close("large numbers in fp16", got, large.double() @ matrix, scale=4e3, dtype=torch.float16,
                advice="Sums of fp16 numbers overflow before they are divided; compute in float32.")  # fmt: skip


def test_the_transform_never_writes_the_matrix_down(lab: Any) -> None:
    row = drawn(3, 96)
    check_close("order 96", lab.hadamard_transform(row), row @ lab.hadamard_matrix(96) / math.sqrt(96), scale=4.0,
                dtype=DOUBLE)  # fmt: skip
    order = 12 * 2**15  # as a matrix 600 GB, which no machine of a student has
    row = drawn(order, 1, order, dtype=torch.float32)
    check_close("the length of the row", lab.hadamard_transform(row).norm(), row.double().norm(),
                scale=4 * math.sqrt(order), dtype=torch.float32,
                advice="Add and subtract halves, log2(n) times; the matrix is never needed.")  # fmt: skip


def test_random_signs_spread_whatever_comes(lab: Any) -> None:
    for order in (12, 64, 576):
        rotation = check_form("random_rotation", lab.random_rotation(order, 5), (order, order), DOUBLE)
        check_close("QᵀQ", rotation.T @ rotation, torch.eye(order, dtype=DOUBLE), scale=40.0, dtype=DOUBLE)
        check_close("magnitudes of Q", rotation.abs(), torch.full((order, order), order**-0.5, dtype=DOUBLE),
                    scale=1.0, dtype=DOUBLE)  # fmt: skip
        assert torch.equal(rotation, lab.random_rotation(order, 5)), "the same seed gives the same rotation"
        # Two random choices of 12 signs agree with probability 1 / 4096; these seeds are fixed.
        others = [lab.random_rotation(order, seed) for seed in (6, 7, 8)]
        assert not any(torch.equal(rotation, other) for other in others), "another seed gives another rotation"
    rotation = lab.random_rotation(64, 9)
    for what, rows in (("rows", lab.hadamard_matrix(64)), ("columns", lab.hadamard_matrix(64).T)):
        # Of right code the largest of 4,096 entries passes 6 · rms with a probability below 10^-5.
        largest = float((rows @ rotation).abs().max())
        assert largest < 6, (
            f"one of the {what} of H has an entry of {largest:.3g} · rms after the rotation; √64 = 8 means that all of "
            "it ended in one channel: the signs must change it before H does"
        )


def test_the_outlier_ratio_lies_between_one_and_the_root(lab: Any) -> None:
    rows = torch.stack((torch.full((9,), -0.5), torch.eye(9)[4] * 3, torch.zeros(9), torch.arange(9.0) - 3))
    right = torch.tensor([1.0, 3.0, 1.0, 5 / math.sqrt(69 / 9)], dtype=DOUBLE)
    for dtype, factor in ((torch.float32, 1.0), (torch.float16, 1000.0), (torch.float32, 1e-30), (DOUBLE, 1e200)):
        given = (rows.double() * factor).to(dtype).reshape(2, 2, 9)
        wide = DOUBLE if dtype == DOUBLE else torch.float32
        got = lab.outlier_ratio(given)
        check_close(f"outlier_ratio at {factor:.0e}", got, right.reshape(2, 2), scale=3.0, dtype=wide)
    check_refused("infinity", lambda: lab.outlier_ratio(torch.tensor([1.0, math.inf])))


@MODEL
def test_gains_move_into_the_layers_that_read_them(lab: Any, config: ModelConfig) -> None:
    weights = random_weights(config, 2, DOUBLE)
    before = {name: weight.clone() for name, weight in weights.items()}
    new_config, got = lab.fold_gains(config, weights)
    right_config, right = folded(config, weights)
    assert new_config == right_config, f"the config changes in one thing, tie_embeddings is False: got {new_config!r}"
    check_weights_form(got, right)
    for name, weight in right.items():
        check_close(name, got[name], weight, scale=float(weight.abs().max()), dtype=DOUBLE)
    check_same_answers("the logits", logits(new_config, got), logits(config, weights), "Fold every gain, once.")
    for name, weight in before.items():
        check_equal(f"the given {name}", weights[name], weight, "It must stay as it was.")


@MODEL
def test_a_rotated_stream_gives_the_same_answers(lab: Any, config: ModelConfig) -> None:
    config, weights = folded(config, random_weights(config, 3, DOUBLE))
    rotation = orthogonal(4, config.hidden_size)
    got = check_weights_form(lab.rotate_residual(config, weights, rotation), weights)
    embedding = weights["model.embed_tokens.weight"] @ rotation
    check_close("the embedding", got["model.embed_tokens.weight"], embedding, scale=4.0, dtype=DOUBLE,
                advice="Each row h becomes h Q.")  # fmt: skip
    advice = "Who reads the stream becomes W Q, who writes it Qᵀ W; biases that are added to it turn, too."
    check_same_answers("the logits", logits(config, got), logits(config, weights), advice)
    for name, weight in weights.items():
        if name.endswith(("norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias")):
            check_equal(name, got[name], weight, "It isn't part of the stream.")
    half = {name: weight.half() for name, weight in weights.items()}
    got = check_weights_form(lab.rotate_residual(config, half, rotation.float()), half)
    name = "model.layers.1.mlp.down_proj.weight"
    right = rotation.float().double().T @ half[name].double()
    check_close("a weight in fp16", got[name], right, scale=4.0, plain=right.half(), dtype=torch.float16)


@MODEL
def test_rotated_heads_give_the_same_answers(lab: Any, config: ModelConfig) -> None:
    weights = random_weights(config, 5, DOUBLE)
    rotation = orthogonal(6, config.head_dim)
    got = check_weights_form(lab.rotate_heads(config, weights, rotation), weights)
    name = "model.layers.2.self_attn.v_proj.weight"
    right = torch.cat([rotation.T @ head for head in weights[name].split(config.head_dim)])
    check_close(name, got[name], right, scale=4.0, dtype=DOUBLE, advice="Each head's v becomes v R.")
    advice = (
        "o_proj undoes the rotation head by head, also where several query heads share a value head; biases turn, too."
    )
    check_same_answers("the logits", logits(config, got), logits(config, weights), advice)
    touched = {name.split(".")[-2] for name, weight in weights.items() if not torch.equal(got[name], weight)}
    assert touched == {"v_proj", "o_proj"}, f"only v_proj and o_proj change, got {sorted(touched)}"


def test_the_gated_product_is_rotated_while_the_model_runs(lab: Any) -> None:
    config = MODELS["llama"]
    weights = random_weights(config, 7, DOUBLE)
    got = check_weights_form(lab.rotate_gated(config, weights), weights)

    class Online(Decoder):
        def linear(self, inputs: Tensor, name: str) -> Tensor:
            return super().linear(lab.hadamard_transform(inputs) if name.endswith("down_proj") else inputs, name)

    touched = {name.split(".")[-2] for name, weight in weights.items() if not torch.equal(got[name], weight)}
    assert touched == {"down_proj"}, f"down_proj changes, and only that, got {sorted(touched)}"
    advice = "x H (W H)ᵀ = n x Wᵀ: transform the rows of W as the inputs are."
    check_same_answers("the logits", logits(config, got, Online), logits(config, weights), advice)


def test_outliers_and_the_error_of_four_bits_fall(lab: Any) -> None:
    config = ModelConfig.tiny(hidden_size=72, intermediate_size=96)
    weights = with_outliers(config, 8)
    right = logits(config, weights)
    new_config, rotated = lab.fold_gains(config, weights)
    rotated = lab.rotate_residual(new_config, rotated, lab.random_rotation(72, 10))
    rotated = lab.rotate_heads(new_config, rotated, lab.random_rotation(8, 11))
    check_same_answers("the logits in full precision", logits(new_config, rotated), right, "")
    tokens = torch.randint(0, 61, (2, 15), generator=torch.Generator().manual_seed(12))
    ratios, errors = [], []
    for decoder in (Decoder(config, weights, DOUBLE), Decoder(new_config, rotated, DOUBLE)):
        read = linear_inputs(decoder, tokens)
        names = [name for name in read if name.endswith(("q_proj", "v_proj", "up_proj"))]
        ratios.append([float(lab.outlier_ratio(read[name]).mean()) for name in names])
        errors.append([error_of_four_bits(read[name], decoder.weights[f"{name}.weight"]) for name in names])
    for name, before, after in zip(names, *ratios, strict=True):
        assert after < 0.75 * before, f"{name} reads an outlier ratio of {before:.2f}, after the rotation {after:.2f}"
    means = [sum(numbers) / len(numbers) for numbers in errors]
    assert means[1] < 0.75 * means[0], (
        f"W4A4 errs by {means[0]:.3f} before the rotation and by {means[1]:.3f} after it; expected below 0.75 of that"
    )


def test_models_that_cannot_be_rotated_are_refused(lab: Any) -> None:
    config, weights = folded(MODELS["llama"], random_weights(MODELS["llama"], 9, DOUBLE))
    rotation, head_rotation = orthogonal(10, 24), orthogonal(11, 8)
    got = lab.rotate_residual(config, weights, rotation)
    check_close("a good call first", got["lm_head.weight"], weights["lm_head.weight"] @ rotation, scale=4.0,
                dtype=DOUBLE)  # fmt: skip
    tied = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
    check_refused("tied embeddings", lambda: lab.rotate_residual(MODELS["llama"], tied, rotation))
    gains = dict(weights)
    name = "model.layers.3.post_attention_layernorm.weight"
    gains[name] = weights[name] * 1.5
    check_refused("a gain that isn't folded", lambda: lab.rotate_residual(config, gains, rotation), mentions=name)
    for what, bad in (("a stretch", rotation * 1.1), ("a projection", torch.diag(torch.arange(24.0) % 2).double()),
                      ("another size", orthogonal(12, 23)), ("NaN", rotation * math.nan)):  # fmt: skip
        check_refused(what, lambda q=bad: lab.rotate_residual(config, weights, q), mentions="rotation")
    check_refused("a rotation of the stream for heads", lambda: lab.rotate_heads(config, weights, rotation))
    check_refused("a stretch of heads", lambda: lab.rotate_heads(config, weights, 2 * head_rotation))
    odd = ModelConfig.tiny(intermediate_size=42)
    check_refused("an MLP of 42", lambda: lab.rotate_gated(odd, random_weights(odd, 1)), mentions="42")
    lame = {name: weight for name, weight in weights.items() if not name.endswith("up_proj.weight")}
    for what, call in (("fold_gains", lambda: lab.fold_gains(config, lame)),
                       ("rotate_heads", lambda: lab.rotate_heads(config, lame, head_rotation))):  # fmt: skip
        check_refused(f"missing weights in {what}", call, mentions="up_proj")


@pytest.mark.integration
def test_your_own_quantizer_errs_less_on_rotated_numbers(lab: Any) -> None:
    inputs, weight = drawn(13, 40, 576, dtype=torch.float32), drawn(14, 30, 576, dtype=torch.float32) / 24
    inputs[:, 7] *= 40
    rotation = lab.random_rotation(576, 15).float()
    right, errors = inputs.double() @ weight.double().T, []
    for x, w in ((inputs, weight), (inputs @ rotation, weight @ rotation)):
        low = [lab.dequantize(lab.quantize(y, 4, granularity=kind)) for y, kind in ((x, "token"), (w, "channel"))]
        errors.append(float((low[0].double() @ low[1].double().T - right).norm() / right.norm()))
    assert errors[1] < 0.5 * errors[0], f"W4A4 errs by {errors[0]:.3f} without and {errors[1]:.3f} with the rotation"
