"""Task 3: which matrices of a model become integers, which stay, and what the whole then weighs and computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from grader.judge.numerics import check_equal, check_form
from grader.judge.quantization_reference import (
    check_quantized_form,
    reference_dequantize,
    reference_quantize,
)
from grader.judge.refusal import check_refused
from labkit.checkpoints import load_tokenizer
from labkit.checkpoints.bundled import bundled_folder
from labkit.checkpoints.errors import CheckpointError
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.linear_inputs import linear_names
from labkit.quantized import QuantizedTensor
from labkit.specs import Checkpoint

pytestmark = pytest.mark.task(3)

TINY = ModelConfig.tiny(num_layers=2)
UNTIED = ModelConfig.tiny(num_layers=1, tie_embeddings=False)
QWEN = ModelConfig.tiny(num_layers=1, architecture="qwen2")
TEXT = (
    "The tide comes in twice a day. When the water is low, people walk out over the sand to the small island and look "
    "for shells; when it rises again they have to be back, for the sea is quick and the way is long."
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def expected_linears(config: ModelConfig) -> list[str]:
    """The weights of a model's linear layers, by what labkit knows of it."""
    return [f"{name}.weight" for name in linear_names(config)]


class Recorder:
    """A quantizer that is right and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, dict[str, Any]]] = []

    def __call__(self, x: Tensor, bits: int, *, symmetric: bool = True, granularity: str = "group",
                 group_size: int | None = None) -> QuantizedTensor:  # fmt: skip
        asked = {"bits": bits, "symmetric": symmetric, "granularity": granularity, "group_size": group_size}
        self.calls.append((x.clone(), asked))
        return reference_quantize(x, **asked)

    def check(self, weights: dict[str, Tensor], wanted: dict[str, dict[str, Any]]) -> None:
        """Every wanted matrix was quantized once, and as it should be; nothing else was."""
        names = {name: [i for i, (x, _) in enumerate(self.calls) if x.shape == weights[name].shape
                        and torch.equal(x, weights[name])] for name in wanted}  # fmt: skip
        for name, calls in names.items():
            assert len(calls) == 1, f"{name} must be quantized once, it was {len(calls)} times"
            asked = self.calls[calls[0]][1]
            assert asked == wanted[name], f"{name} must be quantized with {wanted[name]}, not with {asked}"
        assert len(self.calls) == len(wanted), f"{len(wanted)} matrices need quantizing, {len(self.calls)} were"


def by_group(bits: int, group_size: int, symmetric: bool = True) -> dict[str, Any]:
    """What a linear layer's weight is quantized with."""
    return {"bits": bits, "symmetric": symmetric, "granularity": "group", "group_size": group_size}


def check_same(what: str, got: object, right: QuantizedTensor) -> None:
    """A quantized matrix, number for number."""
    form = check_quantized_form(
        what, got, tuple(right.codes.shape), right.bits, (right.scale.shape[0], right.scale.shape[1]),
        symmetric=right.zero_point is None,
    )  # fmt: skip
    check_equal(f"{what}: codes", form.codes, right.codes)
    check_equal(f"{what}: scale", form.scale, right.scale)
    if right.zero_point is not None:
        check_equal(f"{what}: zero_point", form.zero_point, right.zero_point)


def test_linear_layers_are_known_by_their_names(lab: Any) -> None:
    for what, config in (("a Llama", TINY), ("an untied Llama", UNTIED), ("a Qwen2 with biases", QWEN)):
        weights = random_weights(config, 1)
        got = lab.linear_weights(weights)
        right = [name for name in weights if name in expected_linears(config)]
        assert list(got) == right, f"{what}: the linear layers are {right}, in the model's order; got {got}"
    shuffled = {name: torch.ones(2, 2) for name in (
        "model.layers.1.mlp.up_proj.weight", EMBEDDING, "model.layers.0.self_attn.k_proj.weight", HEAD,
        "model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate_proj.weight_scale", "model.norm.weight",
    )}  # fmt: skip
    right = ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"]
    got = lab.linear_weights(shuffled)
    assert list(got) == right, f"of {list(shuffled)}, {right} are linear layers' weights; got {got}"


def test_each_linear_layer_is_quantized_once(lab: Any) -> None:
    for config, bits, size, symmetric in ((TINY, 4, 8, True), (QWEN, 3, 4, False), (UNTIED, 8, 2, True)):
        weights = random_weights(config, 2)
        before = {name: weight.clone() for name, weight in weights.items()}
        recorder = Recorder()
        got = lab.quantize_linears(weights, bits, size, symmetric=symmetric, quantize=recorder)
        linears = [name for name in weights if name in expected_linears(config)]
        assert list(got) == linears, f"quantized must be exactly {linears}, got {list(got)}"
        recorder.check(weights, dict.fromkeys(linears, by_group(bits, size, symmetric)))
        for name in linears:
            right = reference_quantize(weights[name], bits, symmetric=symmetric, group_size=size)
            check_same(name, got[name], right)
        for name, weight in before.items():
            check_equal(f"the model's {name}", weights[name], weight, "The model that was given must not change.")


def test_the_head_is_quantized_on_request_only(lab: Any) -> None:
    for config, head, bits in ((TINY, EMBEDDING, 8), (UNTIED, HEAD, 8), (QWEN, EMBEDDING, 6)):
        weights = random_weights(config, 3)
        recorder = Recorder()
        got = lab.quantize_linears(weights, 4, 8, symmetric=False, head_bits=bits, quantize=recorder)
        names = [name for name in weights if name in (*expected_linears(config), head)]
        assert list(got) == names, (
            f"{'tied' if config.tie_embeddings else 'untied'}: the matrix that makes the logits is {head}; quantized "
            f"must be {names}, got {list(got)}"
        )
        per_row = {"bits": bits, "symmetric": False, "granularity": "channel", "group_size": None}
        wanted = {name: per_row if name == head else by_group(4, 8, False) for name in names}
        recorder.check(weights, wanted)
        check_same(head, got[head], reference_quantize(weights[head], bits, symmetric=False, granularity="channel"))


def test_groups_that_do_not_divide_a_row_are_refused(lab: Any) -> None:
    # Rows are 24 wide, but for those of o_proj (48) and down_proj (40).
    weights = random_weights(UNTIED, 4)
    for size, named in ((16, "q_proj"), (12, "down_proj"), (48, "q_proj"), (24, "down_proj"), (1000, "q_proj")):
        recorder = Recorder()
        check_refused(
            f"groups of {size} in rows of 24 and 40",
            lambda size=size, recorder=recorder: lab.quantize_linears(weights, 4, size, quantize=recorder),
            mentions=named,
        )
        assert not recorder.calls, f"groups of {size} must be refused before anything is quantized"
        got = lab.quantize_linears(weights, 4, size, short_groups=True, quantize=recorder)
        for name in expected_linears(UNTIED):
            groups = -(-weights[name].shape[1] // size)
            check_same(f"{name}, {groups} groups of at most {size}", got[name],
                       reference_quantize(weights[name], 4, group_size=size))  # fmt: skip
    got = lab.quantize_linears(weights, 4, 8, quantize=Recorder())
    assert len(got) == 7, f"groups of 8 divide all rows, so all 7 matrices are quantized, got {list(got)}"
    wide = {"model.layers.0.mlp.up_proj.weight": torch.randn(2, 576, generator=torch.Generator().manual_seed(1))}
    check_refused("576 in groups of 128", lambda: lab.quantize_linears(wide, 4, 128), mentions="576")


def test_a_rebuilt_model_has_rounded_weights(lab: Any) -> None:
    for config, dtype in ((TINY, torch.float32), (UNTIED, torch.bfloat16), (QWEN, torch.float16)):
        weights = random_weights(config, 5, dtype)
        quantized = {name: reference_quantize(weights[name], 4, symmetric=False, group_size=8)
                     for name in reversed(expected_linears(config))}  # fmt: skip
        before = {name: weight.clone() for name, weight in weights.items()}
        got = lab.rebuild(weights, quantized, lambda q: reference_dequantize(q).float())
        assert isinstance(got, dict) and list(got) == list(weights), (
            f"the rebuilt model has all weights, in the model's order; got {list(got)}"
        )
        for name, weight in before.items():
            right = reference_dequantize(quantized[name]).float().to(dtype) if name in quantized else weight
            check_equal(f"rebuilt {name}", got[name], right, "Rounded if it was quantized, else as it was; same dtype.")
            check_equal(f"the model's {name}", weights[name], weight, "The model that was given must not change.")


def test_a_model_weighs_codes_scales_and_the_rest(lab: Any) -> None:
    up, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    weights = {EMBEDDING: torch.ones(5, 23), up: torch.ones(4, 23), norm: torch.ones(23)}
    high = 23 * 5 * 16 + 23 * 16
    for arguments, options, right in (
        # 4 rows of 23 in groups of 8: 92 codes and 12 scales, and as many zero points of 4 bits.
        (dict(bits=4, group_size=8), {}, (high + 92 * 4 + 12 * 16) / 8),
        (dict(bits=4, group_size=8, symmetric=False), {}, (high + 92 * 4 + 12 * (16 + 4)) / 8),
        (dict(bits=3, granularity="channel"), {"scale_bits": 32}, (high + 92 * 3 + 4 * 32) / 8),
        (dict(bits=8, granularity="tensor"), {"high_bits": 32}, (2 * high + 92 * 8 + 16) / 8),
    ):
        quantized = {up: reference_quantize(weights[up], **arguments)}
        got = lab.model_bytes(weights, quantized, **options)
        assert got == math.ceil(right) and isinstance(got, int), (
            f"138 numbers left high and 92 quantized with {arguments}, {options or 'by default'}: "
            f"{math.ceil(right)} bytes, got {got!r}"
        )
    assert lab.model_bytes(weights, {}) == (high + 92 * 16) // 8, "without quantization, two bytes a number"


def test_what_is_no_model_is_refused(lab: Any) -> None:
    weights = random_weights(UNTIED, 6)
    name = "model.layers.0.self_attn.v_proj.weight"
    quantized = lab.quantize_linears(weights, 4, 8, quantize=Recorder())
    check_same(f"a good call: {name}", quantized[name], reference_quantize(weights[name], 4, group_size=8))
    rebuilt = lab.rebuild(weights, quantized, lambda q: reference_dequantize(q).float())
    check_equal(f"a good call: {name}", rebuilt[name], reference_dequantize(quantized[name]).float())
    for what, value in (("NaN", math.nan), ("infinity", math.inf)):
        recorder = Recorder()
        broken = {**weights, name: weights[name].clone().fill_(value)}
        check_refused(
            f"a weight of {what}", lambda b=broken, r=recorder: lab.quantize_linears(b, 4, 8, quantize=r), mentions=name
        )
        assert not recorder.calls, f"a model with a weight of {what} must be refused before anything is quantized"
        head = {**weights, HEAD: weights[HEAD].clone().fill_(value)}
        check_refused(f"a head of {what}", lambda h=head: lab.quantize_linears(h, 4, 8, head_bits=8), mentions=HEAD)
        unused = lab.quantize_linears(head, 4, 8, quantize=Recorder())
        check_same("a weight beside a head that stays high", unused[name], quantized[name])
    check_refused("a weight of three axes", lambda: lab.quantize_linears({**weights, name: weights[name][None]}, 4, 8),
                  mentions=name)  # fmt: skip
    check_refused("a model without linear layers", lambda: lab.quantize_linears({EMBEDDING: weights[EMBEDDING]}, 4, 8))
    headless = {key: weight for key, weight in weights.items() if key not in (HEAD, EMBEDDING)}
    check_refused("no head", lambda: lab.quantize_linears(headless, 4, 8, head_bits=8), mentions="head")
    for bits in (1, 9, True):
        check_refused(f"{bits!r} bits", lambda bits=bits: lab.quantize_linears(weights, bits, 8))
        check_refused(f"{bits!r} bits of the head", lambda b=bits: lab.quantize_linears(weights, 4, 8, head_bits=b))
    for size in (0, -1, 2.5):
        check_refused(f"groups of {size}", lambda size=size: lab.quantize_linears(weights, 4, size, short_groups=True))
    other = reference_quantize(torch.ones(3, 3), 4, granularity="tensor")
    check_refused("a matrix of another shape", lambda: lab.rebuild(weights, {name: other}), mentions=name)
    check_refused("an unknown name", lambda: lab.rebuild(weights, {"w": other}), mentions="w")
    check_refused("an unknown name", lambda: lab.model_bytes(weights, {"w": other}), mentions="w")


@pytest.mark.integration
def test_your_own_rounding_moves_a_model_as_much_as_its_bits_allow(lab: Any) -> None:
    weights = random_weights(TINY, 7)
    tokens = torch.randint(0, TINY.vocab_size, (1, 64), generator=torch.Generator().manual_seed(7))
    right = Decoder(TINY, weights)(tokens, torch.arange(64), full_attention)
    errors = {}
    for bits in (8, 6, 4):
        quantized = lab.quantize_linears(weights, bits, 16, short_groups=True, head_bits=8)
        rebuilt = lab.rebuild(weights, quantized)
        for name in (*expected_linears(TINY), EMBEDDING):
            values = check_form(f"rebuilt {name}", rebuilt[name], tuple(weights[name].shape), torch.float32)
            size = 16 if name != EMBEDDING else values.shape[1]
            step = torch.cat([
                part.abs().amax(1, keepdim=True).expand_as(part) / (2 ** (quantized[name].bits - 1) - 1)
                for part in weights[name].split(size, dim=1)
            ], dim=1)  # fmt: skip
            worst = float(((values - weights[name]).abs() / step).max())
            assert worst <= 0.501, f"{name} in {bits} bits: a weight moved by {worst:.3f} steps, more than half of one"
        logits = Decoder(TINY, rebuilt)(tokens, torch.arange(64), full_attention)
        errors[bits] = float((logits - right).square().mean().sqrt())
    # Two bits less make the step four times as large. Errors add up the same way until they are as large as the logits.
    for more, fewer in ((8, 6), (6, 4)):
        ratio = errors[fewer] / errors[more]
        assert 2.5 < ratio < 7, f"the logits move by {errors}, at {more} and {fewer} bits"


@pytest.mark.integration
def test_your_own_rounding_leaves_the_real_model_able_to_read(lab: Any) -> None:
    try:
        bundled_folder()
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")
    decoder = Checkpoint("smollm2").build()
    blocks = (0, 29)
    chosen = {
        name: weight for name, weight in decoder.weights.items()
        if any(name.startswith(f"model.layers.{block}.") for block in blocks)
    }  # fmt: skip
    check_refused("groups of 128 in rows of 576", lambda: lab.quantize_linears(chosen, 4, 128), mentions="576")
    tokens = torch.tensor([load_tokenizer("smollm2").encode(TEXT)[:48]])

    def logits_of(weights: dict[str, Tensor]) -> Tensor:
        return Decoder(decoder.config, weights)(tokens, torch.arange(48), full_attention)[0, :-1]

    plain = logits_of(decoder.weights)
    moved, losses = {}, {16: float(cross_entropy(plain, tokens[0, 1:]))}
    for bits in (8, 4):
        quantized = lab.quantize_linears(chosen, bits, 64)
        assert len(quantized) == 14, f"two blocks have 14 linear layers, got {len(quantized)}"
        logits = logits_of({**decoder.weights, **lab.rebuild(chosen, quantized)})
        moved[bits] = float((logits - plain).square().mean().sqrt() / plain.std())
        losses[bits] = float(cross_entropy(logits, tokens[0, 1:]))
        size = lab.model_bytes(chosen, quantized)
        linear = sum(chosen[name].numel() for name in quantized)
        rest = sum(weight.numel() for weight in chosen.values()) - linear
        right = math.ceil((linear * (bits + 16 / 64) + rest * 16) / 8)
        assert size == right, f"two blocks in {bits} bits, groups of 64: {right} bytes, got {size}"
    assert moved[8] < 0.05 < moved[4] < 0.6, f"relative to their spread, the logits move by {moved}"
    assert abs(losses[8] - losses[16]) < 0.05 and losses[4] - losses[16] < 0.5, f"the text's losses are {losses}"
